"""Recordings, made ready: split, checked, scaled, and written once as flat columns of float32.

Two passes over the tables, a file at a time: the first finds what the splits and scales depend on
(lengths, moments of each column, labels, recordings that leak), the second writes. The store holds
each sample once. What a network reads of it (windows, chunks, whole recordings) is an index, made
when the store is opened.
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

from flatout.data.samples.cells import CellsTable
from flatout.data.sequences.columns import Floats, RecordingRules
from flatout.data.sequences.info import ROWS_A_BLOCK, Scaler, describe_units
from flatout.data.sequences.leaks import CopyFinder, find_overlaps, hash_runs
from flatout.data.sequences.odd_units import describe_odd_units
from flatout.data.sequences.recordings import (
    ReadingNotes,
    Recording,
    Scratch,
    blocks_of,
    measured_targets,
    read_recordings,
)
from flatout.data.sequences.settings import PartBy, SequenceDataConfig, SequenceProblem
from flatout.data.sequences.splitting import RecordingEntry, Segment, Splitter
from flatout.data.sequences.views import MEASURED, RECORDINGS, SEGMENTS
from flatout.data.store.cache import Cache, CacheReport, Recipe
from flatout.data.store.progress import Progress
from flatout.data.store.store import SCHEMA, Column, Store, StoreWriter
from flatout.data.tables.prints import fingerprints_of, heads_noted, require_unchanged
from flatout.data.tables.sources import open_splits
from flatout.data.tables.splits import SPLITS
from flatout.data.tables.table import Table
from flatout.errors import require

_VERSION = 4
_FEW = 10  # different labels from which on whole numbers are hardly classes


class SequencePreparation:
    """From settings to a store, a stage a method."""

    def __init__(self, config: SequenceDataConfig) -> None:
        self.config = config
        if config.is_sample:
            self.tables: dict[str, Table] = {
                split: CellsTable(config.sample, split) for split in SPLITS
            }
        else:
            with heads_noted(Cache(config.cache).folder, [config.source, *config.given.values()]):
                self.tables = open_splits(config.source, config.given, config.read)
        require(
            "train" in self.tables,
            "data.train",
            "no training recordings",
            hint="Set data.source or data.train.",
        )
        self.rules = RecordingRules.of(config)
        self.source = self.tables["train"].name

    def open(self) -> tuple[Store, CacheReport]:
        config = self.config
        cache = Cache(self.config.cache)
        fingerprints = fingerprints_of(self.tables, cache.folder)
        shares = config.taken_shares(self.tables)
        kind = "label" if config.problem is SequenceProblem.label else "values"
        recipe: Recipe = {
            "kind": f"sequences {kind} {_VERSION}",
            "source": fingerprints,
            "read": asdict(config.read),
            "rules": {
                name: value
                for name, value in asdict(self.rules).items()
                if name not in ("targets", "past_only")
            },
            "targets": config.targets,
            "problem": config.problem,
            "scale": config.scale,
            "split": {
                "shares": shares,
                "by": config.split_by,
                "at": config.split_at,
                "seed": config.split_seed,
            },
            "schema": SCHEMA,
        }
        # other stores keep the key that they had before there was a choice
        if self.rules.carries_forward:
            recipe["carried"] = "forward"
        return cache.open_or_build(self.source, recipe, partial(self._build, fingerprints))

    def _build(self, fingerprints: dict[str, str], writer: StoreWriter) -> None:
        notes = ReadingNotes()
        with (
            Progress() as progress,
            TemporaryDirectory(dir=writer.folder, prefix="scratch") as folder,
        ):
            scratch = Scratch(Path(folder), self.rules)
            survey = self.survey(notes, progress, scratch)
            survey.finish()
            repeated = self._write(writer, survey, progress, scratch)
        require_unchanged(self.tables, fingerprints, Cache(self.config.cache).folder)
        writer.facts |= survey.facts()
        writer.facts["lines"] = [*survey.lines(), *notes.lines()]
        if repeated:
            writer.facts["repeated"] = repeated
            line = (
                f"targets: {repeated:,} repeat the value before; they are in no loss and no score"
            )
            writer.facts["lines"].append(line)
        writer.facts["step"] = self.config.step or (
            float(np.median(notes.steps)) if self.rules.time else None
        )

    def survey(
        self, notes: ReadingNotes, progress: Progress, scratch: Scratch | None = None
    ) -> Survey:
        """All recordings, looked at once."""
        splitter = Splitter(
            self.config,
            self.config.taken_shares(self.tables),
            len(self.tables["train"].tables) or 1,
        )
        found = Survey(self.config, self.rules.names, splitter)
        for split, recording in self._read(notes, progress, scratch):
            found.add(split, recording)
        return found

    def _read(
        self, notes: ReadingNotes, told: Progress, scratch: Scratch | None
    ) -> Iterator[tuple[str, Recording]]:
        """The recordings of all tables, each with the split of its table; large files by way of
        `scratch`.
        """
        advance = told.task("reading")
        for split, table in self.tables.items():
            for file in table.tables or [table]:
                if scratch is not None and (long := scratch.read(file, notes)) is not None:
                    yield split, long
                    advance(len(long.values))
                else:
                    yield from (
                        (split, each) for each in read_recordings(file, self.rules, notes, advance)
                    )

    def _write(
        self, writer: StoreWriter, survey: Survey, progress: Progress, scratch: Scratch
    ) -> int:
        """Write all samples, and where values are carried forward which targets were measured; how
        many were not.
        """
        columns = {"values": Column("float32", ragged=True), "label": Column("float32")}
        if self.rules.carries_forward:
            columns[MEASURED] = Column("uint8", ragged=True)
        recordings = writer.split(RECORDINGS, columns)
        targets = len(self.config.targets)
        repeated = 0
        found = self._read(ReadingNotes(), progress, scratch)
        for (_, recording), label in zip(found, survey.numbers.astype(np.float32), strict=False):
            for block in blocks_of(recording.values, ROWS_A_BLOCK):
                recordings.extend("values", survey.scaler.scale(block).reshape(-1))
            length = np.array([np.prod(recording.values.shape)], np.int32)
            others: dict[str, Any] = {}
            if self.rules.carries_forward:
                measured = measured_targets(recording, targets).astype(np.uint8)
                repeated += int(measured.size - measured.sum(dtype=np.int64))
                others[MEASURED] = (measured.reshape(-1), np.array([measured.size], np.int32))
            recordings.append(
                values=(np.empty(0, np.float32), length), label=label.reshape(1), **others
            )
        names = ("split", "recording", "first", "stop")
        places = [
            (SPLITS.index(each.split), each.recording, each.first, each.stop)
            for each in survey.segments
        ]
        segments = writer.split(SEGMENTS, {name: Column("int64") for name in names})
        segments.append(**dict(zip(names, np.array(places).T, strict=True)))
        return repeated


class Survey:
    """Adds up recordings, then decides splits and scales."""

    def __init__(self, config: SequenceDataConfig, columns: list[str], splitter: Splitter) -> None:
        self.config = config
        self.columns = columns
        self.splitter = splitter
        self.found: list[RecordingEntry] = []
        self.segments: list[Segment] = []
        self.scaler = Scaler([])
        self.train: dict[str, Floats] = {}  # moments of each column over the training samples
        self.classes: list[str] = []
        # the label of each recording as a number; zeros where there are none
        self.numbers = np.empty(0)
        self._warnings: list[str] = []
        # a forecast may read its targets' past
        is_estimate = config.problem is SequenceProblem.estimate
        self._copies = CopyFinder(columns, config.targets if is_estimate else [])

    def add(self, split: str, recording: Recording) -> None:
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
        entry.moments = {
            span: _moments_of(values, *span)
            for span in {(0, len(values)), *self.splitter.spans(entry)}
        }
        middle = len(values) // 2
        entry.halves = [_moments_of(values, 0, middle), _moments_of(values, middle, len(values))]
        self.found.append(entry)

    def finish(self) -> None:
        """Decide splits, then scales and classes, by the training samples."""
        cuts = {"step": self.config.step, "max_gap": self.config.max_gap}
        named = " or ".join(
            f"data.{name}={value:g}" for name, value in cuts.items() if value is not None
        )
        require(
            bool(self.found),
            "data",
            "no recording has two samples or more",
            hint=f"Name longer recordings{f', or change {named}' if named else ''}.",
        )
        self.segments = self.splitter.split(self.found)
        self._require_no_leak()
        moments: dict[str, dict[str, Floats]] = {}
        for split in SPLITS:
            own = [each for each in self.segments if each.split == split]
            require(
                bool(own) or split == "test",
                "data.split_by",
                f"no recordings are left for the {split} split",
                hint="Name more recordings.",
            )
            if own:
                moments[split] = _merge(
                    [self.found[each.recording].moments[each.first, each.stop] for each in own]
                )
        self.train = moments.pop("train")
        self._require_usable()
        self.scaler = Scaler.fit(self.config.scale.value, self.train)
        for split, other in moments.items():
            ratio = _rms(other) / np.maximum(_rms(self.train), 1e-30)
            units = describe_units(self.columns, ratio, other["count"].max())
            self._warnings += [f"warning {split}: {line}" for line in units]
        odd = describe_odd_units(self.columns, self.found)
        self._warnings += [f"warning recordings: {line}" for line in odd]
        self._number_labels()

    def facts(self) -> dict[str, Any]:
        """What the store keeps beside the values."""
        own = {split: [each for each in self.segments if each.split == split] for split in SPLITS}
        samples = {
            split: sum(each.stop - each.first for each in parts) for split, parts in own.items()
        }
        numbers = self.numbers[sorted({each.recording for each in own["train"]})]
        codes = numbers.astype(int) if self.classes else np.zeros(len(numbers), int)
        labels = np.zeros(1) if self.classes else numbers
        return {
            "columns": self.columns,
            "scaler": asdict(self.scaler),
            "sizes": _rms(self.train).tolist(),
            "recordings": [each.name for each in self.found],
            "parts": [each.part for each in self.found],
            "splits": {
                name: {"recordings": len(own[name]), "samples": samples[name]}
                for name in SPLITS
                if own[name]
            },
            "classes": self.classes,
            "class_counts": np.bincount(codes, minlength=len(self.classes)).tolist(),
            "label_mean": float(labels.mean()),
            "label_spread": float(labels.std()) or 1.0,
        }

    def describe_columns(self) -> dict[str, dict[str, float]]:
        """Mean, spread, least and most of each column over the training samples."""
        found = self.train | {"spread": np.sqrt(self.train["squares"] / self.train["count"])}
        return {
            column: {
                name: float(found[name][place]) for name in ("mean", "spread", "least", "most")
            }
            for place, column in enumerate(self.columns)
        }

    def lines(self) -> list[str]:
        splits = self.facts()["splits"].items()
        counts = ", ".join(
            f"{name} {each['recordings']:,} ({each['samples']:,} samples)" for name, each in splits
        )
        return [f"recordings: {counts}; {self.splitter.how}", *self._warnings]

    def _number_labels(self) -> None:
        """Labels are classes where one of them is no number."""
        labels = ["0" if each.label is None else each.label for each in self.found]
        try:
            self.numbers = np.array(list(map(float, labels)))
        except ValueError:
            self.classes = sorted(
                {labels[each.recording] for each in self.segments if each.split == "train"}
            )
            unknown = sorted(set(labels) - set(self.classes))
            require(
                not unknown,
                "data.target",
                f"{', '.join(map(repr, unknown[:3]))} stands in no training recording",
                hint="Give the training recordings of each class.",
            )
            require(len(self.classes) > 1, "data.target", "one class", allowed="two or more")
            places = {name: number for number, name in enumerate(self.classes)}
            self.numbers = np.array([places[label] for label in labels], dtype=np.float64)
        else:
            broken = [
                each
                for each, number in zip(self.found, self.numbers, strict=True)
                if not math.isfinite(number)
            ]
            what = "".join(f"the label of {each.name} is {each.label}" for each in broken[:1])
            require(
                not broken, "data.target", what, hint="Write a number, or leave the recording out."
            )
            known = set(self.numbers.tolist())
            is_label = self.config.problem is SequenceProblem.label
            if is_label and len(known) < _FEW and all(each.is_integer() for each in known):
                note = (
                    "labels: whole numbers are predicted as numbers; write them as texts (c0, c1)"
                    " for classes"
                )
                self._warnings.append(note)

    def _require_usable(self) -> None:
        moments = (self.train[name].tolist() for name in ("least", "most", "squares"))
        for name, least, most, squares in zip(self.columns, *moments, strict=True):
            key = "data.target" if name in self.config.targets else "data.features"
            require(
                least != most,
                key,
                f"{name!r} is constant in the training recordings ({least:g})",
                hint="Leave it out.",
            )
            require(
                math.isfinite(squares),
                key,
                f"{name!r} reaches {max(-least, most):g}, its variance is not finite",
                hint="Use another unit.",
            )
        for copy in self._copies.find():
            require(
                not copy.is_equal,
                "data.features",
                f"{copy.feature!r} has the values of the target {copy.target!r} in all recordings",
                hint="Leave it out.",
            )
            line = f"{copy.target} = {copy.factor:.4g} * {copy.feature} + {copy.shift:.4g}"
            self._warnings.append(
                f"warning data.features: {line} in all recordings; leave {copy.feature} out"
            )

    def _require_no_leak(self) -> None:
        """Refuse recordings that two splits share, and warn of samples that two splits share."""
        if self.splitter.by is PartBy.time:
            return  # every recording is in all splits
        # Every segment is a whole recording, and they come in the order of the recordings.
        first_with: dict[str, Segment] = {}
        for segment in self.segments:
            entry = self.found[segment.recording]
            keys = {"holds the samples of": entry.digest}
            # each file has its own groups
            if self.config.group and self.splitter.by is not PartBy.file:
                keys["is the group of"] = entry.whole.partition(": ")[2]
            for how, key in keys.items():
                first = first_with.setdefault(key, segment)
                earlier = self.found[first.recording].name
                require(
                    not key or first.split == segment.split,
                    f"data.{segment.split}",
                    f"{entry.name} {how} {earlier}, which is in the {first.split} split",
                    hint="Leave it out of one of the two.",
                )
        self._warn_of_overlaps()

    def _warn_of_overlaps(self) -> None:
        runs = [entry.runs for entry in self.found]
        splits = [SPLITS.index(segment.split) for segment in self.segments]
        for overlap in find_overlaps(runs, splits):
            name = self.found[overlap.recording].name
            earlier = self.found[overlap.earlier].name
            split = self.segments[overlap.recording].split
            earlier_split = self.segments[overlap.earlier].split
            self._warnings.append(
                f"warning {split}: {name} has {overlap.share:.0%} of its samples in {earlier},"
                f" which is in the {earlier_split} split; leave one out"
            )


def _moments_of(values: Any, first: int, stop: int) -> dict[str, Floats]:
    parts = []
    for block in blocks_of(values, ROWS_A_BLOCK, first, stop):
        with np.errstate(over="ignore"):  # a variance that is not finite is refused later, by name
            mean = block.mean(axis=0)
            squares = ((block - mean) ** 2).sum(axis=0)
        least = block.min(axis=0)
        most = block.max(axis=0)
        count = np.full_like(mean, len(block))
        parts.append(
            {"count": count, "mean": mean, "squares": squares, "least": least, "most": most}
        )
    return parts[0] if len(parts) == 1 else _merge(parts)


def _merge(parts: list[dict[str, Floats]]) -> dict[str, Floats]:
    """Moments of several runs of samples together, without the loss of digits of plain sums."""
    counts, means, squares, least, most = (
        np.stack([part[name] for part in parts]) for name in parts[0]
    )
    count = counts.sum(axis=0)
    with np.errstate(over="ignore"):
        mean = (counts * means).sum(axis=0) / count
        apart = squares.sum(axis=0) + (counts * (means - mean) ** 2).sum(axis=0)
    return {
        "count": count,
        "mean": mean,
        "squares": apart,
        "least": least.min(axis=0),
        "most": most.max(axis=0),
    }


def _rms(moments: dict[str, Floats]) -> Floats:
    return np.sqrt(moments["mean"] ** 2 + moments["squares"] / moments["count"])
