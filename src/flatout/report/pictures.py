"""Figures for TensorBoard, which shows pixels only: the confusion matrix, and the parts of a step's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flatout.errors import printable
from flatout.report.figures import COLOURS, GRID, INK, LETTER, MUTED, PAPER, add_axes, drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_CLASSES = 40
_DPI = 108
"""Half as many pixels again as a page has: TensorBoard enlarges a picture that is clicked."""
_DARK = 0.55
"""Fraction of a class from which the text on its cell is white."""


def confusion_figure(classes: Sequence[str], counts: NDArray[np.integer]) -> Figure:
    """Rows by true class (down) and predicted class (across), coloured by their fraction of the true class.

    Of many classes, the commonest.
    """
    from matplotlib.colors import LinearSegmentedColormap

    order = np.argsort(-counts.sum(1), kind="stable")[:_MOST_CLASSES]
    shown, names = counts[np.ix_(order, order)], [_short(classes[place]) for place in order]
    shares = shown / np.maximum(counts[order].sum(1, keepdims=True), 1)
    size = int(np.clip(640 // len(names), 16, 72))
    margin, edge, head = 24 + LETTER * 1.1 * max(map(len, names)), size * len(names), 30
    of_all = f" (the {len(names)} commonest of {len(classes)})" if len(names) < len(classes) else ""
    with drawing(max(margin + edge + 16, 400), head + margin + edge + 16, dpi=_DPI) as figure:
        width = figure.get_size_inches()[0] * 72
        axes = add_axes(figure, left=margin, right=width - margin - edge, top=head + margin, bottom=16)
        axes.imshow(shares, cmap=LinearSegmentedColormap.from_list("", [PAPER, COLOURS[0]]), vmin=0, vmax=1)
        axes.set(xticks=range(len(names)), yticks=range(len(names)), yticklabels=names)
        axes.set_xticklabels(names, rotation=90)
        axes.tick_params(labelcolor=INK, labeltop=True, labelbottom=False, labelsize=11 if size < 30 else 12)
        axes.set_xticks(np.arange(len(names) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(names) + 1) - 0.5, minor=True)
        axes.grid(visible=False)
        axes.grid(which="minor", color=GRID)
        for down, across in zip(*np.nonzero(shown), strict=True):
            if len(text := str(shown[down, across])) * LETTER * 1.1 < size - 2:
                ink = PAPER if shares[down, across] > _DARK else INK
                axes.text(across, down, text, color=ink, fontsize=9 if size < 30 else 11, ha="center", va="center")
        figure.text(12 / width, 0.985, f"true class down, predicted class across{of_all}", va="top", fontsize=13)
    return figure


def time_figure(step_ms: Mapping[str, float | None]) -> Figure | None:
    """One bar of the parts of a step's time, with times and shares; None where fewer than two parts are known."""
    parts = {name: value for name, value in step_ms.items() if value is not None}
    total = sum(parts.values())
    if len(parts) < 2 or total <= 0:
        return None
    with drawing(484, 120 + 26 * len(parts), dpi=_DPI) as figure:
        axes = add_axes(figure, left=12, right=12, top=44, bottom=12)
        axes.set(xlim=(0, 1), ylim=(2.4 + 0.65 * len(parts), 0))
        axes.set_axis_off()
        axes.set_title(f"each step: {total:.2f} ms", loc="left", fontsize=15)
        before = 0.0
        for row, ((name, value), colour) in enumerate(zip(parts.items(), COLOURS, strict=False)):
            share, y = value / total, 2.4 + 0.65 * row
            axes.barh(0.8, share, left=before, height=1.2, color=colour)
            axes.barh(y, 0.03, height=0.4, color=colour)
            before += share
            for x, text, colour, side in (
                (0.05, name, INK, "left"),
                (0.5, f"{value:.3f} ms", INK, "right"),
                (0.65, f"{share:.1%}", MUTED, "right"),
            ):
                axes.text(x, y, text, color=colour, fontsize=14, ha=side, va="center")
    return figure


def _short(name: str, most: int = 22) -> str:
    name = printable(name)
    return name if len(name) <= most else f"{name[: most - 1]}…"
