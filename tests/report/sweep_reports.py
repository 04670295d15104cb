"""Trials of a made-up sweep, and its report."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from flatout.report.sweep_page import SweepReport, TrialRow, write_sweep

EVIL = "<script>alert(1)</script>\"'&"
WIDTHS = ([64], [128], [256, 128])


def trial(number: int, status: str = "complete", value: float | None = None, **changes) -> TrialRow:
    value = 0.8 + number / 1000 if value is None and status != "failed" else value
    curve: list[tuple[int, float]] = []
    if value is not None:
        curve = [(step, value - 0.1 / step) for step in range(1, 6)]
    metrics = {"val/accuracy": value, "test/accuracy": (value or 0.0) - 0.01}
    has_metrics = status == "complete" and value
    row = TrialRow(
        number=number,
        status=status,
        value=value,
        params={
            "optim.lr": 10 ** (-4 + number % 7 / 3),
            "model.widths": WIDTHS[number % 3],
            "model.tied": number % 2 > 0,
        },
        seconds=12.0,
        folder=f"trial_{number}",
        curve=curve,
        metrics=metrics if has_metrics else {},
    )
    return dataclasses.replace(row, **changes)


def report(*trials: TrialRow, **changes) -> SweepReport:
    values = SweepReport(
        name="news",
        command="python -m flatout sweep +experiment=news",
        metric="val/accuracy",
        mode="max",
        space={
            "optim.lr": "tag(log, interval(1e-4, 1e-2))",
            "model.widths": "choice([64],[128],[256,128])",
        },
        log_keys=frozenset({"optim.lr"}),
        trials=list(trials),
        best_overrides="python -m train optim.lr=0.003 'model.widths=[256,128]'",
        importance={"optim.lr": 0.75, "model.widths": 0.25},
        confirmed={},
        seconds=600.0,
    )
    return dataclasses.replace(values, **changes)


MIXED = [
    *map(trial, range(9)),
    trial(9, "pruned", 0.7, note="below the median at step 3"),
    trial(10, "failed", note="ValueError: no such thing", curve=[(1, math.nan)]),
    trial(11, "running", seconds=None),
]


def page(folder: Path, written_report: SweepReport) -> str:
    write_sweep(folder, written_report)
    return (folder / "sweep.html").read_text(encoding="utf-8")
