"""What a run on recordings shows of its answers to the test or the validation: pictures, and the errors of each one."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from flatout.data.batches.feed import Feeds
from flatout.report.figures import Chart
from flatout.report.sequence_charts import draw_errors, draw_recording
from flatout.tasks.sequence_answers import KeptAnswers, keep_answers
from flatout.tasks.sequences import SequenceRegressor
from flatout.tasks.task import Task

RECORDINGS, TARGETS = "recordings.csv", "targets.csv"


def draw_answers(task: Task, feeds: Feeds, folder: Path) -> list[Chart]:
    """The charts of a task on recordings, and a file of its errors; none for other tasks. Only the first rank draws."""
    if not isinstance(task, SequenceRegressor):
        return []
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
