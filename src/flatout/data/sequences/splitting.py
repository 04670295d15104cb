"""Which recordings, or which parts of them, are trained on, validated with and tested with; and
what leaks.

Answers are given away by features that are copies of a target, and by samples that two splits
share.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.data.checks.findings import counted
from flatout.data.sequences.columns import Floats
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
    runs: NDArray[np.uint64]
    moments: dict[tuple[int, int], dict[str, Floats]] = field(default_factory=dict)
    """Of the whole recording and of the parts that time may make of it, from a sample to before
    another."""
    halves: list[dict[str, Floats]] = field(default_factory=list)
    """Moments of its first and of its second half."""


class Splitter:
    """Gives each recording its segments."""

    def __init__(
        self, config: SequenceDataConfig, shares: tuple[float, float], num_files: int
    ) -> None:
        self.config = config
        self.shares = shares
        self.num_files = num_files
        self.needed = 1 + sum(share > 0 for share in shares)
        self.how = ""  # in words, for the line that is printed

    def split(self, recordings: list[RecordingEntry]) -> list[Segment]:
        """The segments of all recordings, in their order."""
        own = [each for each in recordings if each.split == "train"]
        if not any(self.shares):
            require(
                self.config.split_at is None,
                "data.split_at",
                "is set, and files give the splits",
                hint="Leave it out, or name one source that is split.",
            )
            self.how = "as given"
            return [
                Segment(each.split, number, 0, each.samples)
                for number, each in enumerate(recordings)
            ]
        by = self._choose(own)
        if by is PartBy.time:
            self.how = "each recording is cut in time"
            return [
                segment
                for number, each in enumerate(recordings)
                for segment in self._cut(number, each)
            ]
        splits = self._deal(own, by)
        dealt = [
            splits[self._key(each, by)] if each.split == "train" else each.split
            for each in recordings
        ]
        return [
            Segment(split, number, 0, recordings[number].samples)
            for number, split in enumerate(dealt)
        ]

    def spans(self, each: RecordingEntry) -> list[tuple[int, int]]:
        """The parts of a recording that time may make of it."""
        may_cut = self.config.split_by in (PartBy.time, PartBy.auto) and any(self.shares)
        return [(part.first, part.stop) for part in self._cut(0, each)] if may_cut else []

    def _choose(self, own: list[RecordingEntry]) -> PartBy | None:
        """What stays whole; None: each recording by itself."""
        wanted, needed = self.config.split_by, self.needed
        if wanted is not PartBy.auto:
            is_file = wanted is not PartBy.file or self.num_files >= needed
            require(
                is_file,
                "data.split_by",
                f"file, but {counted(self.num_files, 'file')} cannot make {needed} splits",
                hint="Name more files, or set data.split_by=time.",
            )
            return wanted
        if self.config.group and len({each.part for each in own}) >= needed:
            return PartBy.group
        if self.num_files >= needed:
            return PartBy.file
        count = len({self._key(each, None) for each in own})
        return PartBy.time if self.config.problem != "label" and count < needed else None

    def _key(self, each: RecordingEntry, by: PartBy | None) -> str:
        """What stays whole of a recording; pieces of a group between gaps stay together."""
        if by is PartBy.file and self.config.group:
            return each.whole.partition(": ")[0]
        return each.part if by else each.whole if self.config.group else each.name

    def _deal(self, own: list[RecordingEntry], by: PartBy | None) -> dict[str, str]:
        """The split of each name, whole names in the order of their hashes until the shares are
        met.
        """
        samples: Counter[str] = Counter()
        for each in own:
            samples[self._key(each, by)] += each.samples
        group = f"groups of {(self.config.group or [''])[0]}"
        kind = "files" if by is PartBy.file else group if by is PartBy.group else "recordings"
        self.how = f"whole {kind} taken by a hash of the name"
        hint = "or give a file for each split."
        require(
            len(samples) >= self.needed,
            "data.split_by",
            f"{len(samples)} {kind} for {self.needed} splits",
            hint=f"Set data.split_by=time, {hint}",
        )
        hashes = hash_texts(pa.array(list(samples)))
        rows = np.array(list(samples.values()))
        shares = dict(zip(("validation_share", "test_share"), self.shares, strict=True))
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
        require(
            cuts[-1] <= each.samples,
            "data.split_at",
            f"{cuts}, but {each.name} has {each.samples} samples",
            hint="Lower the numbers.",
        )
        if len(cuts) == 2 and self.shares[1] and self.config.split_at is not None:
            cuts = [*cuts, each.samples]
        parts = zip(SPLITS, [0, *cuts], cuts, strict=False)
        return [Segment(split, number, first, stop) for split, first, stop in parts if first < stop]


_LEAST_UNEXPLAINED = 1e-6
_ROUNDING = 1e-9
"""Share of a target's variance that a line through a feature leaves open; less is a copy in another
unit."""


class Copies:
    """Adds up products of samples, then names features that hold a target, in any unit: nothing
    else is learnt then.
    """

    def __init__(self, columns: list[str], targets: list[str]) -> None:
        self._targets = [name for name in columns if name in targets]
        self._features = [name for name in columns if name not in targets]
        self._places = [columns.index(name) for name in [*self._features, *self._targets]]
        size = len(self._places)
        self._origin: Floats | None = None
        self._count = 0
        self._sums = np.zeros(size)
        self._products = np.zeros((size, size))
        self._is_equal = np.ones((len(self._features), len(self._targets)), np.bool_)

    def add(self, values: Floats) -> None:
        """Take in a block of samples `[samples, columns]`."""
        if not self._is_equal.size or not len(values):
            return
        chosen = values[:, self._places]
        features = len(self._features)
        for place, target in np.argwhere(self._is_equal).tolist():
            self._is_equal[place, target] = np.array_equal(
                chosen[:, place], chosen[:, features + target]
            )
        self._origin = chosen[0].copy() if self._origin is None else self._origin
        # what is too large for a scale is refused by name
        with np.errstate(over="ignore", invalid="ignore"):
            apart = chosen - self._origin
            self._count += len(apart)
            self._sums += apart.sum(axis=0)
            self._products += apart.T @ apart

    def find(self) -> list[tuple[str, str, bool, float, float]]:
        """Feature, target, whether their values are equal, and the line from one to the other;
        equal ones first.
        """
        if self._origin is None:
            return []
        features = len(self._features)
        found = []
        with np.errstate(all="ignore"):  # a column without spread has no line; NaN is no copy
            means = self._sums / self._count
            spreads = self._products / self._count - np.outer(means, means)
            own, other = spreads.diagonal()[:features, None], spreads.diagonal()[features:]
            both = spreads[:features, features:]
            is_line = (
                (own > 0) & (other > 0) & (1 - both * both / (own * other) < _LEAST_UNEXPLAINED)
            )
            factors = np.where(own > 0, both / own, 1.0)
            middles = (means + self._origin).tolist()
        for place, number in np.argwhere(self._is_equal | is_line).tolist():
            factor = float(factors[place, number])
            middle = middles[features + number]
            shift = middle - factor * middles[place]
            shift = 0.0 if abs(shift) < _ROUNDING * abs(middle) else shift
            is_equal = bool(self._is_equal[place, number])
            found.append((self._features[place], self._targets[number], is_equal, factor, shift))
        return sorted(found, key=lambda copy: not copy[2])


_SAMPLES_A_RUN = 8
_KEPT = np.uint64(16)
_LEAST_RUNS = 4
_LEAST_SHARE = 0.5
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def find_overlaps(
    runs: list[NDArray[np.uint64]], splits: list[int]
) -> list[tuple[int, int, float]]:
    """Recordings that share most of their runs with one of an earlier split, that one, and the
    share.
    """
    found = []
    of_runs = np.repeat(np.arange(len(runs)), list(map(len, runs)))
    known = np.concatenate(runs)
    split_of_runs = np.array(splits)[of_runs]
    for number in sorted(range(len(runs)), key=splits.__getitem__):
        if (count := len(runs[number])) < _LEAST_RUNS or splits[number] == min(splits):
            continue
        is_earlier = split_of_runs < splits[number]
        shared = of_runs[is_earlier][np.isin(known[is_earlier], runs[number])]
        if not len(shared):
            continue
        other = int(np.bincount(shared).argmax())
        if (share := int((shared == other).sum()) / count) >= _LEAST_SHARE:
            found.append((number, other, share))
    return found


def run_hashes(values: Floats) -> NDArray[np.uint64]:
    """Hashes of one run of eight samples in sixteen, chosen by itself: two recordings keep the same
    ones.
    """
    if len(values) < _SAMPLES_A_RUN:
        return np.empty(0, np.uint64)
    rows = np.zeros(len(values), np.uint64)
    for column in values.T:  # unsigned numbers wrap around, as a hash should
        rows = _mix(rows ^ np.ascontiguousarray(column).view(np.uint64))
    runs = np.zeros(len(values) - _SAMPLES_A_RUN + 1, np.uint64)
    for place in range(_SAMPLES_A_RUN):
        runs = _mix(runs ^ rows[place : place + len(runs)])
    return np.unique(runs[runs % _KEPT == 0])


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = (numbers ^ (numbers >> _SHIFT)) * _FACTOR
    return mixed ^ (mixed >> _SHIFT)
