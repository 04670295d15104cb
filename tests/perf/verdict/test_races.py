"""What is raced when a training ends: workers, larger batches, the fast loop, a compiled step."""

from __future__ import annotations

import gc
import json
import signal
import time
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch.fx import GraphModule
from torch.utils.data import DataLoader

from flatout.callbacks import Verdict
from flatout.engine import FastLoop
from flatout.perf.verdict import (
    anywhere,
    compiled_step,
    experiments,
    own_ways,
)
from tests.callbacks.plain import Rows, Small
from tests.perf.verdict.trainings import Drawing, Noisy, Notes, trainer_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:You defined a `validation_step`.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*running in `Trainer.barebones=True.*",
)


@pytest.mark.soak(seconds=9)
def test_a_slow_loader_is_named_after_some_steps_and_other_workers_race_at_the_end(
    tmp_path, long_enough
):
    notes = Notes()
    verdict = Verdict(seconds=4, log=notes)
    trainer_of(tmp_path, verdict, max_epochs=6).fit(Small(), DataLoader(Rows(slow_s=0.002), 4))
    assert "after 35 steps" in notes.lines[0]
    assert "limited by waiting for data" in notes.lines[1]
    assert verdict.verdict is not None
    assert verdict.verdict["cause"] == "data"
    assert any(
        each.override.startswith("DataLoader(num_workers=") for each in verdict.evidence.tried
    )
    verdict.save(tmp_path / "verdict.json")
    kept = json.loads((tmp_path / "verdict.json").read_text())
    assert kept["verdict"]["sentence"] in notes.lines[-1]
    assert kept["evidence"]["feed_alone"] < 1000


@pytest.mark.soak(seconds=5)
def test_small_batches_are_raced_in_larger_ones_and_the_fix_is_words_of_python(
    tmp_path, long_enough
):
    verdict = Verdict(seconds=5, log=Notes())
    trainer_of(tmp_path, verdict, max_epochs=4, accumulate_grad_batches=2).fit(
        Small(), DataLoader(Drawing(), 2)
    )
    assert [each.override for each in verdict.evidence.tried if each.cause == "accumulation"] == [
        "DataLoader(batch_size=4) ++trainer.accumulate_grad_batches=1"
    ]
    words = json.dumps(
        [verdict.verdict["fix"], *(each["fix"] for each in verdict.verdict["others"])]
    )
    assert "++trainer" not in words


@pytest.mark.soak(seconds=3)
def test_the_fast_loop_trains_beside_it(tmp_path, long_enough):
    weights = []
    for callbacks in ([], [Verdict(seconds=10, log=Notes())]):
        L.seed_everything(3, verbose=False)
        module = Noisy()
        trainer_of(tmp_path, FastLoop(), *callbacks).fit(module, DataLoader(Drawing(), 2))
        weights.append(list(module.state_dict().values()))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    assert callbacks[0].evidence.tried
    assert callbacks[0].evidence.ms["backward"] > 0


class Bursts(Rows):
    """Every 32nd row is the first of a file that takes long to open."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, number: int) -> Any:
        time.sleep(0.2 if number % 32 == 0 else 0.0)
        return super().__getitem__(number % 40)


@pytest.mark.soak(seconds=12)
def test_workers_that_keep_up_but_for_bursts_are_raced_with_more_read_ahead(
    tmp_path, long_enough, monkeypatch
):
    monkeypatch.setattr(own_ways, "LEAST_GAIN", 0.0)
    verdict = Verdict(seconds=30, log=Notes())
    loader = DataLoader(Bursts(), 4, num_workers=1, persistent_workers=True)
    trainer_of(tmp_path, verdict, max_epochs=1).fit(Small(forward=0.01), loader)
    tried = {each.override: each for each in verdict.evidence.tried}
    ahead = next(
        (each for words, each in tried.items() if words.startswith("DataLoader(prefetch_factor=8")),
        None,
    )
    assert ahead is not None, (
        list(tried),
        verdict.evidence.not_tried,
        verdict.evidence.share("wait"),
    )
    assert 0 < ahead.speedup.low <= ahead.speedup.value <= ahead.speedup.high


@pytest.mark.soak(seconds=2)
def test_the_fast_loop_is_raced_where_the_framework_takes_its_share(tmp_path, long_enough):
    verdict = Verdict(seconds=30, log=Notes())
    trainer_of(tmp_path, verdict).fit(Small(), DataLoader(Rows(), 1))
    (loop,) = (each for each in verdict.evidence.tried if each.cause == "loop")
    assert loop.override == "Trainer(callbacks=[FastLoop()])"
    assert 0 < loop.speedup.low <= loop.speedup.value <= loop.speedup.high
    assert not verdict.evidence.notes


def compiles_for_ever(graph: GraphModule, inputs: list[torch.Tensor]) -> Any:
    time.sleep(60)


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def collects_for_ever(graph: GraphModule, inputs: list[torch.Tensor]) -> Any:
    """What is raised while a collector's callback, or a weak reference's, runs is lost."""
    gc.callbacks.append(lambda phase, about: time.sleep(0.03))
    try:
        for _ in range(300):
            watched = weakref.ref(Cycle(), lambda _: time.sleep(0.1))
            gc.collect()
            assert watched() is None
            time.sleep(0.01)
    finally:
        gc.callbacks.pop()


def compiles_nothing(graph: GraphModule, inputs: list[torch.Tensor]) -> Any:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("backend", "seconds", "why"),
    [
        pytest.param(
            compiles_for_ever, 3, "it had not compiled after", marks=pytest.mark.soak(seconds=3)
        ),
        pytest.param(
            collects_for_ever, 3, "it had not compiled after", marks=pytest.mark.soak(seconds=3)
        ),
        (compiles_nothing, 60, "no such instruction"),
    ],
)
def test_what_does_not_compile_here_or_in_time_is_left_out_with_a_line(
    backend, seconds, why, tmp_path, everything_races, monkeypatch
):
    monkeypatch.setattr(compiled_step, "_BACKEND", backend)
    notes = Notes()
    verdict = Verdict(seconds=seconds, log=notes)
    before = signal.getsignal(signal.SIGALRM)
    left_s = signal.getitimer(signal.ITIMER_REAL)[0]
    trainer_of(tmp_path, verdict).fit(Small(), DataLoader(Rows(), 1))
    (line,) = (each for each in notes.lines if "torch.compile" in each)
    assert line.startswith("verdict: torch.compile was left out")
    assert why in line
    assert signal.getsignal(signal.SIGALRM) is before
    # an alarm of yours comes in its time
    assert left_s - 20 < signal.getitimer(signal.ITIMER_REAL)[0] <= left_s
    # of yours, afterwards
    assert torch.compile(torch.neg, backend="eager")(torch.ones(2)).sum() == -2


def test_the_races_end_in_time(tmp_path, long_enough, monkeypatch):
    monkeypatch.setattr(experiments, "SHARE", 0.5)
    verdict = Verdict(log=Notes())
    began = anywhere.time.perf_counter()
    trainer_of(tmp_path, verdict, max_epochs=8).fit(Small(), DataLoader(Rows(slow_s=0.001), 4))
    assert anywhere.time.perf_counter() - began < 2.5 * verdict._trained_s + 1
