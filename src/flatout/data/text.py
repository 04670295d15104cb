"""A table of texts, made ready: read, checked, split, labelled and encoded once, into a store.

Three passes over the source, each by the block: the first looks at every row and decides its fate, the second trains
the vocabulary, the third encodes. Memory stays flat however many rows there are. Everything that was found on the way
is kept in the store's facts, so an opened store says the same as a built one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from flatout.data.checks.cleaning import CleaningConfig
from flatout.data.checks.findings import Level, Remark, all_remarks
from flatout.data.checks.lengths import Lengths
from flatout.data.checks.survey import Surveyed
from flatout.data.feeding import FeedingConfig, require_other_files
from flatout.data.problem import Problem
from flatout.data.samples.headlines import HeadlinesConfig, HeadlinesTable
from flatout.data.samples.tweets import TaggedTweetsConfig, TaggedTweetsTable, TweetsConfig, TweetsTable
from flatout.data.store.cache import Cache, CacheReport, Recipe
from flatout.data.store.progress import Progress
from flatout.data.store.store import SCHEMA, Column, Store, StoreWriter, smallest_token_type
from flatout.data.tables.roles import Roles
from flatout.data.tables.splits import SPLITS, SplitBy
from flatout.data.tables.table import Table
from flatout.data.text_source import TOPIC, TextBlock, TextSource
from flatout.data.tokens.subwords import Encoder, Subwords, read_encoder, train_encoder
from flatout.data.tokens.vocabulary import EncodedBlock, VocabularyConfig
from flatout.errors import UserError, as_choice, require

_MANY_UNKNOWN = 0.1


SAMPLES: dict[type, Callable[[Any, str], Table]] = {
    HeadlinesConfig: HeadlinesTable,
    TweetsConfig: TweetsTable,
    TaggedTweetsConfig: TaggedTweetsTable,
}
"""The built-in samples: the settings of each, and its table of one split."""


@dataclass(kw_only=True, slots=True)
class TextDataConfig(FeedingConfig):
    """Texts and labels: where they are, what their columns are, how they become batches."""

    source: Any = None
    """Everything at once: a file whose rows are split here, a folder with a file for each split or a folder of texts
    for each class, or a data set of the Hub by its name (`name` or `owner/name`, with `:configuration` if it has any).
    From Python also a mapping of columns, or a pandas, pyarrow or datasets table or dictionary of tables."""
    train: Any = None
    """The training rows: a file (csv, tsv, json, jsonl, parquet, arrow; gzipped or not), a pattern such as
    'part-*.csv', a list of files, a folder, or a table from Python; null: the built-in headlines."""
    validation: Any = None
    """The validation rows; null: taken from the training rows."""
    test: Any = None
    """The test rows; null: taken from the training rows when no validation rows are given either."""
    text: Any = None
    """Column of the texts, or a list of columns to be joined; null: found by its name."""
    join: str = " "
    """What stands between the texts of several columns."""
    pair: bool = False
    """Whether the two columns of `data.text` are read as a pair, parted as the tokenizer of an encoder parts pairs."""
    label: str | None = None
    """Column of the labels; null: found by its name."""
    problem: Problem = Problem.single
    """One class a row, several, a number, or a tag for each word."""
    label_delimiter: str | None = None
    """What separates the labels of a row when there are several in one string."""
    max_classes: int | None = None
    """Most classes; null: half the training rows and at most 20,000, because a column of ids is no label."""
    split_by: SplitBy = SplitBy.content
    """How rows are taken for validation and test: by a hash of the text, so that a grown file keeps its old split;
    stratified: with the same share of each class; group: whole groups of `data.group`."""
    group: str | None = None
    """Column whose equal values stay in one split, for split_by=group."""
    clean: CleaningConfig = field(default_factory=CleaningConfig)
    """What is done with rows that are not as they should be."""
    sample: Any = None
    """The built-in sample for a run without a source: settings of headlines, tweets or tagged tweets.
    null: tagged tweets for tags, else headlines."""
    max_length: int = 128
    """Longest row in tokens; what is longer is cut, and counted."""
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    """How texts become numbers in models trained from scratch."""
    tokenizer: str | None = None
    """Folder or name of a tokenizer of transformers; null: the pretrained model's own, else a vocabulary of the
    training rows."""

    def __post_init__(self) -> None:
        FeedingConfig.__post_init__(self)  # a class with slots has no working super()
        self.problem = as_choice(Problem, self.problem, "data.problem")
        self._require_fitting_sample()
        self.split_by = as_choice(SplitBy, self.split_by, "data.split_by")
        require(self.max_length >= 1, "data.max_length", f"{self.max_length}", allowed="1 or more")
        if self.text is not None:
            names = [self.text] if isinstance(self.text, str) else self.text
            is_named = isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names)
            require(bool(is_named), "data.text", f"{self.text!r}", allowed="a column, or a list of columns")
            require(len(set(names)) == len(names), "data.text", f"{', '.join(names)}", allowed="each column once")
        num_texts = len(self.text) if isinstance(self.text, list | tuple) else 1
        require(
            not self.pair or num_texts == 2, "data.pair", f"{num_texts} columns", allowed="data.text=[FIRST,SECOND]"
        )
        require(
            self.max_classes is None or self.max_classes >= 2,
            "data.max_classes",
            f"{self.max_classes}",
            allowed="2 or more",
        )
        self._require_fitting_split()
        both = self.source is not None and self.train is not None
        require(not both, "data.train", "is set beside data.source", mend="Set one of the two.")
        given = {name: getattr(self, name) for name in ("source", *SPLITS)}
        require_other_files(given, ("train", "source"))

    def sample_table(self, split: str) -> Table:
        """One split of the built-in sample."""
        return SAMPLES[type(self.sample)](self.sample, split)

    def _require_fitting_sample(self) -> None:
        is_tagged = self.problem is Problem.tags
        if self.sample is None:
            self.sample = TaggedTweetsConfig() if is_tagged else HeadlinesConfig()
        kind = type(self.sample)
        allowed = ", ".join(known.__name__ for known in SAMPLES)
        require(kind in SAMPLES, "data.sample", kind.__name__, allowed=allowed)
        fits = self.train is not None or self.source is not None or is_tagged == (kind is TaggedTweetsConfig)
        mend = "Set data=tagged_tweets." if is_tagged else "Set data=headlines or data=tweets."
        require(fits, "data.problem", f"{self.problem} does not fit the built-in sample", mend=mend)

    def _require_fitting_split(self) -> None:
        is_grouped = self.split_by is SplitBy.group
        mend = "Name the column: data.group=COLUMN." if is_grouped else "Set data.split_by=group."
        require(
            is_grouped == (self.group is not None),
            "data.group",
            f"{self.group} with data.split_by={self.split_by}",
            mend=mend,
        )
        is_dealt = self.split_by is SplitBy.stratified and self.problem is Problem.regression
        require(not is_dealt, "data.split_by", "stratified needs classes, not numbers", allowed="content, group")

    def prepare(self) -> PreparedText:
        """Open the store of this data, building it first when there is none."""
        if self.problem is Problem.tags:
            from flatout.data.tagging import TagPreparation  # it stands on this module

            return TagPreparation(self).run()
        return TextPreparation(self).run()


@dataclass(frozen=True, slots=True)
class PreparedText:
    """Data that is ready to train on."""

    store: Store
    vocabulary: Encoder
    report: CacheReport
    source: str
    problem: Problem
    roles: Roles

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
            "columns": self.facts["columns"],
            "lengths": self.facts["lengths"],
            "checks": self.facts["remarks"],
        }

    def known_ceilings(self) -> dict[str, float]:
        """The best accuracy there can be, of each split of the built-in sample; empty for other data."""
        splits = self.facts["splits"]
        return {split: counts["ceiling"] for split, counts in splits.items() if "ceiling" in counts}


class TextPreparation:
    """From a TextDataConfig to a store, a stage a method."""

    def __init__(self, config: TextDataConfig) -> None:
        self.config = config
        self.source: TextSource = self._open_source()
        self.given = self._load_given()
        """The tokenizer that is not made here."""

    def _load_given(self) -> Subwords | None:
        return None if self.config.tokenizer is None else Subwords.load(self.config.tokenizer)

    def _open_source(self) -> TextSource:
        return TextSource(self.config)

    def run(self) -> PreparedText:
        cache = Cache(self.config.cache)
        store, report = cache.open_or_build(self.source.name, self._recipe(), self._build)
        vocabulary = read_encoder(store.read_text("tokenizer.json"))
        return PreparedText(store, vocabulary, report, self.source.name, self.config.problem, self.source.columns)

    def _recipe(self) -> Recipe:
        config, splitting, roles = self.config, self.source.splitting, self.source.columns
        return {
            "source": self.source.fingerprints,
            "read": asdict(config.read),
            "column": asdict(roles),
            "problem": config.problem.value,
            "label_delimiter": config.label_delimiter,
            "max_classes": config.max_classes,
            "split": asdict(splitting),
            "clean": asdict(config.clean),
            "vocabulary": asdict(config.vocabulary) if self.given is None else self.given.fingerprint(),
            "max_length": config.max_length,
            "schema": SCHEMA,
        }

    def _build(self, writer: StoreWriter) -> None:
        with Progress() as progress:
            surveyed = self.source.survey(progress.task("checking"))
            census = surveyed.census
            self._require_rows(surveyed)
            self._require_classes(surveyed)
            vocabulary = self._train_vocabulary(surveyed, progress.task("reading"))
            totals = self._encode(writer, surveyed, vocabulary, progress.task("encoding"))
        self.source.require_unchanged()
        writer.write_text("tokenizer.json", vocabulary.to_json())
        mean, spread = census.scale()
        remarks = self._remarks(surveyed, totals)
        writer.facts |= {
            "classes": self._classes(surveyed),
            "class_counts": self._class_counts(surveyed),
            "target_mean": mean,
            "target_spread": spread,
            "columns": {"text": list(self.source.columns.texts), "label": self.source.columns.label},
            "splits": {split: total.facts() for split, total in totals.items()},
            "lengths": {split: total.lengths.as_dict() for split, total in totals.items()},
            "remarks": [remark.as_dict() for remark in remarks],
            "lines": [*self._lines(totals), *(remark.line() for remark in remarks)],
            **self._more_facts(),
        }

    def _require_classes(self, surveyed: Surveyed) -> None:
        surveyed.census.require_classes(where="data.label")

    def _class_remarks(self, surveyed: Surveyed) -> list[Remark]:
        return surveyed.census.remarks("training rows")

    def _classes(self, surveyed: Surveyed) -> list[str]:
        return surveyed.census.classes()

    def _class_counts(self, surveyed: Surveyed) -> list[int]:
        return surveyed.census.train_counts()

    def _more_facts(self) -> dict[str, Any]:
        """What else is to be known of the data; for kinds of labels that need it."""
        return {}

    def _require_rows(self, surveyed: Surveyed) -> None:
        tables = self.source.tables
        for split in self.config.split_names(tables):
            if not surveyed.rows(split):
                key = "source" if self.config.source is not None else split if split in tables else "train"
                what = f"no rows are left for the {split} split of {self.source.name}"
                raise UserError(f"data.{key}", what, mend="python -m flatout check tells what became of them.")

    def _train_vocabulary(self, surveyed: Surveyed, told: Callable[[int], None]) -> Encoder:
        """Second pass: the words of the training rows, and their numbers if these are the labels."""

        def training_texts() -> Iterator[pa.Array]:
            for _, block in self.source.texts_and_labels(surveyed, told, splits=("train",)):
                if self.config.problem is Problem.regression:
                    surveyed.census.add_numbers(block.labels.to_numpy(zero_copy_only=False))
                yield block.texts

        if self.given is None:
            return train_encoder(training_texts(), self.config.vocabulary)
        if self.config.problem is Problem.regression:
            for _ in training_texts():
                pass  # the numbers are counted on the way
        return self.given

    def _encode(
        self, writer: StoreWriter, surveyed: Surveyed, vocabulary: Encoder, told: Callable[[int], None]
    ) -> dict[str, _Totals]:
        """Third pass: tokens and targets of every split."""
        columns = {
            "tokens": Column(smallest_token_type(vocabulary.size), ragged=True),
            "targets": _TARGET_COLUMNS[self.config.problem],
            "rows": Column("int64"),
        }
        tables = self.source.tables
        writers = {split: writer.split(split, columns) for split in self.config.split_names(tables)}
        writer.expected_rows = sum(surveyed.rows(split) for split in writers)
        totals = {split: _Totals() for split in writers}
        for split, block in self.source.texts_and_labels(surveyed, told):
            encoded, targets = self._encoded(split, block, surveyed, vocabulary)
            writers[split].append(tokens=(encoded.tokens, encoded.lengths), targets=targets, rows=block.rows)
            totals[split].add(encoded, is_clean=_is_clean(block))
        return totals

    def _encoded(
        self, split: str, block: TextBlock, surveyed: Surveyed, vocabulary: Encoder
    ) -> tuple[EncodedBlock, Any]:
        """Ids and targets of some rows."""
        return (
            vocabulary.encode(block.texts, max_length=self.config.max_length),
            surveyed.census.targets(block.labels),
        )

    def _lines(self, totals: dict[str, _Totals]) -> list[str]:
        counts = ", ".join(f"{split} {total.rows:,}" for split, total in totals.items())
        made = [split for split in totals if split not in self.source.tables]
        how = f" ({' and '.join(made)} taken from the training rows {_TAKEN[self.config.split_by]})" if made else ""
        return [f"rows: {counts}{how}"]

    def _remarks(self, surveyed: Surveyed, totals: dict[str, _Totals]) -> list[Remark]:
        return [
            *self.source.remarks(),
            *([] if self.source.is_sample else surveyed.account()),
            *self._class_remarks(surveyed),
            *all_remarks(surveyed.findings.values()),
            *loss_remarks(
                {split: (total.unknown, total.lengths) for split, total in totals.items()}, self.config.max_length
            ),
        ]


_TAKEN = {
    SplitBy.content: "by a hash of the text",
    SplitBy.stratified: "with the same share of each class",
    SplitBy.group: "by whole groups",
}


def unknown_remarks(words: dict[str, tuple[int, int]], where: str = "") -> list[Remark]:
    """Shares of words that are not in the vocabulary, from their number and that of all words."""
    shares = {split: unknown / max(1, total) for split, (unknown, total) in words.items()}
    told = ", ".join(f"{split} {share:.1%}" for split, share in shares.items())
    if any(share > _MANY_UNKNOWN for share in shares.values()):
        return [Remark(Level.warning, f"unknown words{where}", told, "data.vocabulary.kind=bpe")]
    return [Remark(Level.note, f"unknown words{where}", told)]


def loss_remarks(splits: dict[str, tuple[int, Lengths]], max_length: int) -> list[Remark]:
    """What encoding loses: words that are not in the vocabulary, and rows that are cut."""
    remarks = unknown_remarks({split: (unknown, lengths.tokens) for split, (unknown, lengths) in splits.items()})
    for split, (_, lengths) in splits.items():
        if cut := lengths.truncation(max_length):
            is_much = lengths.is_cut_much(max_length)
            mend = f"data.max_length={lengths.fine_length()}" if is_much else ""
            remarks.append(Remark(Level.warning if is_much else Level.note, split, cut, mend))
    return remarks


_TARGET_COLUMNS = {
    Problem.single: Column("int32"),
    Problem.multi: Column("int32", ragged=True),
    Problem.regression: Column("float32"),
    Problem.tags: Column("int32", ragged=True),
}


@dataclass(slots=True)
class _Totals:
    """What the encoded rows of one split add up to."""

    rows: int = 0
    tokens: int = 0
    unknown: int = 0
    truncated_rows: int = 0
    truncated_tokens: int = 0
    lengths: Lengths = field(default_factory=Lengths)
    """Lengths before anything is cut."""
    clean: int | None = None
    """Rows whose label is the sample's clean topic."""

    def add(self, block: EncodedBlock, is_clean: int | None) -> None:
        self.rows += len(block.lengths)
        self.tokens += len(block.tokens)
        self.unknown += block.unknown
        self.truncated_rows += block.truncated_rows
        self.truncated_tokens += block.truncated_tokens
        self.lengths.add(block.whole_lengths)
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


def _is_clean(block: TextBlock) -> int | None:
    """Rows whose label is the clean one; None where nobody knows."""
    if TOPIC not in block.block.schema.names:
        return None
    same = pc.equal(block.block.column("label"), block.block.column(TOPIC))
    return int(pc.sum(same).as_py() or 0)
