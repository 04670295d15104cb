"""The one place of a run that asks whose module trains: flatout's, or the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.config import RunConfig
    from flatout.run.context import RunParts


def parts_of(config: RunConfig) -> type[RunParts]:
    """The parts of a run with these settings."""
    # imported here: a run needs one of them, and they import all that its stages do
    if config.has_own_parts:
        from flatout.run.own_parts import OwnRunParts

        return OwnRunParts
    from flatout.run.our_parts import OurRunParts

    return OurRunParts
