"""Where batches are gathered: the one choice that settings and feeds share."""

from __future__ import annotations

from enum import StrEnum


class FeedKind(StrEnum):
    """Where batches are gathered."""

    auto = "auto"
    resident = "resident"
    threaded = "threaded"
    workers = "workers"
