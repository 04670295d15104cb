"""Which columns of a table hold the text and the label, where nobody said so.

A name that says it all (`text`, `label`) wins. Any other name is taken where it is the only one of its kind; where
there are several, or none, the person is asked, with the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.data.table import Table
from flatout.errors import UserError

_TEXTS = (
    "text sentence headline content document doc review tweet comment comment_text body message question utterance"
    " lyrics abstract description post title query input sms review_text text_clean"
).split()
_LABELS = (
    "label category class target topic sentiment emotion genre intent labels categories classes topics emotions genres"
    " label_text coarse_label stars rating score y class_label"
).split()
_TOKENS = ["tokens", "words"]
_TAGS = ["tags", "ner_tags", "pos_tags", "labels"]


@dataclass(frozen=True, slots=True)
class Roles:
    """The columns that hold the texts and the labels."""

    texts: tuple[str, ...]
    label: str
    join: str = " "
    """What stands between the texts of several columns."""

    @property
    def columns(self) -> list[str]:
        """All of them, each once."""
        return list(dict.fromkeys((*self.texts, self.label)))


def find_text(table: Table) -> str:
    """The column of the texts."""
    return _find(table, "data.text", _TEXTS, "texts")


def find_label(table: Table) -> str:
    """The column of the labels."""
    return _find(table, "data.label", _LABELS, "labels")


def find_tokens(table: Table) -> str:
    """The column of lists of words."""
    return _find(table, "data.text", _TOKENS, "words")


def find_tags(table: Table) -> str:
    """The column of lists of tags."""
    return _find(table, "data.label", _TAGS, "tags")


def has_tags(table: Table) -> bool:
    """Whether there are columns of words and of tags by their names."""
    names = {name.lower() for name in table.columns}
    return bool(names & set(_TOKENS)) and bool(names & set(_TAGS))


def _find(table: Table, key: str, known: Sequence[str], what: str) -> str:
    plain = {name: name.strip().lower().replace(" ", "_") for name in table.columns}
    for exact in known[:1]:
        if found := [name for name, written in plain.items() if written == exact]:
            return found[0]
    found = [name for name, written in plain.items() if written in known]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(table.columns[:20]) + (", …" if len(table.columns) > 20 else "")
    several = f"{' and '.join(map(repr, found))} may all hold the {what}"
    problem = f"{several} of {table.name}" if found else f"which column of {table.name} holds the {what}?"
    raise UserError(key, problem, allowed=f"columns: {listed}", mend=f"Name it: {key}=COLUMN.{_headless(table)}")


def _headless(table: Table) -> str:
    """A hint where the names look like a row: the first line may be no list of names."""
    is_row = any(len(name) > 40 or name.strip().isdecimal() or name.count(" ") > 3 for name in table.columns)
    hint = " Is its first line a row already? Then name the columns: data.read.columns=[text,label]."
    return hint if is_row else ""
