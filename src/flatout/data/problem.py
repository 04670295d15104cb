"""What the rows of a table are labelled with: the one word that targets, losses and metrics all turn on."""

from __future__ import annotations

from enum import StrEnum


class Problem(StrEnum):
    """Kind of label: one class a row, any number of classes a row, a number, or a tag for each word."""

    single = "single"
    multi = "multi"
    regression = "regression"
    tags = "tags"
