"""Fixtures for commands that run as processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.plants import Planted
from tests.faults.runs import train
from tests.run.short_runs import BROKEN
from tests.started import ours, started

__all__ = ["ours", "started"]


@pytest.fixture
def cut_short(tmp_path) -> Path:
    """Where a run of two epochs of ten steps was ended by a callback after step 14."""
    with pytest.raises(Planted):
        train(BROKEN, tmp_path / "runs")
    return tmp_path / "runs"
