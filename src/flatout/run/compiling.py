"""Compile the network of a run: whole where it is asked for, the layers of a flat encoder where that pays."""

from __future__ import annotations

from typing import Any

from flatout.data.batches.feed import Feeds
from flatout.data.batches.gather import TOKENS
from flatout.engine.compile import choose_compile, compile_in_place, compile_layers
from flatout.engine.precision import PrecisionChoice
from flatout.models.encoder.network import Transformer
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
    model, device = task.model, feeds.train.device
    if asked:
        compile_in_place(model, device)
        log.decision("compile", True, "asked for", "the first step waits for it")
    if asked is not None or not isinstance(model, Transformer) or not model.is_flat:
        return
    if before is not None:
        if before["value"]:
            compile_layers(model)
        log.decision("compile", before["value"], before["why"], before["evidence"])
    elif not may_measure:
        log.decision("compile", False, "compile=auto measures on one device", "compile=true compiles on several")
    else:
        plan = feeds.train.plan
        rows = plan.rows_per_batch * float(feeds.train.split.lengths(TOKENS).mean())
        tokens = int(min(rows, plan.tokens_per_batch or rows))
        passes = (task.total_steps or 1) * plan.accumulate
        found = choose_compile(model, device, precision.precision, tokens=tokens, passes=passes)
        log.decision("compile", found.value, found.why, found.evidence)
