"""`audit.html`: the findings of an audit on one page, with the rows and the curve behind them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flatout.audit.findings import Finding, beginning, slices
from flatout.audit.labels import mixed_up
from flatout.audit.measure import Measured
from flatout.files import write_atomically
from flatout.report.figures import Curve, line_chart
from flatout.report.page import render_page, tile

_SHOWN = 20


def write_audit_page(measured: Measured, findings: list[Finding], title: str, command: str, path: Path) -> None:
    """Write the page of an audit."""
    rows, found = measured.rows, measured.suspects
    curves = [Curve(f"fold {number + 1}", _points(measured, 1 - each)) for number, each in enumerate(measured.errors)]
    shown = found.places[:_SHOWN]
    unlike = np.argsort(measured.closeness, kind="stable")[: _SHOWN // 2]
    page = render_page(
        "audit",
        title=title,
        command=command,
        figures=_tiles(measured),
        findings=[[f"{100 * each.worth:.1f}", each.what, each.step] for each in findings],
        suspects=[
            [*_row(measured, place), rows.classes[likely], f"{margin:.2f}"]
            for place, likely, margin in zip(shown, found.likely, found.margins, strict=False)
        ],
        mixed=[
            [rows.classes[a], rows.classes[b], f"{count:,}"] for a, b, count in mixed_up(found.joint, len(rows), 10)
        ],
        charts_of_rows=[line_chart("score by rows trained on", curves, x_label="rows", doublings=True)],
        forecast=measured.forecast.line(),
        slices=[[each.name, f"{each.rows:,}", f"{100 * each.score:.1f} %"] for each in slices(measured)[:_SHOWN]],
        unlike=[[*_row(measured, place), f"{measured.closeness[place]:.3f}"] for place in unlike],
    )
    write_atomically(path, page)


def _points(measured: Measured, values: np.ndarray) -> list[tuple[float, float]]:
    return list(zip(measured.sizes.tolist(), values.tolist(), strict=True))


def _row(measured: Measured, place: int) -> list[str]:
    rows = measured.rows
    return [f"{rows.rows[place]:,}", beginning(rows.texts[place]), rows.classes[rows.labels[place]]]


def _tiles(measured: Measured) -> list[dict[str, str]]:
    (score, low, high), noise = measured.score, measured.noise
    gain = measured.forecast
    return [
        tile(f"{100 * score:.1f} %", "answered as labelled", f"{100 * low:.1f} to {100 * high:.1f}"),
        tile(f"{100 * noise[0]:.1f} %", "labels that look wrong", f"{100 * noise[1]:.1f} to {100 * noise[2]:.1f}"),
        tile(
            f"{100 * gain.gain:+.1f}",
            f"points by {gain.more:,} more rows",
            f"{100 * gain.low:.1f} to {100 * gain.high:.1f}",
        ),
        tile(f"{len(measured.rows):,}", "rows"),
    ]
