"""Trials are processes of their own: what goes wrong in one stays there, and none is
left behind.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import train
from flatout import (
    BiLSTMConfig,
    CheckpointConfig,
    HeadlinesConfig,
    MonitorConfig,
    OptimConfig,
    RunConfig,
    TextDataConfig,
    UserError,
    fit,
)
from flatout.distributed.signals import ASKING
from flatout.errors import RunBroke, as_seconds
from flatout.report.summary import read_summary
from flatout.run.job import RunJob
from flatout.sweep.many import Multirun, _over_seeds, begun_with, newest_of, print_resuming, run_all
from flatout.sweep.trial import Board, Ending, Judge, Status, Trial
from flatout.sweep.trials import Readings, TimeLimits, make_slots, run_trials
from tests.composed import run_train
from tests.params import at_once
from tests.run_files import read_csv
from tests.started import begin, wait_for
from tests.sweep.planted import Planted
from tests.warm import begin_warm

MODEL = BiLSTMConfig(hidden=8, embedding=8)
BOARD = Board("trials", "val/accuracy", "max", 4)


def config(**settings: Any) -> RunConfig:
    data = TextDataConfig(sample=HeadlinesConfig(rows=200, eval_rows=50, classes=3), batch_size=32)
    given = {
        "trainer": {"max_epochs": 2},
        "optim": OptimConfig(lr=1e-2),
        "precision": "fp32",
        **settings,
    }
    return RunConfig(data=data, model=MODEL, monitor=MonitorConfig(progress=False), **given)


def trial(folder: Path, number: int = 0, **settings: Any) -> Trial:
    return Trial(number, folder / str(number), RunJob(config(**settings)), [], [f"number={number}"])


def ended(
    trials: list[Trial], parallel: int = 1, judge: Judge | None = None, **limits: float
) -> dict[int, Ending]:
    waiting = iter(trials)
    running = run_trials(
        lambda: next(waiting, None),
        make_slots(parallel),
        BOARD,
        limits=TimeLimits(**limits),
        judge=judge,
    )
    return {trial.number: ending for trial, ending in running}


def test_a_trial_gives_what_the_run_alone_gives_and_takes_no_memory_here(tmp_path):
    alone = fit(**vars_of(config()), folder=tmp_path / "alone")
    before = psutil.Process().memory_info().rss
    found = ended([trial(tmp_path)])
    assert found[0].status is Status.complete
    assert found[0].value == alone.objective and found[0].metrics == pytest.approx(alone.metrics)
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
    assert "no such file" in found[2].note and found[2].is_mistake
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
    assert (
        found[0].status is Status.failed and found[0].note == "ran longer than 4 s and was stopped"
    )
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
    assert found[1].status is Status.pruned and found[1].note == "after 2 validations"


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
    assert again[0].status is Status.failed and again[0].is_mistake
    assert "optim.lr was 0.01 and is 0.001" in again[0].note


def rows_of(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.soak(seconds=3)
def test_of_a_list_of_trials_those_that_failed_are_named_at_the_end(tmp_path, capsys):
    trials = [trial(tmp_path, 0, callbacks={"planted": Planted("raise")}), trial(tmp_path, 1)]
    with pytest.raises(
        RunBroke, match=r"trial 0: ValueError: planted here\n1 of 2 trials failed"
    ) as caught:
        run_all(trials, of=Multirun(tmp_path, [], "python -m train -m"))
    assert str(tmp_path) in str(caught.value)
    said = capsys.readouterr().out
    assert "trial 0: failed" in said and "trial 1: complete, val/accuracy" in said


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("45", 45), ("1.5m", 90)]
)
def test_durations_are_written_as_people_do(text, expected):
    assert as_seconds(text, "for") == expected


@pytest.mark.parametrize("text", ["soon", "-3m", "0", "3 weeks", ""])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(UserError, match=r"is no duration \(such as 90s, 30m, 2h\)"):
        as_seconds(text, "for")


def multirun(*words: str, hidden: str = "8,16", begin: Callable[[list[str]], Any] = begin) -> Any:
    return begin(["train", "-m", "data.sample.rows=300", f"model.hidden={hidden}", *words])


@pytest.mark.soak(seconds=9)
@pytest.mark.parametrize(
    "number", at_once(signal.SIGINT, of=[signal.SIGINT, signal.SIGKILL], seconds=20)
)
def test_when_a_multirun_is_stopped_nothing_is_left_running(number, tmp_path):
    process = multirun(
        "trainer.max_epochs=100000",
        "checkpoint.patience=null",
        "launcher.parallel=2",
        f"hydra.sweep.dir={tmp_path}/many",
    )
    for trial_number in (0, 1):
        wait_for(tmp_path / "many" / str(trial_number) / "checkpoints" / "last", process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    assert process.returncode == (-number if number is signal.SIGKILL else 130)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.soak(seconds=25)
def test_a_multirun_of_several_devices_each_ends_and_hangs_nowhere(tmp_path):
    process = multirun(
        "trainer.devices=2", "trainer.max_epochs=1", f"hydra.sweep.dir={tmp_path}/many"
    )
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert said.count(": complete, val/accuracy") == 2
    counts = [
        json.loads((tmp_path / "many" / f"{n}" / "summary.json").read_text())["hardware"]["count"]
        for n in (0, 1)
    ]
    assert counts == [2, 2]


@pytest.mark.soak(seconds=20)
@pytest.mark.parametrize("begin", [begin_warm, begin])
def test_a_multirun_that_a_signal_ended_goes_on_by_the_same_words(
    begin, tmp_path, capfd, monkeypatch
):
    words = ["trainer.max_epochs=1,100000", "checkpoint.patience=null", f"output={tmp_path}"]
    first = multirun(*words, hidden="8", begin=begin)
    last = first_trace(tmp_path, first)
    os.killpg(first.pid, signal.SIGTERM)  # as `timeout` and batch systems do
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 143
    assert (
        f"to resume: python -m train -m data.sample.rows=300 model.hidden=8 {' '.join(words)}"
        " resume=auto" in said
    )
    folder = last.parents[2]
    assert [read_summary(folder / name)["status"] for name in "01"] == ["finished", "interrupted"]
    rows = read_csv(folder / "sweep.csv")
    assert [(row["status"], row["note"]) for row in rows] == [
        ("complete", ""),
        ("stopped", "interrupted"),
    ]
    assert float(rows[1]["value"]) > 0
    step = last.resolve().name
    kept = (folder / "0" / "summary.json").read_bytes()
    monkeypatch.setattr(sys, "argv", ["train"])
    threading.Thread(target=interrupt_after, args=(last, step), daemon=True).start()
    with pytest.raises(SystemExit) as left:
        train.main(["-m", "data.sample.rows=300", "model.hidden=8", *words, "resume=auto"])
    assert left.value.code == 130
    said = capfd.readouterr().out
    assert f"resume: continuing in {folder}" in said
    assert re.search(
        r"trial 0: complete, val/accuracy 0\.\d+, (?!0\.0 )\d+\.\d s, had finished before", said
    )
    assert (folder / "0" / "summary.json").read_bytes() == kept
    assert read_summary(folder / "1")["training"]["resumed_from"] == int(step.removeprefix("step-"))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def interrupt_after(last: Path, step: str) -> None:
    """Press Ctrl-C in this process when the link points to another checkpoint."""
    for _ in range(900):
        if last.resolve().name not in (step, "last"):
            os.kill(os.getpid(), signal.SIGINT)
            return
        time.sleep(0.1)


def first_trace(place: Path, process: Any) -> Path:
    """The link to the last checkpoint of the second trial, once it is there."""
    for _ in range(900):
        if found := list(place.glob("*/*/1/checkpoints/last")):
            return found[0]
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("no checkpoint in 90 s")


@pytest.mark.soak(seconds=3)
def test_trials_that_have_finished_are_left_as_they_are_and_missing_ones_are_trained(
    tmp_path, capsys
):
    folder = tmp_path / "2026-11-22_10-00-00"
    trials = [replace(trial(folder, number), overrides=[f"seed={number}"]) for number in range(2)]
    of = Multirun(folder, ["seed=0,1"], "python -m train -m seed=0,1 resume=auto")
    first = run_all(trials[:1], of=of)
    assert begun_with(folder) == ["seed=0,1"] and newest_of(["seed=0,1"], tmp_path) == folder
    assert newest_of(["seed=0,2"], tmp_path) is None
    again = run_all([replace(each, is_again=True) for each in trials], of=of)
    assert [ending.note for ending in again] == ["had finished before", ""]
    assert f"page: {folder}/sweep.html" in capsys.readouterr().out
    rows = read_csv(folder / "sweep.csv")
    assert [(row["number"], row["value"]) for row in rows] == [
        (str(each), str(again[each].value)) for each in (0, 1)
    ]
    page = (folder / "sweep.html").read_text()
    assert "python -m train seed=" in page and 'href="./1/report.html"' in page
    assert (again[0].value, again[0].metrics) == (first[0].value, first[0].metrics)
    capsys.readouterr()
    whole = run_all([replace(each, is_again=True) for each in trials], of=of)
    assert [ending.value for ending in whole] == [ending.value for ending in again]
    assert (
        f"every trial in {folder} has finished; there is nothing left to train"
        in capsys.readouterr().out
    )


@pytest.mark.soak(seconds=3)
def test_of_trials_that_differ_in_their_seed_the_mean_and_its_spread_are_printed(tmp_path, capsys):
    trials = [
        replace(trial(tmp_path, seed, seed=seed), changed=[f"seed={seed}"]) for seed in range(2)
    ]
    values = [
        ending.value or 0.0
        for ending in run_all(trials, of=Multirun(tmp_path, [], "python -m train -m seed=0,1"))
    ]
    mean, spread = sum(values) / 2, abs(values[0] - values[1]) / 2**0.5
    said = capsys.readouterr().out
    assert f"val/accuracy {mean:.4f} ± {spread:.4f}" in next(
        line for line in said.splitlines() if "over 2 seeds" in line
    )


def test_seeds_of_each_setting_have_a_mean_of_their_own(tmp_path):
    changed = [
        ["model.hidden=8", "seed=0"],
        ["model.hidden=8", "seed=1"],
        ["seed=0", "name=a b"],
        ["name=a b", "seed=1"],
    ]
    trials = [
        replace(trial(tmp_path, number), changed=words) for number, words in enumerate(changed)
    ]
    ended = [
        Ending(Status.complete, 1.0, metrics={"val/accuracy": 0.5 + number / 10})
        for number in range(4)
    ]
    assert _over_seeds(trials, ended) == [
        "model.hidden=8 over 2 seeds: val/accuracy 0.5500 ± 0.0707",
        "'name=a b' over 2 seeds: val/accuracy 0.7500 ± 0.0707",
    ]
    assert _over_seeds(trials[1:3], ended[1:3]) == []


@pytest.fixture
def usual_answers() -> Iterator[None]:
    """Signals are heard as in a terminal, also where the tests run under nohup."""
    before = {number: signal.getsignal(number) for number in ASKING}
    for number in ASKING:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    yield
    for number, answer in before.items():
        signal.signal(number, answer)


@pytest.mark.usefixtures("usual_answers")
@pytest.mark.parametrize("number", ASKING)
def test_every_signal_that_asks_trials_to_end_is_heard_once_and_says_how_to_go_on(number, capsys):
    before = signal.getsignal(number)
    with pytest.raises((KeyboardInterrupt, SystemExit)) as left, print_resuming("this"):
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), number)  # an echo: it must not disturb the ending
            time.sleep(0.01)
    assert capsys.readouterr().out == "to resume: this\n"
    assert number == signal.SIGINT or left.value.code == 128 + number
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume=outputs/x"], "resume: outputs/x is one run, and -m are many. Set resume=auto"),
        (["resume=auto", "hydra.sweep.dir=s"], "holds trials of other words: model.hidden=8,32"),
    ],
)
def test_what_a_multirun_cannot_go_on_with_is_refused(
    words, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "multirun.json").write_text('{"schema": 1, "words": ["model.hidden=8,32"]}')
    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(SystemExit) as left:
        train.main(["-m", "model.hidden=8,16", *words])
    assert left.value.code == 2 and message in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["s", "multirun.json"]


def test_threads_of_a_slot_are_its_cores(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: set_to.append(cores))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    make_slots(1)[0].take()
    assert set_to == [make_slots(1)[0].cores, len(make_slots(1)[0].cores)]


def statuses(folder: Path) -> list[str]:
    return [read_summary(folder / name)["status"] for name in "01"]


@pytest.mark.soak(seconds=5)
def test_hydra_s_own_launcher_runs_all_trials_in_one_process(tmp_path, monkeypatch):
    words = [
        "-m",
        "data.sample.rows=300",
        "model.hidden=8,16",
        "trainer.max_epochs=1",
        "hydra/launcher=basic",
    ]
    assert run_train([*words, f"hydra.sweep.dir={tmp_path}/many"], monkeypatch) == 0
    assert statuses(tmp_path / "many") == ["finished", "finished"]


@pytest.mark.soak(seconds=3)
def test_trials_of_a_module_of_one_s_own_are_compared_by_what_it_logs(
    tmp_path, monkeypatch, capsys
):
    page = (Path(__file__).parents[2] / "docs" / "own_parts.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0].replace("val_accuracy", "val/accuracy")
    (tmp_path / "ownpkg.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    own = ["task._target_=ownpkg.MyModule", "data._target_=ownpkg.MyData", "allow_targets=[ownpkg]"]
    words = [
        "-m",
        *own,
        "task.hidden=4,8",
        "checkpoint.metric=val/accuracy",
        "trainer.max_epochs=1",
        "logger=none",
    ]
    assert (
        run_train([*words, "precision=fp32", f"hydra.sweep.dir={tmp_path}/many"], monkeypatch) == 0
    )
    assert re.search(r"trial [01]: complete, val/accuracy 0\.\d+", capsys.readouterr().out)
    assert statuses(tmp_path / "many") == ["finished", "finished"]


@pytest.mark.soak(seconds=40)
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_other_launchers_still_run_their_trials(launcher, tmp_path):
    done = multirun(
        "trainer.max_epochs=1", f"hydra/launcher={launcher}", f"hydra.sweep.dir={tmp_path}/many"
    )
    said, _ = done.communicate(timeout=180)
    assert done.returncode == 0, said
    assert statuses(tmp_path / "many") == ["finished", "finished"]


def test_nothing_that_lies_in_a_folder_is_overwritten(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "notes.txt").write_text("mine")
    of = Multirun(tmp_path, [], "python -m train -m")
    with pytest.raises(
        UserError, match=r"hydra.sweep.dir: .*/0 holds something already. Choose another"
    ):
        run_all([trial(tmp_path, 0)], of=of)
    with pytest.raises(UserError, match=r"hydra.sweep.subdir: .*/1 twice"):
        run_all([trial(tmp_path, 1), trial(tmp_path, 1)], of=of)
    assert (tmp_path / "0" / "notes.txt").read_text() == "mine"
