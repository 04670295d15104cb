"""What the rows of a table are labelled with: targets, losses and metrics depend on it."""

from __future__ import annotations

from enum import StrEnum

NO_TAG = -100  # the target of a token that begins no word; losses of torch leave it out


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
