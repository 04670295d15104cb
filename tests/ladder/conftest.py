"""Measurements are forked from a process that has imported everything: seconds that no single test
should pay.
"""

from __future__ import annotations

import importlib

import pytest

from flatout.distributed.processes import wait_until_warm, warm_start


@pytest.fixture(scope="session", autouse=True)
def warm_server() -> None:
    warm_start()
    for name in (
        "flatout.cli.boundary",
        "flatout.run.launch",
        "matplotlib.pyplot",
        "pandas",
        "transformers",
    ):
        importlib.import_module(name)
    wait_until_warm()
