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

_MOST_OF_OTHERS = 0.2  # of all cores, in other programs; verdicts of runs hold the same


def closing_lines(ladder: Mapping[str, Any]) -> list[str]:
    """The lines below the table: rungs left out, speed of an epoch, speed-up, startup, quality.

    `ladder` is the mapping of `ladder.json`. Where fewer than two rungs were measured a line says
    so instead of the speeds.
    """
    lines = _skipped_lines(ladder)
    quality_lines = _quality_lines(ladder["quality"])
    whole = ladder["whole"]
    if whole is None:
        lines.append(
            "Fewer than two rungs were measured: no speed-up can be stated. Give more time with"
            " for=."
        )
        return lines + quality_lines
    before = duration(whole["minutes_before"])
    lines.append(f"an epoch as usually written: {before} ({ladder['rows']:,} rows)")
    lines.append(f"an epoch of {whole['top']}: {duration(whole['minutes_after'])}")
    promised = f"; promised {ladder['in_all']}" if ladder["in_all"] else ""
    if has_speedup(whole):
        lines.append(f"speed-up: {written(whole['ratio'])}{promised}")
    else:
        lines.append(f"speed-up: none is stated from one round; give more time with for={promised}")
    startup_before = f"{whole['startup_before_s']:.1f} s before"
    startup_after = f"{whole['startup_after_s']:.1f} s after at most"
    lines.append(f"startup: {startup_before}, {startup_after}")
    return lines + _warn_of_others(ladder) + _warn_of_spread(ladder["rungs"]) + quality_lines


def has_speedup(whole: Mapping[str, Any]) -> bool:
    """Whether several rounds measured foot and top; a file of an older version does not say."""
    return whole.get("rounds", 2) > 1


def _skipped_lines(ladder: Mapping[str, Any]) -> list[str]:
    skipped = ladder["skipped"]
    if not skipped:
        return []
    count = f"{len(skipped)} of {len(ladder['rungs'])} rungs were not measured:"
    return [count, *(f"{rung['name']}: {rung['why']}" for rung in skipped)]


def _quality_lines(quality: Mapping[str, Any] | None) -> list[str]:
    """The test metric of both programs, where trainings to the end were compared."""
    if not quality:
        return []
    groups = "; ".join(f"{group['name']}: {mean_with_spread(group)}" for group in quality["groups"])
    metric = f"test {quality['metric']} in points, {quality['seeds']} seeds"
    return [f"{metric}: {groups}", quality["sentence"]]


def _warn_of_others(ladder: Mapping[str, Any]) -> list[str]:
    """A warning if other programs computed before the climb or after it."""
    others = ladder.get("others")
    if others is None or others["cores"] < _MOST_OF_OTHERS * others["of"]:
        return []
    return [
        f"other programs kept {others['cores']:.1f} of {others['of']} cores busy: these speeds are"
        " not comparable. Measure again while the machine does nothing else."
    ]


def _warn_of_spread(rungs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning if rounds differ so much that other programs must have been running."""
    several_rounds = [rung for rung in rungs if rung.get("spread")]
    if not several_rounds:
        return []
    # Programs beside the ladder slow some rounds down: rounds of one rung then differ widely.
    widest = max(several_rounds, key=lambda rung: rung["spread"])
    if widest["spread"] <= MOST_SPREAD:
        return []
    fix = "Measure again while the machine does nothing else, or give more time with for=."
    return [f"rounds differ by ±{widest['spread']:.0%} at {widest['name']}: {fix}"]


def mean_with_spread(group: Mapping[str, Any]) -> str:
    """The mean over seeds and their standard deviation: `81.20 ± 0.35`."""
    mean = f"{group['mean']:.2f}"
    return mean if group["sd"] is None else f"{mean} ± {group['sd']:.2f}"


def word_of(rung: Mapping[str, Any]) -> str:
    """The reason why a rung was skipped, or `unsure`, `does not pay`; empty if it pays."""
    if rung["skipped"]:
        return str(rung["skipped"])
    return "" if rung["verdict"] in (None, PAYS) else str(rung["verdict"])


def written(interval: Mapping[str, Any] | None) -> str:
    """A ratio with its interval, where there is one: `1.52× (1.41–1.60)`."""
    if interval is None:
        return "–"
    digits = 2 if interval["value"] < 10 else 1
    value = f"{interval['value']:.{digits}f}×"
    if interval["low"] is None:
        return value
    return f"{value} ({interval['low']:.{digits}f}–{interval['high']:.{digits}f})"


def duration(minutes: float) -> str:
    """Minutes in words: `2.5 min`, and `30.0 s` below one."""
    return f"{minutes:.1f} min" if minutes >= 1 else f"{60 * minutes:.1f} s"


def figures(ladder: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Names of the columns of figures, and the figures of each rung as texts.

    Columns without any figure here are left out: `tokens/s` of data without tokens, `GPU` on a
    machine without one. A rung that was not measured has empty texts.
    """
    rungs = ladder["rungs"]
    left_out = set[str]()
    if not any(rung.get("tokens_per_s") for rung in rungs):
        left_out.add("tokens/s")
    if all(rung.get("device_share") is None for rung in rungs):
        left_out.add("GPU")
    heads = [name for name in _COLUMNS if name not in left_out]
    rows = list[list[str]]()
    for rung in rungs:
        is_measured = bool(rung["cumulative"])
        cells = [""] * len(heads)
        if is_measured:
            cells = [_COLUMNS[name](rung) for name in heads]
        rows.append(cells)
    return heads, rows


def ladder_table(ladder: Mapping[str, Any]) -> Table:
    """The rungs with what a guide promises and what was measured, a row each."""
    names, rows = figures(ladder)
    table = plain_table("rung", "promised", *names, texts=2, title=Text(ladder["title"]))
    table.add_column("")
    for rung, cells in zip(ladder["rungs"], rows, strict=True):
        style = _style_of(rung)
        texts = [
            printable(rung["name"]),
            printable(rung["promised"]),
            *cells,
            printable(word_of(rung)),
        ]
        table.add_row(*(Text(text, style=style) for text in texts))
    return table


def _style_of(rung: Mapping[str, Any]) -> str:
    if rung["skipped"]:
        return "bright_black"
    return {COSTS: "red", UNSURE: "yellow"}.get(rung["verdict"] or "", "")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _measured(rung: Mapping[str, Any]) -> str:
    gain = written(rung["measured"])
    is_of_startup = rung["measures"] == STARTUP and rung["measured"]
    return f"startup {gain}" if is_of_startup else gain


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "measured": _measured,
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
