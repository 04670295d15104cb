"""What a run on recordings shows of its answers to the test or the validation: charts, and files of its errors."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.batches.feed import Feeds
from flatout.report.figures import Chart, Curve, line_chart
from flatout.tasks.sequence_scores import KeptAnswers, keep_answers

RECORDINGS, TARGETS = "recordings.csv", "targets.csv"
Floats = NDArray[np.float64]
_MOST_POINTS = 600
"""Of a longer recording so many samples about its middle are drawn."""


def draw_answers(task: Any, feeds: Feeds, folder: Path) -> list[Chart]:
    """The charts of a task on recordings, and files of its errors. Every rank answers, the first one draws."""
    split = "validation" if feeds.test is None else "test"
    kept = keep_answers(task, feeds.test or feeds.validation, split)
    if task.global_rank != 0:
        return []
    write_errors(kept, folder)
    return draw_charts(kept)


def write_errors(kept: KeptAnswers, folder: Path) -> None:
    """Write `recordings.csv` with the largest error first, and `targets.csv`: errors over all recordings."""
    for name, rows in ((RECORDINGS, kept.errors), (TARGETS, kept.of_targets)):
        _write(folder / name, rows)


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0] if rows else [])
        for row in rows:
            writer.writerow(f"{value:.6g}" if isinstance(value, float) else value for value in row.values())


def draw_charts(kept: KeptAnswers) -> list[Chart]:
    """A chart for each recording that was kept, then the errors."""
    ranks = ["recording"]
    if len(kept.series) > 1:
        ranks = ["median recording", *(f"worst recording {number}" for number in range(1, len(kept.series)))]
    charts = []
    for rank, each in zip(ranks, kept.series, strict=False):
        short = each.name.rpartition("/")[2]
        title = f"{rank}, {kept.target} RMSE {each.rmse:.3g}: {short}"
        charts.append(draw_recording(title, each.places, each.truths, each.answers))
    charts.append(draw_errors(f"error over {kept.target}", kept.by_value, kept.target))
    charts.append(draw_errors("error over time", kept.by_time, kept.time_name))
    return [chart for chart in charts if chart is not None]


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
