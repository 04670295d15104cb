"""Table and page of an audit of recordings or bit strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.audit.numbers import MeasuredNumbers
from flatout.files import write_atomically, write_table
from flatout.report.figures import Curve, line_chart
from flatout.report.page import render_text, tile

WORST = "worst.csv"
_SHOWN = 20


def write_numbers(
    measured: MeasuredNumbers, title: str, command: str, table: Path, page: Path
) -> None:
    """Write all rows as CSV, the worst first, and the page."""
    rows, order = measured.rows, measured.order
    scores = [f"{rows.shown(loss):.6g}" for loss in measured.loss_R]
    found = [
        [rows.names[each], rows.splits[each], scores[each], *measured.classes_of(each)]
        for each in order
    ]
    heads = [
        rows.what.rstrip("s"),
        "split",
        rows.score,
        *(["given", "likely"] if rows.classes else []),
    ]
    write_table(table, [heads, *found])
    note = ", ".join(filter(None, (measured.interval, rows.model)))
    score = tile(f"{rows.shown(measured.loss_R.mean()):.4g}", rows.score, note)
    curves = [
        Curve(f"fold {number}", list(zip(measured.sizes.tolist(), of_fold, strict=True)))
        for number, of_fold in enumerate(measured.curve.tolist() if measured.forecast else (), 1)
    ]
    chart = line_chart(
        f"{rows.score} by rows trained on", curves, x_label=rows.what, doublings=True
    )
    shown: dict[str, Any] = {"title": title, "command": command, "forecast": measured.more_line()}
    shown |= {
        "figures": [score, tile(f"{len(rows.names):,}", rows.what)],
        "charts_of_rows": [chart] if chart else [],
    }
    write_atomically(page, render_text("audit.html", worst=[heads, found[:_SHOWN]], **shown))
