"""The pictures of a run on recordings: its answers to the test or the validation."""

from __future__ import annotations

from flatout.data.batches.feed import Feeds
from flatout.report.figures import Chart
from flatout.report.sequence_charts import draw_errors, draw_recording
from flatout.tasks.sequence_answers import KeptAnswers, keep_answers
from flatout.tasks.sequences import SequenceRegressor
from flatout.tasks.task import Task


def draw_answers(task: Task, feeds: Feeds) -> list[Chart]:
    """The charts of a task on recordings; none for other tasks, and on the first rank alone."""
    if not isinstance(task, SequenceRegressor):
        return []
    split = "validation" if feeds.test is None else "test"
    kept = keep_answers(task, feeds.test or feeds.validation, split)
    return draw_charts(kept) if task.global_rank == 0 else []


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
