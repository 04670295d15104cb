"""A multirun of Hydra: its trials end, hang, fail or are interrupted, and the same words go on."""

from __future__ import annotations

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

import train
from flatout import (
    UserError,
)
from flatout.distributed.signals import ASKING
from flatout.errors import RunBroke
from flatout.report.summary import read_summary
from flatout.sweep.many import Multirun, _over_seeds, begun_with, newest_of, print_resuming, run_all
from flatout.sweep.trial import Ending, Status
from tests.composed import run_train
from tests.params import at_once
from tests.run_files import read_csv
from tests.started import begin, wait_for
from tests.sweep.planted import Planted
from tests.sweep.trials import statuses, trial
from tests.warm import Command, begin_warm


@pytest.mark.soak(seconds=3)
def test_of_a_list_of_trials_those_that_failed_are_named_at_the_end(tmp_path, capsys):
    trials = [trial(tmp_path, 0, callbacks={"planted": Planted("raise")}), trial(tmp_path, 1)]
    with pytest.raises(
        RunBroke, match=r"trial 0: ValueError: planted here\n1 of 2 trials failed"
    ) as caught:
        run_all(trials, of=Multirun(tmp_path, [], "python -m train -m"))
    assert str(tmp_path) in str(caught.value)
    said = capsys.readouterr().out
    assert "trial 0: failed" in said
    assert "trial 1: complete, val/accuracy" in said


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


def first_trace(place: Path, process: Command) -> Path:
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
    assert begun_with(folder) == ["seed=0,1"]
    assert newest_of(["seed=0,1"], tmp_path) == folder
    assert newest_of(["seed=0,2"], tmp_path) is None
    again = run_all([replace(each, is_again=True) for each in trials], of=of)
    assert [ending.note for ending in again] == ["had finished before", ""]
    assert f"page: {folder}/sweep.html" in capsys.readouterr().out
    rows = read_csv(folder / "sweep.csv")
    assert [(row["number"], row["value"]) for row in rows] == [
        (str(each), str(again[each].value)) for each in (0, 1)
    ]
    page = (folder / "sweep.html").read_text()
    assert "python -m train seed=" in page
    assert 'href="./1/report.html"' in page
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
    mean = sum(values) / 2
    spread = abs(values[0] - values[1]) / 2**0.5
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
    assert left.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["s", "multirun.json"]


def test_a_trial_that_cannot_be_composed_leaves_no_typed_secret(tmp_path, monkeypatch):
    words = ["-m", "seed=1,abc", "data.validation=https://me:sw0rdfish@x.invalid/y.csv"]
    assert run_train([*words, f"hydra.sweep.dir={tmp_path}/many"], monkeypatch) == 2
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        assert "sw0rdfish" not in file.read_text(encoding="utf-8")
    assert (tmp_path / "many" / "multirun.yaml").is_file()


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
