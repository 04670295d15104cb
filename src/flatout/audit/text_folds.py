"""The quick model of texts in folds: each row is answered by a model of the other folds.

Words are weighed once, over all rows, because labels play no part in it. So a fold costs one linear
model, and other labels or fewer rows cost no more reading. What an encoder or a network says of the
texts stands beside the words as further columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack

from flatout.audit.labels import find_suspects
from flatout.baselines.linear_text import STRENGTH, Head
from flatout.data.problem import Problem

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
# Strength of the second model: where few labels are wrong, it may follow them more closely.
_SURER = 50.0


@dataclass(frozen=True, slots=True)
class TextFolds:
    """Features and folds of all rows, and models of the folds."""

    features: csr_matrix  # a row for each text
    folds: Integers  # fold of each row
    num_classes: int

    def fit_head(
        self, labels: Integers, taught: NDArray[np.generic], strength: float = STRENGTH
    ) -> Head:
        """A model of some rows; `taught`: their numbers, or whether each row is one of them."""
        head = Head(Problem.single, self.num_classes, strength)
        return head.fit(self.features[taught], labels[taught])

    def answer(
        self, labels: Integers, left_out: Integers | Sequence[int] = (), strength: float = STRENGTH
    ) -> Floats:
        """`[N, C]` probabilities of each row by a model of the other folds.

        `left_out`: numbers of rows that no model learns from.
        """
        probabilities = np.empty((len(labels), self.num_classes))
        is_taught = ~np.isin(np.arange(len(labels)), left_out)
        for fold in np.unique(self.folds):
            is_judged = self.folds == fold
            head = self.fit_head(labels, ~is_judged & is_taught, strength)
            probabilities[is_judged] = head.predict(self.features[is_judged])
        return probabilities

    def answer_without_suspects(self, labels: Integers, first: Floats, least: int = 1) -> Floats:
        """Probabilities to judge labels by: of models that learned from no suspect.

        `first`: the probabilities that name the suspects. Wrong labels taught those models; here
        few are left.
        """
        suspects = find_suspects(first, labels, least)
        return self.answer(labels, suspects.rows, _SURER)


def put_beside(words: csr_matrix, encoded: csr_matrix | None) -> csr_matrix:
    """Words, and where there are any the columns of an encoder or a network to their right."""
    return words if encoded is None else hstack([words, encoded], format="csr")
