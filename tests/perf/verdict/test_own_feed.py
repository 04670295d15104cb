"""Copies of a user's loader run none of the user's script again."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flatout.perf.verdict.own_feed import OwnFeed


class Parents(Dataset[Tensor]):
    """Each row is the process that started the one that reads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor(os.getppid())


def feed() -> OwnFeed:
    return OwnFeed(
        loader=DataLoader(Parents(), 2),
        device=torch.device("cpu"),
        move=lambda batch: batch,
        rows=2.0,
        accumulate=1,
        batches=2.0,
        epochs=1.0,
    )


def test_workers_that_are_tried_are_forked_and_import_no_script(monkeypatch):
    # Python 3.14's default on Linux; its server imports the script that started it
    server = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing.context._default_context, "_default_context", server)
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", server)
    assert multiprocessing.get_start_method() == "forkserver"
    found = [each.batch.tolist() for each in feed().opened(num_workers=1)]
    assert found == [[os.getpid()] * 2] * 2


@pytest.fixture
def _start_of_the_script() -> Iterator[None]:
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(None, force=True)


@pytest.mark.usefixtures("_start_of_the_script")
def test_workers_that_are_tried_are_not_forked_where_the_script_has_chosen_to_spawn():
    loader = feed().opened(num_workers=1)._open()
    assert isinstance(loader, DataLoader)
    assert loader.multiprocessing_context is None
