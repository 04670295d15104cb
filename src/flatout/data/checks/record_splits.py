"""Which split each row is in: by its text, dealt out by classes, or by whole groups of rows.

`choose_assigner` reads the settings of the split, and returns a function from the records of a file
to their splits. Texts that are alike get one split, unless groups decide. Open this file to add a
way to split; how shares are dealt stands in `data/tables/splits.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import counted
from flatout.data.checks.record_files import RecordFiles, Records
from flatout.data.tables.splits import (
    Dealer,
    SplitBy,
    Splitting,
    reseeded,
    split_by_hash,
    split_groups,
)
from flatout.errors import require

# Gives the records of one file their splits: 0 training, 1 validation, 2 test. Call it once for
# each file, in the order of files: where classes are dealt out, it counts on from the file before.
Assigner = Callable[[Records], NDArray[np.int8]]


def choose_assigner(
    splitting: Splitting, files: RecordFiles, strata: NDArray[np.int64]
) -> Assigner:
    """The function that assigns splits to records, by the settings in `splitting`.

    Rows of the files that settings name for validation or test stay there. `strata` has a stratum
    for each number of a label; it is used where splits are stratified.
    """
    if not any(splitting.shares.values()):
        return lambda records: records["table"].astype(np.int8)
    if splitting.by is SplitBy.group:
        assign = _by_group(splitting, files)
    else:
        assign = _by_text(splitting, strata if splitting.by is SplitBy.stratified else None)

    def assign_training_rows(records: Records) -> NDArray[np.int8]:
        splits = records["table"].astype(np.int8)
        is_of_training_table = splits == 0
        if is_of_training_table.all():
            return assign(records)
        splits[is_of_training_table] = assign(records[is_of_training_table])
        return splits

    return assign_training_rows


def _by_text(splitting: Splitting, strata: NDArray[np.int64] | None) -> Assigner:
    """Assign splits by a hash of the text, or by its stratum.

    With `strata`, texts are dealt out one by one within each stratum. A text with several labels
    counts in the lowest of their strata, and all its rows get one split.
    """
    if strata is None:
        return lambda records: split_by_hash(
            reseeded(records["alike"], splitting.seed), **splitting.shares
        )
    dealer = Dealer(int(strata.max()) + 1, **splitting.shares)

    def assign(records: Records) -> NDArray[np.int8]:
        hashes = reseeded(records["alike"], splitting.seed)
        # Rows "hi" of stratum 3, "hi" of 1 and "yo" of 2: texts [hi, yo], strata [1, 2]
        texts, text_of_row = np.unique(hashes, return_inverse=True)
        lowest_stratum = np.full(len(texts), strata.max())
        np.minimum.at(lowest_stratum, text_of_row, strata[records["code"]])
        return dealer.deal(lowest_stratum)[text_of_row]

    return assign


def _by_group(splitting: Splitting, files: RecordFiles) -> Assigner:
    """Assign whole groups, after all records were read once to count the rows of each."""
    groups = np.empty(0, np.uint64)
    rows_of_group = np.empty(0, np.int64)
    # Two files going through:
    #
    #     so far            groups [4, 9]       rows [2, 1]
    #     a file adds       groups [7, 9]       rows [1, 5]
    #     together          groups [4, 7, 9]    rows [2, 1, 6]    number of 4 9 7 9: 0 2 1 2
    for records in files.parts():
        is_of_training_table = records["table"] == 0
        new_groups, counts = np.unique(records["group"][is_of_training_table], return_counts=True)
        groups, number = np.unique(np.append(groups, new_groups), return_inverse=True)
        all_counts = np.append(rows_of_group, counts)
        rows_of_group = np.bincount(number, weights=all_counts).astype(np.int64)
    needed = 1 + sum(share > 0 for share in splitting.shares.values())
    require(
        len(groups) >= needed,
        "data.group",
        (
            f"{counted(len(groups), 'group')} in {splitting.group!r} cannot be parted into {needed}"
            " splits"
        ),
        hint="Name another column, or give a file for each split.",
    )
    splits = split_groups(groups, rows_of_group, **splitting.shares, seed=splitting.seed)
    return lambda records: splits[np.searchsorted(groups, records["group"])]
