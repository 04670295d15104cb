"""Compile the network of a run: where that is asked for, or the layers of a flat encoder where it pays."""

from __future__ import annotations

from typing import Any

from flatout.data.batches.feed import Feeds
from flatout.data.batches.gather import TOKENS
from flatout.engine.compile import CompileChoice, choose_compile, compile_in_place, compiles_layers
from flatout.engine.precision import PrecisionChoice
from flatout.run_log import RunLog
from flatout.tasks.task import Task


def compile_network(
    task: Task,
    feeds: Feeds,
    precision: PrecisionChoice,
    log: RunLog,
    *,
    asked: bool | None,
    may_measure: bool,
    before: dict[str, Any] | None,
) -> None:
    """Compile as asked; None: measure whether it pays. `before`: the choice of the run that resumes here."""
    device, plan = feeds.train.device, feeds.train.plan
    if asked:
        compile_in_place(task.model, device)
        log.decision("compile", True, "asked for", "the first step waits for it")
    if asked is not None or not compiles_layers(task.model):
        return
    if before is not None:
        choice = CompileChoice(before["value"], before["why"], before["evidence"])
        if choice.value:
            compile_in_place(task.model, device)
    elif not may_measure:
        choice = CompileChoice(False, "compile=auto measures on one device", "compile=true compiles on several")
    else:
        rows = plan.rows_per_batch * float(feeds.train.split.lengths(TOKENS).mean())
        tokens = int(min(rows, plan.tokens_per_batch or rows))
        passes = (task.total_steps or 1) * plan.accumulate
        choice = choose_compile(task.model, device, precision.precision, tokens=tokens, passes=passes)
    log.decision("compile", choice.value, choice.why, choice.evidence)
