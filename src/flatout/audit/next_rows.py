"""Which rows of an unlabelled file to label next: unsure ones that differ from each other.

The quick model learns from all labelled rows and answers the others. The least sure answers teach
it most, but the same question ten times teaches it once. So each choice makes rows like it less
wanted. Open this file to change how rows are chosen, or what the table shows of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from flatout.audit.rows import AuditRows
from flatout.baselines.linear_text import QuickModel
from flatout.data.problem import Problem
from flatout.data.tokens.subwords import PAIR
from flatout.errors import printable
from flatout.files import write_table

_POOL = 10  # times the rows asked for: so many of the least sure ones are compared with each other
_SHOWN_CHARACTERS = 120  # of a text in a table


def write_next_rows(rows: AuditRows, texts: list[str], file: str, top: int, path: Path) -> int:
    """Write the `top` texts to label next as a table, the first one first; returns how many."""
    model = QuickModel(Problem.single, len(rows.classes)).fit(list(rows.texts), rows.labels)
    features = model.features.read(texts)
    answers = model.head.predict(features)
    # An answer is as unsure as can be where the two likeliest classes have no margin between them.
    # Probabilities 0.5 0.4 0.1 → 1 - (0.5 - 0.4) = 0.9.
    by_probability = np.sort(answers, axis=1)
    margin = by_probability[:, -1] - by_probability[:, -2]
    unsure = 1 - margin
    is_blank = [not text.strip() for text in texts]
    unsure[is_blank] = -1  # nothing to label there
    heads = ["row", "file", "text", "likely", "unsure"]
    lines = list[list[object]]()
    for row in choose_rows(features, unsure, top):
        likely = rows.classes[answers[row].argmax()]
        lines.append([row + 1, file, shorten(texts[row]), likely, f"{unsure[row]:.3f}"])
    write_table(path, [heads, *lines])
    return len(lines)


def choose_rows(features: csr_matrix, unsure: NDArray[np.float64], top: int) -> list[int]:
    """Choose rows one after the other, each as unsure and as unlike the chosen ones as can be.

    `unsure`: 0 for a sure answer, 1 for two classes alike; rows below 0 are never chosen.
    """
    # Three rows, unsure by 1.0, 0.9 and 0.5; the first two are alike (cosine 0.8), the last is like
    # none. The first is chosen. Then the second is worth 0.9 * 0.2, the last one 0.5: it is next.
    #
    # Only the least sure rows are compared: likeness takes a product with each of them.
    num_open = int((unsure >= 0).sum())
    pool = np.argsort(-unsure, kind="stable")[: min(_POOL * top, num_open)]
    in_pool = features[pool]
    squares = in_pool.multiply(in_pool).sum(axis=1)
    norms = np.sqrt(np.asarray(squares).ravel())
    likeness = np.zeros(len(pool))  # cosine with the chosen row that is most like it
    chosen = list[int]()  # places in the pool
    for _ in range(min(top, len(pool))):
        worth = unsure[pool] * (1 - likeness)
        worth[chosen] = -1  # a chosen row is like itself, but rounding may leave a little
        best = int(worth.argmax())
        chosen.append(best)
        products = (in_pool @ in_pool[[best]].T).toarray().ravel()
        cosines = products / np.maximum(1e-12, norms * norms[best])
        likeness = np.maximum(likeness, cosines)
    return pool[chosen].tolist()


def shorten(text: str) -> str:
    """The first characters of a text, on one line; of a pair, a bar between its two."""
    return printable(text[:_SHOWN_CHARACTERS].replace(PAIR, " | "))
