"""Everything that a run would find out about its data before training, without a store: what `flatout check` tells.

Rows are counted, compared and measured all of them; what only a tokenizer can tell is read off the first rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from flatout.data.assignment import Splitting
from flatout.data.findings import Level, Remark, all_remarks, counted
from flatout.data.lengths import Lengths
from flatout.data.problem import Problem
from flatout.data.progress import Progress
from flatout.data.roles import Roles, find_roles, has_tags
from flatout.data.sources import open_splits
from flatout.data.splits import SPLITS
from flatout.data.survey import Survey, Surveyed
from flatout.data.table import Table, require_columns
from flatout.data.tagged_table import COLUMNS, TaggedTable
from flatout.data.tags import TagCensus
from flatout.data.text import TextDataConfig, TextSource, loss_remarks
from flatout.data.vocabulary import Vocabulary, VocabularyKind
from flatout.errors import UserError

_ROWS_TOKENISED = 50_000


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


def check(config: TextDataConfig) -> Checkup:
    """Look at all rows of some data; what would end a run is a remark here, where the rest can still be told."""
    if config.problem is Problem.tags or _is_tagged(config):
        return _check_tags(config)
    source = TextSource(config)
    with Progress() as progress:
        surveyed = source.survey(progress.task("checking"))
        found = Checkup(
            source=source.name,
            problem=config.problem,
            columns={"text": list(source.roles.texts), "label": source.roles.label},
            rows=_rows(surveyed),
            classes=surveyed.census.counts,
        )
        found.remarks += [*source.remarks(), *surveyed.account(), *all_remarks(surveyed.findings.values())]
        found.remarks += surveyed.census.remarks("training rows")
        found.remarks += _errors(surveyed, found, config.split_names(source.tables))
        if found.rows.get("train"):
            found.remarks += _tokenised(source, surveyed, found)
    return found


def _rows(surveyed: Surveyed) -> dict[str, int]:
    counts = {
        split: sum(int((fates == number).sum()) for fates in surveyed.fates.values())
        for number, split in enumerate(SPLITS)
    }
    return {split: count for split, count in counts.items() if count}


def _errors(surveyed: Surveyed, found: Checkup, wanted: list[str]) -> Iterator[Remark]:
    """What would end a run."""
    for split in wanted:
        if not found.rows.get(split):
            yield Remark(Level.error, found.source, f"no rows are left for the {split} split")
    try:
        surveyed.census.require_classes("labels")
    except UserError as mistake:
        what = mistake.what + (f" ({mistake.allowed})" if mistake.allowed else "")
        yield Remark(Level.error, "labels", what, mistake.mend.rstrip("."))


def _tokenised(source: TextSource, surveyed: Surveyed, found: Checkup) -> Iterator[Remark]:
    """Lengths, what would be cut, and how many words of the other splits training does not know."""
    config, samples = source.config, _first_texts(source, surveyed)
    vocabulary = Vocabulary.train(samples["train"], config.vocabulary)
    unknown: dict[str, int] = {}
    for split, blocks in samples.items():
        unknown[split], lengths = 0, found.lengths.setdefault(split, Lengths())
        for texts in blocks:
            encoded = vocabulary.encode(texts, max_length=config.max_length)
            unknown[split] += encoded.unknown
            lengths.add(encoded.whole_lengths)
    is_part = sum(found.rows.values()) > sum(lengths.rows for lengths in found.lengths.values())
    told = {split: (unknown[split], lengths) for split, lengths in found.lengths.items()}
    remarks = loss_remarks(told, config.max_length)
    if is_part:
        first = f"the first {_ROWS_TOKENISED:,} rows of each split"
        yield Remark(Level.note, "tokens", f"unknown words are counted in {first}")
        yield remarks[0]
        # Words are counted in all rows; pieces of words only a tokenizer can count.
        if config.vocabulary.kind is VocabularyKind.word:
            found.lengths = {name: words for name, words in surveyed.words.items() if words.rows}
        yield from loss_remarks({split: (0, each) for split, each in found.lengths.items()}, config.max_length)[1:]
    else:
        yield from remarks


def _first_texts(source: TextSource, surveyed: Surveyed) -> dict[str, list[pa.Array]]:
    """The first rows of each split."""
    samples: dict[str, list[pa.Array]] = {}
    wanted = {split: min(_ROWS_TOKENISED, count) for split, count in _rows(surveyed).items()}
    for split, block in source.texts_and_labels(surveyed, lambda rows: None):
        taken = samples.setdefault(split, [])
        missing = wanted[split] - sum(map(len, taken))
        if missing > 0:
            taken.append(block.texts.slice(0, missing))
        elif all(sum(map(len, samples.get(each, []))) >= number for each, number in wanted.items()):
            break
    return {split: samples[split] for split in SPLITS if split in samples}


def _is_tagged(config: TextDataConfig) -> bool:
    """Whether the columns are words and tags, and nobody named others."""
    is_asked = config.problem is Problem.single and config.text is None and config.label is None
    if not is_asked or (config.source is None and config.train is None):
        return False
    return has_tags(next(iter(_tables(config).values())))


def _tables(config: TextDataConfig) -> dict[str, Table]:
    return open_splits(config.source, {split: getattr(config, split) for split in SPLITS}, config.read)


def _check_tags(config: TextDataConfig) -> Checkup:
    tables = _tables(config)
    first = tables["train"]
    roles = find_roles(first, text=config.text, label=config.label, tags=True)
    for table in tables.values():
        require_columns(table, {"data.text": roles.texts[0], "data.label": roles.label})
    census = TagCensus(first.name)
    tagged = {split: TaggedTable(table, roles, split, census) for split, table in tables.items()}
    validation_share, test_share = config.taken_shares(tables)
    splitting = Splitting(config.split_by, None, validation_share, test_share, config.split_seed)
    with Progress() as progress:
        told = progress.task("checking")
        surveyed = Survey(tagged, Roles(COLUMNS[:1], COLUMNS[1]), Problem.tags, splitting, config.clean).run(told)
    scheme = census.scheme()
    for split, table in tagged.items():
        findings = surveyed.findings[split]
        table.tell(findings, scheme)
        findings.rows_repaired += findings.found["repaired_tag"].count if "repaired_tag" in findings.found else 0
    kinds = ", ".join(f"{name} {count:,}" for name, count in census.entities.get("train", {}).items())
    remarks = [
        Remark(Level.note, first.name, first.how() or "lists of words and tags"),
        *surveyed.account(),
        Remark(Level.note, "tags", f"{scheme.value}, {counted(len(census.types), 'type')}, {census.tokens:,} words"),
        Remark(Level.note, "training entities", kinds or "none"),
        *all_remarks(surveyed.findings.values()),
        *_unseen_types(census),
    ]
    columns = {"text": roles.texts[0], "label": roles.label}
    return Checkup(first.name, Problem.tags, columns, _rows(surveyed), census.entities, surveyed.words, remarks)


def _unseen_types(census: TagCensus) -> Iterator[Remark]:
    train = census.entities.get("train", {})
    for split, counts in census.entities.items():
        if unseen := [name for name in counts if name not in train]:
            yield Remark(Level.warning, split, f"entities that no training row has: {', '.join(unseen)}")
    if not train:
        yield Remark(Level.error, "tags", "the training rows mark nothing", "data.label=COLUMN")
