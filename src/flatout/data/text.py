"""A table of texts, made ready: read, cleaned, split, labelled and encoded once, into a store.

Two passes over the source, both by the block: the first counts labels and trains the vocabulary, the second encodes.
Memory stays flat however many rows there are. Everything that was found on the way is kept in the store's facts, so an
opened store says the same as a built one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.cache import Cache, CacheReport, Recipe
from flatout.data.checks import CleanBlock, Findings, LabelCensus, all_lines, clean_block, normalise_labels, read_texts
from flatout.data.feeding import SPLITS, FeedingConfig, require_other_files
from flatout.data.problem import Problem
from flatout.data.progress import Progress
from flatout.data.samples import HeadlinesConfig, HeadlinesTable
from flatout.data.splits import assign_splits
from flatout.data.store import SCHEMA, Column, Store, StoreWriter, smallest_token_type
from flatout.data.table import Table, open_table, require_columns, table_of
from flatout.data.vocabulary import EncodedBlock, Vocabulary, VocabularyConfig
from flatout.errors import UserError, as_choice, require

_TOPIC = "topic"


@dataclass(kw_only=True, slots=True)
class TextDataConfig(FeedingConfig):
    """A table of texts and labels: where it is, what its columns are, how it becomes batches."""

    train: Any = None
    """File with the training rows (csv, tsv, json, jsonl, parquet, gzipped or not); null: the built-in headlines.
    From Python also a mapping of columns, or a pandas, pyarrow or datasets table."""
    validation: Any = None
    """File with the validation rows; null: taken from the training rows."""
    test: Any = None
    """File with the test rows; null: taken from the training rows when no validation file is given either."""
    text: str = "text"
    """Column that holds the text."""
    label: str = "label"
    """Column that holds the label."""
    problem: Problem = Problem.single
    """One class a row, several, or a number."""
    label_delimiter: str | None = None
    """What separates the labels of a row when there are several in one string."""
    sample: HeadlinesConfig = field(default_factory=HeadlinesConfig)
    """The built-in headlines, used when no file is given."""
    max_length: int = 128
    """Longest row in tokens; what is longer is cut, and counted."""
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    """How texts become numbers in models trained from scratch."""

    def __post_init__(self) -> None:
        FeedingConfig.__post_init__(self)  # a class with slots has no working super()
        self.problem = as_choice(Problem, self.problem, "data.problem")
        require(self.max_length >= 1, "data.max_length", f"{self.max_length}", allowed="1 or more")
        require_other_files("train", self.train, {"validation": self.validation, "test": self.test})

    def prepare(self) -> PreparedText:
        """Open the store of this data, building it first when there is none."""
        return TextPreparation(self).run()


@dataclass(frozen=True, slots=True)
class PreparedText:
    """Data that is ready to train on."""

    store: Store
    vocabulary: Vocabulary
    report: CacheReport
    source: str
    problem: Problem

    @property
    def facts(self) -> dict[str, Any]:
        return self.store.facts

    @property
    def classes(self) -> list[str]:
        return list(self.facts["classes"])

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says of the data."""
        splits = self.facts["splits"]
        return {
            "rows": {split: counts["rows"] for split, counts in splits.items()},
            "classes": len(self.classes),
            "tokens": splits["train"]["tokens"],
            "mean_length": splits["train"]["mean_length"],
            "truncated_rows": sum(counts["truncated_rows"] for counts in splits.values()),
        }

    def known_ceilings(self) -> dict[str, float]:
        """The best accuracy there can be, of each split of the built-in sample; empty for other data."""
        splits = self.facts["splits"]
        return {split: counts["ceiling"] for split, counts in splits.items() if "ceiling" in counts}


class TextPreparation:
    """From a TextDataConfig to a store, a stage a method."""

    def __init__(self, config: TextDataConfig) -> None:
        self.config = config
        self.tables = self._open_tables()
        self.is_sample = config.train is None
        """The built-in sample knows the clean topic of each row."""

    def run(self) -> PreparedText:
        cache = Cache(self.config.cache)
        source = self.tables["train"].name
        store, report = cache.open_or_build(source, self._recipe(), self._build)
        vocabulary = Vocabulary.from_json(store.read_text("tokenizer.json"))
        return PreparedText(store, vocabulary, report, source, self.config.problem)

    def _open_tables(self) -> dict[str, Table]:
        config = self.config
        if config.train is None:
            return {split: HeadlinesTable(config.sample, split) for split in SPLITS}
        tables: dict[str, Table] = {}
        for split in SPLITS:
            if (given := getattr(config, split)) is not None:
                is_path = isinstance(given, str | Path)
                tables[split] = open_table(given, where=f"data.{split}") if is_path else table_of(given)
        for table in tables.values():
            require_columns(table, {"data.text": config.text, "data.label": config.label})
        return tables

    def _recipe(self) -> Recipe:
        config = self.config
        validation_share, test_share = self.config.taken_shares(self.tables)
        return {
            "source": {split: table.fingerprint() for split, table in self.tables.items()},
            "column": {"text": config.text, "label": config.label},
            "problem": config.problem.value,
            "label_delimiter": config.label_delimiter,
            "split": {"validation_share": validation_share, "test_share": test_share, "seed": config.split_seed},
            "vocabulary": asdict(config.vocabulary),
            "max_length": config.max_length,
            "schema": SCHEMA,
        }

    def _build(self, writer: StoreWriter) -> None:
        census = LabelCensus(self.config.problem)
        findings = self._new_findings()
        with Progress() as progress:
            vocabulary = self._survey(census, findings, progress)
            census.require_classes(where="data.label")
            totals = self._encode(writer, census, vocabulary, progress)
        writer.write_text("tokenizer.json", vocabulary.to_json())
        mean, spread = census.scale()
        writer.facts |= {
            "classes": census.classes(),
            "class_counts": census.train_counts(),
            "target_mean": mean,
            "target_spread": spread,
            "splits": {split: total.facts() for split, total in totals.items()},
            "lines": [*self._split_lines(totals), *all_lines(findings.values()), *census.lines(), *_losses(totals)],
        }

    def _survey(self, census: LabelCensus, findings: dict[str, Findings], progress: Progress) -> Vocabulary:
        """First pass: labels of all splits, and the vocabulary of the training rows."""

        def training_texts() -> Iterator[pa.Array]:
            for split, block in self._clean_blocks(findings, progress.task("reading")):
                census.add(split, self._labels(block))
                if split == "train":
                    yield block.texts

        return Vocabulary.train(training_texts(), self.config.vocabulary)

    def _encode(
        self, writer: StoreWriter, census: LabelCensus, vocabulary: Vocabulary, progress: Progress
    ) -> dict[str, _Totals]:
        """Second pass: tokens and targets of every split."""
        columns = {
            "tokens": Column(smallest_token_type(vocabulary.size), ragged=True),
            "targets": _TARGET_COLUMNS[self.config.problem],
            "rows": Column("int64"),
        }
        writers = {split: writer.split(split, columns) for split in self.config.split_names(self.tables)}
        totals = {split: _Totals() for split in writers}
        for split, block in self._clean_blocks(self._new_findings(), progress.task("encoding")):
            encoded = vocabulary.encode(block.texts, max_length=self.config.max_length)
            targets = census.targets(self._labels(block))
            writers[split].append(tokens=(encoded.tokens, encoded.lengths), targets=targets, rows=block.rows)
            totals[split].add(encoded, is_clean=_is_clean(block) if self.is_sample else None)
        for split, total in totals.items():
            if total.rows == 0:
                where = f"data.{split if split in self.tables else 'train'}"
                raise UserError(where, f"no rows are left for the {split} split of {self.tables['train'].name}")
        return totals

    def _clean_blocks(
        self, findings: dict[str, Findings], told: Callable[[int], None]
    ) -> Iterator[tuple[str, CleanBlock]]:
        """Every row of every split, cleaned, with the split it belongs to."""
        config = self.config
        wanted = [config.text, config.label, *([_TOPIC] if self.is_sample else [])]
        for name, table in self.tables.items():
            first_row = 0
            for block in table.blocks(wanted):
                rows = np.arange(first_row, first_row + block.num_rows)
                first_row += block.num_rows
                for split, mask in self._assigned(name, block, rows):
                    yield (
                        split,
                        clean_block(
                            block if mask is None else block.filter(pa.array(mask)),
                            text=config.text,
                            label=config.label,
                            rows=rows if mask is None else rows[mask],
                            problem=config.problem,
                            is_train=split == "train",
                            findings=findings[name],
                        ),
                    )
                told(block.num_rows)

    def _assigned(
        self, name: str, block: pa.RecordBatch, rows: NDArray[np.int64]
    ) -> Iterator[tuple[str, NDArray[np.bool_] | None]]:
        """The splits that rows of a table go to, with the mask of each; no mask: all rows."""
        validation_share, test_share = self.config.taken_shares(self.tables)
        if name != "train" or self.is_sample or not (validation_share or test_share):
            yield name, None
            return
        texts = read_texts(block.column(self.config.text), self.config.text, rows, Findings(name))
        seed = self.config.split_seed
        splits = assign_splits(
            pc.fill_null(texts, ""), validation_share=validation_share, test_share=test_share, seed=seed
        )
        for number, split in enumerate(SPLITS):
            if (mask := splits == number).any():
                yield split, mask

    def _labels(self, block: CleanBlock) -> pa.Array:
        config = self.config
        source = self.tables["train"].name
        return normalise_labels(
            block.labels, block.rows, problem=config.problem, delimiter=config.label_delimiter, source=source
        )

    def _new_findings(self) -> dict[str, Findings]:
        return {split: Findings(table.name) for split, table in self.tables.items()}

    def _split_lines(self, totals: dict[str, _Totals]) -> list[str]:
        counts = ", ".join(f"{split} {total.rows:,}" for split, total in totals.items())
        made = [split for split in totals if split not in self.tables]
        how = f" ({' and '.join(made)} taken from the training rows by a hash of the text)" if made else ""
        return [f"rows: {counts}{how}"]


_TARGET_COLUMNS = {
    Problem.single: Column("int32"),
    Problem.multi: Column("int32", ragged=True),
    Problem.regression: Column("float32"),
}


@dataclass(slots=True)
class _Totals:
    """What the encoded rows of one split add up to."""

    rows: int = 0
    tokens: int = 0
    unknown: int = 0
    truncated_rows: int = 0
    truncated_tokens: int = 0
    clean: int | None = None
    """Rows whose label is the sample's clean topic."""

    def add(self, block: EncodedBlock, is_clean: int | None) -> None:
        self.rows += len(block.lengths)
        self.tokens += len(block.tokens)
        self.unknown += block.unknown
        self.truncated_rows += block.truncated_rows
        self.truncated_tokens += block.truncated_tokens
        if is_clean is not None:
            self.clean = (self.clean or 0) + is_clean

    def facts(self) -> dict[str, Any]:
        known = {} if self.clean is None else {"ceiling": self.clean / max(1, self.rows)}
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "mean_length": self.tokens / max(1, self.rows),
            "unknown_share": self.unknown / max(1, self.tokens),
            "truncated_rows": self.truncated_rows,
            "truncated_tokens": self.truncated_tokens,
            **known,
        }


def _losses(totals: dict[str, _Totals]) -> list[str]:
    """What encoding lost: words that are not in the vocabulary, and rows that were cut."""
    shares = ", ".join(f"{split} {total.unknown / max(1, total.tokens):.1%}" for split, total in totals.items())
    lines = [f"unknown words: {shares}"]
    if rows := sum(total.truncated_rows for total in totals.values()):
        tokens = sum(total.truncated_tokens for total in totals.values())
        lines.append(f"cut at data.max_length: {rows:,} rows, {tokens:,} tokens lost")
    return lines


def _is_clean(block: CleanBlock) -> int:
    same = pc.equal(block.block.column("label"), block.block.column(_TOPIC))
    return int(pc.sum(same).as_py() or 0)
