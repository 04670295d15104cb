"""Charts of answers to recordings: prediction over truth, error over the target's range, error over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flatout.data.batches.feed import Feeds
from flatout.report.curves import Curve, line_chart
from flatout.report.figures import Chart
from flatout.tasks.sequence_answers import KeptAnswers, Series, keep_answers
from flatout.tasks.sequences import SequenceRegressor
from flatout.tasks.task import Task

_MOST_POINTS = 600
"""Of a longer recording so many samples about its middle are drawn."""


def draw_answers(task: Task, feeds: Feeds) -> list[Chart]:
    """The charts of a task on recordings, from its answers to the test or the validation; none for other tasks."""
    if not isinstance(task, SequenceRegressor):
        return []
    split = "validation" if feeds.test is None else "test"
    kept = keep_answers(task, feeds.test or feeds.validation, split)
    return draw_charts(kept) if task.global_rank == 0 else []


def draw_charts(kept: KeptAnswers) -> list[Chart]:
    """A chart for each recording that was kept, then the errors."""
    titles = (
        ["recording"]
        if len(kept.series) == 1
        else ["median recording", *(f"worst recording {number}" for number in range(1, len(kept.series)))]
    )
    charts = [_draw_series(title, kept.target, each) for title, each in zip(titles, kept.series, strict=True)]
    charts.append(line_chart(f"error over {kept.target}", [Curve("RMSE", kept.by_value)], x_label=kept.target))
    charts.append(line_chart("error over time", [Curve("RMSE", kept.by_time)], x_label=kept.time_name))
    return [chart for chart in charts if chart is not None]


def _draw_series(title: str, target: str, series: Series) -> Chart | None:
    first = max(0, (len(series.places) - _MOST_POINTS) // 2)
    shown = slice(first, first + _MOST_POINTS)
    curves = [
        Curve(name, _points(series.places[shown], values[shown]))
        for name, values in (("measured", series.truths), ("answered", series.answers))
    ]
    short = series.name.rpartition("/")[2]
    return line_chart(f"{title}, {target} RMSE {series.rmse:.3g}: {short}", curves, x_label="sample")


def _points(places: Sequence[float] | np.ndarray, values: np.ndarray) -> list[tuple[float, float]]:
    return list(zip(np.asarray(places).tolist(), values.tolist(), strict=True))
