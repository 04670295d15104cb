"""Fixtures for commands that run as processes."""

from __future__ import annotations

import importlib

import pytest

from flatout.distributed.processes import wait_until_warm, warm_start
from tests.started import ours, started

__all__ = ["ours", "started"]
IMPORTED_BY_A_SWEEP = (
    "flatout.cli.boundary",
    "flatout.run.launch",
    "flatout.sweep.sweep",
    "matplotlib.pyplot",
)


@pytest.fixture(scope="session", autouse=True)
def warm_server() -> None:
    """Trials are forked from a process that has imported everything: seconds that no single test
    should pay.
    """
    warm_start()
    for name in IMPORTED_BY_A_SWEEP:
        importlib.import_module(name)
    wait_until_warm()
