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
from flatout.ladder.rungs import STARTUP
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

_ROW = 34  # height of a rung, in pixels
_TOP = 8  # margins
_BOTTOM = 30
_WIDTH = 900
_TICKS = (0.1, 0.2, 0.5, 0.8, 1, 1.5, 2, 3, 5, 8, 12, 20, 40, 80, 160)
# middle of the bars, and of the text beside them, below the upper edge of a rung: fractions of it
_PROMISED_AT = 0.3
_MEASURED_AT = 0.64
_PROMISED = "#c9d4dc"
_COLOURS = {PAYS: COLOURS[0], UNSURE: "#b08900", COSTS: "#b3261e"}  # the last two are amber and red


def promise_chart(rungs: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Promised and measured speed-up of each rung; None where nothing was measured."""
    if not (shown := _select_rungs(rungs)):
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
    """Draw promised and measured speed-ups into a file of TensorBoard."""
    if not (shown := _select_rungs(rungs)):
        return
    height = _TOP + _BOTTOM + _ROW * len(shown)
    with event_file(folder, ".ladder") as writer, drawing(_WIDTH, height, dpi=108) as figure:
        _draw(figure, shown)
        writer.add_figure("ladder/promised_and_measured", figure, 0, close=False)


def _select_rungs(rungs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rungs above the foot that have a promise or a measurement; empty if none was measured."""
    shown = [rung for rung in rungs if rung["measured"] or rung["factor"]]
    has_measured = any(rung["measured"] for rung in shown)
    return shown if has_measured else []


def _draw(figure: Figure, shown: Sequence[Mapping[str, Any]]) -> None:
    names = [_name_of(rung) for rung in shown]
    left = 16 + 1.08 * LETTER * max(map(len, names))
    axes = add_axes(figure, left=left, right=60, top=_TOP, bottom=_BOTTOM)
    low, high = _range_of(shown)
    axes.set_xscale("log")
    axes.set(xlim=(low, high), ylim=(len(names), 0))
    ticks = [value for value in _TICKS if low <= value <= high]
    axes.set_xticks(ticks, [f"{value:g}×" for value in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks([row + 0.5 for row in range(len(names))], names)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(visible=False)
    axes.grid(axis="x")
    axes.axvline(1, color=MUTED, linewidth=1)
    for row, rung in enumerate(shown):
        if rung["factor"]:
            _draw_promise(axes, row, rung)
        if rung["measured"]:
            _draw_measured(axes, row, rung, low, high)
        else:
            _write(axes, 1, row + _MEASURED_AT, printable(rung["skipped"]), MUTED)


def _name_of(rung: Mapping[str, Any]) -> str:
    name = printable(rung["name"])
    return f"{name} (startup)" if rung["measures"] == STARTUP else name


def _range_of(shown: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Ends of the axis: all promises and measured values lie within, and so does no change at 1."""
    values = list[float]()
    for rung in shown:
        values += rung["factor"] or ()
        values += _measured(rung)[:1]
    return min(0.8, 0.9 * min(values)), max(2.0, 1.1 * max(values))


def _draw_promise(axes: Axes, row: int, rung: Mapping[str, Any]) -> None:
    least, most = rung["factor"]
    bar = axes.barh(
        row + _PROMISED_AT, math.fabs(most - 1), left=min(1, most), height=0.24, color=_PROMISED
    )
    axes.plot([least, least], [row + 0.18, row + 0.42], color=MUTED, linewidth=1)
    explain(bar[0], [f"{rung['name']}: promised {rung['promised']}"])


def _draw_measured(axes: Axes, row: int, rung: Mapping[str, Any], low: float, high: float) -> None:
    value, least, most = _measured(rung)
    y = row + _MEASURED_AT
    colour = _COLOURS[rung["verdict"]]
    bar = axes.barh(y, math.fabs(value - 1), left=min(1, value), height=0.34, color=colour)
    explain(bar[0], [f"{rung['name']}: measured {value:.2f}×"])
    axes.plot([max(low, least), min(high, most)], [y, y], color=INK, linewidth=1.2)
    _write(axes, max(1, value, min(most, high)), y, f"{value:.2f}×", INK)


def _write(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Write a text a little right of a point."""
    axes.annotate(
        text,
        (x, y),
        xytext=(6, 0),
        textcoords="offset points",
        color=colour,
        fontsize=10.5,
        va="center",
    )


def _measured(rung: Mapping[str, Any]) -> tuple[float, ...]:
    """Value and ends of the interval; empty where the rung was not measured.

    Without an interval its ends are the value.
    """
    gain = rung["measured"]
    if not gain:
        return ()
    return tuple(float(gain[name] or gain["value"]) for name in ("value", "low", "high"))
