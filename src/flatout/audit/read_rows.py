"""Reads the rows of an audit of texts, as a run would read them, from all its splits.

The data goes through the same checks and splitting as before a training. What is left becomes
`AuditRows`: a row for each text, or for each entity of tagged sentences. Of more rows than asked
for, some are drawn at random. Also reads the texts of `unlabelled=FILE`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.audit.entities import NO_ENTITY, Blocks, find_word_rows
from flatout.audit.rows import LEAST_ROWS, AuditRows, Objects, Sentences
from flatout.data.checks.cleaning import read_texts
from flatout.data.checks.findings import Findings
from flatout.data.checks.survey import TextSurvey
from flatout.data.problem import Problem
from flatout.data.store.progress import Progress
from flatout.data.tables.roles import find_roles
from flatout.data.tables.sources import open_table
from flatout.data.tables.splits import hash_texts
from flatout.data.tables.table import Table, as_texts, decoded, require_columns
from flatout.data.texts.opening import open_source, open_tables
from flatout.data.texts.settings import TextDataConfig
from flatout.data.texts.source import TagSource, TextSource
from flatout.errors import require

_MOST_UNLABELLED = 200_000  # texts; all are held in memory with their words and n-grams
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Records:
    """The texts or tagged sentences of all splits. Arrays have an entry for each."""

    texts: Objects  # sentences with their words joined by blanks
    groups: Integers
    splits: Objects
    tables: Objects  # key in `source.tables`
    rows: Integers  # number in the table, from 0
    column: Objects


@dataclass(frozen=True, slots=True)
class _Labelled:
    """What is judged: texts, or entities of sentences. Arrays have an entry for each."""

    texts: Objects
    shown: Objects
    labels: Integers
    record: Integers  # number of the text or sentence in `_Records`
    classes: list[str]
    conflicts: int = 0
    sentences: Sentences | None = None
    spans: Integers | None = None


def read_audit_rows(
    config: TextDataConfig, num_folds: int, most_rows: int, column: str | None = None
) -> AuditRows:
    """Read every row that a run would use; of more than `most_rows`, so many drawn at random.

    `column`: name of a column whose values are read along.
    """
    is_tagged = config.problem is Problem.tags
    require(
        is_tagged or config.problem is Problem.single,
        "audit",
        "looks at texts with one class a row, and at tags, in this version",
    )
    source = TagSource(config, open_tables(config)) if is_tagged else open_source(config)
    if column is not None:
        require_columns(source.tables["train"], {"column": column})
    survey, blocks = _read_blocks(source)
    records = _collect_records(source, blocks, config.group, column)
    if isinstance(source, TagSource):
        labelled = _label_words(source, blocks, records)
    else:
        labelled = _label_texts(survey, blocks, records)
    num_labelled = len(labelled.texts)
    order = np.random.default_rng(0).permutation(num_labelled)
    drawn = np.sort(order[:most_rows])
    record = labelled.record[drawn]
    groups = records.groups[record]
    _require_groups(groups, config, num_folds)
    tables = [source.tables[name] for name in records.tables[record]]
    lines = _read_word_lines(source, records, labelled)[drawn]
    rows = records.rows[record]
    return AuditRows(
        texts=labelled.texts[drawn],
        shown=labelled.shown[drawn],
        labels=labelled.labels[drawn],
        files=np.array([table.name for table in tables], object),
        numbers=rows + 1,
        splits=records.splits[record],
        groups=groups,
        locations=np.array(list(map(_locate, tables, rows + 1, lines)), object),
        column=records.column[record],
        classes=labelled.classes,
        conflicts=labelled.conflicts * len(drawn) // num_labelled,
        is_tagged=is_tagged,
        of_splits=dict(Counter(records.splits[labelled.record].tolist())),
        sentences=labelled.sentences,
        spans=None if labelled.spans is None else labelled.spans[drawn],
    )


def _read_blocks(source: TextSource) -> tuple[TextSurvey, Blocks]:
    """Survey all rows, then read the ones that a run would use."""
    with Progress() as progress:
        survey = TextSurvey(source).run(progress.task("checking"))
        source.require_words(survey.has_words)
        num_rows = sum(survey.rows.values())
        require(
            num_rows >= LEAST_ROWS,
            "data.source",
            f"{num_rows} rows are too few to be audited",
            allowed=f"{LEAST_ROWS} or more",
        )
        return survey, list(source.texts_and_labels(survey.fates, progress.task("reading")))


def _collect_records(
    source: TextSource, blocks: Blocks, group: str | None, column: str | None
) -> _Records:
    rows = np.concatenate([block.rows for _, block in blocks])
    splits = np.concatenate([np.full(len(block.rows), split, object) for split, block in blocks])
    # Splits without a table of their own are cut from that of training.
    tables = splits.copy()
    tables[~np.isin(splits, list(source.tables))] = "train"
    texts = list[str]()
    for _, block in blocks:
        for text in block.texts.to_pylist():
            texts.append(text if isinstance(text, str) else " ".join(text))
    # Equal texts would tell a fold the labels of another one.
    names = [text.lower() for text in texts]
    if group:
        names = _read_column(source, group, tables, rows).tolist()
    hashes = hash_texts(pa.array(names, pa.large_string()))
    return _Records(
        texts=np.array(texts, object),
        groups=np.unique(hashes, return_inverse=True)[1],
        splits=splits,
        tables=tables,
        rows=rows,
        column=_read_column(source, column, tables, rows),
    )


def _label_texts(survey: TextSurvey, blocks: Blocks, records: _Records) -> _Labelled:
    census = survey.census
    census.require_classes("data.label")
    conflicts = 0
    for findings in survey.findings.values():
        if "conflict" in findings.by_kind:
            conflicts += findings.by_kind["conflict"].count
    return _Labelled(
        texts=records.texts,
        shown=records.texts,
        labels=np.concatenate([census.targets(block.labels) for _, block in blocks]),
        record=np.arange(len(records.texts)),
        classes=census.classes(),
        conflicts=conflicts,
    )


def _label_words(source: TagSource, blocks: Blocks, records: _Records) -> _Labelled:
    word_rows = list(find_word_rows(source.census, blocks))
    classes = list(source.census.types)
    if not source.census.is_plain:
        classes.insert(0, NO_ENTITY)
    require(
        len(word_rows) >= LEAST_ROWS and len(classes) > 1,
        "data.label",
        f"{len(word_rows)} entities and words like them, of {len(source.census.types)} types, are"
        " too few to be audited",
        allowed=f"{LEAST_ROWS} or more",
    )
    return _Labelled(
        texts=np.array([row.read for row in word_rows], object),
        shown=np.array([row.shown for row in word_rows], object),
        labels=np.array([row.label for row in word_rows], np.int64),
        record=np.array([row.sentence for row in word_rows], np.int64),
        classes=classes,
        sentences=Sentences(
            words=_join_lists(block.texts for _, block in blocks),
            tags=_join_lists(block.labels for _, block in blocks),
            groups=records.groups,
        ),
        spans=np.array([(row.sentence, row.start, row.stop) for row in word_rows]),
    )


def _require_groups(groups: Integers, config: TextDataConfig, num_folds: int) -> None:
    num_groups = len(np.unique(groups))
    is_by_text = not config.group and config.problem is not Problem.tags
    require(
        num_groups >= LEAST_ROWS or not is_by_text,
        "data.source",
        f"{num_groups} different texts are too few to be audited",
        allowed=f"{LEAST_ROWS} or more",
    )
    require(
        num_groups >= num_folds,
        f"data.group={config.group}" if config.group else "folds",
        f"{num_groups} groups for {num_folds} folds",
        hint="Set folds to fewer, or leave data.group out.",
    )


def _read_word_lines(source: TextSource, records: _Records, labelled: _Labelled) -> Integers:
    """The line of each row's first word, where files have a word a line; else 0."""
    lines = np.zeros(len(labelled.texts), np.int64)
    if labelled.spans is None:
        return lines
    lines_of = {name: list(table.word_lines() or ()) for name, table in source.tables.items()}
    for number, (sentence, start, _) in enumerate(labelled.spans.tolist()):
        of_table = lines_of[records.tables[sentence]]
        if of_table:
            lines[number] = of_table[records.rows[sentence]][start]
    return lines


def _locate(table: Table, number: int, line: int) -> str:
    """File and row, or its line if there is one; a table of several files names the file by
    itself.
    """
    location = table.locate(number)
    if line:
        file = location.rpartition(":")[0] or table.name
        return f"{file}:{line}"
    return f"{table.name}:{location}" if location.isdecimal() else location


def _read_column(source: TextSource, name: str | None, tables: Objects, rows: Integers) -> Objects:
    """A column's values as texts; empty for rows of tables that lack it."""
    values = np.full(len(rows), "", object)
    for split, table in source.tables.items():
        if name is None or name not in table.columns:
            continue
        of_table = list[str]()
        for block in table.blocks([name]):
            texts = as_texts(decoded(block.column(name))).to_pylist()
            of_table += [text or "" for text in texts]
        is_of_table = tables == split
        values[is_of_table] = np.array(of_table, object)[rows[is_of_table]]
    return values


def _join_lists(columns: Iterable[pa.Array]) -> Objects:
    """An array of lists. Without the None numpy would make a matrix of lists of one length."""
    lists = [values for column in columns for values in column.to_pylist()]
    return np.array([*lists, None], object)[:-1]


def read_unlabelled(config: TextDataConfig, file: str) -> list[str]:
    """The texts of a file, read as those of the data are; missing ones are empty."""
    table = open_table(file, where="unlabelled", reading=config.read)
    roles = find_roles(table, text=config.text, join=config.join, is_labelled=False)
    require_columns(table, dict(zip(("data.text", "data.text[1]"), roles.texts, strict=False)))
    texts = list[str]()
    for rows, block in table.numbered(roles.texts):
        read, _ = read_texts(block, roles, rows, Findings(table.name))
        texts += [text or "" for text in read.to_pylist()]
        require(
            len(texts) <= _MOST_UNLABELLED,
            "unlabelled",
            f"{file} has more than {_MOST_UNLABELLED:,} rows",
            hint="Take a part of it.",
        )
    require(bool(texts), "unlabelled", f"{file} has no rows")
    return texts
