"""Charts of answers to recordings: prediction over truth, and errors over the target's range or over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flatout.report.curves import Curve, line_chart
from flatout.report.figures import Chart

Floats = NDArray[np.float64]
_MOST_POINTS = 600
"""Of a longer recording so many samples about its middle are drawn."""


def draw_recording(title: str, places: Floats, truths: Floats, answers: Floats) -> Chart | None:
    """What was measured and what was answered in one recording, over its samples."""
    first = max(0, (len(places) - _MOST_POINTS) // 2)
    shown = slice(first, first + _MOST_POINTS)
    curves = [
        Curve(name, list(zip(places[shown].tolist(), values[shown].tolist(), strict=True)))
        for name, values in (("measured", truths), ("answered", answers))
    ]
    return line_chart(title, curves, x_label="sample")


def draw_errors(title: str, points: Sequence[tuple[float, float]], x_label: str) -> Chart | None:
    """Root mean square errors over something."""
    return line_chart(title, [Curve("RMSE", list(points))], x_label=x_label)
