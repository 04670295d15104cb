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
Columns = dict[str, tuple[str, ...]]  # names of columns by their role: text, label


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
    """The columns that are named, else those whose names say that they hold texts or labels.

    `tags`: texts are lists of words. `is_labelled` false: there is no column of labels.
    """
    usual_names = {"text": _TEXTS, "label": _LABELS}
    spoken = {"text": "texts", "label": "labels"}
    if tags:
        usual_names = {"text": _TOKENS, "label": _TAGS}
        spoken = {"text": "words", "label": "tags"}
    texts = (text,) if isinstance(text, str) else tuple(text or ())
    for key, name in (("text", text), ("label", label)):
        if name == "" and is_labelled:
            raise UserError(
                f"data.{key}",
                "no column is named",
                allowed=table.listed(),
                hint=f"Name a column, or leave data.{key} out.",
            )
    named = {"text": texts, "label": () if label is None else (label,)}
    names_of = {key: named[key][:1] or _found(table, names) for key, names in usual_names.items()}
    if not is_labelled:
        names_of["label"] = ("",)
    unclear = [key for key, names in names_of.items() if len(names) != 1]
    if not unclear:
        return Roles(texts or names_of["text"], names_of["label"][0], join)
    for key, names in usual_names.items():
        of_files = (_found(file, names) for file in table.tables if not names_of[key])
        for name in next(filter(None, of_files), ()):
            who, there = table.lacking(name)
            raise UserError(f"data.{key}", f"no column {name!r} in {who}", allowed=there)
    raise _ask_for_columns(table, named, names_of, {key: spoken[key] for key in unclear})


def _ask_for_columns(
    table: Table, named: Columns, names_of: Columns, unclear: dict[str, str]
) -> UserError:
    """The question which column holds the roles in `unclear`, which are none's or several's.

    `named`: what the settings name. `names_of`: that, or what was found.
    """
    several = [repr(name) for key in unclear for name in names_of[key]]
    choice = f": {' or '.join(several)}" if several else ""
    question = f"which column of {table.name} holds the {' and '.join(unclear.values())}{choice}?"
    absent = [name for names in named.values() for name in names if name not in table.columns]
    if absent:
        question = f"no column {', '.join(map(repr, absent))}; {question}"
    nearest = [did_you_mean(name, table.columns) for name in absent]
    keys = [key for key in names_of if key in unclear or set(named[key]) & set(absent)]
    return UserError(
        " and ".join(f"data.{key}" for key in keys),
        question,
        allowed=table.listed(),
        hint=" ".join(filter(None, [*nearest, f"Set {_words_for(table, names_of, keys)}."]))
        + _headless(table, has_texts=bool(names_of["text"])),
    )


def _words_for(table: Table, names_of: Columns, unclear: Sequence[str]) -> str:
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
