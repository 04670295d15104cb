"""Which labels are probably wrong: confident learning on out-of-fold probabilities.

The method of Northcutt, Jiang and Chuang, "Confident Learning" (JAIR 2021). A row counts for class
j where its probability of j reaches the mean of that of the rows labelled j. Rows that count for
another class than their own are suspects; those whose own class is least probable come first. A
hard row looks like a wrong one. So the rate of noise comes from planted errors: as many of the rows
as look like those can be wrong, and no more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float64]
Classes = NDArray[np.int64]
# of planted errors, how many more go to pairs of classes that no suspect lies between
SPREAD = 0.25
# by the latter share real errors may be found more or less easily than planted ones
_SURE = 1.96
_UNLIKE = 0.25
# planted errors that a threshold must leave, so that a share of them means something
_LEAST_PLANTED = 15


@dataclass(frozen=True, slots=True)
class Suspects:
    """Rows whose labels are probably wrong, the surest first."""

    places: NDArray[np.int64]
    likely: NDArray[np.int64]  # the class of each suspect by the model
    sure: NDArray[np.float64]  # probability that the given class is not the row's, by the model
    # share of the rows with a given label (row) and a likely one (column)
    joint: NDArray[np.float64]

    def in_order_of(self, sure: NDArray[np.float64]) -> Suspects:
        """The same rows, those first of which another model is surest."""
        order = np.argsort(-sure[self.places], kind="stable")
        return Suspects(
            self.places[order], self.likely[order], sure[self.places[order]], self.joint
        )


def margins(probabilities: Probabilities, labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Probability of the likeliest other class less that of the given one."""
    own = probabilities[np.arange(len(labels)), labels]
    others = probabilities.copy()
    others[np.arange(len(labels)), labels] = -1
    return others.max(axis=1) - own


def find_suspects(
    probabilities: Probabilities, labels: NDArray[np.int64], least: int = 1
) -> Suspects:
    """Confident learning: the rows off the diagonal of the confident joint; classes of fewer rows
    take no part.
    """
    num_classes = probabilities.shape[1]
    rows = np.bincount(labels, minlength=num_classes)
    own = [
        probabilities[labels == each, each].mean() if rows[each] >= least else np.inf
        for each in range(num_classes)
    ]
    counted = np.where(probabilities >= np.array(own), probabilities, 0.0)
    is_counted = counted.any(axis=1) & (rows >= least)[labels]
    likely = np.where(is_counted, counted.argmax(axis=1), labels)
    counts = np.zeros((num_classes, num_classes))
    np.add.at(counts, (labels[is_counted], likely[is_counted]), 1)
    joint = counts / np.maximum(1, counts.sum(axis=1, keepdims=True)) * rows[:, None] / len(labels)
    places = np.flatnonzero(likely != labels)
    sure = 1 - probabilities[np.arange(len(labels)), labels]
    return Suspects(places, likely[places], sure[places], joint).in_order_of(sure)


def plant(
    labels: Classes, joint: Probabilities, share: float, spread: float = SPREAD, least: int = 1
) -> tuple[Classes, NDArray[np.int64]]:
    """Some labels replaced by wrong ones, as the suspects' are, and `spread` of these more; which
    rows they are.
    """
    random = np.random.default_rng(1)
    weights = joint.T.copy()
    np.fill_diagonal(weights, 0)
    # so that no class is without a wrong label to draw
    weights += (spread * weights.sum() + 1e-6) / weights.size
    np.fill_diagonal(weights, 0)
    rows = np.bincount(labels, minlength=len(weights))
    weights *= np.outer(rows >= least, rows >= least)
    of_rows = weights.sum(axis=1)[labels] / rows[labels]
    number = min(
        max(2 * _LEAST_PLANTED, round(share * len(labels))), int(np.count_nonzero(of_rows)) // 2
    )
    places = random.choice(len(labels), number, replace=False, p=of_rows / of_rows.sum())
    planted = labels.copy()
    for place in places:
        row = weights[labels[place]]
        planted[place] = random.choice(len(row), p=row / row.sum())
    return planted, places


def noise_rate(
    observed: NDArray[np.float64], planted: NDArray[np.float64]
) -> tuple[float, float, float]:
    """Share of wrong labels, with a 95 % interval, from the margins of all rows and of planted
    errors.
    """
    # Wrong rows reach a threshold as often as planted ones do, so the rows above it bound how many
    # are wrong. The threshold with the least upper bound is taken. Its interval is of two counts
    # and of errors unlike planted ones.
    observed, planted = np.sort(observed), np.sort(planted)
    best = (1.0, 1.0, 0.0)
    for threshold in planted[: len(planted) - _LEAST_PLANTED]:
        above, of_planted = (
            len(all_) - np.searchsorted(all_, threshold) for all_ in (observed, planted)
        )
        rate = above / len(observed) / (of_planted / len(planted))
        error = np.sqrt(
            1 / max(1, above) + (1 - of_planted / len(planted)) / of_planted + _UNLIKE**2
        )
        high = min(
            1.0,
            rate * np.exp(_SURE * error)
            if above
            else 3 / len(observed) / (of_planted / len(planted)),
        )
        if high < best[1]:
            best = (rate, high, rate * np.exp(-_SURE * error) if above else 0.0)
    return best[0], best[2], best[1]


def mixed_up(labels: Classes, suspects: Suspects, most: int = 5) -> list[tuple[int, int, int]]:
    """Pairs of classes (given, likely) that the suspects lie between, with their rows, the most
    first.
    """
    pairs = Counter(zip(labels[suspects.places].tolist(), suspects.likely.tolist(), strict=True))
    return [
        (*pair, rows)
        for pair, rows in sorted(pairs.items(), key=lambda each: (-each[1], each[0]))[:most]
    ]
