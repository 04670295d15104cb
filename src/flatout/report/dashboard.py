"""A run's TensorBoard pages beside its curves: the layout of charts, closing text, figures, precision-recall curves.

The layout is written with the first curves. The rest comes at the end, in a separate event file. A resumed run replaces
that file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatout.callbacks.step_timer import PARTS
from flatout.report.closing import closing_markdown
from flatout.report.figures import ignoring_missing_glyphs
from flatout.report.hyperparameters import EventFile, write_hyperparameters
from flatout.report.pictures import confusion_figure, time_figure
from flatout.tasks.metrics import Counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIX = ".closing"
_MOST_POINTS = 127
"""TensorBoard keeps at most so many points of a precision-recall curve."""
_MOST_CURVES = 20

Layout = dict[str, dict[str, list[Any]]]


def layout(metrics: Sequence[str], *, has_card: bool) -> Layout:
    """The charts under each heading."""
    memory = ["host/process_memory_gb", "host/available_memory_gb", *(["gpu/memory_gb"] if has_card else [])]
    charts = {
        "speed": {
            "rows a second": ["speed/rows_per_s"],
            "tokens a second": ["speed/tokens_per_s"],
            "padding, fraction": ["speed/padding_share"],
            **({"fraction of the card's peak (MFU)": ["speed/mfu"]} if has_card else {}),
        },
        "time": {
            "parts of a step's time, ms": [f"time/{part}_ms" for part in PARTS],
            "time of a step, 50th and 99th percentile, ms": ["time/p50_ms", "time/p99_ms"],
        },
        "memory": {"memory, GB": memory},
        "loss": {
            "training and validation loss": ["train/loss", "val/loss"],
            "learning rate": ["train/lr"],
        },
        "quality": {"validation metrics": [f"val/{name}" for name in metrics]},
    }
    if has_card:
        charts["gpu"] = {
            "in use": ["gpu/utilisation", "gpu/throttled_share"],
            "power, W": ["gpu/power_w"],
            "temperature, °C": ["gpu/temperature_c"],
            "clocks, MHz": ["gpu/sm_clock_mhz", "gpu/memory_clock_mhz"],
        }
    return {
        heading: {title: ["Multiline", [f"{tag}$" for tag in tags]] for title, tags in group.items()}
        for heading, group in charts.items()
    }


def write_dashboard(
    folder: Path, summary: dict[str, Any], settings: Mapping[str, Any], counted: Counted | None
) -> None:
    """Write the closing text, the figures, the precision-recall curves and the settings, at the run's last step."""
    step = summary["training"]["steps"] or 0
    with EventFile(folder, SUFFIX) as writer:
        writer.add_text("verdict", closing_markdown(summary), step)
        if (figure := time_figure(summary["speed"]["step_ms"])) is not None:
            _add_figure(writer, "time/each_step", figure, step)
        if counted is not None:
            if counted.confusion is not None:
                _add_figure(writer, "validation/confusion", confusion_figure(counted.classes, counted.confusion), step)
            for name, points in precision_over_recall(counted).items():
                writer.add_pr_curve_raw(f"validation/{name}", *points, step, num_thresholds=points.shape[1])
    speed = {name: summary["speed"][name] for name in ("rows_per_s", "tokens_per_s")}
    write_hyperparameters(folder, settings, {**summary["metrics"], **speed}, step)


def precision_over_recall(counted: Counted) -> dict[str, NDArray[np.float64]]:
    """Precision-recall curves of the commonest classes, as TensorBoard takes them.

    Each is [6, points]: true and false positives, true and false negatives, precision, recall. The points are evenly
    spaced logits, so that a confident model has a curve too. TensorBoard takes them for evenly spaced probabilities:
    the thresholds it shows are not theirs.
    """
    if counted.binned is None:
        return {}
    thinned = np.linspace(0, len(counted.binned) - 1, min(_MOST_POINTS, len(counted.binned))).round().astype(int)
    binned = counted.binned[thinned].astype(np.float64)  # [points, classes, target, answer]
    right, wrong, missed, left = binned[..., 1, 1], binned[..., 0, 1], binned[..., 1, 0], binned[..., 0, 0]
    answered, given = right + wrong, right + missed
    precision = np.where(answered > 0, right / np.maximum(answered, 1), 1.0)
    curves = np.stack([right, wrong, left, missed, precision, right / np.maximum(given, 1)])
    rows = given[0]
    most = len(counted.classes) if counted.are_several else _MOST_CURVES
    shown = [place for place in np.argsort(-rows, kind="stable")[:most] if rows[place]]
    return {counted.classes[place]: curves[:, :, place] for place in shown}


def _add_figure(writer: Any, tag: str, figure: Figure, step: int) -> None:
    with ignoring_missing_glyphs():
        writer.add_figure(tag, figure, step, close=False)  # nothing to close: pyplot does not hold it
