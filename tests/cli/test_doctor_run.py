"""`python -m flatout doctor run SCRIPT`: verdicts of scripts that know nothing of flatout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flatout.perf.measure.intervals import SpeedupInterval
from flatout.perf.measure.own_clock import OwnClock
from flatout.perf.verdict.kept import Pace, compare_with
from tests.verbs import verb

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*number of training batches.*",
    "ignore:.*isinstance.treespec, LeafSpec.*",
)
OF_TRANSFORMERS = """
import sys
from tests.perf.verdict.transformers_trainings import trainer_of
for steps in sys.argv[1:]:
    trainer_of("classification", "out", max_steps=int(steps)).train()
"""
OF_LIGHTNING = """
import pytorch_lightning
from tests.callbacks.plain import loader
from tests.plain_trainer.test_both_lightnings import module_of
settings = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = pytorch_lightning.Trainer(max_epochs=4, accelerator="cpu", **settings)
trainer.fit(module_of(pytorch_lightning), loader())
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


def run(text: str, *words: object, options: tuple[object, ...] = ()) -> int:
    Path("script.py").write_text(text, encoding="utf-8")
    return verb("doctor", "run", *options, "script.py", *words)


def test_a_script_with_transformers_trainer_leaves_a_verdict_and_a_page(capsys):
    assert run(OF_TRANSFORMERS, 50) == 0
    kept = json.loads(Path("doctor/verdict.json").read_text(encoding="utf-8"))
    assert kept["evidence"]["steps"] == 45
    assert kept["machine"]["device"] == "cpu"
    assert kept["evidence"]["workers"] == 0
    page = Path("doctor/verdict.html").read_text(encoding="utf-8")
    assert "script.py 50" in page
    assert "forward" in page
    assert "that read batches" in page
    said = capsys.readouterr().out
    assert f"verdict: {kept['verdict']['sentence']}" in said
    kept["own_steps_per_s"] = {"value": 1e6, "low": 1e6, "high": 1e6}
    write("faster.json", kept)
    options = ("--against", "faster.json", "--fail-below", 0.9)
    assert run(OF_TRANSFORMERS, 40, options=options) == 1
    assert "doctor: slower than allowed" in capsys.readouterr().out


def test_a_baseline_is_never_replaced_by_what_is_compared_with_it(capsys):
    assert run(OF_LIGHTNING) == 0
    kept = Path("doctor/verdict.json").read_bytes()
    assert run(OF_LIGHTNING, options=("--against", "doctor/verdict.json")) == 2
    assert "would be replaced" in capsys.readouterr().err
    assert Path("doctor/verdict.json").read_bytes() == kept
    assert run("print('it ran')", "--fail-below=1") == 0
    assert "--fail-below=1 goes to script.py: options of doctor" in capsys.readouterr().out
    assert verb("doctor", "script.py") == 2
    assert "write python -m flatout doctor run train.py" in capsys.readouterr().err


def write(name: str, kept: dict[str, Any]) -> None:
    Path(name).write_text(json.dumps(kept), encoding="utf-8")


def test_a_script_with_lightning_leaves_a_verdict(capsys):
    assert run(OF_LIGHTNING) == 0
    kept = json.loads(Path("doctor/verdict.json").read_text(encoding="utf-8"))
    assert kept["evidence"]["steps"] == 35
    assert kept["steps_per_s"]["value"] > 0
    assert "doctor: kept in doctor/verdict.json and doctor/verdict.html" in capsys.readouterr().out


def test_of_two_trainings_the_longest_is_judged(capsys):
    assert run(OF_TRANSFORMERS, 2, 45) == 0
    said = capsys.readouterr().out
    assert (
        "doctor: 2 trainings in script.py; the verdict is of number 2, the longest with a verdict"
        in said
    )


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("print('hello')", 0, "no verdict of script.py: nothing was trained in it"),
        ("import sys\nsys.exit(7)", 7, "nothing was trained in it"),
        ("def f():\n    1 / 0\nf()", 1, "ZeroDivisionError"),
        ("1 +", 1, "SyntaxError"),
    ],
)
def test_a_script_without_a_training_keeps_its_exit_code_and_its_traceback(text, code, said, capfd):
    assert run(text) == code
    printed = "".join(capfd.readouterr())
    assert said in printed
    assert "runpy" not in printed
    assert "watched_script" not in printed
    assert not Path("doctor").exists()


@pytest.mark.parametrize(
    "text",
    [
        OF_LIGHTNING + "trainer.fit(None)",
        OF_TRANSFORMERS + "trainer_of('classification', 'out').train(1, 2, 3, 4, 5, 6)",
    ],
)
def test_an_error_within_a_training_has_no_line_of_ours_in_its_traceback(text, capfd):
    assert run(text) == 1
    printed = capfd.readouterr().err
    assert "Traceback" in printed
    assert "script.py" in printed
    assert "watched_script" not in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--fail-below", 0.9), "--fail-below: 0.9 of nothing"),
        (("--fail-below", 0, "--against", "a"), "--fail-below: 0.0"),
        (("--fail-below", 90, "--against", "a"), "--fail-below: 90.0 (a ratio such as 0.9)"),
        (("--output", "script.py"), "--output: script.py is a file. Name a folder."),
        (("--against", "none.json"), "--against: there is no none.json"),
        (("--against", "script.py"), "--against: script.py is not valid JSON"),
    ],
)
def test_a_mistake_is_refused_before_the_script_runs(options, said, capsys):
    assert run("print('it ran')", options=options) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "it ran" not in printed.out


def test_a_gate_has_nothing_to_compare_where_nothing_was_trained(capsys):
    pace = {"value": 1.0, "low": 1.0, "high": 1.0}
    write("before.json", {"machine": {}, "steps_per_s": pace})
    assert run("", options=("--against", "before.json")) == 2
    assert "nothing to compare: nothing was trained" in capsys.readouterr().err


def test_a_pace_is_the_median_of_blocks_without_what_lies_between_steps():
    pace = Pace()
    now_s = 0.0
    outside_s = 0.0
    for step in range(121):
        is_disturbed = 30 < step <= 40
        now_s += 0.5 if is_disturbed else 0.1
        if step % 20 == 0:  # a validation
            now_s += 3.0
            outside_s += 3.0
        pace.note_step(now_s, outside_s)
    found = pace.steps_per_s()
    assert found is not None
    assert (found.value, found.low) == pytest.approx((10.0, 10.0))
    assert Pace().steps_per_s() is None


def test_an_own_pace_leaves_out_the_waits_for_a_core_within_steps_alone():
    pace = Pace()
    now_s = 0.0
    outside_s = 0.0
    waited_s = 0.0
    for step in range(121):
        now_s += 0.1
        if step > 60:  # another process has the core for two of three turns
            now_s += 0.2
            waited_s += 0.2
        if step == 90:  # a validation, which waits as often
            now_s += 3.0
            outside_s += 3.0
            waited_s += 2.0
        pace.note_step(now_s, outside_s, waited_s)
    found = pace.own_steps_per_s()
    assert found is not None
    assert (found.low, found.value, found.high) == pytest.approx((10.0, 10.0, 10.0))
    usual = pace.steps_per_s()
    assert usual is not None
    assert usual.low == pytest.approx(10 / 3)


def test_the_own_clock_stands_still_while_another_process_has_the_core():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the other one inherits it
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        clock = OwnClock()
        waited_s = clock.waited_s()
        until = time.thread_time() + 0.15
        while time.thread_time() < until:
            pass
        assert clock.waited_s() - waited_s > 0.03
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)


def test_a_pace_of_another_machine_is_not_compared():
    now = {"device": "cpu", "threads": 2}
    found = compare_with(SpeedupInterval(8.0, 7.8, 8.2), {}, now, {"device": "cpu", "threads": 8})
    assert found == "not compared: another machine (threads 2 now, 8 then)"


def test_a_pace_fell_only_where_the_whole_interval_did():
    machine = {"device": "cpu"}
    before = {"value": 10.0, "low": 9.5, "high": 10.5}
    slower = compare_with(SpeedupInterval(8.0, 7.8, 8.2), before, machine, machine)
    unsteady = compare_with(SpeedupInterval(8.0, 6.0, 10.0), before, machine, machine)
    assert isinstance(slower, SpeedupInterval)
    assert isinstance(unsteady, SpeedupInterval)
    assert slower.high < 0.9 < unsteady.high
    assert str(slower) == "0.80× (0.74–0.86)"
