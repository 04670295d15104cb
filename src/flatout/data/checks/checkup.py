"""Everything that a run would find out about its data before training, without a store: what `flatout check` tells.

Rows are counted, compared and measured all of them; what only a tokenizer can tell is read off the first rows.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.data.checks.findings import Level, Remark, all_remarks
from flatout.data.checks.lengths import Lengths, loss_remarks, unknown_remarks
from flatout.data.checks.survey import Surveyed
from flatout.data.problem import Problem
from flatout.data.store.progress import Progress
from flatout.data.tables.find_roles import has_tags
from flatout.data.tables.splits import SPLITS
from flatout.data.tag_source import TagSource
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import open_source, open_tables, survey
from flatout.data.tokens.coverage import Coverage
from flatout.data.tokens.subwords import Subwords, train_encoder
from flatout.data.tokens.vocabulary import VocabularyKind
from flatout.errors import UserError


@dataclass(slots=True)
class Checkup:
    """What was found out."""

    source: str
    problem: Problem
    columns: dict[str, Any]
    rows: dict[str, int] = field(default_factory=dict)
    """Rows of each split."""
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Rows of each class, or entities of each type, by split."""
    lengths: dict[str, Lengths] = field(default_factory=dict)
    """Tokens a row, by split."""
    remarks: list[Remark] = field(default_factory=list)

    def count(self, level: Level) -> int:
        return sum(remark.level is level for remark in self.remarks)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
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
        """The command that trains on these rows; empty where words and tags need a model of your choice."""
        more = " model=transformer task=mlm" if self.problem is Problem.none else ""
        command = f"python -m train data.{key}={shlex.quote(source)} {shlex.join(settings)}".rstrip() + more
        return command if self.problem is not Problem.tags else ""


def check(config: TextDataConfig) -> Checkup:
    """Look at all rows of some data; a mistake that would end a run becomes a remark, and the check continues."""
    if config.problem is Problem.tags or _is_tagged(config):
        return _check_tags(config)
    source = open_source(config)
    with Progress() as progress:
        surveyed = survey(config, source, progress.task("checking"))
        found = Checkup(
            source=source.name,
            problem=config.problem,
            columns={"text": list(source.roles.texts), "label": source.roles.label or None},
            rows=_rows(surveyed),
            classes=surveyed.census.counts,
        )
        found.remarks += [*source.remarks(), *surveyed.account(), *all_remarks(surveyed.findings.values())]
        found.remarks += surveyed.census.remarks("training rows")
        found.remarks += _errors(surveyed, found, config.split_names(source.tables))
        if found.rows.get("train"):
            found.remarks += _tokenised(config, surveyed, found)
    return found


def _rows(surveyed: Surveyed) -> dict[str, int]:
    return {split: count for split in SPLITS if (count := surveyed.rows(split))}


_NO_ROWS = "give more rows, or a file for each split"


def _errors(surveyed: Surveyed, found: Checkup, wanted: list[str]) -> Iterator[Remark]:
    """What would end a run."""
    for split in wanted:
        if not found.rows.get(split):
            yield Remark(Level.error, found.source, f"no rows are left for the {split} split", _NO_ROWS)
    try:
        surveyed.census.require_classes("labels")
    except UserError as mistake:
        what = mistake.what + (f" ({mistake.allowed})" if mistake.allowed else "")
        yield Remark(Level.error, "labels", what, mistake.hint.rstrip("."))


def _tokenised(config: TextDataConfig, surveyed: Surveyed, found: Checkup) -> list[Remark]:
    """Lengths, what would be cut, and how many words of the other splits training does not know."""
    samples = surveyed.first_texts()
    rows_sampled = sum(len(texts) for blocks in samples.values() for texts in blocks)
    is_part = rows_sampled < sum(found.rows.values()) and "train" in samples
    if is_part and config.vocabulary.kind is VocabularyKind.word and config.tokenizer is None:
        known = Coverage(samples["train"], config.vocabulary)
        unknown = {split: known.unknown(blocks) for split, blocks in samples.items()}
        found.lengths = {name: words for name, words in surveyed.words.items() if words.rows}
        cut = loss_remarks({split: (0, each) for split, each in found.lengths.items()}, config.max_length)[1:]
        return [*unknown_remarks(unknown, f" in the first {rows_sampled:,} rows"), *cut]
    few = {split: blocks[:1] if is_part else blocks for split, blocks in samples.items()}
    given = None if config.tokenizer is None else Subwords.load(config.tokenizer)
    vocabulary = given or train_encoder(few.get("train", []), config.vocabulary)
    losses: dict[str, tuple[int, Lengths]] = {}
    for split, blocks in few.items():
        encoded = [vocabulary.encode(texts, max_length=config.max_length) for texts in blocks]
        losses[split] = (sum(each.unknown for each in encoded), Lengths())
        for each in encoded:
            losses[split][1].add(each.whole_lengths)
    found.lengths = {split: lengths for split, (_, lengths) in losses.items()}
    return loss_remarks(losses, config.max_length)


def _is_tagged(config: TextDataConfig) -> bool:
    """Whether the columns are words and tags, and the settings name no others."""
    is_asked = config.problem is Problem.single and config.text is None and config.label is None
    if not is_asked or config.is_sample:
        return False
    return has_tags(next(iter(open_tables(config).values())))


def _check_tags(config: TextDataConfig) -> Checkup:
    config = replace(config, problem=Problem.tags, sample=None)
    source = TagSource(config, open_tables(config))
    with Progress() as progress:
        surveyed = survey(config, source, progress.task("checking"))
    of_tags = source.tag_remarks(surveyed)
    remarks = [*source.remarks(), *surveyed.account(), *of_tags, *all_remarks(surveyed.findings.values())]
    columns = {"text": source.columns.texts[0], "label": source.columns.label}
    entities = source.census.entities
    return Checkup(source.name, Problem.tags, columns, _rows(surveyed), entities, surveyed.words, remarks)
