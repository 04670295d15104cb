"""`sweep.html`: all trials of a sweep on one page, without network or script, and `sweep.csv` with the same numbers.

What a search found best is chosen for its luck too: where the setting was run again with other seeds, those runs stand
beside it, and they are what to quote.
"""

from __future__ import annotations

import csv
import html
import io
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flatout.files import lies_inside
from flatout.report.page import STYLE, section, table
from flatout.report.sweep_charts import (
    Dot,
    Line,
    far_worse,
    history_chart,
    importance_chart,
    is_number,
    learning_chart,
    metric_axis,
    parallel_chart,
    shortened,
    slice_chart,
    value_axis,
    written,
)

PAGE, ROWS = "sweep.html", "sweep.csv"
_REPORT = "report.html"
STATUSES = ("complete", "pruned", "failed", "running")
_DANGEROUS = ("=", "+", "-", "@", "\t", "\r")
_STYLE = """
.charts,.slices{align-items:end;grid-template-columns:repeat(auto-fill,minmax(400px,1fr))}
.slices{display:grid;grid-template-columns:repeat(auto-fill,minmax(280px,1fr));gap:1rem}
.halo{paint-order:stroke;stroke:#fff;stroke-width:5px;stroke-linejoin:round}
.wide{overflow-x:auto}.wide table{font-size:13px}.wide td{overflow-wrap:break-word;max-width:16rem}
.best td{font-weight:600}.complete{color:#1f6f8b}.pruned{color:#57606a}pre{white-space:pre-wrap;overflow-wrap:anywhere}
@media print{.wide{overflow:visible}.trials table{font-size:9px}.trials td,.trials th{padding-right:.4rem}
.charts{grid-template-columns:1fr 1fr}.slices{grid-template-columns:1fr 1fr 1fr}.muted{break-after:avoid}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """One trial of a sweep, as far as it is known."""

    number: int
    status: str
    """One of `STATUSES`."""
    value: float | None
    """The metric on validation; of a pruned trial the last one reported."""
    params: dict[str, Any]
    """Values by their keys, as a person would write them in an override."""
    seconds: float | None
    note: str = ""
    """Why it failed, or when it was pruned."""
    folder: str = ""
    """Its run folder, seen from the sweep's."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """What it reported, as (step, value)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics on validation and test, of a complete trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """The best setting, run again with another seed."""

    seed: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """All there is to say about a sweep."""

    name: str
    command: str
    """The line that began it, as a person types it."""
    metric: str
    mode: str
    """max or min."""
    space: dict[str, str]
    """What was searched, by key, as it was written."""
    log_keys: frozenset[str]
    """Keys whose values differ by factors."""
    trials: list[TrialRow]
    best_overrides: str
    """The line that trains the best setting again; empty where no trial is complete."""
    importance: dict[str, float]
    """Shares that sum to 1; empty where there are too few trials."""
    confirmed: list[Confirmed]
    seconds: float


def write_sweep(folder: Path, report: SweepReport) -> None:
    """Write both files into a sweep's folder."""
    _replace(folder / ROWS, _rows(report))
    _replace(folder / PAGE, _page(report, {trial.folder for trial in report.trials if _has_page(folder, trial)}))


def _has_page(folder: Path, trial: TrialRow) -> bool:
    """Whether a trial has left a report of its own inside the sweep's folder."""
    return lies_inside(trial.folder, folder) and (folder / trial.folder / _REPORT).is_file()


def _replace(path: Path, text: str) -> None:
    """Write a file in one step; what cannot be encoded, such as half a character in an error, is spelled out."""
    beside = path.with_name(f".{path.name}-new")
    beside.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
    beside.replace(path)


def _rows(report: SweepReport) -> str:
    keys = _keys(report)
    metrics = list(dict.fromkeys(name for trial in report.trials for name in trial.metrics))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(map(_defused, ("number", "status", "value", "seconds", *keys, *metrics, "note", "folder")))
    for trial in report.trials:
        results = [_cell(trial.metrics, name) for name in metrics]
        params = [_cell(trial.params, key) for key in keys]
        numbers = ["" if number is None else written(number) for number in (trial.value, trial.seconds)]
        cells = [str(trial.number), trial.status, *numbers, *params, *results, trial.note, trial.folder]
        writer.writerow(map(_defused, cells))
    return file.getvalue()


def _cell(values: dict[str, Any], key: str) -> str:
    return written(values[key]) if key in values else ""


def _defused(text: str) -> str:
    """A text that a spreadsheet would run as a formula, made plain text; numbers stay numbers."""
    if not text.startswith(_DANGEROUS):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def _page(report: SweepReport, with_page: Collection[str]) -> str:
    """The page; `with_page` are folders of trials that have a report of their own."""
    best = _best(report)
    sections = [
        _heading(report),
        _figures(report, best),
        section("The best setting", _best_setting(report, best)),
        section("The same again with other seeds", _confirmed(report, best)),
        section("What mattered", importance_chart(report.importance)),
        section("Trials", _charts(report, best)),
        section("Each parameter", _slices(report, best)),
        section("All parameters together", _parallel(report)),
        section("All trials", _trials(report, best, with_page)),
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(report.name)}</title><style>{STYLE}{_STYLE}</style><body>{''.join(sections)}</body></html>"
    )


def _heading(report: SweepReport) -> str:
    counts = {status: sum(trial.status == status for trial in report.trials) for status in STATUSES}
    words = ", ".join(f"{count:,} {status}" for status, count in counts.items() if count) or "no trial yet"
    return (
        f'<h1>{html.escape(report.name)}</h1><p class="muted">Trials: {words}. {_duration(report.seconds)} in all.'
        f" Searched for the {'highest' if report.mode == 'max' else 'lowest'} {html.escape(report.metric)}.<br>"
        f"<code>{html.escape(report.command)}</code></p>"
    )


def _figures(report: SweepReport, best: TrialRow | None) -> str:
    if best is None:
        return ""
    tiles = [(f"{best.value:.4f}", report.metric, f"trial {best.number}")]
    for name, value in best.metrics.items():
        if name.startswith("test/") and is_number(value):
            tiles.append((f"{value:.4f}", name, ""))
    made = (f"<div><b>{value}</b>{html.escape(name)} <small>{about}</small></div>" for value, name, about in tiles)
    return f'<div class="figures">{"".join(made)}</div>'


def _best_setting(report: SweepReport, best: TrialRow | None) -> str:
    line = f"<pre>{html.escape(report.best_overrides)}</pre>" if report.best_overrides else ""
    params = {} if best is None else best.params
    rows = [[key, report.space.get(key, ""), _short(params[key]) if key in params else "–"] for key in _keys(report)]
    nothing = "" if best else "<p>No trial is complete, so there is no best one yet.</p>"
    return f'{nothing}{line}<div class="wide">{table(["parameter", "searched", "best"], rows)}</div>'


def _confirmed(report: SweepReport, best: TrialRow | None) -> str:
    """Each metric of the best trial beside its mean and standard deviation over the seeds run later."""
    if not report.confirmed:
        return ""
    names = dict.fromkeys(name for run in report.confirmed for name in run.metrics)
    searched = {} if best is None else best.metrics
    rows = [
        [
            name,
            _figure(searched.get(name)),
            _spread([run.metrics[name] for run in report.confirmed if is_number(run.metrics.get(name))]),
            *(_figure(run.metrics.get(name)) for run in report.confirmed),
        ]
        for name in names
    ]
    heads = ["metric", "in the search", "mean ± standard deviation", *(f"seed {run.seed}" for run in report.confirmed)]
    return (
        "<p>The best of many trials is partly the luckiest; these runs were not chosen for their result.</p>"
        f'<div class="wide">{table(heads, rows, first_number=1)}</div>'
    )


def _charts(report: SweepReport, best: TrialRow | None) -> str:
    dots = [
        Dot(trial.number, _kind(trial, best), trial.number, trial.value)
        for trial in report.trials
        if trial.status == "complete" and is_number(trial.value)
    ]
    lines = [
        Line(trial.number, _kind(trial, best), [point for point in trial.curve if all(map(is_number, point))])
        for trial in report.trials
    ]
    history = history_chart(dots, metric=report.metric, mode=report.mode)
    learning = learning_chart(lines, metric=report.metric, mode=report.mode)
    return f'<div class="charts">{history}{learning}</div>' if history or learning else ""


def _slices(report: SweepReport, best: TrialRow | None) -> str:
    shown = [trial for trial in report.trials if trial.status in ("complete", "pruned") and is_number(trial.value)]
    values = [trial.value for trial in shown if is_number(trial.value)]
    if not values:
        return ""
    axis, charts = metric_axis(values, report.mode), []
    for key in _by_importance(report):
        dots = [
            Dot(trial.number, _kind(trial, best), trial.params[key], value)
            for trial, value in zip(shown, values, strict=True)
            if key in trial.params
        ]
        charts.append(slice_chart(key, dots, axis, log=key in report.log_keys))
    words = f"{html.escape(report.metric)} over each value; filled: complete, hollow: pruned, orange: the best"
    words += f"{far_worse(axis, values)}."
    return f'<p class="muted">{words}</p><div class="slices">{"".join(charts)}</div>'


def _parallel(report: SweepReport) -> str:
    trials = [trial for trial in _ordered(report) if trial.status == "complete" and is_number(trial.value)]
    axes = {}
    for key in _by_importance(report):
        if values := [trial.params[key] for trial in trials if key in trial.params]:
            axes[key] = value_axis(values, log=key in report.log_keys)
    if not axes:
        return ""
    axes[report.metric] = metric_axis([trial.value for trial in trials if is_number(trial.value)], report.mode)
    placed = [trial.params | {report.metric: trial.value} for trial in trials]
    lines = [{key: values[key] for key in axes if key in values} for values in placed]
    return parallel_chart(axes, lines)


def _trials(report: SweepReport, best: TrialRow | None, with_page: Collection[str]) -> str:
    keys = _keys(report)
    heads = ["trial", "status", report.metric, "seconds", *keys, "note", "folder"]
    head = "".join(f"<th>{html.escape(_breakable(text))}</th>" for text in heads)
    body = []
    for trial in _ordered(report):
        numbers = (_figure(trial.value), "–" if trial.seconds is None else f"{trial.seconds:,.0f}")
        params = [_short(trial.params[key]) if key in trial.params else "–" for key in keys]
        body.append(
            f'<tr class="{"best" if trial is best else ""}"><td class="n">{trial.number}</td>'
            f'<td class="{html.escape(trial.status)}">{html.escape(trial.status)}</td>'
            + "".join(f'<td class="n">{number}</td>' for number in numbers)
            + "".join(f"<td>{html.escape(text)}</td>" for text in [*params, shortened(trial.note, 300)])
            + f"<td>{_folder(trial, with_page)}</td></tr>"
        )
    return f'<div class="wide trials"><table><tr>{head}</tr>{"".join(body)}</table></div>' if body else ""


def _folder(trial: TrialRow, with_page: Collection[str]) -> str:
    """The name of a trial's folder, which leads to its own report where there is one."""
    name = html.escape(trial.folder)
    return f'<a href="./{quote(trial.folder)}/{_REPORT}">{name}</a>' if trial.folder in with_page else name


def _keys(report: SweepReport) -> list[str]:
    """What was searched, then what trials have beside it."""
    return list(dict.fromkeys([*report.space, *(key for trial in report.trials for key in trial.params)]))


def _by_importance(report: SweepReport) -> list[str]:
    return sorted(_keys(report), key=lambda key: -report.importance.get(key, 0.0))


def _ordered(report: SweepReport) -> list[TrialRow]:
    """Complete trials, best first, then pruned, failed and running ones."""
    sign = -1 if report.mode == "max" else 1

    def place(trial: TrialRow) -> tuple[int, bool, float]:
        status = STATUSES.index(trial.status) if trial.status in STATUSES else len(STATUSES)
        return (status, False, sign * trial.value) if is_number(trial.value) else (status, True, 0.0)

    return sorted(report.trials, key=place)


def _best(report: SweepReport) -> TrialRow | None:
    return next((trial for trial in _ordered(report) if trial.status == "complete" and is_number(trial.value)), None)


def _kind(trial: TrialRow, best: TrialRow | None) -> str:
    if trial is best:
        return "best"
    return "complete" if trial.status == "complete" else "pruned"


def _spread(values: Sequence[float]) -> str:
    """Mean and, of two and more, the standard deviation of a sample."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


def _figure(value: float | None) -> str:
    return f"{value:.4f}" if is_number(value) else "–"


def _short(value: Any) -> str:
    """A value with as many digits as one reads."""
    return f"{value:.4g}" if isinstance(value, float) else shortened(written(value), 40)


def _breakable(key: str) -> str:
    """A key that may be broken after a dot or an underscore."""
    return key.replace(".", ".\u200b").replace("_", "_\u200b")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
