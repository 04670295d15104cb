"""`sweep.html`: all trials of a sweep on one page; and `sweep.csv` with the same numbers.

The best trial of a search is partly a lucky one. Runs of its setting with other seeds stand beside
it: quote those. `SweepReport` holds everything the page shows, `_page` brings it into words.
"""

from __future__ import annotations

import csv
import io
import itertools
import statistics
from collections import Counter
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

SPENT = ("kwh", "money")  # among the metrics of a complete trial, as far as they are known


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
    """Write `sweep.html` and `sweep.csv` into the sweep's folder, each in one step."""
    inside = [trial.folder for trial in report.trials if lies_inside(trial.folder, folder)]
    with_page = {name for name in inside if (folder / name / _REPORT).is_file()}
    write_atomically(folder / ROWS, _rows(report))
    write_atomically(folder / PAGE, _page(report, with_page))


def _rows(report: SweepReport) -> str:
    """The text of `sweep.csv`: a row for each trial; unknown cells are empty."""
    keys = _keys(report)
    metrics = list(dict.fromkeys(itertools.chain(*(trial.metrics for trial in report.trials))))
    file = io.StringIO()
    heads = ["number", "status", "value", "seconds", *keys, *metrics, "note", "folder"]
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(guard_row(heads))
    for trial in report.trials:
        cells = [
            str(trial.number),
            trial.status,
            "" if trial.value is None else written(trial.value),
            "" if trial.seconds is None else written(trial.seconds),
            *_written_cells(trial.params, keys),
            *_written_cells(trial.metrics, metrics),
            trial.note,
            trial.folder,
        ]
        writer.writerow(guard_row(cells))
    return file.getvalue()


def _written_cells(values: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    cells = {name: written(value) for name, value in values.items()}
    return [cells.get(name, "") for name in names]


def _page(report: SweepReport, with_page: Collection[str]) -> str:
    """The page; `with_page` are the folders of trials that have a report of their own."""
    trials = _ordered(report)
    keys = _keys(report)
    counts = Counter(trial.status for trial in trials)
    known_counts = (f"{counts[status]:,} {status}" for status in STATUSES if counts[status])
    complete = [trial for trial in trials if trial.status == "complete" and is_number(trial.value)]
    best = complete[0] if complete else None
    tiles = []
    params: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    if best is not None:
        params = best.params
        metrics = best.metrics
        tiles.append(tile(f"{best.value:.4f}", report.metric, f"trial {best.number}"))
    for name, value in metrics.items():
        if name.startswith("test/") and is_number(value):
            tiles.append(tile(f"{value:.4f}", name))
    by_importance = sorted(keys, key=lambda key: -report.importance.get(key, 0.0))
    shares = [(share, key) for key, share in report.importance.items() if is_number(share)]
    shares.sort(reverse=True)
    seeds = (f"seed {seed}" for seed in report.confirmed)
    slices, note = _slices(report, best, by_importance)
    spent = [name for name in SPENT if any(name in trial.metrics for trial in report.trials)]
    heads = ("trial", "status", report.metric, "seconds", *spent, *keys, "note", "folder")
    return render_text(
        "sweep.html",
        report=report,
        goal="highest" if report.mode == "max" else "lowest",
        counts=", ".join(known_counts) or "no trial yet",
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
        trials=[_trial_row(trial, spent, keys, trial is best, with_page) for trial in trials],
    )


def _confirmed(report: SweepReport, searched: Mapping[str, float]) -> list[list[str]]:
    """A row for each metric of the best setting: in the search, and with other seeds."""
    runs = report.confirmed.values()
    rows = []
    for name in dict.fromkeys(itertools.chain(*runs)):
        values = [run.get(name) for run in runs]
        mean = mean_with_spread([value for value in values if is_number(value)])
        rows.append([name, _figure(searched.get(name)), mean, *map(_figure, values)])
    return rows


def _charts(report: SweepReport, best: TrialRow | None) -> list[Chart]:
    """Results in the order of trials, and while training, as far as there are any."""
    dots = []
    lines = []
    for trial in report.trials:
        kind = _kind(trial, best)
        if trial.status == "complete" and is_number(trial.value):
            dots.append(Dot(trial.number, kind, trial.number, trial.value))
        points = (point for point in trial.curve if all(map(is_number, point)))
        lines.append([Dot(trial.number, kind, *point) for point in points])
    history = sweep_charts.history_chart(dots, metric=report.metric, mode=report.mode)
    learning = sweep_charts.learning_chart(lines, metric=report.metric, mode=report.mode)
    return [chart for chart in (history, learning) if chart]


def _slices(
    report: SweepReport, best: TrialRow | None, keys: Sequence[str]
) -> tuple[list[Chart], str]:
    """A chart of the results over each parameter in `keys`, and over energy and money where they
    are known; one note for all of them.
    """
    ended = [trial for trial in report.trials if trial.status in ("complete", "pruned")]
    values = [trial.value for trial in ended if is_number(trial.value)]
    if not values:
        return [], ""
    results = sweep_charts.metric_scale(values, report.mode)
    charts = []
    for key in keys:
        dots = [
            Dot(trial.number, _kind(trial, best), trial.params[key], trial.value)
            for trial in ended
            if key in trial.params and is_number(trial.value)
        ]
        charts.append(sweep_charts.slice_chart(key, dots, results, log=key in report.log_keys))
    for name in SPENT:
        dots = [
            Dot(trial.number, _kind(trial, best), trial.metrics[name], trial.value)
            for trial in ended
            if is_number(trial.metrics.get(name)) and is_number(trial.value)
        ]
        charts.append(sweep_charts.slice_chart(name, dots, results, log=False))
    note = f"{report.metric} over each value; filled: complete, hollow: pruned, orange: the best"
    return [chart for chart in charts if chart], f"{note}{sweep_charts.far_worse(results, values)}."


def _trial_row(
    trial: TrialRow,
    spent: Sequence[str],
    keys: Sequence[str],
    is_best: bool,
    with_page: Collection[str],
) -> dict[str, Any]:
    return {
        "trial": trial,
        "is_best": is_best,
        "numbers": [
            _figure(trial.value),
            "–" if trial.seconds is None else f"{trial.seconds:,.0f}",
            *(_spent(trial, name) for name in spent),
        ],
        "texts": [*(_value(trial.params, key) for key in keys), shortened(trial.note, 300)],
        "link": f"./{quote(trial.folder)}/{_REPORT}" if trial.folder in with_page else "",
    }


def _spent(trial: TrialRow, name: str) -> str:
    """Energy or money of a trial in three digits; "–" if it is not known."""
    value = trial.metrics.get(name)
    return f"{value:.3g}" if is_number(value) else "–"


def _value(params: Mapping[str, Any], key: str) -> str:
    """A trial's value of a parameter in four digits or forty letters; "–" if it has none."""
    if key not in params:
        return "–"
    value = params[key]
    return f"{value:.4g}" if isinstance(value, float) else shortened(written(value), 40)


def _keys(report: SweepReport) -> list[str]:
    """The keys that were searched, then other keys that trials set."""
    params = (trial.params for trial in report.trials)
    return list(dict.fromkeys(itertools.chain(report.space, *params)))


def _ordered(report: SweepReport) -> list[TrialRow]:
    """Complete trials, best first, then pruned, failed and running ones."""
    sign = -1 if report.mode == "max" else 1

    def sort_key(trial: TrialRow) -> tuple[int, bool, float]:
        status = STATUSES.index(trial.status) if trial.status in STATUSES else len(STATUSES)
        if is_number(trial.value):
            return status, False, sign * trial.value
        return status, True, 0.0

    return sorted(report.trials, key=sort_key)


def _kind(trial: TrialRow, best: TrialRow | None) -> str:
    """How charts mark a trial; one that failed or still runs looks like a pruned one."""
    if trial is best:
        return "best"
    return "complete" if trial.status == "complete" else "pruned"


def mean_with_spread(values: Sequence[float]) -> str:
    """The mean and, of two or more values, the sample's standard deviation."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


def spread(name: str, runs: Sequence[Mapping[str, float]]) -> str:
    """A metric's name with its mean and spread over some runs: `val/f1 0.8123 ± 0.0042`."""
    values = [run[name] for run in runs if run.get(name) is not None]
    return f"{name} {mean_with_spread(values) if values else 'is not a number'}"


def _figure(value: float | None) -> str:
    return f"{value:.4f}" if is_number(value) else "–"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
