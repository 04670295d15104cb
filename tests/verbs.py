"""`python -m flatout` inside a test's own process."""

from __future__ import annotations

from flatout.__main__ import main


def verb(*arguments) -> int:
    """Run a verb; its exit code."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as left:
        return int(left.code or 0)
    return 0
