"""What an audit of texts prints and writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flatout.audit.findings import UNKNOWN, AuditFinding, slices, span, wrong_share
from flatout.audit.labels import mixed_up
from flatout.audit.measure import AuditMeasurement
from flatout.audit.next_rows import beginning
from flatout.audit.rows import small_classes
from flatout.files import write_atomically, write_table
from flatout.report.figures import Curve, line_chart
from flatout.report.page import render_text, tile

_SHOWN = 20  # rows of a table on the page


def lines(measured: AuditMeasurement, num_folds: int) -> Iterator[str]:
    """What is printed: score and luck, labels, rows, more rows."""
    rows, (score, low, high) = measured.rows, measured.score
    yield f"score:  {100 * score:.1f} % of the rows answered as labelled ({span(low, high)})"
    test = rows.of_splits.get("test") or len(rows) // num_folds
    luck = f"{196 * np.sqrt(2 * score * (1 - score) / test):.1f} points by chance"
    folds = span(measured.fold_scores.min(), measured.fold_scores.max())
    again = span(*sorted(measured.dealt_again))
    yield (
        f"luck:   folds from {folds} %, dealt again {again} %; two test sets of {test:,} rows"
        f" differ by {luck}"
    )
    yield f"labels: {len(measured.suspects.places):,} suspects; {wrong_share(measured.noise)}"
    for given, likely, count in mixed_up(rows.labels, measured.suspects):
        yield f"        {rows.classes[given]}, likely {rows.classes[likely]}: {count:,} rows"
    gain, least, most = measured.without_suspects
    yield (
        f"        without the suspects in training: {100 * gain:+.1f} points ({span(least, most)})"
    )
    long, lost, *_ = measured.cut
    if not rows.is_tagged:
        yield (
            f"rows:   {long:,} texts are longer than data.max_length; the cut costs"
            f" {100 * lost:.1f} points"
        )
    if small := small_classes(rows, num_folds):
        named = ", ".join(small[:5]) + (", …" if len(small) > 5 else "")
        yield f"        classes with fewer rows than folds, judged from little: {named}"
    yield f"more:   {measured.forecast.line()}"


def write_suspects(measured: AuditMeasurement, path: Path) -> None:
    """The suspects as a table, the surest first, with what words and encoder say; `data.exclude`
    reads it.
    """
    rows, found = measured.rows, measured.suspects
    table: list[list[object]] = [
        ["row", "file", "split", "text", "given", "likely", "sure", *measured.views, "place"]
    ]
    for place, likely, sure in zip(found.places, found.likely, found.sure, strict=True):
        where = [
            rows.rows[place],
            rows.files[place],
            rows.splits[place],
            beginning(rows.shown[place]),
        ]
        views = [
            rows.classes[of_rows[place]] if of_rows[place] >= 0 else ""
            for of_rows in measured.views.values()
        ]
        said = [rows.classes[rows.labels[place]], rows.classes[likely], f"{sure:.3f}", *views]
        table.append([*where, *said, rows.places[place]])
    write_table(path, table)


def write_audit_page(
    measured: AuditMeasurement, findings: list[AuditFinding], title: str, command: str, path: Path
) -> None:
    rows, found = measured.rows, measured.suspects
    points = [
        list(zip(measured.sizes.tolist(), scores, strict=True))
        for scores in (1 - measured.errors).tolist()
    ]
    curves = [Curve(f"fold {number}", of_fold) for number, of_fold in enumerate(points, 1)]
    unlike = np.argsort(measured.closeness, kind="stable")[: _SHOWN // 2]
    page = render_text(
        "audit.html",
        title=title,
        command=command,
        figures=_tiles(measured),
        findings=[[f"{100 * each.worth:.1f}", each.what, each.step] for each in findings],
        suspects=[
            [*_row(measured, place), rows.classes[likely], f"{sure:.3f}"]
            for place, likely, sure in zip(
                found.places[:_SHOWN], found.likely, found.sure, strict=False
            )
        ],
        mixed=[
            [rows.classes[a], rows.classes[b], f"{num:,}"]
            for a, b, num in mixed_up(rows.labels, found, 10)
        ],
        charts_of_rows=[
            line_chart("score by rows trained on", curves, x_label="rows", doublings=True)
        ],
        forecast=measured.forecast.line(),
        slices=[
            [each.name, f"{each.rows:,}", f"{100 * each.score:.1f} %"]
            for each in slices(measured)[:_SHOWN]
        ],
        unlike=[[*_row(measured, place), f"{measured.closeness[place]:.3f}"] for place in unlike],
    )
    write_atomically(path, page)


def _row(measured: AuditMeasurement, place: int) -> list[str]:
    rows = measured.rows
    where = rows.places[place] if len(rows.places[place]) < 40 else f"…{rows.places[place][-39:]}"
    return [where, beginning(rows.shown[place]), rows.classes[rows.labels[place]]]


def _tiles(measured: AuditMeasurement) -> list[dict[str, str]]:
    score, low, high = measured.score
    noise = measured.noise
    gain = measured.forecast
    return [
        tile(f"{100 * score:.1f} %", "answered as labelled", span(low, high)),
        tile(
            f"{100 * noise[0]:.1f} %" if noise[2] < UNKNOWN else "?",
            "labels that look wrong",
            span(*noise[1:]),
        ),
        tile(
            f"{100 * gain.gain:+.1f}",
            f"points by {gain.more:,} more rows",
            span(gain.low, gain.high),
        ),
        tile(f"{len(measured.rows):,}", "rows"),
    ]
