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
from flatout.ladder.closing import closing_lines, duration, figures, mean_with_spread, word_of
from flatout.report.page import render_text, tile

PAGE = "ladder.html"


def write_ladder_page(folder: Path, found: Mapping[str, Any]) -> None:
    """From the plain values of its `ladder.json`."""
    heads, cells = figures(found)
    rows = [
        {name: rung[name] for name in ("name", "about", "promised")}
        | {"figures": texts, "word": word_of(rung)}
        | {"kind": "skipped" if rung["skipped"] else (rung["verdict"] or "").replace(" ", "-")}
        for rung, texts in zip(found["rungs"], cells, strict=True)
    ]
    chart = promise_chart(found["rungs"])
    page = render_text(
        "ladder.html",
        title=found["title"],
        command=found["command"],
        about=f"{found['rows']:,} rows an epoch, on {found['device']}, {found['date']}",
        figures=_tiles(found),
        charts_of_rungs=[chart] if chart else [],
        heads=heads,
        rows=rows,
        lines=closing_lines(found),
        quality=_quality(found["quality"]),
    )
    write_atomically(folder / PAGE, page)


def _tiles(found: Mapping[str, Any]) -> list[dict[str, str]]:
    if (whole := found["whole"]) is None:
        return []
    ratio = whole["ratio"]
    sure = "" if ratio["low"] is None else f"{ratio['low']:.1f} to {ratio['high']:.1f}"
    sides = (
        ("as usually written", whole["minutes_before"]),
        (whole["top"], whole["minutes_after"]),
    )
    epochs = [tile(duration(minutes), "an epoch", name) for name, minutes in sides]
    return [tile(f"{ratio['value']:.1f}×", "in all", sure), *epochs]


def _quality(quality: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if quality is None:
        return None
    groups = quality["groups"]
    rows = [
        [each["name"], mean_with_spread(each), *(f"{value:.2f}" for value in each["values"])]
        for each in groups
    ]
    heads = [
        "",
        f"test {quality['metric']}, points",
        *(f"seed {number + 1}" for number in range(quality["seeds"])),
    ]
    return {
        "heads": heads,
        "rows": rows,
        "sentence": quality["sentence"],
        "epochs": quality["epochs"],
    }
