"""The columns of a table that hold texts and labels: named by settings, or found by their names.

The names `text` and `label` win. Another known name is taken where it is the only one of its kind.
Open this file to add a name that many data sets use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.errors import UserError, did_you_mean, example_columns

if TYPE_CHECKING:
    from flatout.data.tables.table import Table

_TEXTS = (
    "text sentence headline content document doc review tweet comment comment_text body message"
    " question utterance lyrics abstract description post title query input sms review_text"
    " text_clean"
).split()
_LABELS = (
    "label category class target topic sentiment emotion genre intent labels categories classes"
    " topics emotions genres label_text coarse_label stars rating score y class_label"
).split()
_TOKENS = ["tokens", "words"]
_TAGS = ["tags", "ner_tags", "pos_tags", "labels"]


@dataclass(frozen=True, slots=True)
class Roles:
    """The columns that hold the texts and the labels."""

    texts: tuple[str, ...]
    label: str  # empty where rows have no labels
    join: str = " "  # what stands between the texts of several columns

    @property
    def columns(self) -> list[str]:
        """The names of these columns, each once."""
        return list(dict.fromkeys((*self.texts, *([self.label] if self.label else []))))


def find_roles(
    table: Table,
    *,
    text: str | Sequence[str] | None = None,
    label: str | None = None,
    join: str = " ",
    tags: bool = False,
    is_labelled: bool = True,
) -> Roles:
    """The columns that are named, and those that are found by their names; `is_labelled` false: no
    column of labels.
    """
    usual_names, spoken = (
        ((_TOKENS, _TAGS), ("words", "tags")) if tags else ((_TEXTS, _LABELS), ("texts", "labels"))
    )
    texts = (text,) if isinstance(text, str) else tuple(text or ())
    for key, name in (("text", text), ("label", label)):
        if name == "" and is_labelled:
            raise UserError(
                f"data.{key}",
                "no column is named",
                allowed=table.listed(),
                hint=f"Name a column, or leave data.{key} out.",
            )
    labels = (label,) if label is not None else _found(table, usual_names[1])
    names_of = {
        "text": texts[:1] or _found(table, usual_names[0]),
        "label": labels if is_labelled else ("",),
    }
    unclear = [key for key, names in names_of.items() if len(names) != 1]
    if not unclear:
        return Roles(texts or names_of["text"], names_of["label"][0], join)
    for key, names in zip(names_of, usual_names, strict=True):
        of_files = (_found(file, names) for file in table.tables if not names_of[key])
        for name in next(filter(None, of_files), ()):
            who, there = table.lacking(name)
            raise UserError(f"data.{key}", f"no column {name!r} in {who}", allowed=there)
    roles = " and ".join(word for key, word in zip(names_of, spoken, strict=True) if key in unclear)
    several = [repr(name) for key in unclear for name in names_of[key]]
    choice = f": {' or '.join(several)}" if several else ""
    question = f"which column of {table.name} holds the {roles}{choice}?"
    named = {"text": texts, "label": () if label is None else (label,)}
    absent = [name for names in named.values() for name in names if name not in table.columns]
    if absent:
        question = f"no column {', '.join(map(repr, absent))}; {question}"
    nearest = [did_you_mean(name, table.columns) for name in absent]
    keys = [key for key in names_of if key in unclear or set(named[key]) & set(absent)]
    raise UserError(
        " and ".join(f"data.{key}" for key in keys),
        question,
        allowed=table.listed(),
        hint=" ".join(filter(None, [*nearest, f"Set {_words_for(table, names_of, keys)}."]))
        + _headless(table, has_texts=bool(names_of["text"])),
    )


def _words_for(table: Table, names_of: dict[str, tuple[str, ...]], unclear: Sequence[str]) -> str:
    """The words that settle the columns; a column is named where only one is left for one role."""
    taken = {name for names in names_of.values() for name in names}
    left = [name for name in table.columns if name not in taken]
    if (
        len(unclear) == len(left) == 1
        and not names_of[unclear[0]]
        and re.fullmatch(r"\w+", left[0])
    ):
        return f"data.{unclear[0]}={left[0]}"
    return " ".join(f"data.{key}=COLUMN" for key in unclear)


def _found(table: Table, usual_names: Sequence[str]) -> tuple[str, ...]:
    """The columns whose names say so; the first of the known names wins over all others."""
    plain = {name: name.strip().lower().replace(" ", "_") for name in table.columns}
    exact = [name for name, written in plain.items() if written == usual_names[0]]
    return tuple(exact[:1] or [name for name, written in plain.items() if written in usual_names])


def has_tags(table: Table) -> bool:
    """Whether there are columns of words and of tags by their names."""
    names = {name.lower() for name in table.columns}
    return bool(names & set(_TOKENS)) and bool(names & set(_TAGS))


def _headless(table: Table, *, has_texts: bool) -> str:
    """A hint where the first line may be no list of names, or was not parted into columns.

    `has_texts`: whether a column is known to hold texts.
    """
    is_row = any(
        len(name) > 40 or name.strip().isdecimal() or name.count(" ") > 3 for name in table.columns
    )
    if not has_texts and table.holds_numbers():
        return (
            " Are they recordings? Set data.target=COLUMN data.features=[COLUMN,…], and"
            " data=sequence to train."
        )
    if len(table.columns) == 1 and any(mark in table.columns[0] for mark in ",;\t|"):
        return (
            " Is that several columns? Then leave data.read.delimiter out, or name the right one."
        )
    return (
        " Is its first line a row already? Then name the columns:"
        f" data.read.columns={example_columns(len(table.columns))}."
        if is_row
        else ""
    )
