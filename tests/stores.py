"""The store of some data settings, opened without a run."""

from __future__ import annotations

from typing import Any

from flatout.run.kinds import kind_of


def open_store(config: Any) -> Any:
    """What is known of the data, whose store is built where it is missing."""
    return kind_of(config).data.of(config).open_store()
