"""Compile the training step of a foreign module within a time limit.

`compiled` wraps `training_step` of the task's copy in `torch.compile`. It takes a few steps, so
that the compiler sees the usual shapes, and yields the compiled way of training, to be raced. An
alarm signal ends a compile that takes too long. Open this file to change how long a compile may
take, or what is noted when it is left out.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import lightning as L
import torch

from flatout.engine.compile import why_not
from flatout.engine.lightning_internals import set_method
from flatout.engine.time_limit import LEAST_S, TooLong, limit_seconds
from flatout.perf.measure.steps import Steps, TrainingWay, endless
from flatout.perf.verdict.evidence import Evidence

if TYPE_CHECKING:
    from flatout.perf.verdict.copies import OwnTask
    from flatout.tasks.task import Task

_LEAST_COMPILE_S = 8.0  # with less time left no compile is begun
_COMPILE_SHARE = 0.7  # of the time that is left; the rest is for racing the compiled step
_BACKEND = "inductor"


def compiled(
    task: OwnTask, was: TrainingWay, evidence: Evidence, until: float, warm_rows: int
) -> Iterator[TrainingWay]:
    """Yield `was` with a compiled step; yield nothing if compiling fails or takes too long.

    A note in `evidence` says how many seconds the compile took, or why it was left out. `until` is
    the end of all tries, a time of `time.perf_counter`; `warm_rows` are trained to warm up.
    """
    began = time.perf_counter()
    if until - began < _LEAST_COMPILE_S:
        return
    way = replace(was, cause="eager", override="torch.compile(module)", model=L.LightningModule())
    # One compile thread: a pool of processes would be left behind.
    inductor_settings = importlib.import_module("torch._inductor.config")
    with inductor_settings.patch(compile_threads=1):
        why_none = _why_not_compiled(task, way, began, until, warm_rows)
    evidence.compile_s = time.perf_counter() - began
    if why_none:
        evidence.notes.append(f"torch.compile was left out: {why_none}")
        return
    evidence.notes.append(
        f"torch.compile took {evidence.compile_s:.1f} s; only steps after it are compared"
    )
    yield way


def _why_not_compiled(
    task: OwnTask, way: TrainingWay, began: float, until: float, warm_rows: int
) -> str:
    """Compile the step of `way` and take some; why that failed, empty where it did not."""
    why_none = why_not(way.feed.device)
    if why_none:
        return why_none
    allowed_s = max(LEAST_S, _COMPILE_SHARE * (until - time.perf_counter()))
    try:
        with limit_seconds(allowed_s):
            _compile_step(task, way, warm_rows)
    except TooLong:
        return f"it had not compiled after {time.perf_counter() - began:.0f} s"
    except Exception as error:
        # Compilers, and your own code in them, may raise anything; the step stays as it is.
        return " ".join(str(error).split())[:200]
    return ""


def _compile_step(task: OwnTask, way: TrainingWay, warm_rows: int) -> None:
    """Compile `training_step`, and take steps over the loader's batches.

    The batches come as the loader gives them, since other shapes would be compiled again.
    """
    # A LightningModule with nothing but the compiled step.
    step = cast(L.LightningModule, way.model)
    # Lightning keeps its own `log` out of the graph, too. That of the copy does nothing.
    uncompiled_log = torch.compiler.disable(task.model.log)
    set_method(task.model, "log", uncompiled_log)
    set_method(task.model, "log_dict", uncompiled_log)
    set_method(step, "training_step", torch.compile(task.model.training_step, backend=_BACKEND))
    shaped_as_ours = cast("Task[Any]", task)
    with closing(Steps(shaped_as_ours, way, endless(way.feed), task.build(step))) as steps:
        steps.take(1 + warm_rows // steps.rows_a_step)
