"""What a climb found, rung by rung: plain values for `ladder.json`, the table in the terminal, the
page and its figure.

`ladder.html` shows promised against measured, without network or script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from flatout.errors import printable
from flatout.files import write_atomically
from flatout.ladder.climb import TOO_SHORT, Step, ratio, top_of
from flatout.ladder.compare_runs import Estimate
from flatout.ladder.rungs import STARTUP, Ladder
from flatout.report.closing import plain_table
from flatout.report.dashboard import event_file
from flatout.report.figures import (
    COLOURS,
    INK,
    LETTER,
    MUTED,
    Chart,
    add_axes,
    draw_svg,
    drawing,
    explain,
)
from flatout.report.page import filled, render_text, tile

FILE = "ladder.json"
SCHEMA = 1
LEAST_GAIN = 1.02  # a rung below this ratio does not pay
MOST_SPREAD = 0.2  # rounds that differ by more are not those of a quiet machine
PAYS = "pays"
UNSURE = "unsure"
COSTS = "does not pay"


def results(
    ladder: Ladder, steps: Sequence[Step], *, rows: int, about: dict[str, Any]
) -> dict[str, Any]:
    """All figures of a ladder; `rows`: of an epoch."""
    rungs = list[dict[str, Any]]()
    below = list[Step]()
    for step in steps:
        rungs.append(_rung(step, below))
        below += [step] if step.found else []
    return {
        "schema": SCHEMA,
        **{name: getattr(ladder, name) for name in ("name", "title", "kind", "in_all")},
        "rows": rows,
        **about,
        "rungs": rungs,
        "whole": _whole([step for step in steps if step.found], rows),
        "skipped": [
            {"name": step.rung.name, "why": step.skipped}
            for step in steps
            if step.skipped and not step.found
        ],
        "is_complete": not any(step.skipped == TOO_SHORT for step in steps),
        "quality": None,
    }


def _rung(step: Step, below: Sequence[Step]) -> dict[str, Any]:
    """The figures of a rung; `below`: the rungs below it that were measured."""
    rung = step.rung
    found: dict[str, Any] = {
        **{name: getattr(rung, name) for name in ("name", "about", "promised")},
        "factor": list(rung.factor) if rung.factor else None,
        "measures": rung.measures,
        "program": "flatout" if rung.is_ours else "usual",
        "change": list(rung.words) if rung.is_ours else dict(rung.keywords or {}),
        "skipped": step.skipped if not step.found else "",
        **dict.fromkeys(("measured", "cumulative", "verdict")),
    }
    if not step.found:
        return found
    if below:
        gain = ratio(below[-1], step, rung.measures)
        found |= {"measured": asdict(gain), "verdict": judge(gain), "against": below[-1].rung.name}
    found["cumulative"] = asdict(ratio(below[0] if below else step, step))
    for name in (
        "rows_per_s",
        "tokens_per_s",
        "wait_share",
        "padding_share",
        "startup_s",
        "memory_gb",
        "device_share",
    ):
        found[name] = step.middle(name)
    return found | {"rounds": len(step.found), "spread": step.spread}


def judge(gain: Estimate) -> str:
    """Whether a rung pays: its gain is worth a setting, and enough rounds show that it is no
    chance.
    """
    if gain.value < LEAST_GAIN:
        return COSTS
    return PAYS if gain.low is not None and gain.low > 1 else UNSURE


def _whole(measured: Sequence[Step], rows: int) -> dict[str, Any] | None:
    if not (place := top_of([step.rung for step in measured])):
        return None
    foot, top = measured[0], measured[place]
    minutes = [rows / (step.middle("rows_per_s") or 1e-9) / 60 for step in (foot, top)]
    found = {
        "foot": foot.rung.name,
        "top": top.rung.name,
        "minutes_before": minutes[0],
        "minutes_after": minutes[1],
    }
    found |= {"ratio": asdict(ratio(foot, top)), "startup_before_s": foot.middle("startup_s")}
    return found | {
        "startup_after_s": top.middle("startup_s"),
        "startup_ratio": asdict(ratio(foot, top, STARTUP)),
    }


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

PAGE = "ladder.html"
_ROW = 34
_TOP = 8
_BOTTOM = 30
_WIDTH = 900
_PROMISED = "#c9d4dc"
_COLOURS = {PAYS: COLOURS[0], UNSURE: "#b08900", COSTS: "#b3261e"}  # the last two are amber and red


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


def promise_chart(rungs: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Promised and measured speed-up of each rung; None where nothing was measured."""
    if not (shown := _drawn(rungs)):
        return None
    title = "speed-up of each rung"
    with drawing(_WIDTH, _TOP + _BOTTOM + _ROW * len(shown)) as figure:
        _draw(figure, shown)
        svg = draw_svg(figure, title)
    legend = [(name, colour, "█") for name, colour in {"promised": _PROMISED, **_COLOURS}.items()]
    return Chart(
        title=title,
        svg=svg,
        legend=legend,
        note="· a line reaches from the least to the most of all rounds",
    )


def write_figure(folder: Path, rungs: Sequence[Mapping[str, Any]]) -> None:
    """The same chart for TensorBoard."""
    if not (shown := _drawn(rungs)):
        return
    height = _TOP + _BOTTOM + _ROW * len(shown)
    with event_file(folder, ".ladder") as writer, drawing(_WIDTH, height, dpi=108) as figure:
        _draw(figure, shown)
        writer.add_figure("ladder/promised_and_measured", figure, 0, close=False)


def _drawn(rungs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rungs above the foot that a guide or a measurement says something of."""
    shown = [rung for rung in rungs if rung["measured"] or rung["factor"]]
    return shown if any(rung["measured"] for rung in shown) else []


def _draw(figure: Figure, shown: Sequence[Mapping[str, Any]]) -> None:
    names = [
        printable(rung["name"]) + (" (startup)" if rung["measures"] == "startup" else "")
        for rung in shown
    ]
    axes = add_axes(
        figure, left=16 + 1.08 * LETTER * max(map(len, names)), right=60, top=_TOP, bottom=_BOTTOM
    )
    values = [value for rung in shown for value in (*(rung["factor"] or ()), *_measured(rung)[:1])]
    low = min(0.8, 0.9 * min(values))
    high = max(2.0, 1.1 * max(values))
    axes.set_xscale("log")
    axes.set(xlim=(low, high), ylim=(len(names), 0))
    ticks = [
        value
        for value in (0.1, 0.2, 0.5, 0.8, 1, 1.5, 2, 3, 5, 8, 12, 20, 40, 80, 160)
        if low <= value <= high
    ]
    axes.set_xticks(ticks, [f"{value:g}×" for value in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks([place + 0.5 for place in range(len(names))], names)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(visible=False)
    axes.grid(axis="x")
    axes.axvline(1, color=MUTED, linewidth=1)
    for place, rung in enumerate(shown):
        if rung["factor"]:
            _draw_promise(axes, place, rung)
        if rung["measured"]:
            _draw_measured(axes, place, rung, low, high)
        else:
            _write(axes, 1, place + 0.64, printable(rung["skipped"]), MUTED)


def _draw_promise(axes: Axes, place: int, rung: Mapping[str, Any]) -> None:
    least, most = rung["factor"]
    bar = axes.barh(
        place + 0.3, math.fabs(most - 1), left=min(1, most), height=0.24, color=_PROMISED
    )
    axes.plot([least, least], [place + 0.18, place + 0.42], color=MUTED, linewidth=1)
    explain(bar[0], [f"{rung['name']}: promised {rung['promised']}"])


def _draw_measured(
    axes: Axes, place: int, rung: Mapping[str, Any], low: float, high: float
) -> None:
    value, least, most = _measured(rung)
    at = place + 0.64
    bar = axes.barh(
        at, math.fabs(value - 1), left=min(1, value), height=0.34, color=_COLOURS[rung["verdict"]]
    )
    explain(bar[0], [f"{rung['name']}: measured {value:.2f}×"])
    axes.plot([max(low, least), min(high, most)], [at, at], color=INK, linewidth=1.2)
    _write(axes, max(1, value, min(most, high)), at, f"{value:.2f}×", INK)


def _write(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    options: dict[str, Any] = {
        "textcoords": "offset points",
        "color": colour,
        "fontsize": 10.5,
        "va": "center",
    }
    axes.annotate(text, (x, y), xytext=(6, 0), **options)


def _measured(rung: Mapping[str, Any]) -> tuple[float, ...]:
    """Value and ends of the interval; empty where the rung was not measured."""
    found = rung["measured"]
    return (
        tuple(float(found[name] or found["value"]) for name in ("value", "low", "high"))
        if found
        else ()
    )
