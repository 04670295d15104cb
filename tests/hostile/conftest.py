"""Attempts are forked from a process that is warm."""

from __future__ import annotations

import pytest

import train
from flatout.distributed.processes import warm_start
from tests.fitting import own_cache
from tests.hostile import attempts as hostile


@pytest.fixture(autouse=True, scope="module")
def _warm():
    warm_start()  # sweeps ask for it too, from folders that are gone when it has come up


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The model folders of a small network and of a small encoder."""
    folder = tmp_path_factory.mktemp("models")
    tiny = [*hostile.TINY, "model.hidden=8", "data.vocabulary.size=100"]
    with own_cache(folder):
        for name, words in (
            ("lstm", []),
            ("encoder", ["model=transformer", "model.layers=1", "model.heads=2"]),
        ):
            train.main([*words, *tiny, f"hydra.run.dir={folder / name}"])
    return folder
