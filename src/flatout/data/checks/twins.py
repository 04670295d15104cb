"""Texts that occur more than once: repeated, labelled in two ways, or on both sides of a split.

Each row leaves a record of fixed size with the hashes of its text. `RecordFiles` keeps the records
in 64 files by their hash, so equal texts meet in the same file. Only one file at a time is in
memory, however many rows there are. `assigner` gives the records of a file their splits, then
`find_twins` compares them. What becomes of rows with a twin is decided in `survey`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import counted
from flatout.data.tables.splits import (
    Dealer,
    SplitBy,
    Splitting,
    reseeded,
    split_by_hash,
    split_groups,
)
from flatout.errors import explain_full_tmpdir, require

RECORD = np.dtype(
    [
        ("alike", "u8"),  # hash of the text's letters and digits
        ("exact", "u8"),  # hash of the text as it stands
        ("group", "u8"),  # hash of the value of `data.group`
        ("row", "i8"),  # number of the row in its table
        ("code", "i4"),  # number of its label
        ("table", "i1"),  # number of the split that its table was given for
    ],
    align=True,
)
"""What is kept of a row to compare it with others."""
_USE_OF_TMPDIR = f"comparing texts takes {RECORD.itemsize} bytes a row there"
# Bits of the hash `alike` that choose a record's file.
_FILE_BITS = 6
_NUM_FILES = 1 << _FILE_BITS
# A file of records stays in memory up to so many bytes, then goes to the disk.
_MEMORY_BYTES = 1 << 20
_MOST_WAITING = 4  # blocks of records that wait to be written; a fifth makes the reader wait
Records = NDArray[np.void]
Mask = NDArray[np.bool_]
# Gives the records of one file their splits: 0 training, 1 validation, 2 test.
Assigner = Callable[[Records], NDArray[np.int8]]


class RecordFiles:
    """Records in files by the first bits of their hash. A thread of its own writes them."""

    def __init__(self) -> None:
        # `close` closes them
        self._files = [
            tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115
            for _ in range(_NUM_FILES)
        ]
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[Future[None]] = []

    def close(self) -> None:
        """Remove all files."""
        self._thread.shutdown()
        for file in self._files:
            with suppress(OSError):  # a full disk refuses what is still to be written
                file.close()

    def add(self, records: Records) -> None:
        """Hand records to the thread that writes them, in the order of the calls."""
        while len(self._waiting) >= _MOST_WAITING:
            with explain_full_tmpdir(_USE_OF_TMPDIR):
                self._waiting.pop(0).result()
        self._waiting.append(self._thread.submit(self._write, records))

    def parts(self) -> Iterator[Records]:
        """The records of one file after the other, once all are written."""
        with explain_full_tmpdir(_USE_OF_TMPDIR):
            while self._waiting:
                self._waiting.pop().result()
        for file in self._files:
            with explain_full_tmpdir(_USE_OF_TMPDIR):
                file.seek(0)
                content = file.read()
            yield np.frombuffer(content, RECORD)

    def _write(self, records: Records) -> None:
        file_numbers = (records["alike"] >> np.uint64(64 - _FILE_BITS)).astype(np.uint8)
        records = records.take(np.argsort(file_numbers, kind="stable"))
        ends = np.cumsum(np.bincount(file_numbers, minlength=_NUM_FILES))
        parts = np.split(records, ends[:-1])
        for file, part in zip(self._files, parts, strict=True):
            file.write(part.tobytes())


def assigner(splitting: Splitting, files: RecordFiles, strata: NDArray[np.int64]) -> Assigner:
    """The function that assigns splits to records, by the settings in `splitting`.

    Rows of a table that the user names for validation or test stay there. `strata` has a stratum
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


@dataclass(frozen=True, slots=True)
class Twins:
    """Which of some records have a twin, and of what kind."""

    # Training rows with the text and the label of an earlier training row.
    repeated: Mask
    # Training rows like an earlier one in letters and digits, but not equal to it.
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
        # Twins come to stand side by side: by letters, by exact text, by label, in file order.
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
