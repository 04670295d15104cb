"""From the tables of recordings to a store, in which each sample stands once as float32.

Two passes over the tables, a file at a time:

    Survey         adds up what splits and scales depend on (lengths, moments of columns, labels)
                   and finds recordings that leak
    RecordingPass  writes the scaled samples, and which of them belong to which split

What a network reads of them (windows, chunks, whole recordings) is an index that `views` makes when
the store is opened. Open this file to change what a store of recordings depends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from flatout.data.samples.cells import CellsTable
from flatout.data.sequences.columns import RecordingRules
from flatout.data.sequences.recording import Recording
from flatout.data.sequences.recording_pass import RecordingPass
from flatout.data.sequences.recordings import ReadingNotes, read_recordings
from flatout.data.sequences.scratch import Scratch
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.sequences.splitting import Splitter
from flatout.data.sequences.survey import Survey
from flatout.data.store.cache import Cache, Recipe
from flatout.data.store.preparation import Preparation
from flatout.data.store.progress import Progress
from flatout.data.store.store import SCHEMA, StoreWriter
from flatout.data.tables.prints import SourceTables, heads_noted
from flatout.data.tables.sources import open_splits
from flatout.data.tables.splits import SPLITS
from flatout.errors import UserError, require

_VERSION = 4  # of what is written; with a higher number all stores of recordings are built again


class SequencePreparation(SourceTables, Preparation):
    """Builds the store of recordings that settings name."""

    def __init__(self, config: SequenceDataConfig) -> None:
        self.config = config
        self.cache = Cache(config.cache).folder
        if config.is_sample:
            self.tables = {split: CellsTable(config.sample, split) for split in SPLITS}
        else:
            with heads_noted(self.cache, [config.source, *config.given.values()]):
                self.tables = open_splits(config.source, config.given, config.read)
        require(
            "train" in self.tables,
            "data.train",
            "no training recordings",
            hint="Set data.source or data.train.",
        )
        self.rules = RecordingRules.of(config)
        self.name = self.tables["train"].name
        self.cache_folder = config.cache

    def recipe(self) -> Recipe:
        config = self.config
        shares = config.taken_shares(self.tables)
        kind = "label" if config.problem is SequenceProblem.label else "values"
        rules = asdict(self.rules)
        # Both follow from settings that are in the recipe themselves.
        del rules["targets"], rules["past_only"]
        recipe: Recipe = {
            "kind": f"sequences {kind} {_VERSION}",
            "source": self.fingerprints,
            "read": config.read.facts(),
            "rules": rules,
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
        return recipe

    def write(self, writer: StoreWriter, progress: Progress) -> dict[str, Any]:
        notes = ReadingNotes()
        with TemporaryDirectory(dir=writer.folder, prefix="scratch") as folder:
            scratch = Scratch(Path(folder), self.rules)
            survey = self.survey(notes, progress, scratch)
            survey.finish()
            recordings = self._read(ReadingNotes(), progress, scratch)
            repeated = RecordingPass(self.rules, survey).write(writer, recordings)
        return self._facts(survey, notes, repeated)

    def _facts(self, survey: Survey, notes: ReadingNotes, repeated: int) -> dict[str, Any]:
        """What the store says of itself. `repeated`: targets that were not measured."""
        facts = survey.facts()
        facts["lines"] = [*survey.lines(), *notes.lines()]
        if repeated:
            facts["repeated"] = repeated
            facts["lines"].append(
                f"targets: {repeated:,} repeat the value before; they are in no loss and no score"
            )
        facts["step"] = self.config.step
        if not self.config.step and self.rules.time:
            facts["step"] = float(np.median(notes.steps))
        return facts

    def survey(
        self,
        notes: ReadingNotes,
        progress: Progress,
        scratch: Scratch | None = None,
        mistakes: list[UserError] | None = None,
    ) -> Survey:
        """The first pass: read all recordings and add them up.

        `mistakes`: takes the error of each file that is refused, instead of raising the first.
        """
        shares = self.config.taken_shares(self.tables)
        splitter = Splitter(self.config, shares, len(self.tables["train"].tables) or 1)
        survey = Survey(self.config, self.rules.names, splitter)
        for split, recording in self._read(notes, progress, scratch, mistakes):
            survey.add(split, recording)
        return survey

    def _read(
        self,
        notes: ReadingNotes,
        progress: Progress,
        scratch: Scratch | None,
        mistakes: list[UserError] | None = None,
    ) -> Iterator[tuple[str, Recording]]:
        """The recordings of all tables, each with the split of its table.

        A large file is copied to a scratch file, if there may be any, and read from there.
        `mistakes`: see `survey`.
        """
        advance = progress.task("reading")
        for split, table in self.tables.items():
            for file in table.tables or [table]:
                if scratch is not None and (recording := scratch.read(file, notes)) is not None:
                    yield split, recording
                    advance(len(recording.values))
                    continue
                try:
                    for recording in read_recordings(file, self.rules, notes, advance):
                        yield split, recording
                except UserError as error:
                    if mistakes is None:
                        raise
                    mistakes.append(error)
