"""What an audit of recordings or bit strings prints, and its table and page.

Open this file to change a line of the terminal, a column of `worst.csv`, or a tile of `audit.html`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flatout.audit.numbers import LEAST_FOR_CURVE, MeasuredNumbers
from flatout.files import write_atomically, write_table
from flatout.report.figures import Curve, fold_curves, line_chart
from flatout.report.page import render_text, tile

WORST = "worst.csv"
_NAMED_ROWS = 3  # on the terminal
_ROWS_ON_PAGE = 20  # the page's table; worst.csv has all rows


def describe_numbers(measured: MeasuredNumbers) -> Iterator[str]:
    """The lines of the terminal: score, luck, the worst rows, and more rows."""
    rows = measured.rows
    of_folds = measured.curve[:, -1]
    interval = f" ({measured.interval})" if measured.interval else ""
    yield f"score:  {rows.score} {measured.score:.4g}{interval}, {rows.model}, out of fold"
    yield f"luck:   folds from {of_folds.min():.4g} to {of_folds.max():.4g}"
    yield f"rows:   {_name_worst(measured)}"
    yield f"        {_count_wrong(measured) if rows.classes else _weigh_worst_tenth(measured)}"
    if not rows.classes:
        yield from _name_outlier(measured)
    yield f"more:   {describe_forecast(measured)}"


def _name_worst(measured: MeasuredNumbers) -> str:
    rows = measured.rows
    worst = list[str]()
    for row in measured.order[:_NAMED_ROWS]:
        loss = float(measured.loss_R[row])
        if not loss:
            continue
        remark = f"{rows.score_of(loss):.3g}"
        if rows.classes:
            given, likely = measured.classes_of(row)
            remark = f"(given {given}, likely {likely})"
        worst.append(f"{rows.names[row]} {remark}")
    return f"the worst are {', '.join(worst)}" if worst else "all are answered rightly"


def _count_wrong(measured: MeasuredNumbers) -> str:
    num_wrong = int(measured.loss_R.sum())
    num_rows = len(measured.rows.names)
    return f"{num_wrong:,} of the {num_rows:,} {measured.rows.kind} are answered otherwise"


def _weigh_worst_tenth(measured: MeasuredNumbers) -> str:
    """How much of the loss the worst tenth makes: much means that few rows are odd."""
    rows = measured.rows
    num_rows = len(rows.names)
    num_worst = -(-num_rows // 10)  # rounded up
    worst = measured.order[:num_worst]
    share = measured.loss_R[worst].sum() / max(measured.loss_R.sum(), 1e-12)
    loss = "squared error" if rows.unit else "loss"
    return f"a tenth of the {num_rows:,} {rows.kind} makes {share:.0%} of the {loss}"


def _name_outlier(measured: MeasuredNumbers) -> Iterator[str]:
    """A line about the worst row, where it makes more than half of the loss."""
    rows = measured.rows
    worst = measured.order[0]
    if 2 * measured.loss_R[worst] <= measured.loss_R.sum():
        return
    others = float(np.delete(measured.loss_R, worst).mean())
    score = rows.score_of(others)
    yield f"        {rows.names[worst]} alone makes most of it: {score:.4g} without it"


def describe_forecast(measured: MeasuredNumbers) -> str:
    """What more rows would bring, in a sentence."""
    rows = measured.rows
    forecast = measured.forecast
    if forecast is None:
        return (
            f"{len(rows.names)} {rows.kind} are too few for a forecast: {LEAST_FOR_CURVE} or more"
        )
    most = forecast.high * (rows.unit or 1)
    gain = f"{rows.score} better by {most:.3g} at most, by {forecast.more:,} more {rows.kind}"
    return f"rows of this kind will not help: {gain}" if forecast.is_useless else gain


def write_numbers(
    measured: MeasuredNumbers, title: str, command: str, table: Path, page: Path
) -> None:
    """Write all rows as CSV, the worst first, and the page."""
    rows = measured.rows
    heads = [rows.kind.rstrip("s"), "split", rows.score]
    if rows.classes:
        heads += ["given", "likely"]
    lines = list[list[str]]()
    for row in measured.order:
        score = rows.score_of(float(measured.loss_R[row]))
        classes = measured.classes_of(row)
        lines.append([rows.names[row], rows.splits[row], f"{score:.6g}", *classes])
    write_table(table, [heads, *lines])
    note = ", ".join(filter(None, (measured.interval, rows.model)))
    tiles = [
        tile(f"{measured.score:.4g}", rows.score, note),
        tile(f"{len(rows.names):,}", rows.kind),
    ]
    chart = line_chart(
        f"{rows.score} by rows trained on", _curves(measured), x_label=rows.kind, doublings=True
    )
    text = render_text(
        "audit.html",
        title=title,
        command=command,
        forecast=describe_forecast(measured),
        figures=tiles,
        charts_of_rows=[chart] if chart else [],
        worst=[heads, lines[:_ROWS_ON_PAGE]],
    )
    write_atomically(page, text)


def _curves(measured: MeasuredNumbers) -> list[Curve]:
    """The learning curve of each fold; none where there is no forecast."""
    if measured.forecast is None:
        return []
    return fold_curves(measured.sizes, measured.curve)
