"""A linear model on texts: words and character n-grams, weighted by TF-IDF.

It answers in seconds what a network answers in minutes: how far plain words go, and which labels
they contradict. Words and n-grams are hashed, so no text is too odd for it. The same rows give the
same answers, on one core. `Features` makes rows of numbers of texts, `Head` learns from these, and
`QuickModel` is both in one. What it has learned are a few arrays, which a file may keep.

Where rows are few, Naive Bayes learns more from each than a regression: it only counts. What it
says may be added to the weights of a fitted model (`fit_with_counts`). Where rows are many, it
learns in a fraction of the time of a regression, and answers alone (`fit_counts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack
from scipy.special import expit, logit
from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
from sklearn.linear_model import LogisticRegression, Ridge

from flatout.data.problem import Problem
from flatout.data.tokens.subwords import PAIR
from flatout.errors import require

STRENGTH = 5.0  # inverse regularisation of the logistic regression; rows of TF-IDF have length 1
_RIDGE = 1.0  # regularisation of the ridge regression
_COLUMNS = 1 << 20  # hashes of words, and as many of n-grams; fewer would fall together
_FEW_ROWS = 50  # from so many rows on, words and n-grams that one row alone has are left out
_LONGEST = 1_000  # characters of a text whose n-grams are read; its words are read to the end
# How exact the weights of a logistic regression are, with few rows and from so many rows on. A
# thousand times more exact takes twice the time, and is no better on test rows of huffpost41.
_USUAL_TOLERANCE = 1e-4
_TOLERANCE = 0.1
_MANY_ROWS = 2_000
# probability of a class that no row has, so that no row of answers adds up to nothing
_LEAST = 1e-6
# Naive Bayes: its weight beside the regression, and what it adds to the sum of each column, as a
# share of a usual number of a row. Chosen on four of eight sets (docs/texts.md).
_BAYES = 0.3
_ADDED = 0.3
_GROUPS = ("words", "letters")  # of columns
# Memory that learning takes, by the letters of the texts: 158 and 90 bytes on headlines and on long
# articles. Each class has a weight for each n-gram, of which there is one for some 13 letters.
_BYTES_A_LETTER = 160
_BYTES_A_CLASS = 1.2
Arrays = dict[str, NDArray[Any]]


class Features:
    """Texts as rows of numbers. Of a pair: both sides, and what they share."""

    def __init__(self) -> None:
        self._is_pair = False
        words = HashingVectorizer(
            n_features=_COLUMNS,
            alternate_sign=False,
            norm=None,
            ngram_range=(1, 2),
            token_pattern=r"\b\w+\b",
        )
        letters = HashingVectorizer(
            n_features=_COLUMNS,
            alternate_sign=False,
            norm=None,
            analyzer="char_wb",
            ngram_range=(2, 5),
        )

        def count_letters(texts: Sequence[str]) -> csr_matrix:
            return letters.transform([text[:_LONGEST] for text in texts])

        self._weighted = [_Weighted(words.transform), _Weighted(count_letters)]

    def fit(self, texts: Sequence[str]) -> csr_matrix:
        """Learn how rare words and n-grams are in some texts, and return the rows of these texts.

        Labels play no part, so the texts may be those of all folds.
        """
        self._is_pair = any(PAIR in text for text in texts)
        sides = self._split_pairs(texts)
        of_all_sides = [text for side in sides for text in side]
        columns = [weighted.fit(of_all_sides) for weighted in self._weighted]
        rows = hstack(columns, format="csr")
        if not self._is_pair:
            return rows
        return _join_sides(rows[: len(texts)], rows[len(texts) :])

    def read(self, texts: Sequence[str]) -> csr_matrix:
        """A row of numbers for each text, with the weights that were learned."""
        rows = [self._read_side(side) for side in self._split_pairs(texts)]
        return _join_sides(*rows) if self._is_pair else rows[0]

    def arrays(self) -> Arrays:
        """What was learned: for words and for n-grams the hashes that count, and their rarity."""
        arrays: Arrays = {"is_pair": np.array([self._is_pair])}
        for name, weighted in zip(_GROUPS, self._weighted, strict=True):
            arrays |= {f"{name}.{part}": values for part, values in weighted.arrays().items()}
        return arrays

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Features:
        features = cls()
        (is_pair,) = arrays["is_pair"]
        features._is_pair = bool(is_pair)
        for name, weighted in zip(_GROUPS, features._weighted, strict=True):
            weighted.take(arrays[f"{name}.columns"], arrays[f"{name}.idf"])
        return features

    def _read_side(self, texts: Sequence[str]) -> csr_matrix:
        return hstack([weighted.read(texts) for weighted in self._weighted], format="csr")

    def _split_pairs(self, texts: Sequence[str]) -> list[Sequence[str]]:
        """All first texts of pairs, and all second ones; or the texts, where there are no pairs."""
        if not self._is_pair:
            return [texts]
        pairs = [text.partition(PAIR) for text in texts]
        return [[first for first, _, _ in pairs], [second for _, _, second in pairs]]


def _join_sides(first: csr_matrix, second: csr_matrix) -> csr_matrix:
    """Both sides, and their products: columns that only what both have is in."""
    return hstack([first, second, first.multiply(second)], format="csr")


class _Weighted:
    """Counts of words or of n-grams, weighted by TF-IDF."""

    def __init__(self, count: Callable[[Sequence[str]], csr_matrix]) -> None:
        self._count = count
        self._weights = TfidfTransformer(sublinear_tf=True)
        self._columns = np.empty(0, np.int64)  # hashes that count

    def fit(self, texts: Sequence[str]) -> csr_matrix:
        counts = self._count(texts)
        rows_with = np.bincount(counts.indices, minlength=_COLUMNS)
        least = 2 if len(texts) >= _FEW_ROWS else 1
        self._columns = np.flatnonzero(rows_with >= least)
        if not len(self._columns):
            # No two rows share any word, and weighing wants a column.
            self._columns = np.zeros(1, np.int64)
        return self._weights.fit_transform(counts[:, self._columns])

    def read(self, texts: Sequence[str]) -> csr_matrix:
        return self._weights.transform(self._count(texts)[:, self._columns])

    def arrays(self) -> Arrays:
        return {"columns": self._columns, "idf": self._weights.idf_}

    def take(self, columns: NDArray[np.int64], idf: NDArray[np.floating]) -> None:
        """Use the columns and weights of fitted features, as `arrays` gives them."""
        self._columns = columns
        self._weights.idf_ = idf.astype(np.float64)


class Head:
    """The linear model: a logistic regression for each class, or a ridge regression for numbers.

    Whichever it is, what it has learned are the weights and the constant of each of its models.

    Shapes: N rows, D columns of features, M models, C classes.
    """

    def __init__(self, problem: Problem, num_classes: int = 1, strength: float = STRENGTH) -> None:
        """`strength`: the inverse regularisation of a class's model.

        The greater it is, the surer are the answers.
        """
        self.problem = problem
        self.num_classes = num_classes
        self._strength = strength
        self._weights_MD = np.empty((0, 0))
        self._constants_M = np.empty(0)

    def fit(self, features: csr_matrix, targets: NDArray[np.generic]) -> Head:
        """`targets`: class numbers (single), a row of 0 and 1 for each text (multi), or numbers
        (regression).
        """
        if self.problem is Problem.regression:
            ridge = Ridge(_RIDGE, solver="sparse_cg", tol=1e-4).fit(features, targets)
            models = [(ridge.coef_, ridge.intercept_)]
        else:
            members = self._members_of_classes(targets)
            models = [_fit_class(features, is_member, self._strength) for is_member in members]
        self._weights_MD = np.stack([weights for weights, _ in models])
        self._constants_M = np.array([constant for _, constant in models])
        return self

    def fit_counts(self, features: csr_matrix, targets: NDArray[np.generic]) -> Head:
        """Learn as Naive Bayes does: the commoner a class, and its words in it, the likelier."""
        members = self._members_of_classes(targets)
        shares = [float(np.clip(is_member.mean(), _LEAST, 1 - _LEAST)) for is_member in members]
        self._constants_M = logit(np.array(shares))
        self._weights_MD = np.stack([_log_odds(features, is_member) for is_member in members])
        return self

    def add_counts(self, features: csr_matrix, targets: NDArray[np.generic]) -> Head:
        """This model of classes or labels, with what Naive Bayes says added to its weights.

        The rows are those it was fitted on.
        """
        arrays = self.arrays()
        # a copy, as this model's own weights would change
        coefficients = arrays["coefficients"].copy()
        for row, is_member in enumerate(self._members_of_classes(targets)):
            coefficients[row] += _BAYES * _log_odds(features, is_member)
        return Head.of_arrays(
            self.problem, self.num_classes, arrays | {"coefficients": coefficients}
        )

    def predict(self, features: csr_matrix) -> NDArray[np.float64]:
        """Probabilities, one column for each class; or numbers."""
        # Model by model: a product with all weights would copy them first, also for a single row.
        sums_NM = np.column_stack([features @ weights for weights in self._weights_MD])
        scores_NM = sums_NM + self._constants_M
        if self.problem is Problem.regression:
            return scores_NM[:, 0]
        shares_NC = expit(scores_NM)
        if self._is_binary:
            shares_NC = np.concatenate([1 - shares_NC, shares_NC], axis=1)
        if self.problem is Problem.multi:
            return shares_NC
        return shares_NC / shares_NC.sum(axis=1, keepdims=True)

    def arrays(self) -> Arrays:
        """The weights of each class's model, and its constant; or those of the numbers' model."""
        return {"coefficients": self._weights_MD, "constants": self._constants_M}

    @classmethod
    def of_arrays(
        cls, problem: Problem, num_classes: int, arrays: Mapping[str, NDArray[Any]]
    ) -> Head:
        head = cls(problem, num_classes)
        head._weights_MD = arrays["coefficients"].astype(np.float64)
        head._constants_M = arrays["constants"].astype(np.float64)
        return head

    def _members_of_classes(self, targets: NDArray[np.generic]) -> list[NDArray[np.bool_]]:
        """For each model, which rows are of its class."""
        is_of_class = targets
        if self.problem is Problem.single:
            is_of_class = targets[:, None] == np.arange(self.num_classes)
        # Of two classes, the model of the second answers for both.
        first = 1 if self._is_binary else 0
        return [
            np.asarray(is_of_class[:, number], bool) for number in range(first, self.num_classes)
        ]

    @property
    def _is_binary(self) -> bool:
        return self.problem is Problem.single and self.num_classes == 2


class QuickModel:
    """Features and head in one: given texts and labels, probabilities for other texts."""

    def __init__(self, problem: Problem, num_classes: int = 1) -> None:
        self.features = Features()
        self.head = Head(problem, num_classes)

    def fit(self, texts: Sequence[str], targets: NDArray[np.generic]) -> QuickModel:
        """Learn from texts and their targets, which are those of `Head.fit`."""
        self.head.fit(self.features.fit(texts), targets)
        return self

    def fit_with_counts(self, texts: Sequence[str], targets: NDArray[np.generic]) -> QuickModel:
        """Learn, and return another model: this one with what Naive Bayes says of the same rows."""
        rows = self.features.fit(texts)
        self.head.fit(rows, targets)
        model = QuickModel(self.head.problem, self.head.num_classes)
        model.features = self.features
        model.head = self.head.add_counts(rows, targets)
        return model

    def fit_counts(self, texts: Sequence[str], targets: NDArray[np.generic]) -> QuickModel:
        """Learn as Naive Bayes does, in a fraction of the time of `fit`."""
        self.head.fit_counts(self.features.fit(texts), targets)
        return self

    def predict(self, texts: Sequence[str]) -> NDArray[np.float64]:
        return self.head.predict(self.features.read(texts))

    def arrays(self) -> Arrays:
        """The weights of features and head, by name, for a file."""
        arrays = self.features.arrays() | self.head.arrays()
        for name, values in arrays.items():
            # fp32 halves the file; hashes stay whole numbers
            if values.dtype == np.float64:
                arrays[name] = values.astype(np.float32)
        return arrays

    @classmethod
    def of_arrays(
        cls, problem: Problem, num_classes: int, arrays: Mapping[str, NDArray[Any]]
    ) -> QuickModel:
        """The model that has learned these arrays, which may come from others."""
        require(_fit(arrays, problem, num_classes), "linear model", "its arrays do not fit")
        model = cls(problem, num_classes)
        model.features = Features.of_arrays(arrays)
        model.head = Head.of_arrays(problem, num_classes, arrays)
        return model


def needed_bytes(texts: Sequence[str], num_classes: int) -> float:
    """About the memory that a `QuickModel` takes while it learns from some texts."""
    letters = sum(min(len(text), _LONGEST) for text in texts)
    return letters * (_BYTES_A_LETTER + _BYTES_A_CLASS * num_classes)


def _fit(arrays: Mapping[str, NDArray[Any]], problem: Problem, num_classes: int) -> bool:
    """Whether arrays have the types and shapes that `QuickModel.arrays` gives them."""
    width = 0
    for name in _GROUPS:
        columns = arrays[f"{name}.columns"]
        are_hashes = columns.dtype.kind in "iu" and ((columns >= 0) & (columns < _COLUMNS)).all()
        if not are_hashes or columns.ndim != 1 or arrays[f"{name}.idf"].shape != columns.shape:
            return False
        width += len(columns)
    is_pair = arrays["is_pair"]
    count = 1 if problem is Problem.single and num_classes == 2 else num_classes
    shapes = [arrays[name].shape for name in ("is_pair", "constants", "coefficients")]
    # of a pair: both sides, and their products
    return shapes == [(1,), (count,), (count, 3 * width if is_pair.any() else width)]


def _fit_class(
    features: csr_matrix, is_member: NDArray[np.bool_], strength: float
) -> tuple[NDArray[np.float64], float]:
    """Weights and constant of one class; no feature moves a class that all rows have, or none."""
    if is_member.all() or not is_member.any():
        return np.zeros(features.shape[1]), logit(1.0 if is_member.any() else _LEAST)
    # liblinear's dual takes a second a class where lbfgs takes two to ten for as good a score
    model = LogisticRegression(
        C=strength,
        solver="liblinear",
        dual=True,
        random_state=0,
        max_iter=1_000,
        tol=_TOLERANCE if len(is_member) >= _MANY_ROWS else _USUAL_TOLERANCE,
    ).fit(features, is_member)
    return model.coef_[0], model.intercept_[0]


def _log_odds(features: csr_matrix, is_member: NDArray[np.bool_]) -> NDArray[np.float64]:
    """How much more of a class than of the other rows each column is, as a logarithm.

    Two columns add up to [3, 1] in the class and to [1, 3] elsewhere: [log 3, -log 3]. A little is
    added to every sum, so that none is 0. No column says anything of a class of all rows, or none.
    """
    if is_member.all() or not is_member.any():
        return np.zeros(features.shape[1])
    # no number at all where no two rows share a word
    usual = features.data.mean() if features.nnz else 1.0
    log_shares = []
    for is_counted in (is_member, ~is_member):
        sums = features.T @ is_counted + _ADDED * usual
        log_shares.append(np.log(sums / sums.sum()))
    of_class, elsewhere = log_shares
    return of_class - elsewhere
