"""A GPU's memory is taken in segments that grow, before any is asked for, unless you set it
yourself.
"""

from __future__ import annotations

import os

import pytest
import torch

from flatout import BiLSTMConfig, HeadlinesConfig, TextDataConfig, fit
from flatout.distributed.limits import let_segments_grow
from flatout.distributed.ranks import Ranks

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_segments_grow_where_nothing_is_set():
    assert let_segments_grow() and let_segments_grow()  # a second run of the process, too
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", NAMES)
def test_your_own_setting_stands(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert not let_segments_grow()
    assert [os.environ.get(each) for each in NAMES if each != name] == [None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would train there")
def test_a_run_on_a_gpu_asks_for_it_before_it_asks_the_gpu(monkeypatch, tmp_path):
    """The first question of a run to a GPU is what it can do; this machine has none to answer."""
    monkeypatch.setattr(Ranks, "device", lambda *unused: torch.device("cuda", 0))
    data = TextDataConfig(sample=HeadlinesConfig(rows=60, eval_rows=20), batch_size=16)
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
        fit(data, BiLSTMConfig(embedding=8, hidden=8), output=str(tmp_path), epochs=1)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
