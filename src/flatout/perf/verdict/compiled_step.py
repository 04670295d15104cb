"""Compile the training step of a foreign module within a time limit.

`compiled` wraps `training_step` of the task's copy in `torch.compile`. It takes a few steps, so
that the compiler sees the usual shapes, and yields the compiled way of training, to be raced. An
alarm signal ends a compile that takes too long. Open this file to change how long a compile may
take, or what is noted when it is left out.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, cast

import lightning as L
import torch

from flatout.engine.compile import why_not
from flatout.engine.lightning_internals import set_method
from flatout.perf.measure.steps import Steps, TrainingWay, endless
from flatout.perf.verdict.evidence import Evidence
from flatout.perf.verdict.ways import Refused

_LEAST_COMPILE_S = 8.0  # with less time left no compile is begun
_COMPILE_SHARE = 0.7  # of the time that is left; the rest is for racing the compiled step
_BACKEND = "inductor"
_AGAIN_S = 0.05  # an alarm that was lost comes again after this long


def compiled(
    was: TrainingWay, evidence: Evidence, until: float, warm_rows: int
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
        why_none = _why_not_compiled(way, began, until, warm_rows)
    evidence.compile_s = time.perf_counter() - began
    if why_none:
        evidence.notes.append(f"torch.compile was left out: {why_none}")
        return
    evidence.notes.append(
        f"torch.compile took {evidence.compile_s:.1f} s; only steps after it are compared"
    )
    yield way


def _why_not_compiled(way: TrainingWay, began: float, until: float, warm_rows: int) -> str:
    """Compile the step of `way` and take some; why that failed, empty where it did not."""
    why_none = why_not(way.feed.device)
    if why_none:
        return why_none
    allowed_s = max(_AGAIN_S, _COMPILE_SHARE * (until - time.perf_counter()))
    try:
        with _limit_seconds(allowed_s):
            _compile_step(way, warm_rows)
    except _TooLong:
        return f"it had not compiled after {time.perf_counter() - began:.0f} s"
    except Exception as error:
        # Compilers, and your own code in them, may raise anything; the step stays as it is.
        return " ".join(str(error).split())[:200]
    return ""


def _compile_step(way: TrainingWay, warm_rows: int) -> None:
    """Compile `training_step`, and take steps over the loader's batches.

    The batches come as the loader gives them, since other shapes would be compiled again.
    """
    feed: Any = way.feed
    task = feed.task
    # A LightningModule with nothing but the compiled step.
    step = cast(L.LightningModule, way.model)
    # Lightning keeps its own `log` out of the graph, too. That of the copy does nothing.
    uncompiled_log = torch.compiler.disable(task.model.log)
    set_method(task.model, "log", uncompiled_log)
    set_method(task.model, "log_dict", uncompiled_log)
    set_method(step, "training_step", torch.compile(task.model.training_step, backend=_BACKEND))
    with closing(Steps(task, way, endless(feed), task.build(step))) as steps:
        steps.take(1 + warm_rows // steps.rows_a_step)


class _TooLong(BaseException):
    """The time limit is over. No `Exception`, because compilers catch and answer those."""


@contextmanager
def _limit_seconds(seconds: float) -> Iterator[None]:
    """Raise `_TooLong` in the block when it has run for `seconds`.

    An alarm signal (SIGALRM) raises it, in the main thread only. `Refused` is raised where the
    alarm cannot be had: in another thread, or where another alarm would come first. That other
    alarm is set again at the end, less the time spent here.

    Some places swallow what a signal handler raises, or break by it. There the alarm waits:

        import in progress     nothing is raised; the alarm comes again after `_AGAIN_S`
        `__del__` in progress  the same
        raised and swallowed   Python calls `sys.unraisablehook`, which sets the alarm again
    """
    others_s, others_again = signal.getitimer(signal.ITIMER_REAL)
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or 0 < others_s <= seconds:
        raise Refused("it could not be ended in time")

    def raise_too_long(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if _must_not_be_interrupted(frame) or frame.f_code is set_alarm_again.__code__:
                return  # until the next alarm
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise _TooLong

    def set_alarm_again(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is _TooLong:
            # at once: what follows may be lost as well
            signal.setitimer(signal.ITIMER_REAL, 0.001, _AGAIN_S)
        else:
            others_hook(unraisable)

    others_handler = signal.signal(signal.SIGALRM, raise_too_long)
    began = time.perf_counter()
    others_hook = sys.unraisablehook
    sys.unraisablehook = set_alarm_again
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, others_handler)
        sys.unraisablehook = others_hook
        if others_s:
            spent_s = time.perf_counter() - began
            signal.setitimer(signal.ITIMER_REAL, max(0.001, others_s - spent_s), others_again)


def _must_not_be_interrupted(frame: FrameType) -> bool:
    """An import would stay half done; what is raised in a finalizer is swallowed."""
    code = frame.f_code
    return code.co_filename.startswith("<frozen importlib") or code.co_name == "__del__"
