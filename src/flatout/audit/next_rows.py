"""Which rows to label next."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from flatout.audit.quick_model import Features, Head
from flatout.audit.rows import AuditRows
from flatout.data.problem import Problem
from flatout.data.tokens.subwords import PAIR
from flatout.errors import printable
from flatout.files import write_table

_POOL = 10  # of so many times the rows asked for, the least sure ones, those that differ are chosen


def write_next_rows(rows: AuditRows, texts: list[str], file: str, top: int, path: Path) -> int:
    """Write which texts of a file to label next, the first one first; how many they are."""
    reader = Features()
    head = Head(Problem.single, len(rows.classes)).fit(reader.fit(list(rows.texts)), rows.labels)
    features = reader.read(texts)
    answers = head.predict(features)
    best = np.sort(answers, axis=1)
    unsure = 1 - (best[:, -1] - best[:, -2])
    unsure[[not text.strip() for text in texts]] = -1  # nothing to label there
    table: list[list[object]] = [["row", "file", "text", "likely", "unsure"]]
    for place in choose_rows(features, unsure, top):
        likely = rows.classes[answers[place].argmax()]
        table.append([place + 1, file, beginning(texts[place]), likely, f"{unsure[place]:.3f}"])
    write_table(path, table)
    return len(table) - 1


def choose_rows(features: csr_matrix, unsure: NDArray[np.float64], top: int) -> list[int]:
    """Rows one after the other: the least sure, less as far as it is like one that is chosen
    already.
    """
    pool = np.argsort(-unsure, kind="stable")[: min(_POOL * top, int((unsure >= 0).sum()))]
    norms = np.sqrt(np.asarray(features[pool].multiply(features[pool]).sum(axis=1)).ravel())
    near = np.zeros(len(pool))
    found = list[int]()
    for _ in range(min(top, len(pool))):
        worth = unsure[pool] * (1 - near)
        worth[found] = -1
        found.append(int(worth.argmax()))
        like = np.asarray((features[pool] @ features[pool[found[-1:]]].T).toarray()).ravel()
        near = np.maximum(near, like / np.maximum(1e-12, norms * norms[found[-1]]))
    return [int(pool[place]) for place in found]


def beginning(text: str) -> str:
    """The first characters of a text, on one line; of a pair, a bar between its two."""
    return printable(text[:120].replace(PAIR, " | "))
