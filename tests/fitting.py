"""Quiet runs of `flatout.fit` in fp32, and a cache for what the fixtures of a module build."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flatout import MonitorConfig, Result, fit


def quiet_fit(data: Any, model: Any, **settings: Any) -> Result:
    """A run in fp32 that prints no progress, writes no events, and tries nothing at its end."""
    quiet: dict[str, Any] = {
        "precision": "fp32",
        "logger": "none",
        "monitor": MonitorConfig(progress=False, verdict=False),
    }
    return fit(data, model, **(quiet | settings))


@contextmanager
def own_cache(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Within it, what fixtures of a module build is cached below a folder; what else they patch is
    undone with it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATOUT_CACHE", str(folder / "cache"))
        yield patch
