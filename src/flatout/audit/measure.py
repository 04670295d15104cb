"""What an audit of texts measures: score, luck, suspects, wrong labels, cut texts, more rows.

All of it comes from the quick model in folds, which is trained several times. It is trained on the
data as they are, without the suspects, with planted errors, on fewer rows, on cut texts, and in
other folds. So a figure costs one linear model for each fold. Open this file to add a figure;
`findings` decides what the figures are worth, `text_report` shows them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.preprocessing import normalize

from flatout.audit.forecast import PARTS, Forecast, forecast, round_number
from flatout.audit.labels import (
    SPREAD,
    Suspects,
    estimate_noise,
    find_margins,
    find_suspects,
    plant_errors,
)
from flatout.audit.rows import AuditRows, deal_folds
from flatout.audit.text_folds import TextFolds, put_beside
from flatout.baselines.linear_text import Features
from flatout.run_log import Say
from flatout.tasks.score_intervals import LEAST_ROWS

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]
Interval = tuple[float, float, float]  # a value, and the bounds of its 95 % interval
_PLANTED = 0.05  # share of the labels that are replaced by wrong ones
_MOST_PLANTED = 0.1  # share from which planted errors disturb the model themselves
_LEAST_LONG = 20  # texts beyond data.max_length; what fewer lose is chance
_RESAMPLES = 2_000  # of an interval
_LEAST_PROBABILITY = 1e-4  # of a network's that counts, so that no logarithm is endless
_OTHER_DEALS = (1, 2)  # seeds of two further ways to deal rows into folds


@dataclass(frozen=True, slots=True)
class CutLoss:
    """What the score on all rows loses because long texts are cut after data.max_length words."""

    num_long: int  # texts that are cut
    lost: float = 0.0
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class AuditMeasurement:
    """All figures of an audit of texts; shares from 0 to 1, not points."""

    rows: AuditRows
    is_right: Bools  # whether each row is answered as labelled, out of fold
    suspects: Suspects
    noise: Interval  # share of wrong labels
    sizes: Floats  # rows trained on
    errors: Floats  # a row for each fold, a column for each of the sizes
    forecast: Forecast
    score: Interval  # share of the rows answered as labelled
    fold_scores: Floats
    dealt_again: Floats  # the score where the rows are dealt into other folds
    without_suspects: Interval  # what the score gains when no model learns from suspects
    cut: CutLoss
    closeness: Floats  # cosine of each text and the mean of the class that is most like it
    # Where an encoder or a network stands beside the words: the classes that each alone gives, by
    # name. -1: it has read nothing of the row.
    views: dict[str, Integers]

    @property
    def suspect_share(self) -> float:
        return len(self.suspects.rows) / len(self.rows)


def measure(
    rows: AuditRows,
    num_folds: int,
    max_length: int,
    say: Say,
    encoded: csr_matrix | None,
    view: str = "encoder",
) -> AuditMeasurement:
    """Run every fold of an audit, on one core.

    `max_length`: words after which a run cuts texts. `encoded`: a row for each text, of an encoder
    or a network; `view` says which of the two.
    """
    reader = Features()
    words = reader.fit(list(rows.texts))
    say(
        f"{rows.files[0]}: {len(rows):,} rows, {words.shape[1]:,} words and n-grams, {num_folds}"
        " folds"
    )
    folds = TextFolds(put_beside(words, encoded), deal_folds(rows, num_folds), len(rows.classes))
    probabilities = folds.answer(rows.labels)
    is_right = probabilities.argmax(axis=1) == rows.labels
    least = _least_class_size(rows, num_folds)
    suspects = find_suspects(
        folds.answer_without_suspects(rows.labels, probabilities, least), rows.labels, least
    )
    cleaner = folds.answer(rows.labels, suspects.rows)
    suspects = suspects.in_order_of(1 - cleaner[np.arange(len(rows)), rows.labels])
    gains = (cleaner.argmax(axis=1) == rows.labels).astype(float) - is_right
    sizes, errors = _learning_curve(folds, rows, is_right)
    num_train = rows.of_splits.get("train", 0)
    fold_scores = [is_right[folds.folds == fold].mean() for fold in range(num_folds)]
    return AuditMeasurement(
        rows=rows,
        is_right=is_right,
        suspects=suspects,
        noise=_measure_noise(folds, rows, suspects.joint, least),
        sizes=sizes,
        errors=errors,
        forecast=forecast(
            sizes, errors, num_train, round_number(num_train / 2), len(rows) // num_folds
        ),
        score=bootstrap_mean(is_right.astype(float), rows.groups),
        fold_scores=np.array(fold_scores),
        dealt_again=_deal_again(folds, rows, num_folds),
        without_suspects=bootstrap_mean(gains, rows.groups),
        cut=_measure_cut(folds, reader, rows, is_right, max_length, encoded),
        closeness=_compare_with_classes(folds.features, rows.labels, len(rows.classes)),
        views={}
        if encoded is None
        else _compare_views(folds, rows, {"words": words, view: encoded}),
    )


def _least_class_size(rows: AuditRows, num_folds: int) -> int:
    """Rows that a class needs to take part in the search for suspects."""
    # A smaller class is missing from some fold. But two classes have to be left.
    num_large = (np.bincount(rows.labels) >= num_folds).sum()
    return num_folds if num_large > 1 else 1


def _measure_noise(folds: TextFolds, rows: AuditRows, joint: Floats, least: int) -> Interval:
    """The share of wrong labels, from how much rows look like planted errors."""
    # A word outside that is called an entity stands out more than a wrong type does, which is the
    # usual error. So none of those are planted beyond what suspects show.
    spread = 0.0 if rows.is_tagged else SPREAD
    labels, planted = plant_errors(rows.labels, joint, _PLANTED, spread, least)
    of_rows = find_margins(folds.answer(labels), labels)
    is_planted = np.isin(np.arange(len(rows)), planted)
    rate, low, high = estimate_noise(of_rows[~is_planted], of_rows[is_planted])
    # So many planted errors disturb the model, and sound rows look wrong, too.
    if len(planted) > _MOST_PLANTED * len(rows):
        low = 0.0
    return rate, low, high


def _deal_again(folds: TextFolds, rows: AuditRows, num_folds: int) -> Floats:
    """The score where rows are dealt into folds in other ways: how much is luck."""
    scores = list[float]()
    for seed in _OTHER_DEALS:
        others = replace(folds, folds=deal_folds(rows, num_folds, seed))
        answers = others.answer(rows.labels).argmax(axis=1)
        scores.append((answers == rows.labels).mean())
    return np.array(scores)


def _compare_views(
    folds: TextFolds, rows: AuditRows, features_of: dict[str, csr_matrix]
) -> dict[str, Integers]:
    """The classes that a model of each view alone gives; -1 where the view has read nothing."""
    views = dict[str, Integers]()
    for name, features in features_of.items():
        answers = replace(folds, features=features).answer(rows.labels).argmax(axis=1)
        views[name] = np.where(features.getnnz(1), answers, -1)
    return views


def scale_answers(answers: Floats) -> csr_matrix:
    """A network's `[N, C]` probabilities as features, to stand beside words.

    Logarithms over ten are about as long as rows of words. Rows of zeros, which the network has not
    read, stay zeros.
    """
    logarithms = np.log(np.maximum(answers, _LEAST_PROBABILITY)) / 10
    return csr_matrix(logarithms * answers.any(axis=1, keepdims=True))


def _learning_curve(folds: TextFolds, rows: AuditRows, is_right: Bools) -> tuple[Floats, Floats]:
    """Numbers of rows trained on, and errors: a row for each fold, a column for each number.

    The errors by all rows are known already, from `is_right`.
    """
    errors = list[list[float]]()
    # Rows join in a random order of groups, which is the same for all folds.
    position_of_group = np.random.default_rng(0).random(int(rows.groups.max()) + 1)
    position = position_of_group[rows.groups]
    for fold in np.unique(folds.folds):
        is_judged = folds.folds == fold
        others = np.flatnonzero(~is_judged)
        others = others[np.argsort(position[others], kind="stable")]
        of_fold = list[float]()
        for part in PARTS[:-1]:
            num_taught = max(1, round(part * len(others)))
            head = folds.fit_head(rows.labels, others[:num_taught])
            answers = head.predict(folds.features[is_judged]).argmax(axis=1)
            of_fold.append((answers != rows.labels[is_judged]).mean())
        of_fold.append(1 - is_right[is_judged].mean())
        errors.append(of_fold)
    num_taught_by_all = len(rows) * (1 - 1 / len(errors))
    return np.array(PARTS) * num_taught_by_all, np.array(errors)


def _measure_cut(
    folds: TextFolds,
    reader: Features,
    rows: AuditRows,
    is_right: Bools,
    max_length: int,
    encoded: csr_matrix | None,
) -> CutLoss:
    """Answer long texts again after a cut; an encoder still reads them as before."""
    words = [text.split(maxsplit=max_length) for text in rows.texts]
    is_long = np.array([len(words_of_text) > max_length for words_of_text in words])
    num_long = int(is_long.sum())
    if num_long < _LEAST_LONG:
        return CutLoss(num_long)
    lost = np.zeros(len(rows))
    for fold in np.unique(folds.folds):
        long = np.flatnonzero((folds.folds == fold) & is_long)
        if not len(long):
            continue
        cut = reader.read([" ".join(words[row][:max_length]) for row in long])
        features = put_beside(cut, None if encoded is None else encoded[long])
        head = folds.fit_head(rows.labels, folds.folds != fold)
        answers = head.predict(features).argmax(axis=1)
        lost[long] = is_right[long].astype(float) - (answers == rows.labels[long])
    return CutLoss(num_long, *bootstrap_mean(lost, rows.groups))


def bootstrap_mean(values: Floats, groups: Integers) -> Interval:
    """The mean of the rows' values, and its 95 % interval by a bootstrap of whole groups.

    Rows of one group resemble each other. Drawn one by one, they would make the interval too
    narrow. Below ten groups its bounds are NaN: so few say nothing of others.
    """
    numbers = np.unique(groups, return_inverse=True)[1]
    if numbers.max(initial=-1) + 1 < LEAST_ROWS:
        return float(values.mean()), math.nan, math.nan
    sums = np.stack([np.bincount(numbers, values), np.bincount(numbers)], axis=1)
    # Groups with equal sums are drawn together, as often as chance has it. With 20,000 rows, each
    # right or wrong, there are two kinds: a resample is two numbers instead of 20,000.
    kinds, counts = np.unique(sums, axis=0, return_counts=True)
    draws = np.random.default_rng(0).multinomial(len(sums), counts / len(sums), _RESAMPLES)
    resampled = draws @ kinds
    low, high = np.quantile(resampled[:, 0] / resampled[:, 1], [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def _compare_with_classes(features: csr_matrix, labels: Integers, num_classes: int) -> Floats:
    """Cosine of each text and the mean of the class that is most like it; small: like none."""
    num_rows = len(labels)
    is_of_class = csr_matrix(
        (np.ones(num_rows), (labels, np.arange(num_rows))), (num_classes, num_rows)
    )
    cosines = normalize(features) @ normalize(is_of_class @ features).T
    return cosines.max(axis=1).toarray().ravel()
