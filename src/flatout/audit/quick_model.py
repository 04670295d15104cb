"""The quick model: words and character n-grams, weighted by TF-IDF, and a linear model on them.

It answers in seconds what a network answers in minutes: how far plain words go, and which labels
they contradict. Words and n-grams are hashed, so no text is too odd for it. The same rows give the
same answers, on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack
from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
from sklearn.linear_model import LogisticRegression, Ridge

from flatout.data.problem import Problem
from flatout.data.tokens.subwords import PAIR

_COLUMNS = 1 << 20
_FEW_ROWS = 50  # from so many rows on, words and n-grams that one row alone has are left out
_LONGEST = 1_000  # characters of a text whose n-grams are read; its words are read to the end
# probability of a class that no row has, so that no row of answers adds up to nothing
_LEAST = 1e-6
STRENGTH = 5.0
_RIDGE = 1.0
"""Inverse regularisation of the logistic regression, and the ridge's: TF-IDF has rows of length 1,
so one fits most."""


class Features:
    """What texts say, as rows of numbers; of a pair both sides, and what they share."""

    def __init__(self) -> None:
        self._is_pair = False
        counted = {"n_features": _COLUMNS, "alternate_sign": False, "norm": None}
        words = HashingVectorizer(ngram_range=(1, 2), token_pattern=r"\b\w+\b", **counted)
        letters = HashingVectorizer(analyzer="char_wb", ngram_range=(2, 5), **counted)
        self._parts = [
            _Part(words.transform),
            _Part(lambda texts: letters.transform([t[:_LONGEST] for t in texts])),
        ]

    def fit(self, texts: Sequence[str]) -> csr_matrix:
        """Weigh words and n-grams by how rare they are in some texts, and read these; labels play
        no part.
        """
        self._is_pair = any(PAIR in text for text in texts)
        sides = self._sides(texts)
        found = hstack(
            [part.fit([text for side in sides for text in side]) for part in self._parts],
            format="csr",
        )
        return _joined([found[: len(texts)], found[len(texts) :]][: len(sides)])

    def read(self, texts: Sequence[str]) -> csr_matrix:
        """A row of numbers for each text."""
        return _joined(
            [
                hstack([part.read(side) for part in self._parts], format="csr")
                for side in self._sides(texts)
            ]
        )

    def _sides(self, texts: Sequence[str]) -> list[Sequence[str]]:
        return (
            [texts]
            if not self._is_pair
            else [[text.partition(PAIR)[place] for text in texts] for place in (0, 2)]
        )


def _joined(sides: list[csr_matrix]) -> csr_matrix:
    return (
        sides[0] if len(sides) == 1 else hstack([*sides, sides[0].multiply(sides[1])], format="csr")
    )


class _Part:
    def __init__(self, count: Callable[[Sequence[str]], csr_matrix]) -> None:
        self._count = count
        self._weights = TfidfTransformer(sublinear_tf=True)
        self._kept = np.empty(0, np.int64)

    def fit(self, texts: Sequence[str]) -> csr_matrix:
        counts = self._count(texts)
        kept = np.flatnonzero(
            np.bincount(counts.indices, minlength=_COLUMNS) >= 1 + (len(texts) >= _FEW_ROWS)
        )
        # no two rows share any, and weighing wants a column
        self._kept = kept if len(kept) else np.zeros(1, np.int64)
        return self._weights.fit_transform(counts[:, self._kept])

    def read(self, texts: Sequence[str]) -> csr_matrix:
        return self._weights.transform(self._count(texts)[:, self._kept])


class Head:
    """The linear model: a logistic regression for each class, or a ridge regression for numbers."""

    def __init__(self, problem: Problem, num_classes: int = 1, strength: float = STRENGTH) -> None:
        """`strength`: the inverse regularisation of a class's model; the greater, the surer are its
        answers.
        """
        self.problem = problem
        self.num_classes = num_classes
        self._strength = strength
        self._models: list[LogisticRegression | float] = []
        self._ridge = Ridge(_RIDGE, solver="sparse_cg", tol=1e-4)

    def fit(self, features: csr_matrix, targets: NDArray[np.generic]) -> Head:
        """`targets`: class numbers (single), a row of 0 and 1 for each text (multi), or numbers
        (regression).
        """
        if self.problem is Problem.regression:
            self._ridge.fit(features, targets)
            return self
        is_of = (
            targets
            if self.problem is Problem.multi
            else targets[:, None] == np.arange(self.num_classes)
        )
        # of two classes, one model answers for both
        fitted = range(int(self._is_binary), self.num_classes)
        self._models = [
            _fitted(features, np.asarray(is_of[:, each], bool), self._strength) for each in fitted
        ]
        return self

    def predict(self, features: csr_matrix) -> NDArray[np.float64]:
        """Probabilities, one column for each class; or numbers."""
        if self.problem is Problem.regression:
            return self._ridge.predict(features)
        found = np.column_stack([_answers(model, features) for model in self._models])
        if self._is_binary:
            found = np.column_stack([1 - found[:, 0], found[:, 0]])
        return found if self.problem is Problem.multi else found / found.sum(axis=1, keepdims=True)

    @property
    def _is_binary(self) -> bool:
        return self.problem is Problem.single and self.num_classes == 2


class QuickModel:
    """Features and head in one: given texts and labels, probabilities for other texts."""

    def __init__(self, problem: Problem, num_classes: int = 1) -> None:
        self._features = Features()
        self._head = Head(problem, num_classes)

    def fit(self, texts: Sequence[str], targets: NDArray[np.generic]) -> QuickModel:
        """Learn from texts and their targets, which are those of `Head.fit`."""
        self._head.fit(self._features.fit(texts), targets)
        return self

    def predict(self, texts: Sequence[str]) -> NDArray[np.float64]:
        return self._head.predict(self._features.read(texts))


def _fitted(
    features: csr_matrix, is_of: NDArray[np.bool_], strength: float
) -> LogisticRegression | float:
    """The model of one class; a class of all rows or none is its own answer."""
    if is_of.all() or not is_of.any():
        return 1.0 if is_of.size and is_of.all() else _LEAST
    # liblinear's dual takes a second a class where lbfgs takes two to ten for as good a score
    model = LogisticRegression(
        C=strength, solver="liblinear", dual=True, random_state=0, max_iter=1_000
    )
    return model.fit(features, is_of)


def _answers(model: LogisticRegression | float, features: csr_matrix) -> NDArray[np.float64]:
    return (
        np.full(features.shape[0], model)
        if isinstance(model, float)
        else model.predict_proba(features)[:, 1]
    )
