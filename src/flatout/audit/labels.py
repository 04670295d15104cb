"""Which labels are probably wrong: confident learning on out-of-fold probabilities.

The method of Northcutt, Jiang and Chuang, "Confident Learning" (JAIR 2021). A row counts for class
j where its probability of j reaches the mean of that of the rows labelled j. Rows that count for
another class than their own are suspects; those whose own class is least probable come first. A
hard row looks like a wrong one. So the rate of noise comes from planted errors: as many of the rows
as look like those can be wrong, and no more.

Shapes: N rows, C classes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
SPREAD = 0.25  # of planted errors, how many more lie between classes that no suspect lies between
_SURE = 1.96  # standard errors on each side of a 95 % interval
_UNLIKE = 0.25  # real errors may be found by so much more or less easily than planted ones
# A class with fewer rows than this part of the mean is rare. Its suspects pile up where they are so
# many times the share of suspects of all rows, and at least so many. Guesses.
_RARE = 0.5
_PILED_UP = 3.0
_LEAST_PILED_UP = 3
_LEAST_PLANTED = 15  # planted errors above a threshold; a share of fewer means little


@dataclass(frozen=True, slots=True)
class Suspects:
    """Rows whose labels are probably wrong, the surest first. Arrays have an entry for each."""

    rows: Integers  # numbers of the rows
    likely: Integers  # the class that the model gives instead
    sure: Floats  # probability that the label is wrong, by the model
    joint: Floats  # `[C, C]` share of all rows with a given label (row) and a likely one (column)

    def in_order_of(self, sure: Floats) -> Suspects:
        """The same suspects in the order of another model; `sure`: `[N]` that its labels are
        wrong.
        """
        order = np.argsort(-sure[self.rows], kind="stable")
        rows = self.rows[order]
        return Suspects(rows, self.likely[order], sure[rows], self.joint)


def find_margins(probabilities: Floats, labels: Integers) -> Floats:
    """Probability of the likeliest other class less that of the label: above 0 looks wrong."""
    every_row = np.arange(len(labels))
    of_label = probabilities[every_row, labels]
    others = probabilities.copy()
    others[every_row, labels] = -1
    return others.max(axis=1) - of_label


def find_suspects(probabilities: Floats, labels: Integers, least: int = 1) -> Suspects:
    """Confident learning on `[N, C]` probabilities of models that did not see the rows.

    Classes of fewer than `least` rows take no part: their rows are no suspects, and no row is
    suspected of belonging to them.
    """
    # Of rows labelled 0, 0, 1 the model gives class 0 the probabilities 0.9, 0.3, 0.8. The mean
    # of class 0 over its own rows is 0.6, and 0.2 for class 1 over the last row. The second row
    # (0.3, 0.7) reaches only the threshold of class 1; its label is 0, so it is a suspect. The
    # last one (0.8, 0.2) reaches both; 0.8 is more, so it is a suspect, too.
    num_rows, num_classes = probabilities.shape
    class_sizes = np.bincount(labels, minlength=num_classes)
    takes_part = class_sizes >= least
    thresholds = np.full(num_classes, np.inf)
    for number in np.flatnonzero(takes_part):
        thresholds[number] = probabilities[labels == number, number].mean()
    reached = np.where(probabilities >= thresholds, probabilities, 0.0)
    is_counted = reached.any(axis=1) & takes_part[labels]
    likely = np.where(is_counted, reached.argmax(axis=1), labels)
    counts = np.zeros((num_classes, num_classes))
    np.add.at(counts, (labels[is_counted], likely[is_counted]), 1)
    # Rows that reach no threshold are spread like the others of their label.
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    joint = shares * class_sizes[:, None] / num_rows
    rows = np.flatnonzero(likely != labels)
    sure = 1 - probabilities[np.arange(num_rows), labels]
    return Suspects(rows, likely[rows], sure[rows], joint).in_order_of(sure)


def plant_errors(
    labels: Integers, joint: Floats, share: float, spread: float = SPREAD, least: int = 1
) -> tuple[Integers, Integers]:
    """Replace a share of the labels by wrong ones; returns all labels, and which rows changed.

    `joint`: that of `Suspects`; errors are planted between the same pairs of classes. `spread`: so
    many more, as a share of these, lie between any two classes. Classes of fewer than `least` rows
    take no part.
    """
    random = np.random.default_rng(1)
    # What is likely j and called i becomes a planted error from j to i, hence the transpose.
    weights = joint.T.copy()
    np.fill_diagonal(weights, 0)
    # The small number gives every class some wrong label to draw.
    weights += (spread * weights.sum() + 1e-6) / weights.size
    np.fill_diagonal(weights, 0)
    class_sizes = np.bincount(labels, minlength=len(weights))
    takes_part = class_sizes >= least
    weights *= np.outer(takes_part, takes_part)
    # The weight of a class is shared by its rows: each is as likely to get a wrong label.
    weight_of_class = weights.sum(axis=1)
    weight_of_row = weight_of_class[labels] / class_sizes[labels]
    wanted = max(2 * _LEAST_PLANTED, round(share * len(labels)))
    number = min(wanted, int(np.count_nonzero(weight_of_row)) // 2)
    chances = weight_of_row / weight_of_row.sum()
    rows = random.choice(len(labels), number, replace=False, p=chances)
    planted = labels.copy()
    for row in rows:
        of_class = weights[labels[row]]
        planted[row] = random.choice(len(of_class), p=of_class / of_class.sum())
    return planted, rows


def estimate_noise(observed: Floats, planted: Floats) -> tuple[float, float, float]:
    """Share of wrong labels and its 95 % interval, from margins of all rows and of planted errors.

    Example: a tenth of 1,000 rows have a margin above 0.5, and half of the planted errors have. So
    100 rows are half of the wrong ones, if all above are wrong: 200 rows, a share of 0.2, or less.
    """
    # Each threshold gives such a bound, and the least upper one is taken. Its interval has the
    # chance of the two counts, and room for real errors that are found more or less easily.
    observed = np.sort(observed)
    planted = np.sort(planted)
    best = (1.0, 0.0, 1.0)  # rate and interval
    for threshold in planted[: len(planted) - _LEAST_PLANTED]:
        num_above = len(observed) - np.searchsorted(observed, threshold)
        num_planted_above = len(planted) - np.searchsorted(planted, threshold)
        share_found = num_planted_above / len(planted)
        rate = num_above / len(observed) / share_found
        # relative variances, of the logarithm of the rate
        of_rows = 1 / max(1, num_above)
        of_planted = (1 - share_found) / num_planted_above
        error = _SURE * np.sqrt(of_rows + of_planted + _UNLIKE**2)
        low = rate * np.exp(-error)
        high = rate * np.exp(error)
        if not num_above:
            # With none of N rows above, the share of such rows is below 3 / N in 95 % of cases.
            low = 0.0
            high = 3 / len(observed) / share_found
        if high < best[2]:
            best = (rate, low, high)
    return best


def count_mixed_pairs(
    labels: Integers, suspects: Suspects, most: int = 5
) -> list[tuple[int, int, int]]:
    """Pairs of classes that suspects lie between: (given, likely, number of rows), most first."""
    given = labels[suspects.rows].tolist()
    pairs = Counter(zip(given, suspects.likely.tolist(), strict=True))
    by_size = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    return [(*pair, num_rows) for pair, num_rows in by_size[:most]]


def find_rare_suspects(labels: Integers, suspects: Suspects) -> list[tuple[int, int, int]]:
    """Rare classes with many suspects: (class, suspects, rows), the class with most first.

    A model has seen too little of such a class, so its rows look wrong though they are right.
    """
    # 1,000 rows of 4 classes, 50 suspects: 5 % of all rows. A class with 16 rows is rare, as the
    # mean is 250. With 7 suspects 44 % of its rows are, which is more than 3 · 5 %.
    class_sizes = np.bincount(labels)
    num_suspects = np.bincount(labels[suspects.rows], minlength=len(class_sizes))
    is_rare = class_sizes < _RARE * class_sizes[class_sizes > 0].mean()
    usual_share = len(suspects.rows) / len(labels)
    piled_up_from = np.maximum(_LEAST_PILED_UP, _PILED_UP * usual_share * class_sizes)
    rare_classes = list[tuple[int, int, int]]()
    for number in np.flatnonzero(is_rare & (num_suspects >= piled_up_from)).tolist():
        rare_classes.append((number, int(num_suspects[number]), int(class_sizes[number])))
    return sorted(rare_classes, key=lambda counts: -counts[1])
