"""The clock: parts that add up to the whole, spreads in little memory, events read when the device
has passed them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from flatout import BiLSTMConfig, HeadlinesConfig, MonitorConfig, TextDataConfig, fit
from flatout.callbacks.clock import FIRST_STEPS, PARTS, Clock, compiled_so_far
from flatout.callbacks.phase_clocks import DevicePhaseClock, HookPhaseClock
from flatout.callbacks.run_curves import RunCurves
from flatout.callbacks.step_timer import Split, StepTimer
from flatout.callbacks.step_times import StepTimes
from flatout.callbacks.throughput import Volume
from flatout.checkpoints.settings import CheckpointConfig
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import PlanSettings
from flatout.data.feeding import FeedKind
from flatout.perf.verdict.gathering import evidence_of
from flatout.report.page import read_curves
from tests.params import at_once

pytestmark = pytest.mark.xdist_group("timing")  # one after the other, not side by side


class Sleeps(L.Callback):
    """Takes its time after each batch, and reads as many numbers of the device as it is told."""

    def __init__(self, seconds: float = 0.0, reads: int = 0) -> None:
        self.seconds = seconds
        self.reads = reads

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        time.sleep(self.seconds)
        for _ in range(self.reads):
            batch.offsets[0].item()


class SleepsInside(Sleeps):
    def on_train_batch_end(self, *_) -> None: ...

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        time.sleep(self.seconds)


def train_headlines(output, *, callbacks=None, checkpoint=None, flush_every=10, **trainer):
    return fit(
        TextDataConfig(sample=HeadlinesConfig(rows=800, eval_rows=100), batch_size=16),
        BiLSTMConfig(embedding=8, hidden=8),
        epochs=1,
        callbacks=callbacks or {},
        checkpoint=checkpoint or CheckpointConfig(),
        monitor=MonitorConfig(flush_every=flush_every),
        trainer=trainer,
        output=str(output),
    )


def split_of(result) -> dict[str, float]:
    return {name: value or 0.0 for name, value in result.summary["speed"]["step_ms"].items()}


def test_the_parts_add_up_to_the_time_of_training(tmp_path):
    result = train_headlines(tmp_path)
    split = split_of(result)
    steps = result.summary["training"]["steps"]
    training_s = sum(value for name, value in split.items() if name != "validation") * steps / 1000
    assert training_s == pytest.approx(800 / result.summary["speed"]["rows_per_s"], rel=0.03)
    assert split["validation"] > 0
    assert split["checkpoint"] > 0
    assert split["logging"] > 0
    assert min(split["forward"], split["backward"], split["optimizer"]) > 0


@pytest.mark.parametrize("kind", at_once(Sleeps, of=[Sleeps, SleepsInside], seconds=2))
def test_what_a_callback_of_a_persons_own_takes_is_told_apart(tmp_path, kind):
    split = split_of(train_headlines(tmp_path, callbacks={"slow": kind(0.005)}))
    assert split["callbacks"] >= 4.6  # of 5 ms; three of 50 steps are looked at otherwise
    assert all(value >= 0 for value in split.values())


def test_callbacks_are_given_back_as_they_were(tmp_path):
    slow = SleepsInside(0.001)
    train_headlines(tmp_path, callbacks={"slow": slow})
    assert "on_before_optimizer_step" not in vars(slow)


def test_what_a_callback_takes_inside_a_phase_is_not_counted_there_too():
    timer = StepTimer(callbacks={})
    timer._phase_s["optimizer"] += 0.75
    timer.clock.inside_s["optimizer"] += 0.5
    timer.clock.spent["callbacks"] += 0.5
    timer.close()
    parts = timer.times.counted().parts_s
    assert (parts["optimizer"], parts["callbacks"]) == (0.25, 0.5)


def test_what_a_device_does_behind_a_callback_costs_nothing(make_split):
    feed = Feed(make_split([3] * 8), PlanSettings(rows_per_batch=2), kind=FeedKind.resident)
    clock = Clock()
    clock.callbacks = {"mine": 1.2, "other": 0.6}
    curves = RunCurves([], timer=StepTimer(callbacks={}))
    curves.timer.clock = clock
    parts = dict.fromkeys(curves.timer.times.total.parts_s, 0.0) | {
        "forward": 0.6,
        "backward": 1.2,
        "callbacks": 1.8,
    }
    curves.timer.times.total = Split(batches=100, seconds=2.0, parts_s=parts)
    curves.throughput.volume.total = Volume(
        batches=100, steps=100, rows=200, tokens=600, computed=600, seconds=2.0
    )
    found = evidence_of(curves, feed, "32-true", 1.0)
    assert found is not None
    assert found.ms["callbacks"] == pytest.approx(2.0)
    assert found.callbacks == pytest.approx({"mine": 4.0 / 3, "other": 2.0 / 3})


def test_graphs_that_torch_makes_again_and_again_are_counted():
    import torch

    before = {"graphs": 0.0, "seconds": 0.0} | compiled_so_far()
    compiled = torch.compile(lambda numbers: numbers.sin() + 1, backend="eager", dynamic=False)
    for count in (3, 4, 5):
        compiled(torch.ones(count))
    now = compiled_so_far()
    assert now["graphs"] == before["graphs"] + 3
    assert now["seconds"] > before["seconds"]


def test_numbers_that_a_callback_reads_are_counted_and_change_nothing(tmp_path):
    clock = Clock()
    reading = Sleeps(reads=3)
    clock.watch({"reading": reading, "silent": Sleeps()})
    batch = next(iter(batches()))
    for step in range(30):
        clock.note_step(step)
        reading.on_train_batch_end(None, None, None, batch, 0)
    assert clock.reads_a_step == {"reading": 3.0}
    assert clock.callbacks["reading"] > 0
    assert clock.callbacks["silent"] == 0


def batches() -> Iterator[object]:
    import torch

    from flatout.data.batches.flat_batch import FlatBatch

    one = torch.ones(1, dtype=torch.int64)
    yield FlatBatch(
        tokens=one, offsets=torch.tensor([0, 1]), lengths=one, rows=one, num_real=1, step_rows=1
    )


@pytest.mark.soak(seconds=2)
def test_curves_tell_the_parts_and_the_spread_of_steps(tmp_path):
    result = train_headlines(tmp_path, callbacks={"slow": Sleeps(0.003)})
    told = [float(row["time/p50_ms"]) for row in read_curves(result.folder) if row["time/p50_ms"]]
    assert len(told) >= 4
    assert all(value > 3 for value in told)
    spread = result.summary["speed"]["step_percentiles_ms"]
    assert 3 < spread["p50"] <= spread["p90"] <= spread["p99"]
    assert len(result.summary["speed"]["first_steps_ms"]) == FIRST_STEPS


@given(
    some.lists(some.floats(1e-5, 100.0), min_size=FIRST_STEPS + 1, max_size=300),
    some.floats(0.01, 1.0),
)
def test_percentiles_are_those_of_all_steps_to_a_few_percent(seconds, share):
    times = StepTimes()
    for start in range(0, len(seconds), 7):
        times.add(seconds[start : start + 7])
    assert times.first == seconds[:FIRST_STEPS]
    rest = np.sort(seconds[FIRST_STEPS:])
    exact = rest[max(0, int(np.ceil(share * len(rest) - 1e-9)) - 1)]
    assert times.percentile(share) == pytest.approx(exact, rel=0.05)
    restored = StepTimes()
    restored.load_state_dict(times.state_dict())
    assert restored.percentile(share) == times.percentile(share)


class Events:
    """A device that passes an event a second, up to where it has come."""

    def __init__(self) -> None:
        self.made = 0
        self.recorded = 0
        self.passed = 0

    def make(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Events) -> None:
        self.device = device
        self.at = 0

    def record(self) -> None:
        self.device.recorded += 1
        self.at = self.device.recorded

    def query(self) -> bool:
        return self.at <= self.device.passed

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "read before the device had passed it"
        return 1000.0 * (other.at - self.at)


def test_events_are_read_only_when_the_device_has_passed_them():
    device = Events()
    times = DevicePhaseClock(device.make)
    for place in range(3 * 4 + 2):  # three batches, and a half
        times.edge(place % 4)
    assert sum(times.take()[0].values()) == 0
    device.passed = 8
    assert times.take()[0] == {"forward": 2.0, "backward": 2.0, "optimizer": 2.0}
    device.passed = device.recorded
    assert times.take()[0] == {"forward": 1.0, "backward": 1.0, "optimizer": 1.0}
    assert times.take()[0] == {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    made = device.made
    for place in range(6):
        times.edge(place % 4)
    assert device.made == made, "events are used again"


def test_a_batch_that_goes_through_in_pieces_or_again_puts_no_other_out_of_step():
    device = Events()
    times = DevicePhaseClock(device.make)
    for edges in ([0, 1, 2, 3], [0, 1, 1, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]):
        for edge in edges:
            times.edge(edge)
    device.passed = device.recorded
    assert times.take()[0] == {"forward": 3.0, "backward": 3.0, "optimizer": 3.0}


def test_steps_on_a_device_are_timed_from_end_to_end_without_what_lay_between():
    device = Events()
    times = DevicePhaseClock(device.make)
    for batch in range(6):  # of which two make a step
        for place in range(4):
            times.edge(place)
        if batch % 2:
            times.end_step(outside_s=1.5 if batch == 3 else 0.0)
    device.passed = 16
    assert times.take()[1] == [3.0, 8.0 - 1.5]
    device.passed = device.recorded
    assert times.take()[1] == [8.0]
    assert times.take()[1] == []


def test_the_optimizer_of_a_device_ends_before_a_callback_that_waits():
    device = Events()

    class Waits(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            device.recorded += 15  # seconds in which the device has nothing to do

    waits = Waits()
    clock = Clock()
    times = DevicePhaseClock(device.make)
    clock.watch({"Waits": waits})
    hooks = HookPhaseClock(clock, times)
    for edge in range(3):
        hooks.edge(edge)
    waits.on_train_batch_end()
    hooks.edge(3)
    device.passed = device.recorded
    assert times.take()[0] == {"forward": 1.0, "backward": 1.0, "optimizer": 1.0}
    clock.restore_methods()
    assert clock.edge is None, "the next training has hooks of its own"


def test_every_part_has_a_curve():
    from flatout.callbacks.gpu import CURVES

    assert {f"time/{part}_ms" for part in PARTS} <= CURVES.keys()


@pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" not in os.environ,
    reason="groups are handed to workers; with -n0 there are none",
)
def test_tests_that_measure_time_are_handed_to_one_worker(request):
    assert request.node.nodeid.endswith("@timing")
