"""Ctrl-C at any moment of starting ends a command with exit code 130 and without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.distributed.imports import ignored_by_children, leaving_at_once

TINY = [
    "data.sample.rows=200",
    "data.sample.eval_rows=40",
    "trainer.max_epochs=100000",
    "checkpoint.patience=null",
]
TRAIN = ["train", "-m", *TINY, "model.hidden=8,16"]
SWEEP = ["flatout", "sweep", *TINY, "model.hidden=choice(8,16)"]
MOMENTS = [  # a command, and the module after whose import the signal comes
    (TRAIN, "flatout.distributed.processes"),
    (TRAIN, "torch.nn"),
    (TRAIN, "flatout.sweep.many"),
    (["flatout", "evaluate", "nothing"], "torch.nn"),
    (SWEEP, "optuna.trial"),
]
USUAL = MOMENTS[1]
SOAK = pytest.mark.soak(seconds=10)


@pytest.mark.soak(seconds=5)
@pytest.mark.parametrize(
    ("words", "module"),
    [
        pytest.param(
            *moment, id=f"{moment[0][0]} at {moment[1]}", marks=[] if moment == USUAL else [SOAK]
        )
        for moment in MOMENTS
    ],
)
def test_an_interrupt_while_a_command_starts_ends_it_without_a_traceback(words, module, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", *words],  # it tells what has been imported
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd=tmp_path,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == module:
                break
        os.killpg(process.pid, signal.SIGINT)  # a terminal tells all of a command's processes
        said = process.stderr.read()
        assert process.wait(60) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stderr.close()
    rest = [line for line in said.splitlines() if not line.startswith("import time:")]
    assert not [line for line in rest if "Traceback" in line or "KeyboardInterrupt" in line], said[
        -3000:
    ]


def test_what_somebody_else_answers_an_interrupt_with_stays():
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with leaving_at_once(), ignored_by_children():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_the_usual_answer_to_an_interrupt_is_given_back():
    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    with leaving_at_once():
        with ignored_by_children():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_what_was_imported_is_never_searched_for_garbage():
    code = (
        "import gc; from flatout.distributed.imports import importing\n"
        "with importing():\n    import yaml; assert not gc.isenabled()\n"
        "kept = gc.get_freeze_count(); assert gc.isenabled() and kept > 1000\n"
        "with importing():\n    made = [[] for _ in range(5)]\n"
        "assert gc.get_freeze_count() <= kept and any(each is made for each in gc.get_objects())"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ}).returncode
        == 0
    )
