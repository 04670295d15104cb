"""Draw the promised and the measured speed-up of each rung, for the page and for TensorBoard.

Each rung has two bars on a logarithmic axis: above what a guide promises, below what was measured,
with a line from the slowest to the fastest round. A rung that was not measured shows why instead.
Open this file to change how the figure looks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flatout.errors import printable
from flatout.ladder.results import COSTS, PAYS, UNSURE
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

_ROW = 34
_TOP = 8
_BOTTOM = 30
_WIDTH = 900
_PROMISED = "#c9d4dc"
_COLOURS = {PAYS: COLOURS[0], UNSURE: "#b08900", COSTS: "#b3261e"}  # the last two are amber and red


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
