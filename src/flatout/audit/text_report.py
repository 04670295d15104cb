"""What an audit of texts prints, and its table of suspects and its page.

Open this file to change a line of the terminal, a column of `suspects.csv`, or a part of
`audit.html`. The findings below these lines are written in `findings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flatout.audit.findings import (
    AuditFinding,
    describe_noise,
    describe_rare_suspects,
    describe_span,
    find_slices,
    is_noise_known,
)
from flatout.audit.labels import count_mixed_pairs
from flatout.audit.measure import AuditMeasurement
from flatout.audit.next_rows import shorten
from flatout.audit.rows import find_small_classes
from flatout.data.checks.findings import counted, name_few
from flatout.files import write_atomically, write_table
from flatout.report.figures import fold_curves, line_chart
from flatout.report.page import render_text, tile

_ROWS_ON_PAGE = 20  # of a table
_UNLIKE_ON_PAGE = 10  # texts that are like no class
_PAIRS_ON_PAGE = 10  # of classes that suspects lie between
_NAMED_CLASSES = 5  # on the terminal
_LONGEST_LOCATION = 40  # characters in a table of the page


def describe_texts(measured: AuditMeasurement, num_folds: int) -> Iterator[str]:
    """The lines of the terminal: score, luck, labels, rows, more rows."""
    rows = measured.rows
    score, low, high = measured.score
    interval = describe_span(low, high)
    yield f"score:  {100 * score:.1f} % of the rows answered as labelled ({interval})"
    yield _describe_luck(measured, num_folds)
    noise = describe_noise(measured.noise)
    yield f"labels: {counted(len(measured.suspects.rows), 'suspect')}; {noise}"
    for given, likely, num_rows in count_mixed_pairs(rows.labels, measured.suspects):
        pair = f"{rows.classes[given]}, likely {rows.classes[likely]}"
        yield f"        {pair}: {counted(num_rows, 'row')}"
    rare = describe_rare_suspects(rows, measured.suspects)
    if rare:
        yield f"        {rare}"
    gain, least, most = measured.without_suspects
    points = f"{100 * gain:+.1f} points ({describe_span(least, most)})"
    yield f"        without the suspects in training: {points}"
    if not rows.is_tagged:
        cut = measured.cut
        long = f"{cut.num_long:,} texts are longer than data.max_length"
        yield f"rows:   {long}; the cut costs {100 * cut.lost:.1f} points"
    small = find_small_classes(rows, num_folds)
    if small:
        named = name_few(small, _NAMED_CLASSES)
        yield f"        classes with fewer rows than folds, judged from little: {named}"
    yield f"more:   {measured.forecast.line()}"


def _describe_luck(measured: AuditMeasurement, num_folds: int) -> str:
    """By how much scores differ though nothing but chance is different."""
    rows = measured.rows
    score = measured.score[0]
    num_test = rows.of_splits.get("test") or len(rows) // num_folds
    # 1.96 standard errors of the difference of two scores, in points
    by_chance = 196 * np.sqrt(2 * score * (1 - score) / num_test)
    folds = describe_span(measured.fold_scores.min(), measured.fold_scores.max())
    again = describe_span(measured.dealt_again.min(), measured.dealt_again.max())
    return (
        f"luck:   folds from {folds} %, dealt again {again} %; two test sets of {num_test:,} rows"
        f" differ by {by_chance:.1f} points by chance"
    )


def write_suspects(measured: AuditMeasurement, path: Path) -> None:
    """Write the suspects as a table, the surest first; `data.exclude` and `data.relabel` read it.

    A column for each view says which class words, encoder or network alone give.
    """
    rows = measured.rows
    suspects = measured.suspects
    views = measured.views
    table: list[list[object]] = [
        ["row", "file", "split", "text", "given", "likely", "sure", *views, "place"]
    ]
    for row, likely, sure in zip(suspects.rows, suspects.likely, suspects.sure, strict=True):
        classes_of_views = list[str]()
        for answers in views.values():
            has_read = answers[row] >= 0
            classes_of_views.append(rows.classes[answers[row]] if has_read else "")
        table.append(
            [
                rows.numbers[row],
                rows.files[row],
                rows.splits[row],
                shorten(rows.shown[row]),
                rows.classes[rows.labels[row]],
                rows.classes[likely],
                f"{sure:.3f}",
                *classes_of_views,
                rows.locations[row],
            ]
        )
    write_table(path, table)


def write_text_page(
    measured: AuditMeasurement, findings: list[AuditFinding], title: str, command: str, path: Path
) -> None:
    """Write the page of an audit of texts."""
    page = render_text(
        "audit.html",
        title=title,
        command=command,
        figures=_tiles(measured),
        findings=[
            [f"{100 * finding.worth:.1f}", finding.what, finding.step] for finding in findings
        ],
        suspects=_suspect_lines(measured),
        mixed=_mixed_lines(measured),
        charts_of_rows=[
            line_chart(
                "score by rows trained on",
                fold_curves(measured.sizes, 1 - measured.errors),
                x_label="rows",
                doublings=True,
            )
        ],
        forecast=measured.forecast.line(),
        slices=[
            [rows.name, f"{rows.rows:,}", f"{100 * rows.score:.1f} %"]
            for rows in find_slices(measured)[:_ROWS_ON_PAGE]
        ],
        unlike=_unlike_lines(measured),
    )
    write_atomically(path, page)


def _tiles(measured: AuditMeasurement) -> list[dict[str, str]]:
    score, low, high = measured.score
    rate, least_rate, most_rate = measured.noise
    forecast = measured.forecast
    return [
        tile(f"{100 * score:.1f} %", "answered as labelled", describe_span(low, high)),
        tile(
            f"{100 * rate:.1f} %" if is_noise_known(measured.noise) else "?",
            "labels that look wrong",
            describe_span(least_rate, most_rate),
        ),
        tile(
            f"{100 * forecast.gain:+.1f}",
            f"points by {forecast.more:,} more rows",
            describe_span(forecast.low, forecast.high),
        ),
        tile(f"{len(measured.rows):,}", "rows"),
    ]


def _suspect_lines(measured: AuditMeasurement) -> list[list[str]]:
    classes = measured.rows.classes
    suspects = measured.suspects
    lines = list[list[str]]()
    first = suspects.rows[:_ROWS_ON_PAGE]
    for row, likely, sure in zip(first, suspects.likely, suspects.sure, strict=False):
        lines.append([*_describe_row(measured, row), classes[likely], f"{sure:.3f}"])
    return lines


def _mixed_lines(measured: AuditMeasurement) -> list[list[str]]:
    rows = measured.rows
    pairs = count_mixed_pairs(rows.labels, measured.suspects, _PAIRS_ON_PAGE)
    return [
        [rows.classes[given], rows.classes[likely], f"{num_rows:,}"]
        for given, likely, num_rows in pairs
    ]


def _unlike_lines(measured: AuditMeasurement) -> list[list[str]]:
    """Texts that are like no class."""
    rows = np.argsort(measured.closeness, kind="stable")[:_UNLIKE_ON_PAGE]
    return [[*_describe_row(measured, row), f"{measured.closeness[row]:.3f}"] for row in rows]


def _describe_row(measured: AuditMeasurement, row: int) -> list[str]:
    """Where a row stands (the end of it, where that is long), its text, and its label."""
    rows = measured.rows
    location = rows.locations[row]
    if len(location) >= _LONGEST_LOCATION:
        location = f"…{location[1 - _LONGEST_LOCATION :]}"
    return [location, shorten(rows.shown[row]), rows.classes[rows.labels[row]]]
