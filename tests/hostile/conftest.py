"""Attempts are forked from a process that is warm."""

from __future__ import annotations

import pytest

from flatout.distributed.processes import warm_start


@pytest.fixture(autouse=True, scope="module")
def _warm():
    warm_start()  # sweeps ask for it too, from folders that are gone when it has come up
