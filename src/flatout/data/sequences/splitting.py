"""Which recordings, or which parts of them, are trained on, validated with and tested with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from flatout.data.checks.findings import counted
from flatout.data.sequences.settings import PartBy, SequenceDataConfig
from flatout.data.tables.splits import SPLITS, hash_texts, split_groups
from flatout.errors import UserError, require


@dataclass(frozen=True, slots=True)
class Segment:
    """The samples of a recording that belong to a split; a forecast may read those before them."""

    split: str
    recording: int
    first: int
    stop: int


@dataclass(slots=True, kw_only=True)
class RecordingEntry:
    """What the splits depend on of a recording."""

    split: str
    """Of its table."""
    name: str
    part: str
    samples: int


class Splitter:
    """Gives each recording its segments."""

    def __init__(self, config: SequenceDataConfig, shares: tuple[float, float], num_files: int) -> None:
        self.config, self.shares, self.num_files = config, shares, num_files
        self.how = ""
        """In words, for the line that is printed."""

    def split(self, recordings: list[RecordingEntry]) -> list[Segment]:
        """The segments of all recordings, in their order."""
        own = [number for number, each in enumerate(recordings) if each.split == "train"]
        if not any(self.shares):
            self.how = "as given"
            return [Segment(each.split, number, 0, each.samples) for number, each in enumerate(recordings)]
        by = self._choose([recordings[number] for number in own])
        if by is PartBy.time:
            self.how = "each recording is cut in time"
            return [segment for number, each in enumerate(recordings) for segment in self._cut(number, each)]
        names = [each.part if by is not None else each.name for each in recordings]
        splits = self._deal([(names[number], recordings[number].samples) for number in own], by)
        return [
            Segment(splits[names[number]] if each.split == "train" else each.split, number, 0, each.samples)
            for number, each in enumerate(recordings)
        ]

    def spans(self, each: RecordingEntry) -> list[tuple[int, int]]:
        """The parts of a recording that time may make of it."""
        may_cut = self.config.split_by in (PartBy.time, PartBy.auto) and any(self.shares)
        return [(part.first, part.stop) for part in self._cut(0, each)] if may_cut else []

    def _choose(self, own: list[RecordingEntry]) -> PartBy | None:
        """What stays whole; None: each recording by itself."""
        wanted = self.config.split_by
        needed = 1 + sum(share > 0 for share in self.shares)
        if wanted is not PartBy.auto:
            is_file = wanted is not PartBy.file or self.num_files >= needed
            what = f"file, but {counted(self.num_files, 'file')} cannot make {needed} splits"
            require(is_file, "data.split_by", what, hint="Name more files, or set data.split_by=time.")
            return wanted
        if self.num_files >= needed:
            return PartBy.file
        if self.config.group and len({each.part for each in own}) >= needed:
            return PartBy.group
        is_cut = self.config.problem != "label" and len(own) < needed
        return PartBy.time if is_cut else None

    def _deal(self, own: list[tuple[str, int]], by: PartBy | None) -> dict[str, str]:
        """The split of each name, whole names in the order of their hashes until the shares are met."""
        samples: dict[str, int] = {}
        for name, count in own:
            samples[name] = samples.get(name, 0) + count
        kind = {PartBy.file: "files", PartBy.group: f"groups of {(self.config.group or [''])[0]}"}
        self.how = f"whole {kind.get(by, 'recordings') if by else 'recordings'} taken by a hash of the name"
        validation, test = self.shares
        needed = 1 + sum(share > 0 for share in self.shares)
        if len(samples) < needed:
            what = f"{len(samples)} {kind.get(by, 'recordings') if by else 'recordings'} for {needed} splits"
            raise UserError("data.split_by", what, hint="Set data.split_by=time, or give a file for each split.")
        hashes, rows = hash_texts(pa.array(list(samples))), np.array(list(samples.values()))
        shares = {"validation_share": validation, "test_share": test}
        splits = split_groups(hashes, rows, **shares, seed=self.config.split_seed)
        return {name: SPLITS[split] for name, split in zip(samples, splits.tolist(), strict=True)}

    def _cut(self, number: int, each: RecordingEntry) -> list[Segment]:
        if each.split != "train":
            return [Segment(each.split, number, 0, each.samples)]
        cuts = self.config.split_at
        if cuts is None:
            validation, test = self.shares
            borders = [1 - validation - test, 1 - test, 1.0] if test else [1 - validation, 1.0]
            cuts = [round(border * each.samples) for border in borders]
        if cuts[-1] > each.samples:
            what = f"{cuts}, but {each.name} has {each.samples} samples"
            raise UserError("data.split_at", what, hint="Lower the numbers.")
        if len(cuts) == 2 and self.shares[1] and self.config.split_at is not None:
            cuts = [*cuts, each.samples]
        starts = [0, *cuts]
        parts = zip(SPLITS, starts, cuts, strict=False)
        return [Segment(split, number, first, stop) for split, first, stop in parts if first < stop]
