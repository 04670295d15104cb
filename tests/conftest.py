"""Every test starts from the same seeds, treats warnings as errors, and has a cache folder of its own."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from flatout.data.store.store import Column, Store, StoreSplit, StoreWriter

# Examples are drawn anew from a fixed seed, so that a failure on one machine is a failure on all.
settings.register_profile("flatout", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("flatout")

FOREIGN_WARNINGS = (
    # Said inside other people's packages about other people's packages.
    "ignore:.*pkg_resources.*:DeprecationWarning",
    "ignore:.*pynvml package is deprecated.*:FutureWarning",
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    for line in FOREIGN_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(autouse=True)
def _same_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = Path.cwd()
    yield
    os.chdir(before)


SplitMaker = Callable[..., StoreSplit]


@pytest.fixture
def make_split(tmp_path: Path) -> SplitMaker:
    """Makes a real store split of random rows: `make_split(lengths, classes=3)`; several=True for several labels."""
    made = 0

    def make(lengths: Any, *, classes: int = 3, several: bool = False, vocabulary: int = 50) -> StoreSplit:
        nonlocal made
        made += 1
        folder = tmp_path / f"store-{made}"
        folder.mkdir()
        random_numbers = np.random.default_rng(made)
        lengths = np.asarray(lengths, dtype=np.int32)
        writer = StoreWriter(folder)
        split = writer.split(
            "train", {"tokens": Column("uint16", ragged=True), "targets": Column("int32", ragged=several)}
        )
        tokens = random_numbers.integers(3, vocabulary, int(lengths.sum()))
        counts = random_numbers.integers(0, classes, len(lengths))
        flat = random_numbers.integers(0, classes, int(counts.sum()))
        targets = (flat, counts) if several else random_numbers.integers(0, classes, len(lengths))
        split.append(tokens=(tokens, lengths), targets=targets)
        writer.close({})
        return Store(folder).splits["train"]

    return make
