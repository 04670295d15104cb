"""Which rows to label next: those that the quick model is least sure of, and that differ from each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from flatout.audit.findings import beginning, write_table
from flatout.audit.quick_model import Features, Head
from flatout.audit.rows import AuditRows
from flatout.data.checks.cleaning import read_texts
from flatout.data.checks.findings import Findings
from flatout.data.problem import Problem
from flatout.data.tables.roles import find_roles
from flatout.data.tables.sources import open_table
from flatout.data.tables.table import require_columns
from flatout.data.text import TextDataConfig
from flatout.errors import require

_POOL = 10
"""Of so many times the rows asked for, the least sure ones, those that differ are chosen."""
_MOST_ROWS = 200_000


def write_next_rows(rows: AuditRows, texts: list[str], file: str, top: int, path: Path) -> int:
    """Write which texts of a file to label next, the first one first; how many they are."""
    reader = Features()
    head = Head(Problem.single, len(rows.classes)).fit(reader.fit(list(rows.texts)), rows.labels)
    features = reader.read(texts)
    answers = head.predict(features)
    best = np.sort(answers, axis=1)
    unsure = 1 - (best[:, -1] - best[:, -2])
    table: list[list[object]] = [["row", "file", "text", "likely", "unsure"]]
    for place in choose_rows(features, unsure, top):
        likely = rows.classes[answers[place].argmax()]
        table.append([place + 1, file, beginning(texts[place]), likely, f"{unsure[place]:.3f}"])
    write_table(path, table)
    return len(table) - 1


def choose_rows(features: csr_matrix, unsure: NDArray[np.float64], top: int) -> list[int]:
    """Rows one after the other: the least sure, less as far as it is like one that is chosen already."""
    pool = np.argsort(-unsure, kind="stable")[: _POOL * top]
    norms = np.sqrt(np.asarray(features[pool].multiply(features[pool]).sum(axis=1)).ravel())
    near, found = np.zeros(len(pool)), list[int]()
    for _ in range(min(top, len(pool))):
        worth = unsure[pool] * (1 - near)
        worth[found] = -1
        found.append(int(worth.argmax()))
        like = np.asarray((features[pool] @ features[pool[found[-1:]]].T).toarray()).ravel()
        near = np.maximum(near, like / np.maximum(1e-12, norms * norms[found[-1]]))
    return [int(pool[place]) for place in found]


def read_unlabelled(config: TextDataConfig, file: str) -> list[str]:
    """The texts of a file, read as those of the data are."""
    table = open_table(file, where="unlabelled", reading=config.read)
    roles = find_roles(table, text=config.text, join=config.join, is_labelled=False)
    require_columns(table, dict(zip(("data.text", "data.text[1]"), roles.texts, strict=False)))
    texts: list[str] = []
    for rows, block in table.numbered(roles.texts):
        found, _ = read_texts(block, roles, rows, Findings(table.name))
        texts += [text or "" for text in found.to_pylist()]
        what = f"{file} has more than {_MOST_ROWS:,} rows"
        require(len(texts) <= _MOST_ROWS, "unlabelled", what, hint="Take a part of it.")
    require(bool(texts), "unlabelled", f"{file} has no rows")
    return texts
