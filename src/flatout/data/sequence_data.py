"""`SequenceData`: recordings as a Lightning DataModule.

They are split, checked, scaled, and written once as flat columns of float32.

Two passes over the tables, a file at a time: the first finds what the splits and scales depend on, the second writes.
The store holds each sample once. What a network reads of it (windows, chunks, whole recordings) is an index, made when
the store is opened; so another lookback needs no other store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import PlanSettings
from flatout.data.feeding import require_other_content
from flatout.data.samples.cells import CellsTable
from flatout.data.sequences.choices import SequenceProblem
from flatout.data.sequences.info import SequenceInfo, read_columns, rules_of, stored_columns
from flatout.data.sequences.long_files import LongRecording, Scratch, blocks_of
from flatout.data.sequences.recordings import (
    ReadingNotes,
    Recording,
    files_of,
    read_recordings,
    require_rules_columns,
)
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.sequences.splitting import Splitter
from flatout.data.sequences.survey import Survey
from flatout.data.sequences.views import RECORDINGS, SEGMENTS, open_views
from flatout.data.store.cache import Cache, Recipe
from flatout.data.store.progress import Progress
from flatout.data.store.store import SCHEMA, Column, StoreWriter
from flatout.data.store_data import StoreData
from flatout.data.tables.sources import open_splits
from flatout.data.tables.splits import SPLITS
from flatout.data.tables.table import Table, require_unchanged
from flatout.errors import require

_VERSION = 2
_ROWS_A_BLOCK = 1 << 16


class SequenceData(StoreData[SequenceDataConfig, SequenceInfo]):
    """Recordings of sensors: whole, in windows, or in chunks whose hidden state is carried on.

    >>> data = SequenceData(source="cells/", features=["voltage", "current"], target="soc", time="t")  # doctest: +SKIP
    >>> trainer.fit(module, datamodule=data)  # doctest: +SKIP
    """

    settings = SequenceDataConfig

    def open_store(self) -> SequenceInfo:
        return SequencePreparation(self.config).open()

    def _feed(self, name: str, plan: PlanSettings, device: torch.device) -> Feed:
        """The feed of a split; chunks keep the order of their recordings."""
        return super()._feed(name, replace(plan, is_stream=self.config.chunk is not None), device)


class SequencePreparation:
    """From settings to a store, a stage a method."""

    def __init__(self, config: SequenceDataConfig) -> None:
        self.config = config
        self.tables = _open_tables(config)
        self.columns = stored_columns(config)
        self.rules = rules_of(config, read_columns(config))

    def open(self) -> SequenceInfo:
        """The store, built where it is missing, with the rows that the settings ask for."""
        source, recipe = self.tables["train"].name, self._recipe()
        build = partial(self._build, recipe["source"])
        store, report = Cache(self.config.cache).open_or_build(source, recipe, build)
        info = SequenceInfo(store=store, report=report, source=source, config=self.config)
        open_views(info)
        return info

    def _recipe(self) -> Recipe:
        config = self.config
        fingerprints = {split: table.fingerprint() for split, table in self.tables.items()}
        require_other_content(fingerprints, {split: table.name for split, table in self.tables.items()})
        shares = config.taken_shares(self.tables)
        split = {"shares": shares, "by": config.split_by.value, "at": config.split_at, "seed": config.split_seed}
        rules = {name: value for name, value in asdict(self.rules).items() if name != "targets"}
        kind = "label" if config.problem is SequenceProblem.label else "values"
        return {
            "kind": f"sequences {kind} {_VERSION}",
            "source": fingerprints,
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
        require_unchanged(self.tables, fingerprints)
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


def _open_tables(config: SequenceDataConfig) -> dict[str, Table]:
    if config.is_sample:
        return {split: CellsTable(config.sample, split) for split in SPLITS}
    tables = open_splits(config.source, config.given, config.read)
    require("train" in tables, "data.train", "no training recordings", hint="Set data.source or data.train.")
    return tables
