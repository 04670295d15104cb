"""Sweeps by their command line, in the test's process or in one of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.started import wait_for
from tests.verbs import verb
from tests.warm import Command, begin_warm


def verbally(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """A sweep in this process: its exit code, and what it complained of."""
    before = list(sys.argv)
    try:
        return verb("sweep", *words), capsys.readouterr().err
    finally:
        sys.argv[:] = before


def swept(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """A sweep in this process, whose warm server is up: its exit code, and all that it printed."""
    before = list(sys.argv)
    try:
        code = verb("sweep", *words)
    finally:
        sys.argv[:] = before
    said = capfd.readouterr()
    return code, said.out + said.err


SMALL = [
    "data.sample.rows=300",
    "data.sample.eval_rows=60",
    "trainer.max_epochs=3",
    "precision=fp32",
    "logger=none",
]
TRUST = "+allow_targets=[tests]"
SEARCHED = ["model.hidden=choice(8,16,24)", "optim.lr=tag(log,interval(1e-4,1e-1))", *SMALL]


def command(*words: str) -> Command:
    return begin_warm(["flatout", "sweep", *words])


def wait_for_trial(folder: Path, number: int, process: Command) -> None:
    wait_for(folder / str(number) / "metrics.csv", process)
