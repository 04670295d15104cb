"""Trials of a tiny run, and how they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout import (
    BiLSTMConfig,
    HeadlinesConfig,
    MonitorConfig,
    OptimConfig,
    RunConfig,
    TextDataConfig,
)
from flatout.report.summary import read_summary
from flatout.run.job import RunJob
from flatout.sweep.trial import Board, Ending, Judge, Trial
from flatout.sweep.trials import TimeLimits, make_slots, run_trials

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


def statuses(folder: Path) -> list[str]:
    return [read_summary(folder / name)["status"] for name in "01"]
