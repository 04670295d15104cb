"""Recordings, made ready: split, checked, scaled, and written once as flat columns of float32.

Two passes over the tables, a file at a time: the first finds what the splits and scales depend on (lengths, moments of
each column, labels, recordings that leak), the second writes. The store holds each sample once. What a network reads of
it (windows, chunks, whole recordings) is an index, made when the store is opened; so another lookback needs no other
store.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatout.data.samples.cells import CellsTable
from flatout.data.sequences.columns import RecordingRules, require_rules_columns
from flatout.data.sequences.recordings import (
    LongRecording,
    ReadingNotes,
    Recording,
    Scratch,
    ScratchValues,
    blocks_of,
    files_of,
    read_recordings,
)
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.sequences.shape import Scaler, describe_units
from flatout.data.sequences.splitting import Copies, Overlaps, RecordingEntry, Segment, Splitter
from flatout.data.sequences.views import RECORDINGS, SEGMENTS
from flatout.data.store.cache import Cache, CacheReport, Recipe
from flatout.data.store.progress import Progress
from flatout.data.store.store import SCHEMA, Column, Store, StoreWriter
from flatout.data.tables.prints import fingerprints_of, require_unchanged
from flatout.data.tables.sources import open_splits
from flatout.data.tables.splits import SPLITS
from flatout.data.tables.table import Table
from flatout.errors import UserError, require

Floats = NDArray[np.float64]
_VERSION = 2
_ROWS_A_BLOCK = 1 << 16


class SequencePreparation:
    """From settings to a store, a stage a method."""

    def __init__(self, config: SequenceDataConfig) -> None:
        self.config = config
        if config.is_sample:
            self.tables: dict[str, Table] = {split: CellsTable(config.sample, split) for split in SPLITS}
        else:
            self.tables = open_splits(config.source, config.given, config.read)
        hint = "Set data.source or data.train."
        require("train" in self.tables, "data.train", "no training recordings", hint=hint)
        self.rules = RecordingRules.of(config)
        self.columns = self.rules.names

    def open(self) -> tuple[Store, CacheReport]:
        """The store, built where it is missing."""
        recipe = self._recipe()
        build = partial(self._build, recipe["source"])
        return Cache(self.config.cache).open_or_build(self.source, recipe, build)

    @property
    def source(self) -> str:
        """The name of the training table."""
        return self.tables["train"].name

    def _recipe(self) -> Recipe:
        config = self.config
        shares = config.taken_shares(self.tables)
        split = {"shares": shares, "by": config.split_by.value, "at": config.split_at, "seed": config.split_seed}
        rules = {name: value for name, value in asdict(self.rules).items() if name != "targets"}
        kind = "label" if config.problem is SequenceProblem.label else "values"
        return {
            "kind": f"sequences {kind} {_VERSION}",
            "source": fingerprints_of(self.tables, Cache(config.cache).folder),
            "read": asdict(config.read),
            "rules": {**rules, "missing": config.missing.value},
            "targets": config.targets,
            "problem": config.problem.value,
            "scale": config.scale.value,
            "split": split,
            "schema": SCHEMA,
        }

    def _build(self, fingerprints: dict[str, str], writer: StoreWriter) -> None:
        notes = ReadingNotes()
        with Progress() as progress, TemporaryDirectory(dir=writer.folder, prefix="scratch") as folder:
            scratch = Scratch(Path(folder), self.rules)
            survey = Survey(self.config, self.columns, self.splitter())
            for split, recording in self.read(notes, progress, scratch):
                survey.add(split, recording)
            survey.finish()
            self._write(writer, survey, progress, scratch)
        require_unchanged(self.tables, fingerprints, Cache(self.config.cache).folder)
        writer.facts |= survey.facts()
        writer.facts["lines"] = [*survey.lines(), *notes.lines()]
        writer.facts["step"] = self.config.step or (float(np.median(notes.steps)) if self.rules.time else None)

    def splitter(self) -> Splitter:
        """What gives each recording its split."""
        files = len(files_of(self.tables["train"]))
        return Splitter(self.config, self.config.taken_shares(self.tables), files)

    def read(
        self, notes: ReadingNotes, progress: Progress, scratch: Scratch | None = None
    ) -> Iterator[tuple[str, Recording | LongRecording]]:
        """The recordings of all tables, each with the split of its table; large files by way of `scratch`."""
        advance = progress.task("reading")
        for split, table in self.tables.items():
            for file in files_of(table):
                require_rules_columns(file, self.rules)
                long = None if scratch is None else scratch.read(file, notes)
                if long is not None:
                    yield split, long
                    advance(len(long.values))
                    continue
                for recording in read_recordings(file, self.rules, notes, advance):
                    yield split, recording

    def _write(self, writer: StoreWriter, survey: Survey, progress: Progress, scratch: Scratch) -> None:
        columns = {"values": Column("float32", ragged=True), "label": Column("float32")}
        recordings = writer.split(RECORDINGS, columns)
        scaler, labels = survey.scaler, iter(survey.label_numbers())
        for _, recording in self.read(ReadingNotes(), progress, scratch):
            for block in blocks_of(recording.values, _ROWS_A_BLOCK):
                recordings.extend("values", scaler.scale(block).reshape(-1))
            length = np.array([np.prod(recording.values.shape)], np.int32)
            label = np.array([next(labels)], np.float32)
            recordings.append(values=(np.empty(0, np.float32), length), label=label)
        segments = writer.split(SEGMENTS, {name: Column("int64") for name in ("split", "recording", "first", "stop")})
        found = survey.segments
        segments.append(
            split=np.array([SPLITS.index(each.split) for each in found]),
            recording=np.array([each.recording for each in found]),
            first=np.array([each.first for each in found]),
            stop=np.array([each.stop for each in found]),
        )


class Survey:
    """Adds up recordings, then decides splits and scales."""

    def __init__(self, config: SequenceDataConfig, columns: list[str], splitter: Splitter) -> None:
        self.config, self.columns, self.splitter = config, columns, splitter
        self.found: list[RecordingEntry] = []
        self.labels: list[str] = []
        self.segments: list[Segment] = []
        self.scaler = Scaler([])
        self.sizes: list[float] = []
        """Root mean square of each column over the training samples."""
        self.classes: list[str] = []
        self._moments: list[dict[tuple[int, int], Floats]] = []
        self._hashes: list[str] = []
        self._warnings: list[str] = []
        targets = config.targets if config.problem is SequenceProblem.estimate else []
        self._copies, self._overlaps = Copies(columns, targets), Overlaps()

    def add(self, split: str, recording: Recording | LongRecording) -> None:
        """Take in one recording."""
        values = recording.values
        self.found.append(RecordingEntry(split=split, name=recording.name, part=recording.part, samples=len(values)))
        if recording.label is not None:
            self.labels.append(recording.label)
        digest = xxhash.xxh3_128()
        self._overlaps.begin()
        for block in blocks_of(values, _ROWS_A_BLOCK):
            digest.update(np.ascontiguousarray(block).view(np.uint8).data)
            self._copies.add(block)
            self._overlaps.add(block)
        self._hashes.append(digest.hexdigest())
        spans = {(0, len(values)), *self.splitter.spans(self.found[-1])}
        self._moments.append({span: _moments_of(values, *span) for span in spans})

    def finish(self) -> None:
        """Decide splits, then scales and classes, by the training samples."""
        cuts = {"step": self.config.step, "max_gap": self.config.max_gap}
        named = " or ".join(f"data.{name}={value:g}" for name, value in cuts.items() if value is not None)
        hint = f"Name longer recordings{f', or change {named}' if named else ''}."
        require(bool(self.found), "data", "no recording has two samples or more", hint=hint)
        self.segments = self.splitter.split(self.found)
        self._require_no_leak()
        moments = {split: self._merged(split) for split in SPLITS}
        for split in ("train", "validation"):
            what = f"no recordings are left for the {split} split"
            require(moments[split] is not None, "data.split_by", what, hint="Name more recordings.")
        train = moments["train"]
        assert train is not None
        self._require_usable(train)
        self.scaler = Scaler.fit(self.config.scale.value, train)
        self.sizes = _rms(train).tolist()
        self._warn_of_units(moments)
        self._number_classes()

    def facts(self) -> dict[str, Any]:
        """What the store keeps beside the values."""
        counts: dict[str, dict[str, int]] = {}
        for segment in self.segments:
            each = counts.setdefault(segment.split, {"recordings": 0, "samples": 0})
            each["recordings"] += 1
            each["samples"] += segment.stop - segment.first
        train = {segment.recording for segment in self.segments if segment.split == "train"}
        numbers = self.label_numbers()[sorted(train)].astype(np.float64)
        is_number = bool(self.labels) and not self.classes
        return {
            "columns": self.columns,
            "scaler": {"shift": self.scaler.shift, "factor": self.scaler.factor},
            "sizes": self.sizes,
            "recordings": [each.name for each in self.found],
            "splits": {split: counts[split] for split in SPLITS if split in counts},
            "classes": self.classes,
            "class_counts": np.bincount(numbers.astype(int), minlength=len(self.classes)).tolist()
            if self.classes
            else [len(train)],
            "label_mean": float(numbers.mean()) if is_number else 0.0,
            "label_spread": (float(numbers.std()) or 1.0) if is_number else 1.0,
        }

    def describe_columns(self) -> dict[str, dict[str, float]]:
        """Mean, spread, least and most of each column over the training samples."""
        train = self._merged("train")
        assert train is not None
        spread = np.sqrt(train["squares"] / train["count"])
        found = {"mean": train["mean"], "spread": spread, "least": train["least"], "most": train["most"]}
        return {
            column: {name: float(values[number]) for name, values in found.items()}
            for number, column in enumerate(self.columns)
        }

    def lines(self) -> list[str]:
        """What is printed of the recordings."""
        splits = self.facts()["splits"]
        counts = ", ".join(
            f"{name} {each['recordings']:,} ({each['samples']:,} samples)" for name, each in splits.items()
        )
        return [f"recordings: {counts}; {self.splitter.how}", *self._warnings]

    def label_numbers(self) -> Floats:
        """The label of each recording as a number; zeros where there are none."""
        if not self.labels:
            return np.zeros(len(self.found))
        if self.classes:
            places = {name: number for number, name in enumerate(self.classes)}
            return np.array([places[label] for label in self.labels], dtype=np.float64)
        return np.array([float(label) for label in self.labels])

    def _number_classes(self) -> None:
        if self.labels and not all(map(_is_number, self.labels)):
            names = [self.labels[each.recording] for each in self.segments if each.split == "train"]
            self.classes = sorted(set(names))
            unknown = sorted(set(self.labels) - set(self.classes))
            what = f"{', '.join(map(repr, unknown[:3]))} stands in no training recording"
            require(not unknown, "data.target", what, hint="Give the training recordings of each class.")
            require(len(self.classes) > 1, "data.target", "one class", allowed="two or more")

    def _merged(self, split: str) -> dict[str, Floats] | None:
        parts = [
            self._moments[each.recording][(each.first, each.stop)]
            for each in self.segments
            if each.split == split and each.stop > each.first
        ]
        return _merge(np.stack(parts)) if parts else None

    def _require_usable(self, train: dict[str, Floats]) -> None:
        """Refuse columns that are constant, too large for a scale, or copies of a target."""
        for name, least, most, squares in zip(
            self.columns, train["least"].tolist(), train["most"].tolist(), train["squares"].tolist(), strict=True
        ):
            key = "data.target" if name in self.config.targets else "data.features"
            what = f"{name!r} is constant in the training recordings ({least:g})"
            require(least != most, key, what, hint="Leave it out.")
            what, hint = f"{name!r} reaches {max(-least, most):g}, its variance is not finite", "Use another unit."
            require(math.isfinite(squares), key, what, hint=hint)
        for copy in self._copies.find():
            what = f"{copy.feature!r} has the values of the target {copy.target!r} in all recordings"
            require(not copy.is_equal, "data.features", what, hint="Leave it out.")
            line = f"{copy.target} = {copy.factor:.4g} * {copy.feature} + {copy.shift:.4g}"
            self._warnings.append(f"warning data.features: {line} in all recordings; leave {copy.feature} out")

    def _require_no_leak(self) -> None:
        """No recording may stand on both sides, by its name or by its samples."""
        if self.splitter.how == "each recording is cut in time":
            return
        seen: dict[str, Segment] = {}
        is_named = bool(self.config.group)
        for segment in self.segments:
            found = self.found[segment.recording]
            keys = [self._hashes[segment.recording], *([found.name.partition(": ")[2]] if is_named else [])]
            for key in filter(None, keys):
                before = seen.setdefault(key, segment)
                if before.split == segment.split:
                    continue
                other, split = self.found[before.recording], SPLITS.index(segment.split)
                how = "holds the samples of" if key == keys[0] else "is the group of"
                what = f"{found.name} {how} {other.name}, which is in the {before.split} split"
                hint = "Leave it out of one of the two."
                raise UserError(f"data.{SPLITS[split]}", what, hint=hint)

        splits = {segment.recording: SPLITS.index(segment.split) for segment in self.segments}
        for overlap in self._overlaps.find([splits[number] for number in range(len(self.found))]):
            name, whole = self.found[overlap.recording].name, self.found[overlap.other].name
            what = f"{name} has {overlap.share:.0%} of its samples in {whole}, which is in the"
            where = SPLITS[splits[overlap.recording]]
            self._warnings.append(f"warning {where}: {what} {SPLITS[splits[overlap.other]]} split; leave one out")

    def _warn_of_units(self, moments: dict[str, dict[str, Floats] | None]) -> None:
        train = moments["train"]
        assert train is not None
        for split in SPLITS[1:]:
            other = moments[split]
            if other is None:
                continue
            ratio = _rms(other) / np.maximum(_rms(train), 1e-30)
            self._warnings += [
                f"warning {split}: {line}" for line in describe_units(self.columns, ratio, other["count"].max())
            ]


def _moments_of(values: Floats | ScratchValues, first: int, stop: int) -> Floats:
    """[5, columns]: count, mean, squared distances from it, least, most; block by block, so that little is copied."""
    if stop <= first:
        return np.zeros((5, values.shape[1]))
    blocks = [_moments_of_block(block) for block in blocks_of(values, _ROWS_A_BLOCK, first, stop)]
    return blocks[0] if len(blocks) == 1 else np.stack(list(_merge(np.stack(blocks)).values()))


def _moments_of_block(values: Floats) -> Floats:
    with np.errstate(over="ignore"):  # a variance that is not finite is refused later, by name
        mean = values.mean(axis=0)
        squares = ((values - mean) ** 2).sum(axis=0)
    return np.stack([np.full_like(mean, len(values)), mean, squares, values.min(axis=0), values.max(axis=0)])


def _merge(parts: NDArray[np.float64]) -> dict[str, Floats]:
    """Moments of several runs of samples together, without the loss of digits of plain sums."""
    counts, means = parts[:, 0], parts[:, 1]
    count = counts.sum(axis=0)
    with np.errstate(over="ignore"):
        mean = (counts * means).sum(axis=0) / count
        squares = parts[:, 2].sum(axis=0) + (counts * (means - mean) ** 2).sum(axis=0)
    least, most = parts[:, 3].min(axis=0), parts[:, 4].max(axis=0)
    return {"count": count, "mean": mean, "squares": squares, "least": least, "most": most}


def _rms(moments: dict[str, Floats]) -> Floats:
    found: Floats = np.sqrt(moments["mean"] ** 2 + moments["squares"] / moments["count"])
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
