"""`evaluate RUN FILE` of a run on recordings: errors over all answers, or the metrics of labels.

The file holds the targets beside what the network reads, and is read as in training. A forecast is judged on every
window of every recording.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flatout.data.problem import Problem
from flatout.data.sequences.recordings import Recording
from flatout.data.tables.table import Table
from flatout.errors import UserError, require
from flatout.inference.sequences import SequencePredictor
from flatout.tasks.metrics import TaskMetrics
from flatout.tasks.sequence_scores import SequenceScores

Advance = Callable[[int], None]


def score_answers(predictor: SequencePredictor, table: Table, advance: Advance) -> tuple[int, dict[str, float]]:
    """How many answers were compared, and their errors in the targets' own units."""
    shape, targets = predictor.shape, predictor.names
    columns = predictor.rules.columns if shape.horizon else [*predictor.rules.columns, *targets]
    scores, total = SequenceScores(1, targets, predictor.scaler.of_targets(shape.targets)[1]), 0
    for recording in predictor.read(table, replace(predictor.rules, columns=columns)):
        _require_length(predictor, recording)
        for answers, truths in predictor.compare(recording.values):
            scores.add(answers, truths, torch.zeros(len(answers), dtype=torch.int64))
            total += len(answers)
        advance(len(recording.times))
    return total, scores.values()


def score_labels(
    predictor: SequencePredictor, table: Table, label: str | None, advance: Advance
) -> tuple[int, TaskMetrics]:
    """How many recordings were labelled, and the metrics of their labels; `label` names another column."""
    column = label or predictor.label
    hint = "Name the column of labels with --label."
    require(column is not None, "evaluate", "this run does not know its column of labels", hint=hint)
    problem = Problem.single if predictor.has_classes else Problem.regression
    metrics, total = TaskMetrics.build(problem, predictor.names), 0
    for recording in predictor.read(table, replace(predictor.rules, label=column)):
        metrics.update(*_labelled(predictor, recording))
        total += 1
        advance(len(recording.times))
    return total, metrics


def _labelled(predictor: SequencePredictor, recording: Recording) -> tuple[Tensor, Tensor]:
    """The answer to a recording as metrics take it, and its label."""
    answer, written = torch.from_numpy(predictor.answer(recording.values)), str(recording.label)
    if predictor.has_classes:
        what, allowed = f"{recording.name} is {written!r}", ", ".join(predictor.names)
        require(written in predictor.names, "--label", what, allowed=allowed)
        return answer.log().unsqueeze(0), torch.tensor([predictor.names.index(written)])
    try:
        return answer, torch.tensor([float(written)])
    except ValueError:
        raise UserError("--label", f"{recording.name} is {written!r}", allowed="numbers") from None


def _require_length(predictor: SequencePredictor, recording: Recording) -> None:
    shape = predictor.shape
    needed = (shape.lookback or 1) + shape.horizon
    what = f"{recording.name} has {len(recording.values)} samples, a window and its forecast need {needed}"
    is_long = not shape.horizon or len(recording.values) >= needed
    require(is_long, "evaluate", what, hint="Leave it out, or name a longer recording.")
