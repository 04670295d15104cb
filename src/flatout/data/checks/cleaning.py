"""Read texts and labels of a block of rows, and drop or repair rows that cannot be trained on.

`clean_block` applies the rules of `data.clean` that concern one row by itself, and counts each row
it touches. A row without a label is dropped everywhere. A row without a text teaches nothing and is
dropped from the training table. It stays in tables for validation and test, as one unknown word, so
that scores stay comparable. All of it is arithmetic over whole blocks; a single row is looked at
only to name it in an error. Rows that depend on other rows are judged in `survey`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flatout.data.checks.characters import decode_escapes
from flatout.data.checks.findings import Findings
from flatout.data.problem import Problem
from flatout.data.tables.roles import Roles
from flatout.data.tables.table import (
    as_texts,
    decoded,
    is_blank,
    is_missing,
    is_plain,
    is_text,
    mask_of,
)
from flatout.errors import UserError, check_settings, require, setting

_TYPE_SHOWN = 60  # letters of the type of a column, in a message
RowRule = StrEnum("RowRule", "keep drop refuse")  # what is done with rows of some kind
# What is done with rows without a text; by_split: dropped in training, kept in validation and test.
Empty = StrEnum("Empty", "by_split keep drop refuse")
Unlabelled = StrEnum("Unlabelled", "drop refuse")  # what is done with rows without a label
Escapes = StrEnum("Escapes", "keep decode")  # what is done with `\u2019` and `&amp;` in a text
# what is done with labels that differ in nothing but how they are written
Alike = StrEnum("Alike", "keep merge")


@dataclass(kw_only=True, slots=True)
class CleaningConfig:
    """Rules for rows that cannot be trained on as written; `refuse` ends the run with an error."""

    empty: Empty = setting(
        Empty.by_split, "Rows without a text; by_split: dropped in training, else kept."
    )
    unlabelled: Unlabelled = setting(Unlabelled.drop, "Rows without a label.")
    duplicates: RowRule = setting(
        RowRule.keep, "Training rows with the text and the label of an earlier one."
    )
    conflicts: RowRule = setting(
        RowRule.keep, "Training rows whose text has another label elsewhere."
    )
    leaks: RowRule = setting(
        RowRule.keep, "Training texts also in validation or test, validation texts in test."
    )
    odd: RowRule = setting(
        RowRule.keep, "Rows whose text has control, invisible or broken characters."
    )
    escapes: Escapes = setting(
        Escapes.keep, "`\\u2019` and `&amp;` written out in a text: kept, or decoded."
    )
    labels: Alike = setting(
        Alike.keep, "Labels that differ in case, blanks or a zero after the point: classes or one."
    )

    def __post_init__(self) -> None:
        check_settings(self, "data.clean")


@dataclass(frozen=True, slots=True)
class CleanBlock:
    """Rows that are used: their texts, labels and numbers in the table, counted from 0."""

    texts: pa.Array
    labels: pa.Array
    rows: NDArray[np.int64]
    is_changed: NDArray[np.bool_]  # which of them were repaired


@dataclass(frozen=True, slots=True)
class TextBlock:
    """Rows of a later pass, with all columns of the block that they came from."""

    texts: pa.Array
    labels: pa.Array
    rows: NDArray[np.int64]
    block: pa.RecordBatch

    def rows_from(self, start: int) -> TextBlock:
        """The rows of the block from one on: `rows_from(2)` leaves out the first two."""
        return TextBlock(
            self.texts.slice(start),
            self.labels.slice(start),
            self.rows[start:],
            self.block.slice(start),
        )


@dataclass(frozen=True, slots=True)
class BlockRules:
    """How the rows of one table are read and cleaned."""

    roles: Roles
    problem: Problem
    is_train: bool  # whether it is the training table
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)


def clean_block(
    block: pa.RecordBatch, rows: NDArray[np.int64], rules: BlockRules, findings: Findings
) -> CleanBlock:
    """The rows of a block that are used; what happened to the others goes to `findings`.

    `rows` are the numbers of the block's rows in the table. Three rows of the training table:

        row  text    label
        7    "fine"  "a"     used
        8    null    "b"     dropped: counted as null_text_dropped
        9    null    null    dropped: counted as null_label, and not a second time
    """
    roles = rules.roles
    cleaning = rules.cleaning
    labels = labels_of(block, roles)
    texts, is_changed = read_texts(block, roles, rows, findings, escapes=cleaning.escapes)
    findings.rows_read += block.num_rows
    has_no_label = mask_of(is_missing(labels, rules.problem))
    # A sentence has as many tags as words, so one without tags is one without words.
    is_tagged = rules.problem is Problem.tags
    findings.add("no_words" if is_tagged else "null_label", rows[has_no_label])
    is_null = mask_of(pc.is_null(texts)) & ~has_no_label
    is_empty = mask_of(is_blank(texts)) & ~has_no_label
    drops_empty = cleaning.empty is Empty.drop
    drops_empty |= cleaning.empty is Empty.by_split and rules.is_train
    outcome = "dropped" if drops_empty else "kept"
    findings.add(f"null_text_{outcome}", rows[is_null])
    findings.add(f"empty_text_{outcome}", rows[is_empty])
    findings.add("names_again", rows[_names_again(texts, labels, roles)])
    has_no_text = is_null | is_empty
    if cleaning.unlabelled is Unlabelled.refuse:
        missing = "words" if is_tagged else roles.label
        _refuse("unlabelled", rows[has_no_label], f"no {missing}", findings)
    if cleaning.empty is Empty.refuse:
        _refuse("empty", rows[has_no_text], f"no {' and '.join(roles.texts)}", findings)
    used = ~has_no_label & ~has_no_text if drops_empty else ~has_no_label
    if not used.all():
        keep = pa.array(used)
        texts = texts.filter(keep)
        labels = labels.filter(keep)
        rows = rows[used]
    is_changed = (is_changed | has_no_text)[used]
    findings.rows_kept += len(rows)
    findings.rows_repaired += int(is_changed.sum())
    return CleanBlock(pc.fill_null(texts, ""), labels, rows, is_changed)


def labels_of(block: pa.RecordBatch, roles: Roles) -> pa.Array:
    """The labels of a block; zeros where the task has no column of labels."""
    if roles.label:
        return decoded(block.column(roles.label))
    return pa.array(np.zeros(block.num_rows, np.float32))


def _names_again(texts: pa.Array, labels: pa.Array, roles: Roles) -> NDArray[np.bool_]:
    """Which rows hold the names of their columns: `cat a.csv b.csv` puts such a line in between."""
    if not (roles.label and is_text(labels.type)):
        return np.zeros(len(texts), np.bool_)
    is_name = pc.and_(pc.equal(texts, roles.texts[0]), pc.equal(labels, roles.label))
    return mask_of(pc.fill_null(is_name, False))


def _refuse(name: str, rows: NDArray[np.int64], problem: str, findings: Findings) -> None:
    """Raise an error that names the first of the rows, if there is one."""
    if len(rows):
        location = findings.locate(int(rows[0]) + 1)
        where = f"data.clean.{name}"
        raise UserError(
            where,
            f"{findings.source} row {location}: {problem}",
            hint=f"Fill it in, or keep the default of {where}.",
        )


def read_texts(
    block: pa.RecordBatch,
    roles: Roles,
    rows: NDArray[np.int64],
    findings: Findings,
    *,
    escapes: Escapes = Escapes.keep,
) -> tuple[pa.Array, NDArray[np.bool_]]:
    """The texts of a block, and which of them were changed.

    Several columns are joined: "Title", "body" → "Title body" with `data.join=" "`. A null is left
    out; the text is null where all columns are.
    """
    is_changed = np.zeros(block.num_rows, np.bool_)
    columns = [_read_column(block.column(name), name, rows, findings) for name in roles.texts]
    texts = columns[0]
    if len(columns) > 1:
        joined = pc.binary_join_element_wise(
            *columns, pa.scalar(roles.join, pa.large_string()), null_handling="skip"
        )
        has_none = np.logical_and.reduce([mask_of(pc.is_null(column)) for column in columns])
        texts = pc.if_else(pa.array(has_none), pa.scalar(None, pa.large_string()), joined)
    if escapes is Escapes.decode:
        texts, decoded_rows = decode_escapes(texts)
        findings.add("decoded", rows[decoded_rows])
        is_changed[decoded_rows] = True
    # A number or a date that was written out counts as a repair.
    if any(not is_text(decoded(block.column(name)).type) for name in roles.texts):
        is_changed |= mask_of(pc.is_valid(texts))
    return texts, is_changed


def _read_column(
    column: pa.Array, name: str, rows: NDArray[np.int64], findings: Findings
) -> pa.Array:
    """A column as texts: numbers and dates are written out and counted, others are refused."""
    column = decoded(column)
    if is_text(column.type) or pa.types.is_null(column.type):
        return column.cast(pa.large_string())
    written = str(column.type)
    hint = (
        "Name a column of texts: data.text=COLUMN. For lists of words and tags set"
        " data.problem=tags."
    )
    if pa.types.is_struct(column.type):
        hint += " Was it written by pandas? Write a row an object: to_json(orient='records')."
    require(
        is_plain(column.type),
        "data.text",
        f"column {name!r} of {findings.source} holds"
        f" {written[:_TYPE_SHOWN]}{'…' if len(written) > _TYPE_SHOWN else ''}",
        allowed="texts",
        hint=hint,
    )
    findings.add("text_cast", rows)
    # NaN is how pandas writes a missing number.
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    return as_texts(column)
