"""The rows of an audit as a run reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.audit.entities import NO_ENTITY, Blocks, entities_and_like
from flatout.audit.rows import LEAST_ROWS, AuditRows, Objects, Sentences, choose
from flatout.data.checks.cleaning import read_texts
from flatout.data.checks.findings import Findings
from flatout.data.checks.survey import TextSurvey
from flatout.data.problem import Problem
from flatout.data.store.progress import Progress
from flatout.data.tables.roles import find_roles
from flatout.data.tables.sources import open_table
from flatout.data.tables.splits import hash_texts
from flatout.data.tables.table import Table, as_texts, decoded, require_columns
from flatout.data.text import TextDataConfig
from flatout.data.text_preparation import open_source, open_tables
from flatout.data.text_source import TagSource, TextSource
from flatout.errors import require

_MOST_UNLABELLED = 200_000


def read_audit_rows(
    config: TextDataConfig, num_folds: int, most_rows: int, column: str | None = None
) -> AuditRows:
    """Every row that a run would use; of more than `most_rows`, so many drawn at random."""
    is_known = config.problem in (Problem.single, Problem.tags)
    require(is_known, "audit", "looks at texts with one class a row, and at tags, in this version")
    is_tagged = config.problem is Problem.tags
    source = TagSource(config, open_tables(config)) if is_tagged else open_source(config)
    if column is not None:
        require_columns(source.tables["train"], {"column": column})
    surveyed, blocks = _read(source)
    rows = np.concatenate([block.rows for _, block in blocks])
    splits = np.concatenate([np.full(len(block.rows), split, object) for split, block in blocks])
    tables = np.array([split if split in source.tables else "train" for split in splits], object)
    read = [text for _, block in blocks for text in block.texts.to_pylist()]
    shown = np.array([" ".join(text) for text in read] if is_tagged else read, object)
    texts = shown
    groups = (
        _column(source, config.group, tables, rows)
        if config.group
        else [text.lower() for text in texts]
    )
    numbers = np.unique(hash_texts(pa.array(groups, pa.large_string())), return_inverse=True)[1]
    places = np.arange(len(rows))
    parts = dict[str, Any]()
    if isinstance(source, TagSource):
        classes = [NO_ENTITY, *source.census.types]
        spans = list(entities_and_like(source.census, blocks))
        require(
            len(spans) >= LEAST_ROWS and len(classes) > 1,
            "data.label",
            f"{len(spans)} entities and words like them, of {len(classes) - 1} types, are too few"
            " to be audited",
            allowed=f"{LEAST_ROWS} or more",
        )
        texts, shown = (np.array([each[nth] for each in spans], object) for nth in range(2))
        labels, places = np.array([each[2:4] for each in spans], np.int64).T
        words, tags = (
            _lists([getattr(block, side) for _, block in blocks]) for side in ("texts", "labels")
        )
        parts = {
            "sentences": Sentences(words, tags, numbers),
            "spans": np.array([each[3:] for each in spans]),
        }
    else:
        surveyed.census.require_classes("data.label")
        classes = surveyed.census.classes()
        labels = np.concatenate([surveyed.census.targets(block.labels) for _, block in blocks])
    of_kind = [each.found.get("conflict") for each in surveyed.findings.values()]
    found = AuditRows(
        texts=texts,
        shown=shown,
        labels=labels,
        files=np.array([source.tables[table].name for table in tables], object)[places],
        rows=rows[places] + 1,
        splits=splits[places],
        groups=numbers[places],
        places=tables[places],
        of_splits=dict(Counter(splits[places].tolist())),
        column=_column(source, column, tables, rows)[places],
        classes=classes,
        conflicts=0 if is_tagged else sum(each.count for each in of_kind if each is not None),
        is_tagged=is_tagged,
        **parts,
    )
    drawn = np.sort(np.random.default_rng(0).permutation(len(found))[:most_rows])
    chosen = replace(choose(found, drawn), conflicts=found.conflicts * len(drawn) // len(found))
    _require_groups(chosen, config, num_folds)
    of_rows = zip(chosen.places, chosen.rows.tolist(), strict=True)
    return replace(
        chosen,
        places=np.array([_located(source.tables[table], row) for table, row in of_rows], object),
    )


def _located(table: Table, row: int) -> str:
    place = table.locate(row)
    # of several files it names the one
    return f"{table.name}:{place}" if place.isdecimal() else place


def _require_groups(found: AuditRows, config: TextDataConfig, num_folds: int) -> None:
    is_by_text = not (config.group or found.is_tagged)
    num_groups = len(np.unique(found.groups))
    where = f"data.group={config.group}" if config.group else "folds"
    require(
        num_groups >= LEAST_ROWS or not is_by_text,
        "data.source",
        f"{num_groups} different texts are too few to be audited",
        allowed=f"{LEAST_ROWS} or more",
    )
    require(
        num_groups >= num_folds,
        where,
        f"{num_groups} groups for {num_folds} folds",
        hint="Set folds to fewer, or leave data.group out.",
    )


def _read(source: TextSource) -> tuple[TextSurvey, Blocks]:
    """What is known of all rows, and those that a run would use."""
    with Progress() as progress:
        surveyed = TextSurvey(source).run(progress.task("checking"))
        source.require_words(surveyed.has_words)
        num_rows = sum(surveyed.rows.values())
        require(
            num_rows >= LEAST_ROWS,
            "data.source",
            f"{num_rows} rows are too few to be audited",
            allowed=f"{LEAST_ROWS} or more",
        )
        return surveyed, list(source.texts_and_labels(surveyed.fates, progress.task("reading")))


def read_unlabelled(config: TextDataConfig, file: str) -> list[str]:
    """The texts of a file, read as those of the data are."""
    table = open_table(file, where="unlabelled", reading=config.read)
    roles = find_roles(table, text=config.text, join=config.join, is_labelled=False)
    require_columns(table, dict(zip(("data.text", "data.text[1]"), roles.texts, strict=False)))
    texts: list[str] = []
    for rows, block in table.numbered(roles.texts):
        found, _ = read_texts(block, roles, rows, Findings(table.name))
        texts += [text or "" for text in found.to_pylist()]
        require(
            len(texts) <= _MOST_UNLABELLED,
            "unlabelled",
            f"{file} has more than {_MOST_UNLABELLED:,} rows",
            hint="Take a part of it.",
        )
    require(bool(texts), "unlabelled", f"{file} has no rows")
    return texts


def _column(
    source: TextSource, name: str | None, tables: Objects, rows: NDArray[np.int64]
) -> Objects:
    """A column's values as texts; empty in tables that lack it."""
    found = np.full(len(rows), "", object)
    for split, table in source.tables.items():
        if name is not None and name in table.columns:
            blocks = (
                as_texts(decoded(block.column(name))).to_pylist() for block in table.blocks([name])
            )
            values = np.array([value or "" for block in blocks for value in block], object)
            found[tables == split] = values[rows[tables == split]]
    return found


def _lists(columns: Sequence[pa.Array]) -> Objects:
    return np.array(
        [*(values for column in columns for values in column.to_pylist()), None], object
    )[:-1]
