"""What `bench rates` and the rows of launches measure on a card is run here on the CPU, at the
smallest size; a trace and a page stand in for those of a card.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from benchmarks import rates as bench
from benchmarks.card import launches, rates
from benchmarks.card.place import Place
from benchmarks.claim import Options, not_here, reaching
from benchmarks.usual_sequences import GraphedLoop, TunedLoop
from torch import Tensor

from flatout.engine.captures import GraphUse

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about trainers as small as these
LSTM = "LSTM, 32 windows a step"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(torch.device("cpu"), tmp_path, Options(tiny=True))


def test_whole_epochs_are_timed_behind_the_first_steps(place):
    timed = rates.train(place, rates.WORKLOADS[LSTM])
    assert timed.seconds > 0
    assert timed.steps == 45  # one epoch of windows, 32 a step
    assert timed.rows == 45 * 32
    assert timed.replayed == "plain steps"  # a CPU captures none


@pytest.mark.soak(seconds=2)
def test_short_epochs_are_timed_until_there_are_enough_steps(place):
    clock = rates.EpochClock(place)
    clock._warm = 46
    clock._least = 60
    timed = rates.train(place, rates.WORKLOADS[LSTM], clock=clock)
    assert (timed.steps, timed.rows) == (90, 90 * 32)  # the third and fourth epoch


def test_a_trace_says_how_long_a_card_was_busy_and_what_the_host_asked_for(tmp_path):
    """Kernels of two streams overlap; a replay is one launch."""

    def event(kind: str, name: str, begin: float, us: float) -> dict[str, object]:
        return {"cat": kind, "name": name, "ts": begin, "dur": us, "ph": "X"}

    events = [
        event("kernel", "gemm", 0, 3),
        event("kernel", "norm", 2, 3),
        event("gpu_memcpy", "Memcpy HtoD", 10, 1),
        event("kernel", "add", 10.25, 0.5),
        event("cuda_runtime", "cudaGraphLaunch", 0, 9),
        event("cuda_runtime", "cudaLaunchKernelExC", 0, 9),
        event("cuda_driver", "cuLaunchKernelEx", 0, 9),
        event("cuda_runtime", "cudaStreamSynchronize", 0, 9),
        event("cpu_op", "aten::add", 0, 9),
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    assert rates.read_trace(path) == rates.OnCard(busy_s=6e-6, launches=3)


@pytest.mark.soak(seconds=2)
def test_the_timed_epochs_are_profiled(place):
    on_card, steps = rates.profile_steps(place, rates.WORKLOADS[LSTM], GraphUse.auto)
    assert steps == 45
    assert on_card == rates.OnCard(0.0, 0)  # a CPU has no kernels
    assert "aten::mse_loss" in (place.folder / "trace.json").read_text(encoding="utf-8")


@dataclass
class Again:
    """In place of a graph: what was captured is called again."""

    replay: Callable[[], object]


class CallsAgain:
    num_bytes = 0

    def capture(self, function: Callable[[], None]) -> Again:
        return Again(function)


def windows() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(70, 6, 3)
    return inputs, inputs.sum((1, 2))[:, None]


def test_a_captured_loop_trains_as_the_tuned_one_it_is_made_of():
    inputs, targets = windows()
    torch.manual_seed(1)
    tuned = TunedLoop(inputs, targets, 4, 16)
    torch.manual_seed(1)
    graphed = GraphedLoop(inputs, targets, 4, 16, CallsAgain())
    torch.manual_seed(2)
    assert graphed.epoch() > 0
    torch.manual_seed(2)
    order = torch.randperm(70)
    # Three steps on the first rows come before its capture; the last rows make no whole batch.
    for chosen in (*[torch.arange(16)] * 3, *order[:64].split(16)):
        take_step(tuned, chosen)
    for expected, weight in zip(tuned.model.parameters(), graphed.model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected)
    assert graphed.total > 0


def take_step(loop: TunedLoop, chosen: Tensor) -> None:
    loop.optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(loop.model(loop.inputs[chosen]), loop.targets[chosen])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
    loop.optimizer.step()


def test_a_card_has_one_row_which_a_later_measurement_replaces(tmp_path):
    page = tmp_path / "card_rates.md"
    page.write_text(bench.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    for card, rate in (("NVIDIA X", "1"), ("NVIDIA A", "2"), ("NVIDIA X", "3")):
        bench.add_row(page, card, [rate] * 6, "torch 9")
    lines = page.read_text(encoding="utf-8").splitlines()
    begin = lines.index("|---|---:|---:|---:|---:|---:|---:|---|")
    assert lines[begin + 1 : begin + 4] == [
        "| NVIDIA A | 2 | 2 | 2 | 2 | 2 | 2 | torch 9 |",
        "| NVIDIA X | 3 | 3 | 3 | 3 | 3 | 3 | torch 9 |",
        "",
    ]
    assert "## Add a row" in lines


def test_a_rate_that_was_not_measured_is_a_dash():
    found = [reaching(row, 1234.5, "", least=None) for row in rates.RATE_ROWS[1:]]
    found.append(not_here(rates.RATE_ROWS[0], "its time was over"))
    assert bench.rates_of(found) == ["–", *["1,234"] * 5]


def test_without_a_card_no_row_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(bench, "PAGE", tmp_path / "none.md")
    found = list(bench.claims(Options()))
    assert [claim.claim for claim in found] == list(rates.RATE_ROWS)
    assert not any(claim.applies for claim in found)
    assert not bench.PAGE.exists()


@pytest.mark.soak(seconds=60)
def test_every_rate_is_measured(place):
    found = list(rates.rate_claims(place))
    assert [claim.claim for claim in found] == list(rates.RATE_ROWS)
    assert all(claim.ours > 0 for claim in found)


@pytest.mark.soak(seconds=20)
def test_rows_of_launches_name_what_only_a_card_has(place, monkeypatch):
    monkeypatch.setattr(launches, "WORKLOADS", {LSTM: rates.WORKLOADS[LSTM]})
    found = list(launches.launch_claims(place))
    assert [claim.claim for claim in found] == [
        row for row in launches.LAUNCH_ROWS if row.startswith(LSTM)
    ]
    assert [claim.applies for claim in found] == [True, True, False, False, False]


@pytest.mark.soak(seconds=60)
def test_the_encoder_is_timed_against_the_trainer_over_as_many_steps(place):
    pytest.importorskip("accelerate", reason="the Trainer's side needs the extra bench")
    quick = replace(place, options=Options(tiny=True, quick=True))
    found = list(launches.trainer_claims(quick))
    assert [claim.claim for claim in found] == list(launches.TRAINER_ROWS)
    assert all(claim.ours > 0 and claim.theirs for claim in found)
