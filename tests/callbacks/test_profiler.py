"""A close look at a few steps changes none of them, and tells what they were made of."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.autograd import DeviceType

from flatout import BiLSTMConfig, HeadlinesConfig, MonitorConfig, TextDataConfig, UserError, fit
from flatout.callbacks.profile_steps import ProfileConfig, slowest_operators, window
from flatout.callbacks.run_curves import RunCurves
from tests.run_files import model_weights, read_csv


def train_profiled(output, profile: ProfileConfig | None, epochs: int = 2, **settings):
    data = TextDataConfig(sample=HeadlinesConfig(rows=240, eval_rows=40), batch_size=16)
    monitor = MonitorConfig(profile=profile or ProfileConfig())
    return fit(
        data,
        BiLSTMConfig(embedding=8, hidden=8),
        epochs=epochs,
        monitor=monitor,
        output=str(output),
        **settings,
    )


def pauses(every: int):
    return lambda step: (step // every + 1) * every


def test_a_profiled_run_has_the_same_weights_to_the_last_bit(tmp_path):
    plain = train_profiled(tmp_path, None)
    looked = train_profiled(tmp_path, ProfileConfig(enabled=True, wait=2, warmup=2, active=3))
    first = model_weights(plain.folder)
    second = model_weights(looked.folder)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (plain.folder / "trace.json.gz").exists()


def test_the_trace_and_the_table_hold_the_steps_of_the_window_and_no_others(tmp_path, capsys):
    run = train_profiled(tmp_path, ProfileConfig(enabled=True, wait=4, warmup=2, active=3))
    with gzip.open(run.folder / "trace.json.gz", "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    marks = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert {mark for mark in marks if mark.startswith("ProfilerStep")} == {
        f"ProfilerStep#{n}" for n in (2, 3, 4)
    }
    steps = [event for event in events if event["name"] == "aten::_fused_adamw_"]
    groups = 2  # matrices decay, biases do not
    assert len(steps) == 3 * groups
    rows = read_csv(run.folder / "operators.csv")
    assert len(rows) == 10
    times = [float(row["self_ms_per_step"]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0
    assert 0.5 < sum(float(row["share"]) for row in rows) <= 1
    adam = sum(float(event["dur"]) for event in steps) / 1000 / 3
    told = {row["operator"]: row for row in rows}
    if "aten::_fused_adamw_" in told:
        assert float(told["aten::_fused_adamw_"]["self_ms_per_step"]) <= adam * 1.01
    said = capsys.readouterr().out
    assert "profile: 3 steps, 7 to 9: trace.json.gz for ui.perfetto.dev, operators.csv" in said
    assert f"  {rows[0]['operator']}" in said


@pytest.mark.soak(seconds=3)
def test_a_run_shorter_than_the_window_gets_what_it_can(tmp_path, capsys):
    run = train_profiled(tmp_path, ProfileConfig(enabled=True), epochs=1, trainer={"max_steps": 5})
    assert "profile: 4 of 8 steps, 2 to 5" in capsys.readouterr().out
    assert (run.folder / "trace.json.gz").stat().st_size > 1000


@pytest.mark.soak(seconds=3)
def test_a_trace_that_cannot_be_written_ends_no_training(tmp_path, capsys):
    (tmp_path / "run" / "trace.json.gz" / "in the way").mkdir(parents=True)
    run = train_profiled(tmp_path, ProfileConfig(enabled=True), epochs=1, folder=tmp_path / "run")
    assert run.summary["training"]["steps"] == 15
    assert "profile: cannot be written (" in capsys.readouterr().out
    assert not list(tmp_path.glob("run/.new-*"))


def test_time_that_belongs_to_no_step_is_not_counted():
    curves = RunCurves([], 1)
    curves.leave_out(1000)
    state = curves.state_dict()
    assert [state[part]["now"]["seconds"] for part in ("timer", "throughput")] == pytest.approx(
        [-1000] * 2, abs=50
    )


def test_a_window_is_laid_between_two_validations():
    config = ProfileConfig(wait=20, warmup=3, active=8)
    found = window(config, 0, 100, pauses(25))
    assert (found.start, found.warmup, found.active) == (25, 3, 8)
    assert window(config, 40, 100, pauses(25)).start == 60  # 40 + 20 leaves room before 75
    assert window(config, 0, 100, pauses(1000)).start == 20


@given(
    some.integers(0, 30),
    some.integers(1, 6),
    some.integers(1, 9),
    some.integers(0, 40),
    some.integers(0, 60),
    some.integers(1, 30),
)
def test_a_window_lies_within_training_and_across_no_pause(wait, warmup, active, done, more, every):
    total = done + more
    found = window(
        ProfileConfig(wait=wait, warmup=warmup, active=active), done, total, pauses(every)
    )
    if more == 0:
        assert found is None
        return
    assert done <= found.start < found.stop <= total
    assert found.active >= 1
    assert found.warmup <= warmup
    assert found.active <= active
    assert pauses(every)(found.start) >= found.stop
    lengths = [min(pauses(every)(place), total) - place for place in range(done, total)]
    assert found.stop - found.start == min(warmup + active, max(lengths))


def test_on_a_gpu_the_time_is_that_of_the_kernels():
    def entry(key, host, device, kind=DeviceType.CPU, is_user_annotation=False):
        return SimpleNamespace(
            key=key,
            count=4,
            self_cpu_time_total=host,
            self_device_time_total=device,
            device_type=kind,
            is_user_annotation=is_user_annotation,
        )

    averages = [
        entry("aten::add", 900.0, 100.0),
        entry("aten::mm", 100.0, 300.0),
        entry("gemm_kernel", 0.0, 300.0, DeviceType.CUDA),
        entry("ProfilerStep*", 5000.0, 5000.0, is_user_annotation=True),
    ]
    found = slowest_operators(averages, 2, on_device=True)
    assert [(each.operator, each.calls, each.self_ms_per_step, each.share) for each in found] == [
        ("aten::mm", 4, 0.15, 0.75),
        ("aten::add", 4, 0.05, 0.25),
    ]
    assert [each.operator for each in slowest_operators(averages, 2, on_device=False)] == [
        "aten::add",
        "aten::mm",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wait", -1),
        ("warmup", 0),
        ("active", 0),
        ("active", 5000),
    ],
)
def test_settings_out_of_range_name_themselves(name, value):
    with pytest.raises(UserError, match=f"monitor.profile.{name}: {value}"):
        ProfileConfig(**{name: value})
