"""What every kind of data says of its splits, its batches and its store."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from flatout.data.feed import FeedKind
from flatout.errors import as_choice, require

SPLITS = ("train", "validation", "test")


@dataclass(kw_only=True, slots=True)
class FeedingConfig:
    """Splits, batches and the store: the settings that texts and bit strings share."""

    validation_share: float = 0.1
    """Share of the training rows taken for validation when no file is given."""
    test_share: float = 0.1
    """Share of the training rows taken for the test when neither file is given."""
    split_seed: int = 0
    """Chooses which rows are taken; the same content always falls in the same split."""
    batch_size: int = 128
    """Rows one device computes at once."""
    tokens_per_batch: int | None = None
    """Cap on the tokens one device computes at once; replaces batch_size."""
    accumulate: int = 1
    """Batches one device computes before the optimizer steps."""
    eval_batch_size: int = 1024
    """Rows one device computes at once in validation and test."""
    feed: FeedKind = FeedKind.auto
    """Where batches are gathered: on the device, in a thread, in worker processes, or the best that fits."""
    workers: int = 2
    """Processes of the `workers` feed."""
    cache: str | None = None
    """Folder of the finished stores; null: $FLATOUT_CACHE, else the user's cache folder."""

    def __post_init__(self) -> None:
        self.feed = as_choice(FeedKind, self.feed, "data.feed")
        for name in ("batch_size", "eval_batch_size", "accumulate", "workers"):
            value = getattr(self, name)
            require(value >= 1, f"data.{name}", f"{value}", allowed="1 or more")
        for name in ("validation_share", "test_share"):
            value = getattr(self, name)
            require(0 < value < 0.5, f"data.{name}", f"{value}", allowed="above 0 and below 0.5")

    def taken_shares(self, given: Collection[str]) -> tuple[float, float]:
        """Shares of the training rows that become validation and test, where files are given for some splits."""
        validation = 0.0 if "validation" in given else self.validation_share
        return validation, 0.0 if {"test", "validation"} & set(given) else self.test_share

    def split_names(self, given: Collection[str]) -> list[str]:
        """The splits there will be."""
        taken = dict(zip(SPLITS[1:], self.taken_shares(given), strict=True))
        return [split for split in SPLITS if split in given or taken.get(split, 0) > 0]


def require_other_files(source_key: str, source: object, others: dict[str, object]) -> None:
    """Files for validation and test need one for training, and must not be it."""
    for name, given in others.items():
        mend = f"Set data.{source_key}=FILE."
        require(source is not None or given is None, f"data.{name}", f"is set without data.{source_key}", mend=mend)
        same = isinstance(given, str) and isinstance(source, str) and Path(given) == Path(source)
        what = "training file" if source_key == "train" else "source"
        require(not same, f"data.{name}", f"{given} is the {what} itself", mend="Leave it out to split one.")
