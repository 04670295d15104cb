"""Write a measured ladder for the terminal: a table of its rungs and the lines below it.

Everything here reads the mapping that `results.py` computes, as it stands in `ladder.json`. The
columns of the table are one entry each in `_COLUMNS`; the page shows the same ones. Open this file
to add a column, or to change a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from flatout.errors import printable
from flatout.ladder.results import COSTS, PAYS, UNSURE
from flatout.ladder.rungs import STARTUP
from flatout.report.closing import plain_table
from flatout.report.page import filled

MOST_SPREAD = 0.2  # rounds that differ by more are not those of a quiet machine


def closing_lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{each['name']}: {each['why']}" for each in found["skipped"]]
    if lines:
        lines.insert(0, f"{len(lines)} of {len(found['rungs'])} rungs were not measured:")
    whole = found["whole"]
    quality = list[str]()
    if known := found["quality"]:
        groups = "; ".join(f"{each['name']}: {mean_with_spread(each)}" for each in known["groups"])
        quality = [
            f"test {known['metric']} in points, {known['seeds']} seeds: {groups}",
            known["sentence"],
        ]
    if whole is None:
        none = (
            "Fewer than two rungs were measured: no speed-up can be stated. Give more time with"
            " for=."
        )
        return [*lines, none, *quality]
    lines.append(
        f"an epoch as usually written: {duration(whole['minutes_before'])} ({found['rows']:,} rows)"
    )
    lines.append(f"an epoch of {whole['top']}: {duration(whole['minutes_after'])}")
    lines.append(
        f"speed-up: {written(whole['ratio'])}"
        + (f"; promised {found['in_all']}" if found["in_all"] else "")
    )
    lines.append(
        f"startup: {whole['startup_before_s']:.1f} s before, {whole['startup_after_s']:.1f} s after"
        " at most"
    )
    return [*lines, *_disturbed(found["rungs"]), *quality]


def _disturbed(rungs: Sequence[dict[str, Any]]) -> list[str]:
    """A warning where rounds differ so much that other programs must have computed, too."""
    widest = max(
        (rung for rung in rungs if rung.get("spread")),
        key=lambda rung: rung["spread"],
        default=None,
    )
    if widest is None or widest["spread"] <= MOST_SPREAD:
        return []
    words = "Measure again while the machine does nothing else, or give more time with for=."
    return [f"rounds differ by ±{widest['spread']:.0%} at {widest['name']}: {words}"]


def mean_with_spread(group: Mapping[str, Any]) -> str:
    return f"{group['mean']:.2f}" + ("" if group["sd"] is None else f" ± {group['sd']:.2f}")


def word_of(rung: Mapping[str, Any]) -> str:
    """Why a rung was skipped, or that it does not pay for sure; empty for one that pays."""
    return str(rung["skipped"] or ("" if rung["verdict"] in (None, PAYS) else rung["verdict"]))


def written(interval: Mapping[str, Any] | None) -> str:
    if interval is None:
        return "–"
    digits = 2 if interval["value"] < 10 else 1
    sure = (
        ""
        if interval["low"] is None
        else f" ({interval['low']:.{digits}f}–{interval['high']:.{digits}f})"
    )
    return f"{interval['value']:.{digits}f}×{sure}"


def duration(value: float) -> str:
    """Minutes in words."""
    return f"{value:.1f} min" if value >= 1 else f"{60 * value:.1f} s"


def figures(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Names of the columns of figures, and the figures of each rung as texts."""
    rungs = found["rungs"]
    left_out = {"tokens/s"} if not any(rung.get("tokens_per_s") for rung in rungs) else set[str]()
    left_out |= {"GPU"} if all(rung.get("device_share") is None for rung in rungs) else set()
    heads = [name for name in _COLUMNS if name not in left_out]
    return heads, [
        [_COLUMNS[name](rung) if rung["cumulative"] else "" for name in heads] for rung in rungs
    ]


def ladder_table(found: Mapping[str, Any]) -> Table:
    names, rows = figures(found)
    table = plain_table("rung", "promised", *names, texts=2, title=Text(found["title"]))
    table.add_column("")
    for rung, cells in zip(found["rungs"], rows, strict=True):
        style = (
            "bright_black"
            if rung["skipped"]
            else {COSTS: "red", UNSURE: "yellow"}.get(rung["verdict"] or "", "")
        )
        texts = [
            printable(rung["name"]),
            printable(rung["promised"]),
            *cells,
            printable(word_of(rung)),
        ]
        table.add_row(*(Text(text, style=style) for text in texts))
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "measured": lambda rung: (
        ("startup " if rung["measures"] == STARTUP and rung["measured"] else "")
        + written(rung["measured"])
    ),
    "in all": lambda rung: written({**rung["cumulative"], "low": None}),
    "rows/s": lambda rung: _number(rung["rows_per_s"]),
    "tokens/s": lambda rung: _number(rung["tokens_per_s"]),
    "±": lambda rung: filled("{:.1%}", rung["spread"]),
    "wait": lambda rung: filled("{:.1%}", rung["wait_share"]),
    "padding": lambda rung: filled("{:.1%}", rung["padding_share"]),
    "memory": lambda rung: filled("{:.2f} GB", rung["memory_gb"]),
    "startup": lambda rung: f"{rung['startup_s']:.1f} s",
    "GPU": lambda rung: filled("{:.1%}", rung["device_share"]),
}
