"""Texts that occur more than once: repeated, labelled in two ways, or on both sides of a split.

Every row leaves a record of fixed size with the hashes of its text. Records are kept in 64 files by
their hash, so equal texts meet in the same file and only one file at a time lies in memory, however
many rows there are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

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
from flatout.errors import out_of_space, require

RECORD = np.dtype(
    [
        ("alike", "u8"),
        ("exact", "u8"),
        ("group", "u8"),
        ("row", "i8"),
        ("code", "i4"),
        ("table", "i1"),
    ],
    align=True,
)  # a row: hashes of its letters, its text and its group; its number, its label's number, its table
_PARTS = 64
_PART_BITS = 6
_HELD_BYTES = 1 << 20
_WAITING = 4
Records = NDArray[np.void]
Mask = NDArray[np.bool_]
# gives the records of one file their splits: 0, 1 or 2
Assigner = Callable[[Records], NDArray[np.int8]]


class RecordFiles:
    """Records by the first bits of their hash, on disk beyond some megabytes; written by a thread
    of their own.
    """

    def __init__(self) -> None:
        # `close` closes them
        self._files = [
            tempfile.SpooledTemporaryFile(_HELD_BYTES)  # noqa: SIM115
            for _ in range(_PARTS)
        ]
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[Future[None]] = []

    def close(self) -> None:
        self._thread.shutdown()
        for file in self._files:
            with suppress(OSError):  # a full disk refuses what is still to be written
                file.close()

    def add(self, records: Records) -> None:
        """Have some records written, in the order of the calls."""
        while len(self._waiting) >= _WAITING:
            with _refusals_of_temporary_disk():
                self._waiting.pop(0).result()
        self._waiting.append(self._thread.submit(self._write, records))

    def parts(self) -> Iterator[Records]:
        with _refusals_of_temporary_disk():
            while self._waiting:
                self._waiting.pop().result()
        for file in self._files:
            with _refusals_of_temporary_disk():
                file.seek(0)
                content = file.read()
            yield np.frombuffer(content, RECORD)

    def _write(self, records: Records) -> None:
        parts = (records["alike"] >> np.uint64(64 - _PART_BITS)).astype(np.uint8)
        records = records.take(np.argsort(parts, kind="stable"))
        ends = np.cumsum(np.bincount(parts, minlength=_PARTS))
        for file, piece in zip(self._files, np.split(records, ends[:-1]), strict=True):
            file.write(piece.tobytes())


@contextmanager
def _refusals_of_temporary_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = (
            "Set TMPDIR to a folder of a disk with more room:"
            f" comparing texts takes {RECORD.itemsize} bytes a row there."
        )
        raise out_of_space(error, Path(tempfile.gettempdir()), None, "TMPDIR", hint) from None


def assigner(splitting: Splitting, files: RecordFiles, strata: NDArray[np.int64]) -> Assigner:
    """The rule of some settings; rows of tables that were given for a split stay there."""
    if not any(splitting.shares.values()):
        return lambda records: records["table"].astype(np.int8)
    if splitting.by is SplitBy.group:
        assign = _by_group(splitting, files)
    else:
        assign = _by_text(splitting, strata if splitting.by is SplitBy.stratified else None)

    def assigned(records: Records) -> NDArray[np.int8]:
        splits = records["table"].astype(np.int8)
        is_own = splits == 0
        splits[is_own] = assign(records if is_own.all() else records[is_own])
        return splits

    return assigned


def _by_text(splitting: Splitting, strata: NDArray[np.int64] | None) -> Assigner:
    """By their hashes; with `strata` distinct texts are dealt out by the first of the classes of
    each.
    """
    if strata is None:
        return lambda records: split_by_hash(
            reseeded(records["alike"], splitting.seed), **splitting.shares
        )
    dealer = Dealer(int(strata.max()) + 1, **splitting.shares)

    def assign(records: Records) -> NDArray[np.int8]:
        hashes = reseeded(records["alike"], splitting.seed)
        texts, inverse = np.unique(hashes, return_inverse=True)
        first = np.full(len(texts), strata.max())
        np.minimum.at(first, inverse, strata[records["code"]])
        return dealer.deal(first)[inverse]

    return assign


def _by_group(splitting: Splitting, files: RecordFiles) -> Assigner:
    groups, rows = np.empty(0, np.uint64), np.empty(0, np.int64)
    for records in files.parts():
        each, counts = np.unique(records["group"][records["table"] == 0], return_counts=True)
        groups, inverse = np.unique(np.append(groups, each), return_inverse=True)
        rows = np.bincount(inverse, weights=np.append(rows, counts)).astype(np.int64)
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
    splits = split_groups(groups, rows, **splitting.shares, seed=splitting.seed)
    return lambda records: splits[np.searchsorted(groups, records["group"])]


@dataclass(frozen=True, slots=True)
class Twins:
    """Which of some records have a twin, and of what kind."""

    repeated: Mask  # training rows with the text and the label of an earlier training row
    alike: Mask  # training rows like an earlier one in letters and digits, but not equal
    conflict: Mask  # rows whose text has another label elsewhere
    exact_splits: NDArray[np.uint8]  # the splits in which the same text stands, a bit for each
    # the splits in which a text of the same letters and digits stands
    alike_splits: NDArray[np.uint8]


def find_twins(records: Records, codes: NDArray[np.integer], splits: NDArray[np.int8]) -> Twins:
    """Compare the records of one file; `splits` are 0, 1 and 2."""
    own = (np.uint8(1) << splits.astype(np.uint8)).astype(np.uint8)
    repeated, alike, conflict = (np.zeros(len(records), np.bool_) for _ in range(3))
    exact_splits, alike_splits = own.copy(), own.copy()
    if len(rows := _with_company(records["alike"])):
        few = records[rows]
        few_codes = codes[rows]
        few_own = own[rows]
        order = np.lexsort((few["row"], few["table"], few_codes, few["exact"], few["alike"]))
        rows = rows[order]
        few = few[order]
        few_codes = few_codes[order]
        few_own = few_own[order]
        same_alike, same_exact = _starts(few["alike"]), _starts(few["alike"], few["exact"])
        alike_splits[rows] = _over_groups(np.bitwise_or, few_own, same_alike)
        exact_splits[rows] = _over_groups(np.bitwise_or, few_own, same_exact)
        least = _over_groups(np.minimum, few_codes, same_exact)
        conflict[rows] = _over_groups(np.maximum, few_codes, same_exact) != least
        train = np.flatnonzero(few_own == 1)
        repeated[rows[train]] = ~_starts(few["alike"][train], few["exact"][train], few_codes[train])
        by_row = train[np.lexsort((few["row"][train], few["alike"][train]))]
        begins = _starts(few["alike"][by_row])
        first_exact = (
            few["exact"][by_row][begins][np.cumsum(begins) - 1]
            if len(by_row)
            else few["exact"][by_row]
        )
        alike[rows[by_row]] = few["exact"][by_row] != first_exact
    return Twins(repeated, alike, conflict, exact_splits, alike_splits)


def _with_company(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Places of the values that occur more than once: a sort finds which they are, far sooner than
    an argsort.
    """
    in_order = np.sort(values)
    several = np.unique(in_order[1:][in_order[1:] == in_order[:-1]])
    if not len(several):
        return np.empty(0, np.int64)
    return np.flatnonzero(
        several[np.minimum(np.searchsorted(several, values), len(several) - 1)] == values
    )


def _starts(*columns: NDArray[np.generic]) -> Mask:
    """Where a run of equal values begins."""
    starts = np.ones(len(columns[0]), np.bool_)
    if len(starts):
        starts[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return starts


def _over_groups(
    reduce: np.ufunc, values: NDArray[np.generic], starts: Mask
) -> NDArray[np.generic]:
    """A reduction of each run, for every member of the run."""
    return reduce.reduceat(values, np.flatnonzero(starts))[np.cumsum(starts) - 1]
