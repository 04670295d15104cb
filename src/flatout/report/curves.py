"""Line charts: values over steps, and over numbers that grow by factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.report.figures import COLOURS, Chart, Mark, add_axes, draw_svg, drawing
from flatout.report.scales import STEPS

if TYPE_CHECKING:
    from matplotlib.axis import Axis

_MOST_DOTS = 30
"""Of a line with more points, only the line is drawn."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One named line of points (step, value)."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(title: str, curves: Sequence[Curve], *, x_label: str = "step", doublings: bool = False) -> Chart | None:
    """A chart of some curves, or None without any point. With `doublings`, equal distances to the right are factors."""
    shown = [Curve(each.name, _shown(each.points, doublings)) for each in curves]
    if not any(each.points for each in shown):
        return None
    with drawing() as figure:
        axes = add_axes(figure)
        if doublings:
            axes.set_xscale("log", base=2)
        for curve, colour in zip(shown, COLOURS, strict=False):
            dots = "o" if len(curve.points) <= _MOST_DOTS else ""
            axes.plot(*zip(*curve.points, strict=True), color=colour, marker=dots, markersize=5, clip_on=False)
        format_numbers(axes.xaxis, "{:,.0f}" if doublings else "{:g}")
        format_numbers(axes.yaxis)
        axes.locator_params(axis="both" if not doublings else "y", nbins=6, steps=STEPS)
        axes.set_xlabel(x_label, loc="right", labelpad=2)
        svg = draw_svg(figure, title)
    legend = [Mark(curve.name, colour) for curve, colour in zip(shown, COLOURS, strict=False)]
    return Chart(title=title, svg=svg, legend=legend)


def format_numbers(axis: Axis, form: str = "{:g}") -> None:
    """Write each tick by itself, without a common factor or offset."""
    axis.set_major_formatter(lambda value, _: form.format(value))


def _shown(points: Sequence[tuple[float, float]], doublings: bool) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(y) and (x > 0 or not doublings)]
