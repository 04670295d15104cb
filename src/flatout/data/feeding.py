"""Settings that every kind of data shares: splits, batches, feed and store.

Open this file to add a setting for all of texts, bit strings and recordings, or to change how
`data.effective_batch` is divided among devices.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.data.batches.plan import FeedKind
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.splits import SPLITS
from flatout.errors import UserError, check_settings, require, setting
from flatout.files import home_expanded

FILES = "a file, a pattern, a list of files; from Python a table"
FOLDERS = "a file, a pattern, a list of files, a folder; from Python a table"
SOURCES = "a file, a pattern, a list of files, a folder, a name of the Hub; from Python a table"
ROWS = 128  # of a batch, where nothing says otherwise
_FURTHEST = 4096  # rows; an error looks so far for numbers that can be divided


@dataclass(kw_only=True, slots=True)
class FeedingConfig:
    """Splits, batches and the store: the settings that texts and bit strings share."""

    validation_share: float = setting(
        0.1, "Share of training rows for validation without a file.", above=0, below=0.5
    )
    test_share: float = setting(
        0.1, "Share of training rows for the test without either file.", above=0, below=0.5
    )
    split_seed: int = setting(
        0, "Seed; equal rows share a split.", allowed="a whole number, each one another split"
    )
    batch_size: int | None = setting(
        None,
        "Rows one device computes at once; null: 128, and fewer where a run has few rows.",
        least=1,
        example="data.batch_size=64",
    )
    tokens_per_batch: int | None = setting(
        None,
        "Cap on the tokens one device computes at once; replaces batch_size.",
        least=1,
        allowed="a whole number, null, the tokens of the longest row or more",
        example="4096",
    )
    accumulate: int = setting(1, "Batches one device computes before the optimizer steps.", least=1)
    effective_batch: int | None = setting(
        None,
        "Rows of each step over all devices: batch_size is then the most one computes at once,"
        " accumulate follows.",
        least=1,
        allowed=(
            "a whole number, null, 1 or more, without data.accumulate and data.tokens_per_batch"
        ),
        example="512",
    )
    eval_batch_size: int = setting(
        1024, "Rows one device computes at once in validation and test.", least=1
    )
    feed: FeedKind = setting(
        FeedKind.auto, "Where batches are gathered: on the device, in a thread or processes."
    )
    workers: int = setting(
        2, "Processes of the `workers` feed.", least=1, example="data.feed=workers data.workers=4"
    )
    cache: str | None = setting(
        None, "Folder of stores; null: $FLATOUT_CACHE, or the user's.", example="/data/cache"
    )
    read: ReadingConfig = setting(
        ReadingConfig, "How files are written, where they do not say so themselves."
    )

    def __post_init__(self) -> None:
        check_settings(self, "data")
        wanted = self.effective_batch
        if wanted is not None:
            where = "data.effective_batch"
            hint = "Leave one of them out."
            require(
                self.accumulate == 1,
                where,
                f"{wanted} with accumulate={self.accumulate}, which it sets",
                hint=hint,
            )
            require(
                self.tokens_per_batch is None,
                where,
                f"{wanted} rows with tokens_per_batch",
                hint=hint,
            )

    @property
    def is_sample(self) -> bool:
        """Whether no rows are given, so that the built-in sample is used."""
        return self._source_of("source") is None and self._source_of("train") is None

    @property
    def given(self) -> dict[str, Any]:
        """The source of each split, None where settings name none."""
        return {split: self._source_of(split) for split in SPLITS}

    def _source_of(self, name: str) -> Any:
        """What a setting names as rows; None where it is empty, or this kind of data lacks it."""
        return getattr(self, name, None)

    @property
    def are_recordings(self) -> bool:
        """Whether rows are recordings, or parts of them."""
        return False

    @property
    def has_windows(self) -> bool:
        """Whether a row is a window that shares its samples with others."""
        return False

    @property
    def usual_rows(self) -> int:
        """Rows of a batch where nothing says otherwise."""
        return ROWS

    def batches(self, world: int) -> tuple[int, int]:
        """Rows that each of `world` devices computes at once, and batches of a step on each."""
        if self.effective_batch is None:
            return self.batch_size or self.usual_rows, self.accumulate
        return divided(self.effective_batch, self.batch_size or self.usual_rows, world)

    def taken_shares(self, named_splits: Collection[str]) -> tuple[float, float]:
        """Shares of the training rows that become validation and test.

        `named_splits`: splits with rows of their own.
        """
        validation = 0.0 if "validation" in named_splits else self.validation_share
        test = 0.0 if {"test", "validation"} & set(named_splits) else self.test_share
        return validation, test

    def split_names(self, named_splits: Collection[str]) -> list[str]:
        """The splits there will be."""
        taken = dict(zip(SPLITS[1:], self.taken_shares(named_splits), strict=True))
        return [split for split in SPLITS if split in named_splits or taken.get(split, 0) > 0]


def require_other_files(settings: dict[str, object], source_keys: Sequence[str]) -> None:
    """Refuse settings that name training rows twice or not at all, or one file for two splits.

    `settings`: settings and their values; `source_keys`: those that name training rows.
    """
    both = settings.get("source") is not None and settings.get("train") is not None
    require(not both, "data.train", "is set beside data.source", hint="Set one of the two.")
    keys = " or ".join(f"data.{key}=FILE" for key in source_keys)
    has_source = any(settings.get(key) is not None for key in source_keys)
    paths: dict[Path, str] = {}
    for name, value in settings.items():
        require(
            value is None or has_source,
            f"data.{name}",
            "is set without training rows",
            hint=f"Set {keys}.",
        )
        if not isinstance(value, str | Path):
            continue
        # `Path.resolve` fails on names that no file can have
        path = Path(os.path.abspath(home_expanded(value)))  # noqa: PTH100
        other = paths.setdefault(path, name)
        require(
            other == name,
            f"data.{name}",
            f"{value} is the {'training' if other == 'train' else other} file itself",
            hint="Leave it out to take rows from the training rows.",
        )


def divided(wanted: int, most: int, world: int) -> tuple[int, int]:
    """Rows of a batch, at most `most`, and batches of a step; times the devices they are `wanted`.

    >>> divided(512, most=64, world=4)
    (64, 2)
    """
    if (parts := _divided(wanted, most, world)) is not None:
        return parts
    below = range(wanted - 1, max(0, wanted - _FURTHEST), -1)
    above = range(wanted + 1, wanted + _FURTHEST)
    nearest: list[str] = []
    for rows in (below, above):
        can_divide = (str(near) for near in rows if _divided(near, most, world))
        nearest += itertools.islice(can_divide, 1)
    shared = f"{world} devices" if world > 1 else "one device"
    raise UserError(
        "data.effective_batch",
        f"{wanted} rows cannot be divided evenly among {shared} in batches of {-(-most // 2)} to"
        f" {most} rows",
        hint=f"Set {' or '.join(nearest)}, or another data.batch_size.",
    )


def _divided(wanted: int, most: int, world: int) -> tuple[int, int] | None:
    """The largest batch that divides a device's share; None where it is under half of `most`."""
    # Smaller batches would leave the device idle. Rows are never dropped or filled up instead.
    share, rest = divmod(wanted, world)
    if rest or not share:
        return None
    batch = next(rows for rows in range(min(most, share), 0, -1) if share % rows == 0)
    return (batch, share // batch) if batch == share or 2 * batch >= most else None
