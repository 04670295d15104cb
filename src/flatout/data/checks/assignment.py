"""The split of every row, where splits are taken from the training rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.findings import counted
from flatout.data.checks.twins import RecordFiles, Records
from flatout.data.tables.splits import Dealer, SplitBy, reseeded, split_by_hash, split_groups
from flatout.errors import UserError

Assigner = Callable[[Records], NDArray[np.int8]]
"""Gives the records of one file their splits: 0, 1 or 2."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """How splits are taken from the training rows."""

    by: SplitBy = SplitBy.content
    group: str | None = None
    validation_share: float = 0.0
    test_share: float = 0.0
    seed: int = 0

    @property
    def shares(self) -> dict[str, float]:
        return {"validation_share": self.validation_share, "test_share": self.test_share}

    @property
    def is_made(self) -> bool:
        return self.validation_share + self.test_share > 0


def assigner(splitting: Splitting, files: RecordFiles, strata: NDArray[np.int64]) -> Assigner:
    """The rule of some settings; rows of tables that were given for a split stay there."""
    if not splitting.is_made:
        return lambda records: records["table"].astype(np.int8)
    rules = {SplitBy.content: _by_content, SplitBy.stratified: _by_class, SplitBy.group: _by_group}
    assign = rules[splitting.by](splitting, files, strata)

    def assigned(records: Records) -> NDArray[np.int8]:
        splits = records["table"].astype(np.int8)
        is_own = splits == 0
        if is_own.all():
            return assign(records)
        splits[is_own] = assign(records[is_own])
        return splits

    return assigned


def _by_content(splitting: Splitting, files: RecordFiles, strata: NDArray[np.int64]) -> Assigner:
    return lambda records: split_by_hash(reseeded(records["alike"], splitting.seed), **splitting.shares)


def _by_class(splitting: Splitting, files: RecordFiles, strata: NDArray[np.int64]) -> Assigner:
    """Distinct texts are dealt out class by class; a text of several classes goes by the first that is met."""
    dealer = Dealer(int(strata.max()) + 1, **splitting.shares)

    def assign(records: Records) -> NDArray[np.int8]:
        hashes = reseeded(records["alike"], splitting.seed)
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        return dealer.deal(strata[records["code"][first]])[inverse]

    return assign


def _by_group(splitting: Splitting, files: RecordFiles, strata: NDArray[np.int64]) -> Assigner:
    groups, rows = np.empty(0, np.uint64), np.empty(0, np.int64)
    for records in files.parts():
        each, counts = np.unique(records["group"][records["table"] == 0], return_counts=True)
        groups, inverse = np.unique(np.append(groups, each), return_inverse=True)
        rows = np.bincount(inverse, weights=np.append(rows, counts)).astype(np.int64)
    needed = 1 + sum(share > 0 for share in splitting.shares.values())
    if len(groups) < needed:
        what = f"{counted(len(groups), 'group')} in {splitting.group!r} cannot be parted into {needed} splits"
        raise UserError("data.group", what, hint="Name another column, or give a file for each split.")
    splits = split_groups(groups, rows, **splitting.shares, seed=splitting.seed)
    return lambda records: splits[np.searchsorted(groups, records["group"])]
