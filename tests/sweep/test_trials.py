"""Trials are processes of their own: what goes wrong in one stays there, and none is
left behind.
"""

from __future__ import annotations

import csv
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from flatout import (
    CheckpointConfig,
    OptimConfig,
    RunConfig,
    TextDataConfig,
    UserError,
    fit,
)
from flatout.errors import as_seconds
from flatout.report.summary import read_summary
from flatout.run.job import RunJob
from flatout.sweep.trial import Status, Trial
from flatout.sweep.trials import Readings, make_slots
from tests.sweep.planted import Planted
from tests.sweep.trials import MODEL, config, ended, trial


def test_a_trial_gives_what_the_run_alone_gives_and_takes_no_memory_here(tmp_path):
    alone = fit(**vars_of(config()), folder=tmp_path / "alone")
    before = psutil.Process().memory_info().rss
    of_folder = trial(tmp_path)
    found = ended([of_folder])
    assert found[0].status is Status.complete
    assert found[0].value == alone.objective
    seconds_read_later, _ = of_folder.job.read_ending(of_folder.folder)
    assert found[0].seconds == seconds_read_later > 0
    assert found[0].metrics == pytest.approx(alone.metrics)
    assert psutil.Process().memory_info().rss - before < 20e6
    assert "run folder:" in (tmp_path / "0" / "output.txt").read_text()
    assert json.loads((tmp_path / "0" / "summary.json").read_text())["status"] == "finished"


def vars_of(settings: RunConfig) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in RunConfig.__dataclass_fields__}


@pytest.mark.soak(seconds=3)
def test_what_goes_wrong_stays_with_its_trial(tmp_path):
    planted = {
        number: {"callbacks": {"planted": Planted(what)}}
        for number, what in enumerate(("raise", "die"))
    }
    wrong = TextDataConfig(train=str(tmp_path / "nothing.csv"))
    trials = [trial(tmp_path, number, **settings) for number, settings in planted.items()]
    trials += [
        Trial(2, tmp_path / "2", RunJob(RunConfig(data=wrong, model=MODEL)), [], []),
        trial(tmp_path, 3),
    ]
    found = ended(trials)
    assert [found[number].status.value for number in range(4)] == [
        "failed",
        "failed",
        "failed",
        "complete",
    ]
    assert found[0].note == "ValueError: planted here"
    assert found[1].note == "was ended by SIGKILL (out of memory is the usual cause)"
    assert "no such file" in found[2].note
    assert found[2].is_mistake
    assert "Traceback" in (tmp_path / "0" / "output.txt").read_text()
    assert [
        json.loads((tmp_path / f"{n}" / "summary.json").read_text())["status"] for n in (0, 1)
    ] == ["failed"] * 2


@pytest.mark.soak(seconds=6)
def test_a_trial_that_hangs_is_stopped_at_its_limit(tmp_path):
    began = time.monotonic()
    found = ended(
        [trial(tmp_path, 0, callbacks={"planted": Planted("hang")}), trial(tmp_path, 1)],
        trial_s=4.0,
    )
    assert time.monotonic() - began < 40
    assert found[0].status is Status.failed
    assert found[0].note == "ran longer than 4 s and was stopped"
    assert found[1].status is Status.complete
    assert json.loads((tmp_path / "0" / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.soak(seconds=5)
def test_when_the_time_is_over_what_runs_is_stopped_and_nothing_else_starts(tmp_path):
    long = {"trainer": {"max_epochs": 100_000}, "checkpoint": CheckpointConfig(patience=None)}
    found = ended(
        [trial(tmp_path, number, **long) for number in range(3)], until=time.monotonic() + 4
    )
    assert {number: ending.status.value for number, ending in found.items()} == {0: "stopped"}


@pytest.mark.soak(seconds=4)
def test_trials_at_once_share_the_cores(tmp_path):
    both = make_slots(2)
    assert not set(both[0].cores) & set(both[1].cores)
    found = ended([trial(tmp_path, number) for number in range(4)], parallel=2)
    assert [found[number].status.value for number in range(4)] == ["complete"] * 4
    assert len({ending.value for ending in found.values()}) == 1


def test_gpus_are_handed_out_and_shared_where_there_are_too_few(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-abc,7")
    assert [slot.gpus for slot in make_slots(2)] == [["4", "5"], ["GPU-abc", "7"]]
    assert make_slots(2)[1].environment() == {"CUDA_VISIBLE_DEVICES": "GPU-abc,7"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert [slot.gpus for slot in make_slots(2)] == [["3"], ["3"]]


@pytest.mark.parametrize("parallel", [0, 999])
def test_more_at_once_than_there_is_room_for_is_refused(parallel):
    with pytest.raises(UserError, match=rf"launcher.parallel: {parallel} \(1 to "):
        make_slots(parallel)


@pytest.mark.soak(seconds=5)
def test_a_trial_may_use_several_devices(tmp_path):
    found = ended([trial(tmp_path, 0, trainer={"max_epochs": 2, "devices": 2})])
    assert found[0].status is Status.complete, found[0].note
    assert json.loads((tmp_path / "0" / "summary.json").read_text())["hardware"]["count"] == 2
    assert "rows a step: 64 rows" in (tmp_path / "0" / "output.txt").read_text()


@pytest.mark.soak(seconds=2)
def test_the_first_trials_tell_the_pruner_of_each_validation_in_order(tmp_path):
    told = []

    def judge(trial: Trial, count: int, value: float) -> bool:
        told.append((trial.number, count))
        return trial.number == 1 and count == 2

    many = {"trainer": {"max_epochs": 4}, "checkpoint": CheckpointConfig(patience=None)}
    found = ended([trial(tmp_path, number, **many) for number in range(2)], judge=judge)
    assert told == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2)]
    assert found[0].status is Status.complete
    assert found[1].status is Status.pruned
    assert found[1].note == "after 2 validations"


def test_readings_take_whole_rows_only(tmp_path):
    path = tmp_path / "metrics.csv"
    readings = Readings(tmp_path, "val/accuracy")
    assert readings.new() == []
    path.write_text("step,train/loss,val/accuracy\n10,0.5,\n20,,0.2")
    assert readings.new() == []
    with path.open("a") as file:
        file.write("5\n30,0.4,\n40,,0.75\n")
    assert readings.new() == [0.25, 0.75]
    assert readings.new() == []


def test_rows_that_a_trial_takes_back_and_writes_again_are_told_once(tmp_path):
    path = tmp_path / "metrics.csv"
    readings = Readings(tmp_path, "val/accuracy")
    rows = ["step,train/loss,val/accuracy", "10,0.5,", "20,,0.25", "30,0.4,", "40,,0.75"]
    path.write_text("".join(f"{row}\n" for row in rows))
    assert readings.new() == [0.25, 0.75]
    path.write_text("".join(f"{row}\n" for row in rows[:4]))
    assert readings.new() == []
    with path.open("a") as file:
        file.write("40,,0.75\n60,,0.875\n")
    assert readings.new() == [0.875]


@pytest.mark.soak(seconds=4)
def test_a_trial_that_was_stopped_goes_on_where_it_was(tmp_path):
    long = {"trainer": {"max_epochs": 12}, "checkpoint": CheckpointConfig(patience=None)}
    alone = fit(**vars_of(config(**long)), folder=tmp_path / "alone")
    first = trial(tmp_path, **long)
    stopped = ended([first], judge=lambda each, count, value: count == 2)
    assert stopped[0].status is Status.pruned
    seen: list[int] = []
    again = ended(
        [replace(first, is_again=True)], judge=lambda each, count, value: bool(seen.append(count))
    )
    assert (again[0].status, again[0].metrics) == (Status.complete, alone.metrics)
    assert seen == list(range(1, 13))
    folder = tmp_path / "0"
    assert read_summary(folder)["training"]["resumed_from"] >= 2 * 7
    assert [row[:2] for row in rows_of(folder)] == [row[:2] for row in rows_of(tmp_path / "alone")]


@pytest.mark.soak(seconds=3)
def test_only_what_the_same_words_began_is_gone_on_with(tmp_path):
    first = replace(trial(tmp_path), overrides=["data.batch_size=32"])
    assert not first.job.can_resume(first.folder, first.overrides)
    ended([first])
    assert first.job.can_resume(first.folder, first.overrides)
    other = replace(first, overrides=["data.batch_size=64"], is_again=True)
    assert not other.job.can_resume(other.folder, other.overrides)
    again = ended([other])
    assert again[0].status is Status.complete
    assert read_summary(tmp_path / "0")["training"]["resumed_from"] is None
    assert (tmp_path / "0" / "overrides.txt").read_text() == "data.batch_size=64\n"


@pytest.mark.soak(seconds=3)
def test_a_trial_that_is_no_longer_the_same_run_is_refused_with_the_difference(tmp_path):
    ended([trial(tmp_path)])
    again = ended([replace(trial(tmp_path, optim=OptimConfig(lr=1e-3)), is_again=True)])
    assert again[0].status is Status.failed
    assert again[0].is_mistake
    assert "optim.lr was 0.01 and is 0.001" in again[0].note


def rows_of(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("45", 45),
        ("1.5m", 90),
    ],
)
def test_durations_are_written_as_people_do(text, expected):
    assert as_seconds(text, "for") == expected


@pytest.mark.parametrize("text", ["soon", "-3m", "0", "3 weeks", ""])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(UserError, match=r"is no duration \(such as 90s, 30m, 2h\)"):
        as_seconds(text, "for")


def test_threads_of_a_slot_are_its_cores(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: set_to.append(cores))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    make_slots(1)[0].take()
    assert set_to == [make_slots(1)[0].cores, len(make_slots(1)[0].cores)]
