"""From the tables of people to a store.

Two passes over the source, each block by block and each in a file of its own:

    survey_pass    numbers the grams, and the numbers of a two-step hash, of the training rows
    encoding_pass  writes each record: its encoding, its grams, and its plain text

Open this file to change what a store depends on, or what its facts say.
"""

from __future__ import annotations

from typing import Any

from flatout.bits.encoding_pass import BitEncodingPass
from flatout.bits.grams import LABELS
from flatout.bits.info import BitInfo
from flatout.bits.settings import KNOWN_BITS, BitsDataConfig
from flatout.bits.source import BitSource
from flatout.bits.survey_pass import MOST_HASHED, survey_records
from flatout.data.store.cache import Cache, Recipe
from flatout.data.store.preparation import Preparation
from flatout.data.store.progress import Progress
from flatout.data.store.store import SCHEMA, StoreWriter
from flatout.data.tables.prints import SourceTables


class BitsPreparation(SourceTables, Preparation):
    """Builds the store of the records that settings name."""

    def __init__(self, config: BitsDataConfig) -> None:
        self.config = config
        self.source = BitSource(config)
        self.name = self.source.name
        self.cache_folder = config.cache
        self.tables = self.source.tables
        self.cache = Cache(config.cache).folder

    def open(self) -> BitInfo:
        store, report = self.open_store()
        return BitInfo(store=store, report=report, source=self.name)

    def recipe(self) -> Recipe:
        config = self.config
        source = self.source
        validation_share, test_share = config.taken_shares(source.tables)
        return {
            "kind": "bits",
            "source": self.fingerprints,
            "read": config.read.facts(),
            "column": {"text": source.columns, "bits": source.bits, "uid": source.uid},
            "form": config.form.value,
            "encoding": None if source.bits else config.encoding.without_secret(),
            "vocabulary": config.vocabulary,
            "split": {
                "validation_share": validation_share,
                "test_share": test_share,
                "seed": config.split_seed,
            },
            "schema": SCHEMA,
        }

    def write(self, writer: StoreWriter, progress: Progress) -> dict[str, Any]:
        survey = survey_records(self.source, progress.task("reading"))
        writer.expected_rows = survey.num_records
        encoding = BitEncodingPass(self.source, survey)
        totals = encoding.write(writer, progress.task("writing"))
        return self._facts(encoding, totals)

    def _facts(
        self, encoding: BitEncodingPass, totals: dict[str, dict[str, int]]
    ) -> dict[str, Any]:
        """What the store says of itself."""
        source = self.source
        survey = encoding.survey
        return {
            "classes": list(LABELS),
            "class_counts": survey.label_counts.tolist(),
            "hashed": survey.hashed.names,
            "is_set": survey.numbers is not None,
            "numbers": [] if survey.numbers is None else survey.numbers.tolist(),
            "num_inputs": survey.num_inputs,
            "columns": source.columns,
            "about": source.encoding_line(),
            "bits_column": source.bits or KNOWN_BITS[0],
            "form": source.form.value,
            "splits": totals,
            "lines": self._lines(encoding, totals),
        }

    def _lines(self, encoding: BitEncodingPass, totals: dict[str, dict[str, int]]) -> list[str]:
        """Lines about records, columns and encodings, which a run prints."""
        survey = encoding.survey
        rows = totals["train"]["rows"]
        made = [split for split in totals if split not in self.source.tables]
        how = f" ({' and '.join(made)} taken from the source by a hash of the text)" if made else ""
        counts = ", ".join(f"{split} {total['rows']:,}" for split, total in totals.items())
        lines = [f"records: {counts}{how}", f"plain text: {', '.join(self.source.columns)}"]
        lines += [f"left out: column {column.line()}" for column in self.source.left_out]
        if survey.numbers is not None:
            about = f"sets of {totals['train']['tokens'] / rows:.0f} known numbers a record"
            about += f", {survey.num_inputs:,} of {survey.numbers_met:,} numbers kept"
        else:
            mean = encoding.bits_set / max(1, rows)
            about = f"{mean:.1f} of {survey.num_inputs:,} bits set on average"
        lines.append(f"encoding: {self.source.encoding_line()}, {about}")
        seen = f"{int((survey.label_counts > 0).sum()):,} of {len(LABELS):,} seen in training"
        kept = "the first " if len(survey.hashed) == MOST_HASHED else ""
        pairs = f"{kept}{len(survey.hashed):,} different pairs in the raw texts"
        lines.append(f"2-grams: {survey.num_labels / max(1, rows):.1f} a record, {seen}; {pairs}")
        if repeated := survey.ids.line(self.source.uid):
            lines.append(repeated)
        if survey.without_label:
            lines.append(f"{self.name}: {survey.without_label:,} records without a 2-gram kept")
        return lines
