"""Compile the training step of a foreign module within a time limit.

`compiled` copies nothing itself: it wraps `training_step` of the task's copy in `torch.compile`,
takes a few steps so that the compiler sees the usual shapes, and yields the compiled way of
training to be raced. A compile that takes too long is ended by an alarm signal. Open this file to
change how long a compile may take, or what is noted when it is left out.
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

import torch
from torch import nn

from flatout.engine.compile import why_not
from flatout.perf.measure.steps import Steps, TrainingWay, endless
from flatout.perf.verdict import experiments
from flatout.perf.verdict.copies import ignore
from flatout.perf.verdict.evidence import Evidence
from flatout.perf.verdict.ways import Refused

_LEAST_COMPILE_S = 8.0  # with less time left no compile is begun
_COMPILE_SHARE = 0.7  # of the time that is left; the rest is for racing the compiled step
_BACKEND = "inductor"
_AGAIN_S = 0.05  # an alarm that was lost comes again after this long


def compiled(was: TrainingWay, evidence: Evidence, until: float) -> Iterator[TrainingWay]:
    """The step compiled, where that is done in time; a note says how long it took, or why it is
    left out.
    """
    feed = was.feed
    began = time.perf_counter()
    if until - began < _LEAST_COMPILE_S:
        return
    way = replace(was, cause="eager", override="torch.compile(module)", model=nn.Module())
    # no process is left behind
    with importlib.import_module("torch._inductor.config").patch(compile_threads=1):
        why = why_not(feed.device)
        try:
            if not why:
                with _ended_after(max(_AGAIN_S, _COMPILE_SHARE * (until - time.perf_counter()))):
                    _compile(way)
        except _TooLong:
            why = f"it had not compiled after {time.perf_counter() - began:.0f} s"
        except Exception as error:
            # compilers, and your own code in them, may raise anything; the step stays as it is
            why = " ".join(str(error).split())[:200]
    evidence.compile_s = time.perf_counter() - began
    took = f"took {evidence.compile_s:.1f} s; only steps after it are compared"
    evidence.notes.append(f"torch.compile {f'was left out: {why}' if why else took}")
    if not why:
        yield way


def _compile(way: TrainingWay) -> None:
    """Take some steps, over batches as the loader gives them: other shapes are compiled again."""
    feed: Any = way.feed
    task = feed.task
    step = cast(Any, way.model)
    # as Lightning's own would
    vars(task.model)["log"] = vars(task.model)["log_dict"] = torch.compiler.disable(ignore)
    step.training_step = torch.compile(task.model.training_step, backend=_BACKEND)
    with closing(Steps(task, way, endless(feed), task.build(step))) as steps:
        steps.take(1 + experiments.ROWS_AROUND // steps.rows_a_step)


class _TooLong(BaseException):
    """Not one of the errors that a compiler answers by itself."""


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End a block by an alarm; one that comes in an import or a finalizer is set again."""
    others_s, others_again = signal.getitimer(signal.ITIMER_REAL)
    if threading.current_thread() is not threading.main_thread() or 0 < others_s <= seconds:
        raise Refused("it could not be ended in time")

    def end(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            code = frame.f_code
            if (
                code.co_filename.startswith("<frozen importlib")
                or code.co_name == "__del__"
                or code is lost.__code__
            ):
                return  # until the next alarm
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise _TooLong

    def lost(what: sys.UnraisableHookArgs) -> None:
        if what.exc_type is _TooLong:
            # at once: what follows may be lost as well
            signal.setitimer(signal.ITIMER_REAL, 0.001, _AGAIN_S)
        else:
            others_hook(what)

    before = signal.signal(signal.SIGALRM, end)
    began = time.perf_counter()
    others_hook = sys.unraisablehook
    sys.unraisablehook = lost
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = others_hook
        if others_s:
            signal.setitimer(
                signal.ITIMER_REAL,
                max(0.001, others_s - (time.perf_counter() - began)),
                others_again,
            )
