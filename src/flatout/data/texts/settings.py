"""Settings of texts and tagged words: sources, columns, labels, splits, tokens.

Each setting is checked by itself when it is typed, and together with others in `__post_init__`.
Open this file to add a setting of texts, or a built-in sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flatout.data.checks.cleaning import CleaningConfig
from flatout.data.feeding import FILES, FOLDERS, SOURCES, FeedingConfig, require_other_files
from flatout.data.problem import Problem
from flatout.data.samples.headlines import HeadlinesConfig, HeadlinesTable
from flatout.data.samples.tagged_tweets import TaggedTweetsConfig, TaggedTweetsTable
from flatout.data.samples.tweets import TweetsConfig, TweetsTable
from flatout.data.tables.splits import SplitBy
from flatout.data.tables.table import Table
from flatout.data.tokens.long_texts import Long, LongTexts
from flatout.data.tokens.vocabulary import VocabularyConfig
from flatout.errors import require, setting

SAMPLES: dict[type, Callable[[Any, str], Table]] = {
    HeadlinesConfig: HeadlinesTable,
    TweetsConfig: TweetsTable,
    TaggedTweetsConfig: TaggedTweetsTable,
}
"""The built-in samples: the settings of each, and its table of one split."""


@dataclass(kw_only=True, slots=True)
class TextDataConfig(FeedingConfig):
    """Texts and labels: where they are, what their columns are, how they become batches."""

    source: Any = setting(
        None,
        "Everything at once: a file whose rows are split here, or a folder with a file for each"
        " split or a folder of texts for each class. A name (`name` or `owner/name`, with"
        " `:configuration` if it has any) is a data set of the Hub. From Python also a mapping of"
        " columns, or a pandas, pyarrow or datasets table or dictionary of tables.",
        allowed=SOURCES,
        example="news.csv",
    )
    train: Any = setting(
        None,
        "The training rows: a file (csv, tsv, json, jsonl, parquet, arrow; gzipped or not), a list"
        " of files, a pattern such as 'part-*.csv', or a folder; null: the built-in headlines. From"
        " Python also a table.",
        allowed=FOLDERS,
        example="train.csv",
    )
    validation: Any = setting(
        None,
        "Validation rows; null: taken from the training rows.",
        allowed=FILES,
        example="data.train=train.csv data.validation=dev.csv",
    )
    test: Any = setting(
        None,
        "The test rows; null: taken from the training rows when no validation rows are given"
        " either.",
        allowed=FILES,
        example="data.train=train.csv data.test=test.csv",
    )
    text: Any = setting(
        None,
        "Column of the texts, or a list of columns to be joined; null: found by its name.",
        allowed="a column, or a list of columns",
        example="[title,body]",
    )
    join: str = setting(
        " ",
        "Stands between the texts of columns.",
        example="data.text=[title,body] data.join=' - '",
    )
    pair: bool = setting(
        False,
        "Whether the two columns of `data.text` are read as a pair, parted as the tokenizer of an"
        " encoder parts pairs.",
        example="model=transformer data.text=[premise,hypothesis] data.pair=true",
        allowed="true or false, with data.text=[FIRST,SECOND]",
    )
    label: str | None = setting(
        None, "Column of the labels; null: found by its name.", example="topic"
    )
    problem: Problem = setting(
        Problem.single, "A class, several, a number, tags, or none (mlm).", example="regression"
    )
    label_delimiter: str | None = setting(
        None,
        "What separates several labels of a row.",
        example="data.problem=multi data.label_delimiter='|'",
    )
    max_classes: int | None = setting(
        None, "Null: half the training rows, at most 20,000.", least=2, example="5000"
    )
    split_by: SplitBy = setting(
        SplitBy.content,
        "How rows are taken for validation and test: by a hash of the text, so that a grown file"
        " keeps its old split; stratified: with the same share of each class; group: whole groups"
        " of `data.group`.",
        example="stratified",
    )
    group: str | None = setting(
        None, "Column; one value, one split.", example="data.split_by=group data.group=author"
    )
    exclude: str | None = setting(
        None,
        "A csv that names rows to leave out, by the columns `row` (from 1) and `file`; `audit`"
        " writes one.",
        allowed="a csv file, or null",
        example="audit/suspects.csv",
    )
    relabel: str | None = setting(
        None,
        "A csv that gives rows another label, by the columns `row` (from 1), `file`, and `label` or"
        " `likely`.",
        allowed="a csv file, or null",
        example="corrected.csv",
    )
    clean: CleaningConfig = setting(
        CleaningConfig, "What is done with rows that are not as they should be."
    )
    sample: Any = setting(
        None,
        "The built-in sample for a run without a source: settings of headlines, tweets or tagged"
        " tweets. null: tagged tweets for tags, else headlines.",
        allowed="chosen by data=headlines, tweets, tagged_tweets or people",
        example="data=tweets data.sample.rows=5000",
    )
    max_length: int = setting(
        128, "Longest row in tokens; what is longer is cut, and counted.", least=1
    )
    long: Long = setting(
        Long.cut,
        "What an encoder reads of a long text: its first `max_length` tokens, a quarter of them and"
        " the rest from its end (head_tail), or all in windows whose answers are joined.",
        example="model=transformer data.long=head_tail",
    )
    window: int = setting(
        128,
        "Tokens of a window for data.long=windows, special ones included; data.max_length is then"
        " the longest text.",
        least=1,
        example="model=transformer data.long=windows data.window=128 data.max_length=1024",
    )
    overlap: int = setting(
        16,
        "Tokens that a window shares with the one before it.",
        least=0,
        example="model=transformer data.long=windows data.overlap=32 data.max_length=1024",
    )
    vocabulary: VocabularyConfig = setting(
        VocabularyConfig, "How texts become numbers in models trained from scratch."
    )
    tokenizer: str | None = setting(
        None,
        "Folder or name of a tokenizer of transformers; null: the pretrained model's own, else a"
        " vocabulary of the training rows.",
        example="model=transformer data.tokenizer=bert-base-uncased",
    )

    def __post_init__(self) -> None:
        FeedingConfig.__post_init__(self)  # a class with slots has no working super()
        self.read.require_texts()
        self._require_fitting_sample()
        if self.text is not None:
            names = [self.text] if isinstance(self.text, str) else self.text
            are_names = isinstance(names, list | tuple) and len(names) > 0
            require(
                are_names and all(isinstance(name, str) for name in names),
                "data.text",
                f"{self.text!r}",
                allowed="a column, or a list of columns",
            )
            require(
                len(set(names)) == len(names),
                "data.text",
                f"{', '.join(names)}",
                allowed="each column once",
            )
        count = len(self.text) if isinstance(self.text, list | tuple) else 1
        require(
            not self.pair or count == 2,
            "data.pair",
            f"{count} columns",
            allowed="data.text=[FIRST,SECOND]",
        )
        self._require_fitting_split()
        self._require_fitting_windows()
        require_other_files({"source": self.source, **self.given}, ("train", "source"))

    @property
    def long_texts(self) -> LongTexts:
        """How long texts become rows; window and overlap are 0 without windows."""
        if self.long is Long.windows:
            return LongTexts(self.long, self.window, self.overlap)
        return LongTexts(self.long)

    def _require_fitting_sample(self) -> None:
        is_tagged = self.problem is Problem.tags
        has_decisions = self.exclude is not None or self.relabel is not None
        require(
            not has_decisions or self.problem is Problem.single,
            "data.exclude, data.relabel",
            "need texts with one class a row",
        )
        if self.sample is None:
            self.sample = TaggedTweetsConfig() if is_tagged else HeadlinesConfig()
        kind = type(self.sample)
        require(
            kind in SAMPLES,
            "data.sample",
            kind.__name__,
            allowed=", ".join(known.__name__ for known in SAMPLES),
        )
        fits = not self.is_sample or is_tagged == (kind is TaggedTweetsConfig)
        hint = "Set data=tagged_tweets." if is_tagged else "Set data=headlines or data=tweets."
        require(fits, "data.problem", f"{self.problem} does not fit the built-in sample", hint=hint)

    def _require_fitting_windows(self) -> None:
        if self.long is Long.cut:
            return
        where, hint = "data.long", "Set data.long=cut."
        fits = self.problem is not Problem.none and (
            self.problem is not Problem.tags or self.long is Long.windows
        )
        require(fits, where, f"{self.long} with data.problem={self.problem}", hint=hint)
        require(
            not self.pair,
            where,
            f"{self.long} with pairs, of which the longer text is cut first",
            hint=hint,
        )
        if self.long is Long.windows:
            require(
                self.overlap < self.window,
                "data.overlap",
                f"{self.overlap}",
                allowed=f"below data.window={self.window}",
            )
            require(
                self.max_length > self.window,
                "data.max_length",
                f"{self.max_length} tokens are one window of data.window={self.window}",
                hint="Set it to the longest text.",
            )

    def _require_fitting_split(self) -> None:
        is_grouped = self.split_by is SplitBy.group
        hint = "Name the column: data.group=COLUMN." if is_grouped else "Set data.split_by=group."
        require(
            is_grouped == (self.group is not None),
            "data.group",
            f"{self.group} with data.split_by={self.split_by}",
            hint=hint,
        )
        is_dealt = self.split_by is SplitBy.stratified and not self.problem.has_classes
        what, hint = "stratified needs classes", "Set data.split_by=content."
        require(not is_dealt, "data.split_by", what, allowed="content, group", hint=hint)
        has_label = self.problem is Problem.none and self.label is not None
        require(
            not has_label,
            "data.label",
            f"{self.label} with data.problem=none",
            hint="Leave it out.",
        )
