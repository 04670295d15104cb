"""Which recordings, or which parts of them, train, validate and test.

Files may be the splits already. Otherwise one source is split. Whole files, groups or recordings go
to a split by a hash of their names, or each recording is cut in time. Where no way is named, the
coarsest that leaves no split empty is taken. Open this file to add a way to split.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from flatout.data.checks.findings import counted
from flatout.data.sequences.leaks import Hashes
from flatout.data.sequences.moments import Moments
from flatout.data.sequences.settings import PartBy, SequenceDataConfig
from flatout.data.tables.splits import SPLITS, hash_texts, split_groups
from flatout.errors import require


@dataclass(frozen=True, slots=True)
class Segment:
    """The samples of a recording that belong to a split; a forecast may read those before them."""

    split: str
    recording: int
    first: int
    stop: int


@dataclass(slots=True, kw_only=True)
class RecordingEntry:
    """What splits, scales and the search for leaks need of a recording."""

    split: str  # of its table
    name: str
    whole: str  # its name before gaps part it
    part: str
    samples: int
    label: str | None
    digest: str  # of its values
    runs: Hashes
    # Moments of the samples from the first number to before the second. They are there for the
    # whole recording, and for the parts that a cut in time would make.
    moments: dict[tuple[int, int], Moments] = field(default_factory=dict)
    # Moments of its first and of its second half.
    halves: list[Moments] = field(default_factory=list)


class Splitter:
    """Gives each recording its segments."""

    def __init__(
        self, config: SequenceDataConfig, shares: tuple[float, float], num_files: int
    ) -> None:
        """Split a source of `num_files` files.

        `shares` are those of validation and test that are taken from the training recordings; both
        are 0 where files give the splits.
        """
        self.config = config
        self.shares = shares
        self.num_files = num_files
        self.num_splits = 1 + sum(share > 0 for share in shares)
        # What stays whole, once `split` has decided; None: each recording by itself.
        self.by: PartBy | None = None
        self.how = ""  # the same in words, for the line that is printed

    def split(self, recordings: list[RecordingEntry]) -> list[Segment]:
        """The segments of all recordings, in their order."""
        if not any(self.shares):
            require(
                self.config.split_at is None,
                "data.split_at",
                "is set, and files give the splits",
                hint="Leave it out, or name one source that is split.",
            )
            self.how = "as given"
            return _whole_segments(recordings, [entry.split for entry in recordings])
        to_split = [entry for entry in recordings if entry.split == "train"]
        self.by = self._choose(to_split)
        if self.by is PartBy.time:
            self.how = "each recording is cut in time"
            segments = []
            for number, entry in enumerate(recordings):
                segments += self._cut(number, entry)
            return segments
        split_of_name = self._deal(to_split)
        splits = []
        for entry in recordings:
            is_dealt = entry.split == "train"
            splits.append(split_of_name[self._key(entry)] if is_dealt else entry.split)
        return _whole_segments(recordings, splits)

    def spans(self, entry: RecordingEntry) -> list[tuple[int, int]]:
        """First sample and end of the parts that a cut in time would make of a recording.

        Empty where the settings rule such a cut out.
        """
        may_cut = self.config.split_by in (PartBy.time, PartBy.auto) and any(self.shares)
        if not may_cut:
            return []
        return [(segment.first, segment.stop) for segment in self._cut(0, entry)]

    def _choose(self, to_split: list[RecordingEntry]) -> PartBy | None:
        """Choose what stays whole in a split; None: each recording by itself."""
        wanted = self.config.split_by
        if wanted is not PartBy.auto:
            has_files = self.num_files >= self.num_splits
            files = counted(self.num_files, "file")
            require(
                wanted is not PartBy.file or has_files,
                "data.split_by",
                f"file, but {files} cannot make {self.num_splits} splits",
                hint="Name more files, or set data.split_by=time.",
            )
            return wanted
        if self.config.group and len({entry.part for entry in to_split}) >= self.num_splits:
            return PartBy.group
        if self.num_files >= self.num_splits:
            return PartBy.file
        num_recordings = len({self._key(entry) for entry in to_split})
        # A label belongs to a whole recording, so cutting would leak it.
        may_cut = self.config.problem != "label"
        return PartBy.time if may_cut and num_recordings < self.num_splits else None

    def _key(self, entry: RecordingEntry) -> str:
        """The name of what stays whole; pieces of a group between gaps stay together."""
        if self.by is PartBy.file and self.config.group:
            return entry.whole.partition(": ")[0]
        if self.by:
            return entry.part
        return entry.whole if self.config.group else entry.name

    def _deal(self, to_split: list[RecordingEntry]) -> dict[str, str]:
        """The split of each name.

        Names are taken in the order of their hashes, until each split has its share of samples.
        """
        samples_of_name: Counter[str] = Counter()
        for entry in to_split:
            samples_of_name[self._key(entry)] += entry.samples
        kind = self._kind()
        self.how = f"whole {kind} taken by a hash of the name"
        if self.by is PartBy.file and not self.config.group:
            self.how += "; data.group=[COLUMN] keeps the files of one machine in one split"
        require(
            len(samples_of_name) >= self.num_splits,
            "data.split_by",
            f"{len(samples_of_name)} {kind} for {self.num_splits} splits",
            hint="Set data.split_by=time, or give a file for each split.",
        )
        validation_share, test_share = self.shares
        splits = split_groups(
            hash_texts(pa.array(list(samples_of_name))),
            np.array(list(samples_of_name.values())),
            validation_share=validation_share,
            test_share=test_share,
            seed=self.config.split_seed,
        )
        names_of_splits = [SPLITS[split] for split in splits.tolist()]
        return dict(zip(samples_of_name, names_of_splits, strict=True))

    def _kind(self) -> str:
        """The name of what stays whole in a split: files, groups or recordings."""
        if self.by is PartBy.file:
            return "files"
        if self.by is PartBy.group:
            columns = self.config.group or [""]
            return f"groups of {columns[0]}"
        return "recordings"

    def _cut(self, number: int, entry: RecordingEntry) -> list[Segment]:
        """The parts of a recording by time; one of another file than training stays whole."""
        if entry.split != "train":
            return [Segment(entry.split, number, 0, entry.samples)]
        cuts = self._cuts(entry.samples)
        require(
            cuts[-1] <= entry.samples,
            "data.split_at",
            f"{cuts}, but {entry.name} has {entry.samples} samples",
            hint="Lower the numbers.",
        )
        # Two numbers and three splits: the test reads to the end.
        if self.config.split_at is not None and len(cuts) == 2 and self.shares[1]:
            cuts = [*cuts, entry.samples]
        parts = zip(SPLITS, [0, *cuts], cuts, strict=False)
        return [Segment(split, number, first, stop) for split, first, stop in parts if first < stop]

    def _cuts(self, samples: int) -> list[int]:
        """Where each split of a recording ends.

        The numbers are as set, or follow from the shares: 100 samples and the shares 0.2 and 0.1
        give 70, 90, 100.
        """
        if self.config.split_at is not None:
            return self.config.split_at
        validation, test = self.shares
        ends = [1 - validation, 1.0]
        if test:
            ends = [1 - validation - test, 1 - test, 1.0]
        return [round(end * samples) for end in ends]


def _whole_segments(recordings: list[RecordingEntry], splits: list[str]) -> list[Segment]:
    """A segment of all samples for each recording."""
    pairs = zip(recordings, splits, strict=True)
    return [Segment(split, number, 0, entry.samples) for number, (entry, split) in enumerate(pairs)]
