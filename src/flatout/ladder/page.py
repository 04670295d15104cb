"""Write `ladder.html`: promised against measured speed-up, without network or script.

The page needs only the plain values of `ladder.json`, so it can be written again from the file.
Its table and sentences are those of `closing.py`, its figure that of `chart.py`. Open this file to
change what the page's template `ladder.html` is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.files import write_atomically
from flatout.ladder.chart import promise_chart
from flatout.ladder.closing import (
    closing_lines,
    duration,
    figures,
    has_speedup,
    mean_with_spread,
    word_of,
)
from flatout.report.page import render_text, tile

PAGE = "ladder.html"


def write_ladder_page(folder: Path, ladder: Mapping[str, Any]) -> None:
    """Write the page into `folder`, from the plain values of its `ladder.json`."""
    heads, figures_of_rungs = figures(ladder)
    rows = [
        _row_of(rung, texts) for rung, texts in zip(ladder["rungs"], figures_of_rungs, strict=True)
    ]
    chart = promise_chart(ladder["rungs"])
    page = render_text(
        "ladder.html",
        title=ladder["title"],
        command=ladder["command"],
        about=f"{ladder['rows']:,} rows an epoch, on {ladder['device']}, {ladder['date']}",
        figures=_tiles(ladder["whole"]),
        charts_of_rungs=[chart] if chart else [],
        heads=heads,
        rows=rows,
        lines=closing_lines(ladder),
        quality=_quality(ladder["quality"]),
    )
    write_atomically(folder / PAGE, page)


def _row_of(rung: Mapping[str, Any], texts: list[str]) -> dict[str, Any]:
    """A rung as the template's table shows it; `kind` is the CSS class of the row."""
    kind = "skipped" if rung["skipped"] else (rung["verdict"] or "").replace(" ", "-")
    return {
        "name": rung["name"],
        "about": rung["about"],
        "promised": rung["promised"],
        "figures": texts,
        "word": word_of(rung),
        "kind": kind,
    }


def _tiles(whole: Mapping[str, Any] | None) -> list[dict[str, str]]:
    """Large figures at the top: the speed-up in all, and an epoch before and after."""
    if whole is None:
        return []
    ratio = whole["ratio"]
    interval = "" if ratio["low"] is None else f"{ratio['low']:.1f} to {ratio['high']:.1f}"
    speedup = [tile(f"{ratio['value']:.1f}×", "in all", interval)] if has_speedup(whole) else []
    return [
        *speedup,
        tile(duration(whole["minutes_before"]), "an epoch", "as usually written"),
        tile(duration(whole["minutes_after"]), "an epoch", whole["top"]),
    ]


def _quality(quality: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A table of the test metric, a row for each program and a column for each seed."""
    if quality is None:
        return None
    rows = list[list[str]]()
    for group in quality["groups"]:
        values = [f"{value:.2f}" for value in group["values"]]
        rows.append([group["name"], mean_with_spread(group), *values])
    seeds = [f"seed {number + 1}" for number in range(quality["seeds"])]
    return {
        "heads": ["", f"test {quality['metric']}, points", *seeds],
        "rows": rows,
        "sentence": quality["sentence"],
        "epochs": quality["epochs"],
    }
