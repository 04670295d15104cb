"""What the rows of a table are labelled with: targets, losses and metrics depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

NO_TAG = -100  # the target of a token that begins no word; losses of torch leave it out
OUTSIDE = "O"  # the tag of a word that belongs to no entity
UNANSWERED = "_"  # what a tagger of plain tags answers to a word that it did not see


class Problem(StrEnum):
    """Kind of label: one class a row, any number of classes a row, a number, a tag for each word,
    or no label.
    """

    single = "single"
    multi = "multi"
    regression = "regression"
    tags = "tags"
    none = "none"

    @property
    def has_classes(self) -> bool:
        """Whether labels are classes, of one row, of several, or of words."""
        return self not in (Problem.regression, Problem.none)


def are_plain(names: Sequence[str]) -> bool:
    """Whether a tagger with these outputs gives plain tags, such as NOUN, and marks no entities."""
    return names[0] != OUTSIDE


def types_of_tags(names: Sequence[str]) -> list[str]:
    """What scores are made for: plain tags themselves, else the types of entities.

    `O B-person I-person B-place I-place` → person, place; `NOUN VERB` → NOUN, VERB.
    """
    if are_plain(names):
        return list(names)
    return [name[2:] for name in names[1::2]]
