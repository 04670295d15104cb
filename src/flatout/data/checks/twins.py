"""Texts that occur more than once: repeated, labelled in two ways, or on both sides of a split.

`find_twins` compares the records of one file of `record_files.py`, after `record_splits.py` gave
them their splits. Texts are equal, or equal in their letters and digits; texts that are merely
similar are not found. Open this file to change what counts as a twin. What becomes of rows with a
twin is decided in `survey.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.record_files import Records

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Twins:
    """Which of some records have a twin, and of what kind."""

    # Training rows with the text and the label of an earlier training row.
    repeated: Mask
    # Training rows like the first such row in letters and digits, but not equal to it. One that
    # equals a later row is `repeated`, too.
    alike: Mask
    # Rows whose text has another label elsewhere.
    conflict: Mask
    # The splits that have the row's text: bit 0 training, 1 validation, 2 test.
    exact_splits: NDArray[np.uint8]
    # The splits that have a text of the same letters and digits, as bits.
    alike_splits: NDArray[np.uint8]


def find_twins(records: Records, codes: NDArray[np.integer], splits: NDArray[np.int8]) -> Twins:
    """Compare the records of one file; `codes` are their labels, `splits` are 0, 1 and 2."""
    # Three rows of one text, letters and digits alike, going through:
    #
    #     row  text    label  split       exact_splits  alike_splits  conflict  repeated  alike
    #     0    "A b."  0      training    0b001         0b011         no        no        no
    #     1    "a B!"  1      training    0b011         0b011         yes       no        yes
    #     2    "a B!"  0      validation  0b011         0b011         yes       no        no
    split_bits = (np.uint8(1) << splits.astype(np.uint8)).astype(np.uint8)
    repeated = np.zeros(len(records), np.bool_)
    alike = np.zeros(len(records), np.bool_)
    conflict = np.zeros(len(records), np.bool_)
    exact_splits = split_bits.copy()
    alike_splits = split_bits.copy()
    rows = _places_of_repeated(records["alike"])  # most rows have no twin, and are done here
    if len(rows):
        few = records[rows]
        # Sorted by letters, exact text and label, then in file order: twins stand side by side.
        order = np.lexsort((few["row"], few["table"], codes[rows], few["exact"], few["alike"]))
        rows = rows[order]
        few = few[order]
        few_codes = codes[rows]
        few_bits = split_bits[rows]
        begins_alike = _starts(few["alike"])
        begins_exact = _starts(few["alike"], few["exact"])
        alike_splits[rows] = _over_runs(np.bitwise_or, few_bits, begins_alike)
        exact_splits[rows] = _over_runs(np.bitwise_or, few_bits, begins_exact)
        lowest_code = _over_runs(np.minimum, few_codes, begins_exact)
        highest_code = _over_runs(np.maximum, few_codes, begins_exact)
        conflict[rows] = highest_code != lowest_code
        train = np.flatnonzero(few_bits == 1)
        of_train = few[train]
        is_first = _starts(of_train["alike"], of_train["exact"], few_codes[train])
        repeated[rows[train]] = ~is_first
        # Of training rows alike in letters, the first in its table is the one to compare with.
        by_row = train[np.lexsort((of_train["row"], of_train["alike"]))]
        exact = few["exact"][by_row]
        begins = _starts(few["alike"][by_row])
        first_exact = exact[begins][np.cumsum(begins) - 1] if len(by_row) else exact
        alike[rows[by_row]] = exact != first_exact
    return Twins(repeated, alike, conflict, exact_splits, alike_splits)


def _places_of_repeated(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Places of the values that occur more than once: [5, 7, 5] → [0, 2].

    Sorting finds these values in a fraction of the time that an argsort of all places would take.
    """
    in_order = np.sort(values)
    repeated = np.unique(in_order[1:][in_order[1:] == in_order[:-1]])
    if not len(repeated):
        return np.empty(0, np.int64)
    nearest = np.minimum(np.searchsorted(repeated, values), len(repeated) - 1)
    return np.flatnonzero(repeated[nearest] == values)


def _starts(*columns: NDArray[np.generic]) -> Mask:
    """Where a run of rows with equal values in all columns begins: [4, 4, 9] → [yes, no, yes]."""
    starts = np.ones(len(columns[0]), np.bool_)
    if len(starts):
        differs = [column[1:] != column[:-1] for column in columns]
        starts[1:] = np.logical_or.reduce(differs)
    return starts


def _over_runs(reduce: np.ufunc, values: NDArray[np.generic], starts: Mask) -> NDArray[np.generic]:
    """Reduce each run of values, and give the result to each of its members.

    The maximum of values [3, 8, 5] in runs that start at [yes, no, yes] is [8, 8, 5].
    """
    return reduce.reduceat(values, np.flatnonzero(starts))[np.cumsum(starts) - 1]
