"""Settings of cleaning: the rule for each kind of row that cannot be trained on as written."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from flatout.errors import check_settings, setting


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
    """Rules for rows that cannot be trained on as written; `refuse` ends the run before it starts."""

    empty: Empty = setting(
        Empty.by_split, "Rows without a text; by_split: dropped in training, kept in validation and test."
    )
    unlabelled: Unlabelled = setting(Unlabelled.drop, "Rows without a label.")
    duplicates: Rows = setting(Rows.keep, "Training rows with the text and the label of an earlier one.")
    conflicts: Rows = setting(Rows.keep, "Training rows whose text has another label elsewhere.")
    leaks: Rows = setting(
        Rows.keep,
        "Training rows whose text is a validation or a test text too, and validation rows whose text is a test text.",
    )
    odd: Rows = setting(Rows.keep, "Rows whose text has control, invisible or broken characters.")
    escapes: Escapes = setting(
        Escapes.keep, "`\\u2019` and `&amp;` written out in a text: kept as they are, or decoded."
    )
    labels: Alike = setting(
        Alike.keep,
        "Labels that differ in case, blanks around them or a zero after the point: each a class, or made one.",
    )

    def __post_init__(self) -> None:
        check_settings(self, "data.clean")
