"""What an audit measures: the quick model in folds, with planted errors, on fewer rows, without
suspects, on cut texts.

Words are weighed once, over all rows: labels play no part in it. So each fold costs one linear
model. What an encoder says of the texts stands beside the words, where there is one. What more rows
would bring is a power law through the errors at an eighth, a quarter, a half and all of the rows.
Each fold has a curve of its own, so the forecast has an interval: folds are drawn again, and errors
with them. The law falls to nothing (`a n^-b`), or to a floor (`a n^-b + c`), or begins at the last
doubling. With few rows a model is near chance, so its errors fall faster later. Four points cannot
tell which, so the interval spans all three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.preprocessing import normalize

from flatout.audit.forecast import PARTS, Forecast, forecast, round_number
from flatout.audit.labels import SPREAD, Suspects, find_suspects, margins, noise_rate, plant
from flatout.audit.quick_model import Features
from flatout.audit.rows import AuditRows, deal
from flatout.audit.text_folds import TextFolds, put_beside
from flatout.run_log import Say

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Integers = NDArray[np.int64]
Interval = tuple[float, float, float]  # a value, and the bounds of its 95 % interval
_PLANTED = 0.05
_MOST_PLANTED = 0.1
_LEAST_LONG = 20
_DRAWS = 2_000
_LEAST = 1e-4


@dataclass(frozen=True, slots=True)
class AuditMeasurement:
    """All figures of an audit; shares, not points."""

    rows: AuditRows
    is_right: NDArray[np.bool_]  # whether each row is answered as labelled, out of fold
    suspects: Suspects
    noise: Interval  # share of wrong labels
    sizes: NDArray[np.float64]  # rows trained on
    errors: NDArray[np.float64]  # a row for each fold, a column for each of the sizes
    forecast: Forecast
    score: Interval  # share of the rows answered as labelled
    fold_scores: NDArray[np.float64]
    dealt_again: NDArray[np.float64]  # the score where the rows are dealt into other folds
    without_suspects: Interval  # what the score gains when the suspects are left out of training
    cut: tuple[int, float, float, float]
    """Texts longer than `max_length` words, and what the score on all rows loses by the cut, with
    its interval."""
    # how like each text is to the mean of the class that it is most like
    closeness: NDArray[np.float64]
    views: dict[str, Integers]
    """Where an encoder or a network stands beside words: the class that each alone gives; -1: it
    has read nothing."""


def measure(
    rows: AuditRows,
    num_folds: int,
    max_length: int,
    say: Say,
    encoded: csr_matrix | None,
    view: str = "encoder",
) -> AuditMeasurement:
    """Run every fold of an audit, on one core.

    `encoded`: a row for each text, of an encoder or a network (`view`).
    """
    folds = deal(rows, num_folds)
    num_classes = len(rows.classes)
    reader = Features()
    words = reader.fit(list(rows.texts))
    trained = TextFolds(put_beside(words, encoded), folds, num_classes)
    say(
        f"{rows.files[0]}: {len(rows):,} rows, {words.shape[1]:,} words and n-grams, {num_folds}"
        " folds"
    )
    probabilities = trained.answers(rows.labels)
    least = num_folds if (np.bincount(rows.labels) >= num_folds).sum() > 1 else 1
    suspects = find_suspects(
        trained.second_look(rows.labels, probabilities, least), rows.labels, least
    )
    better = trained.answers(rows.labels, suspects.places)
    suspects = suspects.in_order_of(1 - better[np.arange(len(rows)), rows.labels])
    # A word outside that is called an entity stands out more than a wrong type does, which is the
    # usual error.
    planted, places = plant(
        rows.labels, suspects.joint, _PLANTED, 0.0 if rows.is_tagged else SPREAD, least
    )
    of_planted = margins(trained.answers(planted), planted)
    is_planted = np.isin(np.arange(len(rows)), places)
    noise = noise_rate(of_planted[~is_planted], of_planted[is_planted])
    # so many disturb the model that sound rows look wrong, too
    if len(places) > _MOST_PLANTED * len(rows):
        noise = noise[0], 0.0, noise[2]
    is_right = probabilities.argmax(axis=1) == rows.labels
    sizes, errors = _curve(trained, rows, is_right)
    train_rows = rows.of_splits.get("train", 0)
    others = [
        replace(trained, folds=deal(rows, num_folds, seed)).answers(rows.labels) for seed in (1, 2)
    ]
    parts = {} if encoded is None else {"words": words, view: encoded}
    return AuditMeasurement(
        rows=rows,
        is_right=is_right,
        suspects=suspects,
        noise=noise,
        sizes=sizes,
        errors=errors,
        forecast=forecast(
            sizes, errors, train_rows, round_number(train_rows / 2), len(rows) // num_folds
        ),
        score=_interval(is_right.astype(float), rows.groups),
        fold_scores=np.array([is_right[folds == fold].mean() for fold in range(num_folds)]),
        dealt_again=np.array(
            [(answers.argmax(axis=1) == rows.labels).mean() for answers in others]
        ),
        without_suspects=_interval(
            (better.argmax(axis=1) == rows.labels).astype(float) - is_right, rows.groups
        ),
        cut=_loss_by_cut(trained, reader, rows, is_right, max_length, encoded),
        closeness=_closeness(trained.features, rows.labels, num_classes),
        views={
            name: np.where(
                part.getnnz(1),
                TextFolds(part, folds, num_classes).answers(rows.labels).argmax(1),
                -1,
            )
            for name, part in parts.items()
        },
    )


def rows_of_answers(answers: Floats) -> csr_matrix:
    """What a network answers, as rows about as long as those of words, to stand beside them; zeros
    stay zeros.
    """
    return csr_matrix(np.log(np.maximum(answers, _LEAST)) / 10 * answers.any(axis=1, keepdims=True))


def _curve(trained: TextFolds, rows: AuditRows, is_right: Bools) -> tuple[Floats, Floats]:
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
    return np.array(PARTS) * (len(rows) * (1 - 1 / len(errors))), np.array(errors)


def _loss_by_cut(
    trained: TextFolds,
    reader: Features,
    rows: AuditRows,
    is_right: Bools,
    max_length: int,
    encoded: csr_matrix | None,
) -> tuple[int, float, float, float]:
    """What answers lose where a text is cut after `max_length` words, over all rows; an encoder
    reads as before.
    """
    words = [text.split(maxsplit=max_length) for text in rows.texts]
    is_long = np.array([len(each) > max_length for each in words])
    if is_long.sum() < _LEAST_LONG:
        return int(is_long.sum()), 0.0, 0.0, 0.0
    lost = np.zeros(len(rows))
    for fold in np.unique(trained.folds):
        places = np.flatnonzero((trained.folds == fold) & is_long)
        if len(places):
            cut = reader.read([" ".join(words[place][:max_length]) for place in places])
            cut = put_beside(cut, None if encoded is None else encoded[places])
            answers = trained.head(rows.labels, trained.folds != fold).predict(cut).argmax(axis=1)
            lost[places] = is_right[places].astype(float) - (answers == rows.labels[places])
    return int(is_long.sum()), *_interval(lost, rows.groups)


def _interval(values: Floats, groups: Integers) -> Interval:
    """Mean of the rows' values, and its 95 % interval by bootstrap over the groups that rows belong
    to.
    """
    numbers = np.unique(groups, return_inverse=True)[1]
    sums = np.stack([np.bincount(numbers, values), np.bincount(numbers)], axis=1)
    # Groups that are alike are drawn together, as often as chance has it.
    kinds, counts = np.unique(sums, axis=0, return_counts=True)
    drawn = np.random.default_rng(0).multinomial(len(sums), counts / len(sums), _DRAWS) @ kinds
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def _closeness(features: csr_matrix, labels: Integers, num_classes: int) -> NDArray[np.float64]:
    is_of = csr_matrix(
        (np.ones(len(labels)), (labels, np.arange(len(labels)))), (num_classes, len(labels))
    )
    return (normalize(features) @ normalize(is_of @ features).T).max(axis=1).toarray().ravel()
