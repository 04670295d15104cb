"""The choices that settings of sequences offer."""

from __future__ import annotations

from enum import StrEnum


class SequenceProblem(StrEnum):
    """What is answered: the target at each time, its next steps, or one class or number a recording."""

    estimate = "estimate"
    forecast = "forecast"
    label = "label"


class Missing(StrEnum):
    """What happens to rows with a missing value."""

    refuse = "refuse"
    fill = "fill"
    drop = "drop"


class Scale(StrEnum):
    """How columns are scaled, by the training rows."""

    standard = "standard"
    minmax = "minmax"
    none = "none"


class PartBy(StrEnum):
    """What is kept whole when recordings are split: a file, a group, or neither, where time splits each recording."""

    auto = "auto"
    file = "file"
    group = "group"
    time = "time"
