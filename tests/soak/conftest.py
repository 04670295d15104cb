"""Fixtures for commands that run as processes."""

from __future__ import annotations

from tests.started import ours, started

__all__ = ["ours", "started"]
