"""Settings of cleaning: the rule for each kind of row that is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from flatout.errors import as_choice


class Rows(StrEnum):
    """What is done with rows of some sort."""

    keep = "keep"
    drop = "drop"
    refuse = "refuse"


class Empty(StrEnum):
    """What is done with rows without a text; by_split: dropped in training, kept in validation and test."""

    by_split = "by_split"
    keep = "keep"
    drop = "drop"
    refuse = "refuse"


class Unlabelled(StrEnum):
    """What is done with rows without a label."""

    drop = "drop"
    refuse = "refuse"


class Escapes(StrEnum):
    """What is done with `\\u2019` and `&amp;` in a text."""

    keep = "keep"
    decode = "decode"


class Alike(StrEnum):
    """What is done with labels that differ in nothing but how they are written."""

    keep = "keep"
    merge = "merge"


@dataclass(kw_only=True, slots=True)
class CleaningConfig:
    """What is done with rows that are not as they should be; `refuse` ends the run before it starts."""

    empty: Empty = Empty.by_split
    """Rows without a text; by_split: dropped in training, kept in validation and test."""
    unlabelled: Unlabelled = Unlabelled.drop
    """Rows without a label."""
    duplicates: Rows = Rows.keep
    """Training rows with the text and the label of an earlier one."""
    conflicts: Rows = Rows.keep
    """Training rows whose text has another label elsewhere."""
    leaks: Rows = Rows.keep
    """Training rows whose text is a validation or a test text too, and validation rows whose text is a test text."""
    odd: Rows = Rows.keep
    """Rows whose text has control, invisible or broken characters."""
    escapes: Escapes = Escapes.keep
    r"""`\u2019` and `&amp;` written out in a text: kept as they are, or decoded."""
    labels: Alike = Alike.keep
    """Labels that differ in case, blanks around them or a zero after the point: each a class, or made one."""

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            setattr(self, name, as_choice(kind, getattr(self, name), f"data.clean.{name}"))


_CHOICES: dict[str, type[StrEnum]] = {
    "empty": Empty,
    "unlabelled": Unlabelled,
    "duplicates": Rows,
    "conflicts": Rows,
    "leaks": Rows,
    "odd": Rows,
    "escapes": Escapes,
    "labels": Alike,
}
