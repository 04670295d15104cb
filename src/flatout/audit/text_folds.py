"""Linear models of texts in folds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack

from flatout.audit.labels import find_suspects
from flatout.audit.quick_model import STRENGTH, Head
from flatout.data.problem import Problem

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
# strength of the second model: where few labels are wrong, it may follow them more closely
_SURER = 50.0


def put_beside(words: csr_matrix, encoded: csr_matrix | None) -> csr_matrix:
    return words if encoded is None else hstack([words, encoded], format="csr")


@dataclass(frozen=True, slots=True)
class TextFolds:
    features: csr_matrix
    folds: Integers
    num_classes: int

    def head(
        self, labels: Integers, taught: NDArray[np.generic], strength: float = STRENGTH
    ) -> Head:
        return Head(Problem.single, self.num_classes, strength).fit(
            self.features[taught], labels[taught]
        )

    def second_look(self, labels: Integers, first: Floats, least: int = 1) -> Floats:
        """Probabilities to judge labels by: wrong ones teach the first model, and few of them the
        second.
        """
        return self.answers(labels, find_suspects(first, labels, least).places, _SURER)

    def answers(
        self, labels: Integers, left_out: Integers | tuple[()] = (), strength: float = STRENGTH
    ) -> Floats:
        """Probabilities of each row by a model of the other folds, of which some rows may be left
        out.
        """
        found = np.empty((len(labels), self.num_classes))
        is_taught = ~np.isin(np.arange(len(labels)), left_out)
        for fold in np.unique(self.folds):
            is_judged = self.folds == fold
            taught = ~is_judged & is_taught
            found[is_judged] = self.head(labels, taught, strength).predict(self.features[is_judged])
        return found
