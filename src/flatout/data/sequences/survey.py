"""The first pass over recordings: what splits and scales depend on is added up and checked.

    in    recordings, one after the other, each with the split of its table
    out   the segments of each split, a scaler, classes or labels, and the facts of the columns

Open this file to change what is checked of recordings before a store is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import xxhash

from flatout.data.sequences.columns import Floats
from flatout.data.sequences.info import ROWS_A_BLOCK, Scaler, describe_units
from flatout.data.sequences.leaks import CopyFinder, find_overlaps, hash_runs
from flatout.data.sequences.moments import Moments
from flatout.data.sequences.odd_units import describe_odd_units
from flatout.data.sequences.recording import Recording
from flatout.data.sequences.scratch import ScratchValues, blocks_of
from flatout.data.sequences.settings import PartBy, SequenceDataConfig, SequenceProblem
from flatout.data.sequences.splitting import RecordingEntry, Segment, Splitter
from flatout.data.tables.splits import SPLITS
from flatout.errors import UserError, require

_FEW_LABELS = 10  # fewer different whole numbers as labels look like classes
_LEAST_SIZE = 1e-30  # a column of zeros would be a division by zero


class Survey:
    """Adds up recordings with `add`; `finish` then decides splits and scales, and checks them."""

    def __init__(self, config: SequenceDataConfig, columns: list[str], splitter: Splitter) -> None:
        self.config = config
        self.columns = columns
        self.splitter = splitter
        self.entries: list[RecordingEntry] = []
        self.segments: list[Segment] = []
        self.scaler = Scaler([])
        self.train: Moments | None = None  # of the training samples, once `finish` has split
        self.classes: list[str] = []
        # the label of each recording as a number; zeros where there are none
        self.numbers = np.empty(0)
        self._warnings: list[str] = []
        # a forecast may read its targets' past
        is_estimate = config.problem is SequenceProblem.estimate
        self._copies = CopyFinder(columns, config.targets if is_estimate else [])

    def add(self, split: str, recording: Recording) -> None:
        """Add up a recording of a table that is named for `split`."""
        values = recording.values
        digest = xxhash.xxh3_128()
        runs = []
        for block in blocks_of(values, ROWS_A_BLOCK):
            digest.update(np.ascontiguousarray(block).view(np.uint8).data)
            self._copies.add(block)
            runs.append(hash_runs(block))
        entry = RecordingEntry(
            split=split,
            name=recording.name,
            whole=recording.whole,
            part=recording.part,
            samples=len(values),
            label=recording.label,
            digest=digest.hexdigest(),
            runs=np.unique(np.concatenate(runs)),
        )
        spans = {(0, len(values)), *self.splitter.spans(entry)}
        entry.moments = {span: _moments_of(values, *span) for span in spans}
        middle = len(values) // 2
        entry.halves = [_moments_of(values, 0, middle), _moments_of(values, middle, len(values))]
        self.entries.append(entry)

    def finish(self) -> None:
        """Decide splits, then scales and classes, by the training samples; raises the first
        mistake.
        """
        for mistake in self.find_mistakes():
            raise mistake

    def find_mistakes(self) -> Iterator[UserError]:
        """Decide as `finish` does; yields each mistake, and continues where it can."""
        cuts = {"step": self.config.step, "max_gap": self.config.max_gap}
        hint = "Name longer recordings"
        if settings := [f"data.{name}={value:g}" for name, value in cuts.items() if value]:
            hint += f", or change {' or '.join(settings)}"
        try:
            problem = "no recording has two samples or more"
            require(bool(self.entries), "data", problem, hint=f"{hint}.")
            self.segments = self.splitter.split(self.entries)
        except UserError as mistake:
            yield mistake
            return
        yield from self._find_leaks()
        moments: dict[str, Moments] = {}
        for split in SPLITS:
            parts = [
                self.entries[segment.recording].moments[segment.first, segment.stop]
                for segment in self._segments_of(split)
            ]
            if parts:
                moments[split] = Moments.merge(parts)
            elif split != "test":
                problem = f"no recordings are left for the {split} split"
                yield UserError("data.split_by", problem, hint="Name more recordings.")
        if "train" not in moments:
            return
        train = moments.pop("train")
        self.train = train
        yield from self._find_unusable(train)
        self.scaler = Scaler.fit(self.config.scale.value, train)
        for split, other in moments.items():
            ratio = other.root_mean_square / np.maximum(train.root_mean_square, _LEAST_SIZE)
            units = describe_units(self.columns, ratio, other.count.max())
            self._warnings += [f"warning {split}: {line}" for line in units]
        odd = describe_odd_units(self.columns, self.entries)
        self._warnings += [f"warning recordings: {line}" for line in odd]
        try:
            self._number_labels()
        except UserError as mistake:
            yield mistake

    def _segments_of(self, split: str) -> list[Segment]:
        return [segment for segment in self.segments if segment.split == split]

    def facts(self) -> dict[str, Any]:
        """What the store keeps beside the values."""
        assert self.train is not None, "facts are asked for before `finish`"
        splits = {}
        for split in SPLITS:
            segments = self._segments_of(split)
            samples = sum(segment.stop - segment.first for segment in segments)
            if segments:
                splits[split] = {"recordings": len(segments), "samples": samples}
        of_training = sorted({segment.recording for segment in self._segments_of("train")})
        numbers = self.numbers[of_training]
        codes = numbers.astype(int) if self.classes else np.zeros(len(numbers), int)
        labels = np.zeros(1) if self.classes else numbers
        return {
            "columns": self.columns,
            "scaler": asdict(self.scaler),
            "sizes": self.train.root_mean_square.tolist(),
            "recordings": [entry.name for entry in self.entries],
            "parts": [entry.part for entry in self.entries],
            "splits": splits,
            "classes": self.classes,
            "class_counts": np.bincount(codes, minlength=len(self.classes)).tolist(),
            "label_mean": float(labels.mean()),
            "label_spread": float(labels.std()) or 1.0,
        }

    def describe_columns(self) -> dict[str, dict[str, float]]:
        """Mean, spread, least and most of each column over the training samples."""
        moments = self.train
        if moments is None:
            return {}
        numbers = np.stack([moments.mean, moments.spread, moments.least, moments.most], axis=1)
        names = ("mean", "spread", "least", "most")
        return {
            column: dict(zip(names, row, strict=True))
            for column, row in zip(self.columns, numbers.tolist(), strict=True)
        }

    def lines(self) -> list[str]:
        """How many recordings each split has, and all warnings."""
        splits = self.facts()["splits"].items()
        counts = ", ".join(
            f"{split} {count['recordings']:,} ({count['samples']:,} samples)"
            for split, count in splits
        )
        return [f"recordings: {counts}; {self.splitter.how}", *self._warnings]

    def _number_labels(self) -> None:
        """Read labels as numbers to predict; as classes where one of them is no number."""
        labels = []
        for entry in self.entries:
            labels.append("0" if entry.label is None else entry.label)
        try:
            self.numbers = np.array(list(map(float, labels)))
        except ValueError:
            self._number_classes(labels)
        else:
            self._check_numbers()

    def _number_classes(self, labels: list[str]) -> None:
        """Number the classes of the training recordings: ["up", "down", "up"] → 1, 0, 1."""
        self.classes = sorted({labels[segment.recording] for segment in self._segments_of("train")})
        unknown = sorted(set(labels) - set(self.classes))
        require(
            not unknown,
            "data.target",
            f"{', '.join(map(repr, unknown[:3]))} stands in no training recording",
            hint="Give the training recordings of each class.",
        )
        require(len(self.classes) > 1, "data.target", "one class", allowed="two or more")
        self.numbers = np.searchsorted(self.classes, labels).astype(np.float64)

    def _check_numbers(self) -> None:
        """Refuse a label that is not finite; warn of labels that look like classes."""
        for entry, number in zip(self.entries, self.numbers.tolist(), strict=True):
            require(
                math.isfinite(number),
                "data.target",
                f"the label of {entry.name} is {entry.label}",
                hint="Write a number, or leave the recording out.",
            )
        labels = set(self.numbers.tolist())
        is_label = self.config.problem is SequenceProblem.label
        if is_label and len(labels) < _FEW_LABELS and all(map(float.is_integer, labels)):
            self._warnings.append(
                "labels: whole numbers are predicted as numbers; write them as texts (c0, c1)"
                " for classes"
            )

    def _find_unusable(self, train: Moments) -> Iterator[UserError]:
        """Columns that teach nothing or overflow, and features that equal a target."""
        for name, least, most, squares in zip(
            self.columns,
            train.least.tolist(),
            train.most.tolist(),
            train.squares.tolist(),
            strict=True,
        ):
            key = "data.target" if name in self.config.targets else "data.features"
            if least == most:
                problem = f"{name!r} is constant in the training recordings ({least:g})"
                yield UserError(key, problem, hint="Leave it out.")
            if not math.isfinite(squares):
                problem = f"{name!r} reaches {max(-least, most):g}, its variance is not finite"
                yield UserError(key, problem, hint="Use another unit.")
        for copy in self._copies.find():
            if copy.is_equal:
                yield UserError(
                    "data.features",
                    f"{copy.feature!r} has the values of the target {copy.target!r} in all"
                    " recordings",
                    hint="Leave it out.",
                )
                continue
            line = f"{copy.target} = {copy.factor:.4g} * {copy.feature} + {copy.shift:.4g}"
            self._warnings.append(
                f"warning data.features: {line} in all recordings; leave {copy.feature} out"
            )

    def _find_leaks(self) -> Iterator[UserError]:
        """Recordings that two splits share; samples that two splits share are warned of."""
        if self.splitter.by is PartBy.time:
            return  # every recording is in all splits
        # Every segment is a whole recording, and they come in the order of the recordings.
        first_with: dict[str, Segment] = {}
        for segment in self.segments:
            entry = self.entries[segment.recording]
            keys = {"holds the samples of": entry.digest}
            # each file has its own groups
            if self.config.group and self.splitter.by is not PartBy.file:
                keys["is the group of"] = entry.whole.partition(": ")[2]
            for how, key in keys.items():
                first = first_with.setdefault(key, segment)
                earlier = self.entries[first.recording].name
                if key and first.split != segment.split:
                    yield UserError(
                        f"data.{segment.split}",
                        f"{entry.name} {how} {earlier}, which is in the {first.split} split",
                        hint="Leave it out of one of the two.",
                    )
        self._warn_of_overlaps()

    def _warn_of_overlaps(self) -> None:
        runs = [entry.runs for entry in self.entries]
        splits = [SPLITS.index(segment.split) for segment in self.segments]
        for overlap in find_overlaps(runs, splits):
            name = self.entries[overlap.recording].name
            earlier = self.entries[overlap.earlier].name
            split = self.segments[overlap.recording].split
            earlier_split = self.segments[overlap.earlier].split
            self._warnings.append(
                f"warning {split}: {name} has {overlap.share:.0%} of its samples in {earlier},"
                f" which is in the {earlier_split} split; leave one out"
            )


def _moments_of(values: Floats | ScratchValues, first: int, stop: int) -> Moments:
    """The moments of the samples from `first` to before `stop`."""
    return Moments.of(blocks_of(values, ROWS_A_BLOCK, first, stop))
