"""What `flatout check` prints: all that a run would find out about its data before training.

No store is built. All rows are counted, compared and measured; what needs a tokenizer is measured
on the first rows. A mistake that would end a run becomes a remark, and the check continues. Open
this file to change what a check reports; the files beside it have the rules.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flatout.data.checks.characters import hash_words
from flatout.data.checks.findings import CheckReport, Level, Remark, all_remarks, counted
from flatout.data.checks.lengths import Lengths, loss_remarks, unknown_remarks
from flatout.data.checks.survey import TextSurvey
from flatout.data.problem import Problem
from flatout.data.sequences.missing import Missing
from flatout.data.sequences.preparation import SequencePreparation
from flatout.data.sequences.recordings import ReadingNotes
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.sequences.views import require_rows
from flatout.data.store.progress import Progress
from flatout.data.tables.roles import has_tags
from flatout.data.texts.decisions import given_labels
from flatout.data.texts.opening import open_source, open_tables
from flatout.data.texts.settings import TextDataConfig
from flatout.data.texts.source import TagSource, TextSource
from flatout.data.tokens.subwords import Subwords, train_encoder
from flatout.data.tokens.vocabulary import NUM_SPECIAL, VocabularyConfig, VocabularyKind
from flatout.errors import UserError

_MOST_MISTAKES = 10  # of recordings that are listed; a folder may hold thousands of bad files
_ROWS_SAMPLED = 20_000  # of each table, for what needs a tokenizer: a few seconds of work
Samples = dict[str, list[pa.Array]]  # some texts of each split


def count_unknown(
    splits: Mapping[str, Sequence[pa.Array]], config: VocabularyConfig
) -> dict[str, tuple[int, int]]:
    """For each split the number of words that a vocabulary would not hold, and of all words.

    Words are compared by their hashes, which is much quicker than training a tokenizer.
    """
    words = {}
    for split, texts in splits.items():
        cased = map(pc.utf8_lower, texts) if config.lowercase else texts
        words[split] = np.concatenate([*map(hash_words, cased)])
    # The vocabulary: the commonest words of the training rows, as `Vocabulary.train` takes them.
    train_words, counts = np.unique(words["train"], return_counts=True)
    commonest = np.argsort(-counts, kind="stable")[: config.size - NUM_SPECIAL]
    vocabulary = train_words[commonest[counts[commonest] >= config.min_frequency]]
    unknown = {}
    for split, hashes in words.items():
        num_unknown = int((~np.isin(hashes, vocabulary)).sum())
        unknown[split] = (num_unknown, len(hashes))
    return unknown


@dataclass(slots=True)
class Checkup(CheckReport):
    """What a check found in texts or tagged words."""

    problem: Problem
    columns: dict[str, Any]
    rows: dict[str, int] = field(default_factory=dict)  # rows of each split
    classes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Rows of each class, or entities of each type, by split."""
    lengths: dict[str, Lengths] = field(default_factory=dict)  # tokens a row, by split

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "problem": self.problem.value,
            "columns": self.columns,
            "rows": self.rows,
            "classes": self.classes,
            "lengths": {split: lengths.as_dict() for split, lengths in self.lengths.items()},
            **self.remarks_as_dict(),
        }

    def lines(self) -> list[str]:
        """Lengths and rows of each split."""
        lines = []
        for split, lengths in self.lengths.items():
            lines += ["", f"{split}: {lengths.line()}", *(f"  {line}" for line in lengths.bars())]
        rows = ", ".join(f"{split} {count:,}" for split, count in self.rows.items())
        return [*lines, "", f"rows for {rows or 'nothing'}"]

    def command(self, key: str, source: str, settings: Sequence[str]) -> str:
        """The command that trains on this data; `key` is the setting that names the source."""
        more = {
            Problem.none: " model=transformer task=mlm",
            Problem.tags: " data.problem=tags task=tagging model=transformer",
        }.get(self.problem, "")
        words = shlex.join(setting for setting in settings if setting not in more)
        return f"python -m train data.{key}={shlex.quote(source)} {words}".rstrip() + more


def check(config: TextDataConfig) -> Checkup:
    """Look at all rows of texts, or of tagged words."""
    # Where no setting says what the rows are, names of columns may: words and tags.
    may_be_tags = (
        config.problem is Problem.single
        and config.text is None
        and config.label is None
        and not config.is_sample
    )
    if config.problem is Problem.tags:
        return _check_tags(config)
    if may_be_tags and has_tags(next(iter(open_tables(config).values()))):
        return _check_tags(config)
    source = open_source(config)
    with Progress() as progress:
        surveyed = TextSurvey(source).run(progress.task("checking"))
        source.require_words(surveyed.has_words)
        columns = {"text": list(source.roles.texts), "label": source.roles.label or None}
        checkup = Checkup(
            source.name, config.problem, columns, surveyed.rows, surveyed.census.counts
        )
        checkup.remarks += source.remarks()
        checkup.remarks += surveyed.account()
        checkup.remarks += all_remarks(surveyed.findings.values())
        checkup.remarks += surveyed.census.remarks("training rows", given_labels(source.tables))
        checkup.remarks += _find_errors(surveyed, checkup, config.split_names(source.tables))
        if checkup.rows.get("train"):
            checkup.remarks += _measure_numbers(source, surveyed)
            samples = _first_texts(source, surveyed)
            checkup.remarks += _measure_tokens(config, samples, surveyed, checkup)
    return checkup


def _find_errors(surveyed: TextSurvey, checkup: Checkup, wanted: list[str]) -> Iterator[Remark]:
    """What would end a run; `wanted`: the splits that it needs."""
    try:
        surveyed.require_columns_as_named()
    except UserError as mistake:
        yield Remark(Level.error, "columns", mistake.what, mistake.hint.rstrip("."))
        return  # the others would follow from that
    yield from _find_empty_splits(checkup, wanted)
    try:
        surveyed.census.require_classes("labels")
    except UserError as mistake:
        what = mistake.what + (f" ({mistake.allowed})" if mistake.allowed else "")
        yield Remark(Level.error, "labels", what, mistake.hint.rstrip("."))


def _measure_numbers(source: TextSource, surveyed: TextSurvey) -> Iterator[Remark]:
    """Mean and spread of the training rows' numbers, or that they are all equal."""
    if source.config.problem is not Problem.regression:
        return
    census = surveyed.census
    for _, block in source.texts_and_labels(surveyed.fates, lambda rows: None, splits=("train",)):
        census.add_numbers(block.labels.to_numpy(zero_copy_only=False))
    try:
        mean, spread = census.scale()
    except UserError as mistake:
        yield Remark(Level.error, "labels", mistake.what, mistake.hint.rstrip("."))
        return
    what = f"numbers with a mean of {mean:.4g} and a standard deviation of {spread:.4g}"
    yield Remark(Level.note, "training rows", what)


def _find_empty_splits(checkup: Checkup, wanted: list[str]) -> Iterator[Remark]:
    for split in wanted:
        if not checkup.rows.get(split):
            what = f"no rows are left for the {split} split"
            hint = "add rows, or name a file for each split"
            yield Remark(Level.error, checkup.source, what, hint)


def _first_texts(source: TextSource, surveyed: TextSurvey) -> Samples:
    """Texts of the first rows of each table, by the split they belong to."""
    texts: Samples = {}
    for piece in source.pieces(surveyed.fates, sys.maxsize):
        blocks = source.texts_and_labels(surveyed.fates, lambda rows: None, pieces=[piece])
        for split, block in blocks:
            if block.rows[0] >= _ROWS_SAMPLED:
                break
            is_sampled = pa.array(block.rows < _ROWS_SAMPLED)
            texts.setdefault(split, []).append(block.texts.filter(is_sampled))
    return texts


def _measure_tokens(
    config: TextDataConfig, samples: Samples, surveyed: TextSurvey, checkup: Checkup
) -> list[Remark]:
    """Measure lengths, rows that would be cut, and words of each split that training lacks.

    Lengths are written into `checkup`.
    """
    rows_sampled = sum(len(texts) for blocks in samples.values() for texts in blocks)
    is_part = rows_sampled < sum(checkup.rows.values()) and "train" in samples
    if is_part and config.vocabulary.kind is VocabularyKind.word and config.tokenizer is None:
        # The survey has counted the words of all rows, so no tokenizer is needed for lengths.
        unknown = count_unknown(samples, config.vocabulary)
        checkup.lengths = {name: words for name, words in surveyed.words.items() if words.rows}
        losses = {split: (0, lengths) for split, lengths in checkup.lengths.items()}
        cut = loss_remarks(losses, config.max_length)[1:]  # the first is of unknown words
        return [*unknown_remarks(unknown, f" in the first {rows_sampled:,} rows"), *cut]
    tokenizer = None if config.tokenizer is None else Subwords.load(config.tokenizer)
    # Of a large source a block of each split is enough.
    most_blocks = 1 if is_part else None
    train_blocks = samples.get("train", [])[:most_blocks]
    encoder = tokenizer or train_encoder(train_blocks, config.vocabulary)
    losses = {}
    for split, blocks in samples.items():
        lengths = checkup.lengths[split] = Lengths()
        num_unknown = 0
        for texts in blocks[:most_blocks]:
            encoded = encoder.encode(texts, max_length=config.max_length)
            lengths.add(encoded.whole_lengths)
            num_unknown += encoded.unknown
        losses[split] = (num_unknown, lengths)
    return loss_remarks(losses, config.max_length, are_given=tokenizer is not None)


def _check_tags(config: TextDataConfig) -> Checkup:
    config = replace(config, problem=Problem.tags, sample=None)
    source = TagSource(config, open_tables(config))
    with Progress() as progress:
        surveyed = TextSurvey(source).run(progress.task("checking"))
    tag_remarks = source.tag_remarks(surveyed.findings)
    remarks = [
        *source.remarks(),
        *surveyed.account(),
        *tag_remarks,
        *all_remarks(surveyed.findings.values()),
    ]
    columns = {"text": source.columns.texts[0], "label": source.columns.label}
    entities = source.census.entities
    checkup = Checkup(
        source.name, Problem.tags, columns, surveyed.rows, entities, surveyed.words, remarks=remarks
    )
    checkup.remarks += _find_empty_splits(checkup, config.split_names(source.tables))
    return checkup


@dataclass(slots=True)
class SequenceCheckup(CheckReport):
    """What a check found in recordings."""

    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each split the number of recordings and of samples, and the samples of the shortest, the
    median and the longest recording."""
    columns: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mean, spread, least and most of each column over the training samples."""
    steps_s: list[float] = field(default_factory=list)
    """Least, median and most seconds between two samples, over the recordings; empty without
    data.time."""
    step_s: float | None = None  # data.step, to which recordings are resampled

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "splits": self.splits,
            "columns": self.columns,
            "steps_s": self.steps_s,
            "remarks": [remark.as_dict() for remark in self.remarks],
        }

    def lines(self) -> list[str]:
        """Lengths, sampling and columns as tables."""
        lines = []
        for split, counts in self.splits.items():
            lengths = f"{counts['shortest']:,}"
            if counts["shortest"] != counts["longest"]:
                lengths += f" to {counts['longest']:,}, median {counts['median']:,}"
            recordings = counted(counts["recordings"], "recording")
            lines.append(f"{split}: {recordings}, {counts['samples']:,} samples; length {lengths}")
        if self.steps_s:
            least_s, median_s, most_s = self.steps_s
            step_s = self.step_s or median_s
            of_files = f"{least_s:g}" if least_s == most_s else f"{least_s:g} to {most_s:g}"
            resampled = "resampled from " if self.step_s else "recordings: "
            lines.append(f"a sample every {step_s:g} s ({resampled}{of_files} s)")
        if self.columns:
            names = ("mean", "spread", "least", "most")
            width = max(map(len, [*self.columns, "training samples"]))
            head = "".join(f"{name:>12}" for name in names)
            lines += ["", "training samples".ljust(width) + head]
            for column, values in self.columns.items():
                cells = "".join(f"{values[name]:>12.5g}" for name in names)
                lines.append(column.ljust(width) + cells)
        return ["", *lines, ""]

    def command(self, key: str, source: str, settings: Sequence[str]) -> str:
        """The command that trains on this data; `key` is the setting that names the source."""
        task = "" if f"data.problem={SequenceProblem.label}" in settings else " task=sequence"
        # Settings of single features are keys that Hydra does not know yet: they need a plus sign.
        of_features = "data.noise.", "data.offset.", "data.low_pass."
        words = []
        for setting in settings:
            words.append("+" * setting.startswith(of_features) + setting)
        start = f"python -m train data=sequence model=rnn{task} precision=fp32"
        return f"{start} data.{key}={shlex.quote(source)} {shlex.join(words)}".rstrip()


def check_recordings(config: SequenceDataConfig) -> SequenceCheckup:
    """Read all recordings, a file at a time, and report every mistake that can be seen.

    Where settings refuse missing values, the files with such values are mistakes. All are then read
    again without these rows, so that the mistakes behind them and the ranges are reported, too.
    """
    notes = ReadingNotes()
    checkup, mistakes = _survey_recordings(config, notes)
    gaps = [mistake for mistake in mistakes if mistake.where == "data.missing"]
    if gaps and config.missing is Missing.refuse:
        notes = ReadingNotes()
        checkup, others = _survey_recordings(replace(config, missing=Missing.drop), notes)
        mistakes = [*gaps, *others]
        notes.dropped.clear()  # the errors name these rows
    checkup.remarks += map(_error_remark, mistakes[:_MOST_MISTAKES])
    left = len(mistakes) - _MOST_MISTAKES
    if left > 0:
        what = f"{counted(left, 'mistake')} more of these recordings"
        checkup.remarks.append(Remark(Level.error, checkup.source, what, stands_for=left))
    checkup.remarks += map(_remark_of_line, notes.lines())
    if notes.steps and config.time is not None:
        checkup.steps_s = np.quantile(notes.steps, (0, 0.5, 1)).tolist()
    checkup.step_s = config.step
    return checkup


def _survey_recordings(
    config: SequenceDataConfig, notes: ReadingNotes
) -> tuple[SequenceCheckup, list[UserError]]:
    """What one pass over all recordings shows, and the mistakes."""
    checkup = SequenceCheckup(str(config.source or config.train or "the built-in cells"))
    mistakes: list[UserError] = []
    try:
        with Progress() as progress:
            survey = SequencePreparation(config).survey(notes, progress, mistakes=mistakes)
    except UserError as not_opened:
        return checkup, [not_opened]
    if mistakes and not survey.entries:
        return checkup, mistakes
    for mistake in survey.find_mistakes():
        # That files are missing from the splits follows from the mistakes in these files.
        if not mistakes or mistake.where != "data.split_by":
            mistakes.append(mistake)
    if survey.train is None:
        return checkup, mistakes
    checkup.columns = survey.describe_columns()
    if not len(survey.numbers):
        return checkup, mistakes  # labels could not be read
    checkup.remarks += map(_remark_of_line, survey.lines())
    for split, counts in survey.facts()["splits"].items():
        segments = [segment for segment in survey.segments if segment.split == split]
        spans = [(segment.first, segment.stop) for segment in segments]
        quantiles = np.quantile([stop - first for first, stop in spans], (0, 0.5, 1)).astype(int)
        shortest, median, longest = quantiles.tolist()
        checkup.splits[split] = counts | {
            "shortest": shortest,
            "median": median,
            "longest": longest,
        }
        names = [survey.entries[segment.recording].name for segment in segments]
        try:
            require_rows(config, split, spans, names)
        except UserError as too_short:
            # The setting is as wrong for the other splits.
            if too_short.where not in [other.where for other in mistakes]:
                mistakes.append(too_short)
    return checkup, mistakes


def _error_remark(error: UserError) -> Remark:
    return Remark(Level.error, error.where, str(error).removeprefix(f"{error.where}: "))


def _remark_of_line(line: str) -> Remark:
    """`warning cells.csv: no time` → a warning about cells.csv."""
    level = Level.warning if line.startswith("warning ") else Level.note
    source, _, what = line.removeprefix("warning ").partition(": ")
    return Remark(level, source, what)
