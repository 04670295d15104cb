"""What an audit measures: the quick model in folds, with planted errors, on fewer rows, without suspects, on cut texts.

Words are weighed once, over all rows: labels play no part in it. So each fold costs one linear model. What an encoder
says of the texts stands beside the words, where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack
from sklearn.preprocessing import normalize

from flatout.audit.curve import PARTS, Floats, Forecast, forecast, round_number
from flatout.audit.labels import Suspects, find_suspects, margins, noise_rate, plant
from flatout.audit.quick_model import Features, Head
from flatout.audit.rows import AuditRows, deal
from flatout.data.problem import Problem
from flatout.run_log import Say

Interval = tuple[float, float, float]
"""A value, and the bounds of its 95 % interval."""
_PLANTED = 0.05
_LEAST_LONG = 20
_DRAWS = 2_000


@dataclass(frozen=True, slots=True)
class Measured:
    """All figures of an audit; shares, not points."""

    rows: AuditRows
    folds: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    """Out of fold, a row for each text."""
    suspects: Suspects
    noise: Interval
    """Share of wrong labels."""
    sizes: NDArray[np.float64]
    """Rows trained on."""
    errors: NDArray[np.float64]
    """A row for each fold, a column for each of the sizes."""
    forecast: Forecast
    score: Interval
    """Share of the rows answered as labelled."""
    fold_scores: NDArray[np.float64]
    without_suspects: Interval
    """What the score gains when the suspects are left out of training."""
    cut: tuple[int, float, float, float]
    """Texts longer than `max_length` words, and what the score on all rows loses by the cut, with its interval."""
    closeness: NDArray[np.float64]
    """How like each text is to the mean of the class that it is most like."""
    views: dict[str, NDArray[np.int64]]
    """Where an encoder reads beside words: the classes that each of them alone gives."""

    @property
    def is_right(self) -> NDArray[np.bool_]:
        return self.probabilities.argmax(axis=1) == self.rows.labels


def measure(
    rows: AuditRows, num_folds: int, max_length: int, say: Say = print, encoded: csr_matrix | None = None
) -> Measured:
    """Run every fold of an audit, on one core. `encoded`: a row for each text, of an encoder."""
    folds, num_classes = deal(rows, num_folds), len(rows.classes)
    reader = Features()
    words = reader.fit(list(rows.texts))
    trained = _Trained(_beside(words, encoded), folds, num_classes)
    say(f"{len(rows):,} rows, {words.shape[1]:,} words and n-grams, {num_folds} folds")
    probabilities = trained.answers(rows.labels)
    suspects = find_suspects(probabilities, rows.labels)
    planted, places = plant(rows.labels, suspects.joint, _PLANTED)
    of_planted = margins(trained.answers(planted), planted)
    is_planted = np.isin(np.arange(len(rows)), places)
    noise = noise_rate(of_planted[~is_planted], of_planted[is_planted])
    is_right = probabilities.argmax(axis=1) == rows.labels
    kept = ~np.isin(np.arange(len(rows)), suspects.places)
    better = trained.answers(rows.labels, kept).argmax(axis=1) == rows.labels
    sizes, errors = _curve(trained, rows, is_right)
    train_rows = int((rows.splits == "train").sum())
    more = round_number(max(1, train_rows) / 2)
    views = {} if encoded is None else {"words": words, "encoder": encoded}
    alone = {name: _Trained(part, folds, num_classes).answers(rows.labels) for name, part in views.items()}
    return Measured(
        rows=rows,
        folds=folds,
        probabilities=probabilities,
        suspects=suspects,
        noise=noise,
        sizes=sizes,
        errors=errors,
        forecast=forecast(sizes, errors, train_rows, more, len(rows) // num_folds),
        score=_interval(is_right.astype(float)),
        fold_scores=np.array([is_right[folds == fold].mean() for fold in range(num_folds)]),
        without_suspects=_interval(better.astype(float) - is_right),
        cut=_loss_by_cut(trained, reader, rows, is_right, max_length, encoded),
        closeness=_closeness(trained.features, rows.labels, num_classes),
        views={name: answers.argmax(axis=1) for name, answers in alone.items()},
    )


def _beside(words: csr_matrix, encoded: csr_matrix | None) -> csr_matrix:
    """What an encoder says beside the words, where there is one."""
    return words if encoded is None else hstack([words, encoded], format="csr")


@dataclass(frozen=True, slots=True)
class _Trained:
    features: csr_matrix
    folds: NDArray[np.int64]
    num_classes: int

    def head(self, labels: NDArray[np.int64], taught: NDArray[np.generic]) -> Head:
        return Head(Problem.single, self.num_classes).fit(self.features[taught], labels[taught])

    def answers(self, labels: NDArray[np.int64], kept: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Probabilities of each row by a model of the other folds, or of the rows of these that are kept."""
        found = np.empty((len(labels), self.num_classes))
        for fold in np.unique(self.folds):
            is_judged = self.folds == fold
            taught = ~is_judged if kept is None else ~is_judged & kept
            found[is_judged] = self.head(labels, taught).predict(self.features[is_judged])
        return found


def _curve(trained: _Trained, rows: AuditRows, is_right: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Errors of each fold by rows trained on; all of them are known already."""
    errors = []
    place_of_group = np.random.default_rng(0).random(int(rows.groups.max()) + 1)[rows.groups]
    for fold in np.unique(trained.folds):
        is_judged = trained.folds == fold
        known = np.flatnonzero(~is_judged)
        known = known[np.argsort(place_of_group[known], kind="stable")]
        of_fold = []
        for part in PARTS[:-1]:
            head = trained.head(rows.labels, known[: max(1, round(part * len(known)))])
            answers = head.predict(trained.features[is_judged]).argmax(axis=1)
            of_fold.append((answers != rows.labels[is_judged]).mean())
        errors.append([*of_fold, 1 - is_right[is_judged].mean()])
    all_rows = len(rows) * (1 - 1 / len(errors))
    return np.array(PARTS) * all_rows, np.array(errors)


def _loss_by_cut(
    trained: _Trained,
    reader: Features,
    rows: AuditRows,
    is_right: NDArray[np.bool_],
    max_length: int,
    encoded: csr_matrix | None,
) -> tuple[int, float, float, float]:
    """What answers lose where a text is cut after `max_length` words, over all rows; an encoder reads as before."""
    words = [text.split(maxsplit=max_length) for text in rows.texts]
    is_long = np.array([len(each) > max_length for each in words])
    if is_long.sum() < _LEAST_LONG:
        return int(is_long.sum()), 0.0, 0.0, 0.0
    lost = np.zeros(len(rows))
    for fold in np.unique(trained.folds):
        places = np.flatnonzero((trained.folds == fold) & is_long)
        if len(places):
            cut = reader.read([" ".join(words[place][:max_length]) for place in places])
            cut = _beside(cut, None if encoded is None else encoded[places])
            answers = trained.head(rows.labels, trained.folds != fold).predict(cut).argmax(axis=1)
            lost[places] = is_right[places].astype(float) - (answers == rows.labels[places])
    return int(is_long.sum()), *_interval(lost)


def _interval(values: Floats) -> Interval:
    """Mean of the rows' values, and its 95 % interval by bootstrap: each value is drawn as often as chance has it."""
    kinds, counts = np.unique(values, return_counts=True)
    draws = np.random.default_rng(0).multinomial(len(values), counts / len(values), _DRAWS) @ kinds / len(values)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def _closeness(features: csr_matrix, labels: NDArray[np.int64], num_classes: int) -> NDArray[np.float64]:
    is_of = csr_matrix((np.ones(len(labels)), (labels, np.arange(len(labels)))), (num_classes, len(labels)))
    return (normalize(features) @ normalize(is_of @ features).T).max(axis=1).toarray().ravel()
