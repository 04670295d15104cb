"""`sweep.html`: all trials of a sweep on one page, without network or script, and `sweep.csv` with
the same numbers.

The best trial of a search is partly a lucky one. Runs of its setting with other seeds stand beside
it: quote those.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flatout.errors import printable
from flatout.files import guard_row, lies_inside, write_atomically
from flatout.report import sweep_charts
from flatout.report.figures import Chart
from flatout.report.page import render_text, tile
from flatout.report.sweep_charts import Dot, is_number, shortened, written

PAGE = "sweep.html"
ROWS = "sweep.csv"
_REPORT = "report.html"
STATUSES = ("complete", "pruned", "failed", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One trial of a sweep; a value that is not known yet is None or empty."""

    number: int
    status: str  # one of `STATUSES`
    value: float | None  # the validation metric; of a pruned trial, the last value reported
    params: dict[str, Any]  # values by their keys, as you write them in an override
    seconds: float | None
    note: str = ""  # why it failed, or when it was pruned
    folder: str = ""  # its run folder, relative to the sweep's
    # the values it reported, as (step, value)
    curve: list[tuple[int, float]] = field(default_factory=list)
    # validation and test metrics of a complete trial
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """Everything that the page of a sweep shows."""

    name: str
    command: str  # the command that started it, as you type it
    metric: str
    mode: str  # max or min
    space: dict[str, str]  # the values searched, by key, as they were written
    trials: list[TrialRow]
    # the command that trains the best setting again; empty while no trial is complete
    best_overrides: str
    log_keys: frozenset[str] = frozenset()  # keys whose values differ by factors
    # shares; none where there are too few trials
    importance: dict[str, float] = field(default_factory=dict)
    # the best setting's metrics with other seeds
    confirmed: dict[int, dict[str, float]] = field(default_factory=dict)
    seconds: float


def write_sweep(folder: Path, report: SweepReport) -> None:
    inside = [trial.folder for trial in report.trials if lies_inside(trial.folder, folder)]
    write_atomically(folder / ROWS, _rows(report))
    write_atomically(
        folder / PAGE,
        _page(report, {each for each in inside if (folder / each / _REPORT).is_file()}),
    )


def _rows(report: SweepReport) -> str:
    keys = _keys(report)
    metrics = list(dict.fromkeys(name for trial in report.trials for name in trial.metrics))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        guard_row(["number", "status", "value", "seconds", *keys, *metrics, "note", "folder"])
    )
    for trial in report.trials:
        results = [
            written(trial.metrics[name]) if name in trial.metrics else "" for name in metrics
        ]
        params = [written(trial.params[key]) if key in trial.params else "" for key in keys]
        numbers = [
            "" if number is None else written(number) for number in (trial.value, trial.seconds)
        ]
        cells = [
            str(trial.number),
            trial.status,
            *numbers,
            *params,
            *results,
            trial.note,
            trial.folder,
        ]
        writer.writerow(guard_row(cells))
    return file.getvalue()


def _page(report: SweepReport, with_page: Collection[str]) -> str:
    """The page; `with_page` are folders of trials that have a report of their own."""
    trials = _ordered(report)
    keys = _keys(report)
    counts = {status: sum(trial.status == status for trial in trials) for status in STATUSES}
    complete = [trial for trial in trials if trial.status == "complete" and is_number(trial.value)]
    best = complete[0] if complete else None
    params, metrics = ({}, {}) if best is None else (best.params, best.metrics)
    by_importance = sorted(keys, key=lambda key: -report.importance.get(key, 0.0))
    shares = sorted(
        ((share, key) for key, share in report.importance.items() if is_number(share)), reverse=True
    )
    tiles = (
        [] if best is None else [tile(f"{best.value:.4f}", report.metric, f"trial {best.number}")]
    )
    tests = {
        name: value
        for name, value in metrics.items()
        if name.startswith("test/") and is_number(value)
    }
    tiles += [tile(f"{value:.4f}", name) for name, value in tests.items()]
    seeds = (f"seed {seed}" for seed in report.confirmed)
    slices, note = _slices(report, best, by_importance)
    heads = ("trial", "status", report.metric, "seconds", *keys, "note", "folder")
    return render_text(
        "sweep.html",
        report=report,
        goal="highest" if report.mode == "max" else "lowest",
        counts=", ".join(f"{count:,} {status}" for status, count in counts.items() if count)
        or "no trial yet",
        duration=_duration(report.seconds),
        figures=tiles,
        has_best=best is not None,
        parameters=[[key, report.space.get(key, ""), _value(params, key)] for key in keys],
        confirmed_heads=["metric", "in the search", "mean ± standard deviation", *seeds],
        confirmed=_confirmed(report, metrics),
        importance=[(printable(key), f"{100 * share:.0f}%") for share, key in shares],
        curves=_charts(report, best),
        slices=slices,
        slices_note=note,
        # a line may break there
        trial_heads=[head.replace(".", ".\u200b").replace("_", "_\u200b") for head in heads],
        trials=[_trial_row(trial, keys, trial is best, with_page) for trial in trials],
    )


def _confirmed(report: SweepReport, searched: Mapping[str, float]) -> list[list[str]]:
    runs = report.confirmed.values()
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run):
        mean = mean_with_spread([run[name] for run in runs if is_number(run.get(name))])
        rows.append(
            [name, _figure(searched.get(name)), mean, *(_figure(run.get(name)) for run in runs)]
        )
    return rows


def _charts(report: SweepReport, best: TrialRow | None) -> list[Chart]:
    ended = ((trial, trial.value) for trial in report.trials if trial.status == "complete")
    dots = [
        Dot(trial.number, _kind(trial, best), trial.number, value)
        for trial, value in ended
        if is_number(value)
    ]
    lines = [
        [
            Dot(trial.number, _kind(trial, best), *point)
            for point in trial.curve
            if all(map(is_number, point))
        ]
        for trial in report.trials
    ]
    history = sweep_charts.history_chart(dots, metric=report.metric, mode=report.mode)
    learning = sweep_charts.learning_chart(lines, metric=report.metric, mode=report.mode)
    return [chart for chart in (history, learning) if chart]


def _slices(
    report: SweepReport, best: TrialRow | None, keys: Sequence[str]
) -> tuple[list[Chart], str]:
    shown = [
        (trial, trial.value) for trial in report.trials if trial.status in ("complete", "pruned")
    ]
    known = [(trial, value) for trial, value in shown if is_number(value)]
    if not known:
        return [], ""
    values = [value for _, value in known]
    charts = []
    results = sweep_charts.metric_scale(values, report.mode)
    for key in keys:
        having = ((trial, value) for trial, value in known if key in trial.params)
        dots = [
            Dot(trial.number, _kind(trial, best), trial.params[key], value)
            for trial, value in having
        ]
        charts.append(sweep_charts.slice_chart(key, dots, results, log=key in report.log_keys))
    note = f"{report.metric} over each value; filled: complete, hollow: pruned, orange: the best"
    return [chart for chart in charts if chart], f"{note}{sweep_charts.far_worse(results, values)}."


def _trial_row(
    trial: TrialRow, keys: Sequence[str], is_best: bool, with_page: Collection[str]
) -> dict[str, Any]:
    return {
        "trial": trial,
        "is_best": is_best,
        "numbers": [
            _figure(trial.value),
            "–" if trial.seconds is None else f"{trial.seconds:,.0f}",
        ],
        "texts": [*(_value(trial.params, key) for key in keys), shortened(trial.note, 300)],
        "link": f"./{quote(trial.folder)}/{_REPORT}" if trial.folder in with_page else "",
    }


def _value(params: Mapping[str, Any], key: str) -> str:
    """A parameter in at most four digits or forty letters."""
    if key not in params:
        return "–"
    value = params[key]
    return f"{value:.4g}" if isinstance(value, float) else shortened(written(value), 40)


def _keys(report: SweepReport) -> list[str]:
    """Keys that were searched, then other keys of trials."""
    return list(
        dict.fromkeys([*report.space, *(key for trial in report.trials for key in trial.params)])
    )


def _ordered(report: SweepReport) -> list[TrialRow]:
    """Complete trials, best first, then pruned, failed and running ones."""
    sign = -1 if report.mode == "max" else 1

    def place(trial: TrialRow) -> tuple[int, bool, float]:
        status = STATUSES.index(trial.status) if trial.status in STATUSES else len(STATUSES)
        return (
            (status, False, sign * trial.value) if is_number(trial.value) else (status, True, 0.0)
        )

    return sorted(report.trials, key=place)


def _kind(trial: TrialRow, best: TrialRow | None) -> str:
    return "best" if trial is best else "complete" if trial.status == "complete" else "pruned"


def mean_with_spread(values: Sequence[float]) -> str:
    """Mean and, of two and more, the standard deviation of a sample."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


def spread(name: str, runs: Sequence[Mapping[str, float]]) -> str:
    """A metric over some runs, by its name."""
    values = [run[name] for run in runs if run.get(name) is not None]
    return f"{name} {mean_with_spread(values) if values else 'is not a number'}"


def _figure(value: float | None) -> str:
    return f"{value:.4f}" if is_number(value) else "–"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
