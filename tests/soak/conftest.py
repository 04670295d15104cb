"""Fixtures for commands that run as processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from tests.started import ours, started

__all__ = ["ours", "started"]


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """For Ray's own files, with a path short enough for its sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder
