"""Everything that a run would find out about its data before training, without a store: what
`flatout check` tells.

Rows are counted, compared and measured all of them; what only a tokenizer can tell is read off the
first rows.
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
from flatout.data.checks.findings import Level, Remark, all_remarks, counted
from flatout.data.checks.lengths import Lengths, loss_remarks, unknown_remarks
from flatout.data.checks.survey import TextSurvey
from flatout.data.decisions import given_labels
from flatout.data.problem import Problem
from flatout.data.sequences.recordings import ReadingNotes
from flatout.data.sequences.settings import Missing, SequenceDataConfig, SequenceProblem
from flatout.data.sequences.survey import SequencePreparation
from flatout.data.sequences.views import require_rows
from flatout.data.store.progress import Progress
from flatout.data.tables.roles import has_tags
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import open_source, open_tables
from flatout.data.text_source import TagSource, TextSource
from flatout.data.tokens.subwords import Subwords, train_encoder
from flatout.data.tokens.vocabulary import NUM_SPECIAL, VocabularyConfig, VocabularyKind
from flatout.errors import UserError

_ROWS_SAMPLED = 20_000
Samples = dict[str, list[pa.Array]]  # some texts of each split


def count_unknown(
    splits: Mapping[str, Sequence[pa.Array]], config: VocabularyConfig
) -> dict[str, tuple[int, int]]:
    """Of each split its words that training does not know, and all, without a tokenizer; by hashes,
    so it is quick.
    """
    lowered = {
        split: map(pc.utf8_lower, texts) if config.lowercase else texts
        for split, texts in splits.items()
    }
    words = {split: np.concatenate([*map(hash_words, texts)]) for split, texts in lowered.items()}
    of_training, counts = np.unique(words["train"], return_counts=True)
    order = np.argsort(-counts, kind="stable")[: config.size - NUM_SPECIAL]
    known = of_training[order[counts[order] >= config.min_frequency]]
    return {split: (int((~np.isin(each, known)).sum()), len(each)) for split, each in words.items()}


@dataclass(slots=True)
class _Found:
    source: str
    remarks: list[Remark] = field(default_factory=list, kw_only=True)

    def count(self, level: Level) -> int:
        return sum(remark.level is level for remark in self.remarks)


@dataclass(slots=True)
class Checkup(_Found):
    """What was found out about texts or tagged words."""

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
            "errors": self.count(Level.error),
            "warnings": self.count(Level.warning),
            "remarks": [remark.as_dict() for remark in self.remarks],
        }

    def lines(self) -> list[str]:
        """Lengths and rows of each split."""
        lines = []
        for split, lengths in self.lengths.items():
            lines += ["", f"{split}: {lengths.line()}", *(f"  {line}" for line in lengths.bars())]
        rows = ", ".join(f"{split} {count:,}" for split, count in self.rows.items())
        return [*lines, "", f"rows for {rows or 'nothing'}"]

    def command(self, key: str, source: str, settings: Sequence[str]) -> str:
        tagging = " data.problem=tags task=tagging model=transformer"
        more = {Problem.none: " model=transformer task=mlm", Problem.tags: tagging}.get(
            self.problem, ""
        )
        settings = [setting for setting in settings if setting not in more]
        return (
            f"python -m train data.{key}={shlex.quote(source)} {shlex.join(settings)}".rstrip()
            + more
        )


def check(config: TextDataConfig) -> Checkup:
    """Look at all rows of some data; a mistake that would end a run becomes a remark, and the check
    continues.
    """
    is_open = (
        config.problem is Problem.single
        and config.text is None
        and config.label is None
        and not config.is_sample
    )
    if config.problem is Problem.tags or (
        is_open and has_tags(next(iter(open_tables(config).values())))
    ):
        # no setting says otherwise, and the columns are words and tags by their names
        return _check_tags(config)
    source = open_source(config)
    with Progress() as progress:
        surveyed = TextSurvey(source).run(progress.task("checking"))
        source.require_words(surveyed.has_words)
        columns = {"text": list(source.roles.texts), "label": source.roles.label or None}
        found = Checkup(source.name, config.problem, columns, surveyed.rows, surveyed.census.counts)
        found.remarks += [
            *source.remarks(),
            *surveyed.account(),
            *all_remarks(surveyed.findings.values()),
        ]
        found.remarks += surveyed.census.remarks("training rows", given_labels(source.tables))
        found.remarks += _errors(surveyed, found, config.split_names(source.tables))
        if found.rows.get("train"):
            found.remarks += _tokenised(config, _first_texts(source, surveyed), surveyed, found)
    return found


def _errors(surveyed: TextSurvey, found: Checkup, wanted: list[str]) -> Iterator[Remark]:
    try:
        surveyed.require_columns_as_named()
    except UserError as mistake:
        yield Remark(Level.error, "columns", mistake.what, mistake.hint.rstrip("."))
        return  # the others would follow from that
    for split in wanted:
        if not found.rows.get(split):
            what = f"no rows are left for the {split} split"
            hint = "give more rows, or a file for each split"
            yield Remark(Level.error, found.source, what, hint)
    try:
        surveyed.census.require_classes("labels")
    except UserError as mistake:
        what = mistake.what + (f" ({mistake.allowed})" if mistake.allowed else "")
        yield Remark(Level.error, "labels", what, mistake.hint.rstrip("."))


def _first_texts(source: TextSource, surveyed: TextSurvey) -> Samples:
    """Texts of the first rows of each table, by the split they belong to."""
    texts: Samples = {}
    for piece in source.pieces(surveyed.fates, sys.maxsize):
        for split, block in source.texts_and_labels(
            surveyed.fates, lambda rows: None, pieces=[piece]
        ):
            if block.rows[0] >= _ROWS_SAMPLED:
                break
            texts.setdefault(split, []).append(
                block.texts.filter(pa.array(block.rows < _ROWS_SAMPLED))
            )
    return texts


def _tokenised(
    config: TextDataConfig, samples: Samples, surveyed: TextSurvey, found: Checkup
) -> list[Remark]:
    """Lengths, what would be cut, and how many words of the other splits training does not know."""
    rows_sampled = sum(len(texts) for blocks in samples.values() for texts in blocks)
    is_part = rows_sampled < sum(found.rows.values()) and "train" in samples
    if is_part and config.vocabulary.kind is VocabularyKind.word and config.tokenizer is None:
        unknown = count_unknown(samples, config.vocabulary)
        found.lengths = {name: words for name, words in surveyed.words.items() if words.rows}
        cut = loss_remarks(
            {split: (0, each) for split, each in found.lengths.items()}, config.max_length
        )[1:]
        return [*unknown_remarks(unknown, f" in the first {rows_sampled:,} rows"), *cut]
    few = {split: blocks[:1] if is_part else blocks for split, blocks in samples.items()}
    given = None if config.tokenizer is None else Subwords.load(config.tokenizer)
    vocabulary = given or train_encoder(few.get("train", []), config.vocabulary)
    losses = {}
    for split, blocks in few.items():
        encoded = [vocabulary.encode(texts, max_length=config.max_length) for texts in blocks]
        lengths = found.lengths[split] = Lengths()
        for each in encoded:
            lengths.add(each.whole_lengths)
        losses[split] = (sum(each.unknown for each in encoded), lengths)
    return loss_remarks(losses, config.max_length, are_given=given is not None)


def _check_tags(config: TextDataConfig) -> Checkup:
    config = replace(config, problem=Problem.tags, sample=None)
    source = TagSource(config, open_tables(config))
    with Progress() as progress:
        surveyed = TextSurvey(source).run(progress.task("checking"))
    of_tags = source.tag_remarks(surveyed.findings)
    remarks = [
        *source.remarks(),
        *surveyed.account(),
        *of_tags,
        *all_remarks(surveyed.findings.values()),
    ]
    columns = {"text": source.columns.texts[0], "label": source.columns.label}
    entities = source.census.entities
    return Checkup(
        source.name, Problem.tags, columns, surveyed.rows, entities, surveyed.words, remarks=remarks
    )


@dataclass(slots=True)
class SequenceCheckup(_Found):
    """What was found out about recordings."""

    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    """Recordings of each split, their samples, and the samples of the shortest, the median and the
    longest."""
    columns: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mean, spread, least and most of each column over the training samples."""
    steps_s: list[float] = field(default_factory=list)
    """Least, median and most of the recordings' seconds between two samples; empty without
    data.time."""

    def as_dict(self) -> dict[str, Any]:
        facts = {
            "source": self.source,
            "splits": self.splits,
            "columns": self.columns,
            "steps_s": self.steps_s,
        }
        return {**facts, "remarks": [remark.as_dict() for remark in self.remarks]}

    def lines(self) -> list[str]:
        """Lengths, sampling and columns as tables."""
        lines = []
        for split, counts in self.splits.items():
            shortest, median, longest = (
                f"{counts[name]:,}" for name in ("shortest", "median", "longest")
            )
            lengths = (
                shortest if shortest == longest else f"{shortest} to {longest}, median {median}"
            )
            recordings = counted(counts["recordings"], "recording")
            lines.append(f"{split}: {recordings}, {counts['samples']:,} samples; length {lengths}")
        if self.steps_s:
            least_s, median_s, most_s = self.steps_s
            lines.append(f"a sample every {median_s:g} s (recordings: {least_s:g} to {most_s:g} s)")
        if self.columns:
            names = ("mean", "spread", "least", "most")
            width = max(map(len, [*self.columns, "training samples"]))
            lines += [
                "",
                "training samples".ljust(width) + "".join(f"{name:>12}" for name in names),
            ]
            for column, values in self.columns.items():
                lines.append(
                    column.ljust(width) + "".join(f"{values[name]:>12.5g}" for name in names)
                )
        return ["", *lines, ""]

    def command(self, key: str, source: str, settings: Sequence[str]) -> str:
        task = "" if f"data.problem={SequenceProblem.label}" in settings else " task=sequence"
        # which `train` takes with a plus sign
        by_feature = "data.noise.", "data.offset.", "data.low_pass."
        words = [
            f"+{setting}" if setting.startswith(by_feature) else setting for setting in settings
        ]
        start = f"python -m train data=sequence model=rnn{task} precision=fp32"
        return f"{start} data.{key}={shlex.quote(source)} {shlex.join(words)}".rstrip()


def check_recordings(config: SequenceDataConfig) -> SequenceCheckup:
    """Read all recordings, a file at a time; a mistake that would end a run is a remark, and what
    can be told is told.

    Rows with a missing value that are to be refused are one mistake: the recordings are read again
    without them.
    """
    found = SequenceCheckup(str(config.source or config.train or "the built-in cells"))
    notes = ReadingNotes()
    try:
        _look_at_recordings(config, found, notes)
    except UserError as error:
        found.remarks.append(_error(error))
        if error.where == "data.missing" and config.missing is Missing.refuse:
            notes = ReadingNotes()
            try:
                _look_at_recordings(replace(config, missing=Missing.drop), found, notes)
            except UserError as further:
                found.remarks.append(_error(further))
            notes.dropped.clear()  # the error names these rows
    found.remarks += map(_remark, notes.lines())
    if notes.steps and config.time is not None:
        found.steps_s = np.quantile(notes.steps, (0, 0.5, 1)).tolist()
    return found


def _look_at_recordings(
    config: SequenceDataConfig, found: SequenceCheckup, notes: ReadingNotes
) -> None:
    """Write what is found into `found` and `notes`, up to the first mistake."""
    with Progress() as progress:
        survey = SequencePreparation(config).survey(notes, progress)
    try:
        survey.finish()
    finally:
        if survey.train:
            found.columns = survey.describe_columns()
    found.remarks += map(_remark, survey.lines())
    for split, counts in survey.facts()["splits"].items():
        own = [each for each in survey.segments if each.split == split]
        lengths = (
            np.quantile([each.stop - each.first for each in own], (0, 0.5, 1)).astype(int).tolist()
        )
        found.splits[split] = counts | dict(
            zip(("shortest", "median", "longest"), lengths, strict=True)
        )
        names = [survey.entries[each.recording].name for each in own]
        require_rows(config, split, [(each.first, each.stop) for each in own], names)


def _error(error: UserError) -> Remark:
    return Remark(Level.error, error.where, str(error).removeprefix(f"{error.where}: "))


def _remark(line: str) -> Remark:
    level = Level.warning if line.startswith("warning ") else Level.note
    source, _, what = line.removeprefix("warning ").partition(": ")
    return Remark(level, source, what)
