"""Steps of a foreign module whose try needs more than a step: the fast loop in a Trainer, and a compiled step."""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from flatout.engine.compile import why_not
from flatout.engine.fast_loop import FastLoop, fast_loop_of, reason_against
from flatout.engine.lightning_internals import disable_signal_handling
from flatout.engine.step_losses import NotFinite
from flatout.perf.measure.intervals import MOST_ROUNDS, speedup
from flatout.perf.measure.steps import Steps, Way, endless
from flatout.perf.verdict.copies import OwnTask, ignore
from flatout.perf.verdict.evidence import Evidence, Tried
from flatout.perf.verdict.experiments import ROUND_S, ROUNDS, ROWS_AROUND, some_batches
from flatout.perf.verdict.ways import Refused, first_line

_LOOP_MS, _LOOP_SHARE, _SETUP_S = 10.0, 0.3, 0.5
"""The longest batch for which half a millisecond matters, which is what a loop may save; of the time that is left, what
the loops may take; a guess at what their Trainer takes to begin.
"""
_COMPILES, _LEAST_COMPILE_S, _COMPILE_SHARE = 0.3, 8.0, 0.7
"""Share of a model's passes from which on compiling is tried, the least time for it, and its share of what is left."""
_BACKEND, _AGAIN_S = "inductor", 0.05


def try_fast_loop(trainer: L.Trainer, module: L.LightningModule, was: Way, evidence: Evidence, until: float) -> None:
    """Fill in what the fast loop saves of each batch, where batches are so short that it is worth it."""
    feed: Any = was.feed
    step_s, left_s = evidence.total_ms * evidence.accumulate / 1000, until - time.perf_counter()
    length = evidence.accumulate * math.ceil(ROUND_S / max(step_s, 1e-6))
    needed_s = 2 * (ROUNDS + 1) * length * evidence.total_ms / 1000 + _SETUP_S
    whole_ms = evidence.model_ms + evidence.ms.get("other", 0.0)
    is_worth_it = whole_ms <= _LOOP_MS and needed_s <= _LOOP_SHARE * left_s
    if fast_loop_of(trainer) is not None or not is_worth_it or reason_against(trainer, module):
        return
    turns = _InTurns(length, time.perf_counter() + _LOOP_SHARE * left_s)
    try:
        _train(trainer, feed.task, some_batches(feed), turns)
    except Refused:
        raise
    except Exception as error:  # of the module's own step: other tries are raced all the same
        evidence.notes.append(f"the fast loop was left out: {first_line(error)}")
        return
    was_rate = 1000 * evidence.rows_per_batch / whole_ms
    # Milliseconds carry over to the run, whose steps have more around them; ratios do not.
    saved = [slow - fast for slow, fast in zip(turns.ms[0], turns.ms[1][1:], strict=False)]
    gain = speedup([1.0] * len(saved), [whole_ms / max(whole_ms - each, 0.1 * whole_ms) for each in saved])
    evidence.tried.append(
        Tried(
            cause="loop",
            override="Trainer(callbacks=[FastLoop()])",
            rows_per_s=was_rate * gain.value,
            as_was=was_rate,
            low=gain.low,
            high=gain.high,
            rows_per_batch=evidence.rows_per_batch,
            batches_per_step=evidence.accumulate,
        )
    )


def _train(trainer: L.Trainer, task: OwnTask, batches: list[Any], turns: _InTurns) -> None:
    """Train a copy in a Trainer that has nothing but both loops."""
    device, interrupt = task.device, signal.getsignal(signal.SIGINT)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    same = ("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
    settings: dict[str, Any] = off | {name: getattr(trainer, name) for name in same}
    devices: Any = 1 if device.type == "cpu" else [device.index or 0]
    inner = L.Trainer(accelerator=device.type, devices=devices, max_epochs=1, **settings)
    vars(inner)["callbacks"] = [turns]  # none that a factory adds
    disable_signal_handling(inner)
    try:
        inner.fit(_Step(task), _until_done(batches, turns))
    except SystemExit:  # Lightning's answer to Ctrl-C, which it then ignores
        signal.signal(signal.SIGINT, interrupt)
        raise KeyboardInterrupt from None
    finally:
        task.optimizers[0].zero_grad()
        task.optimizers[0].load_state_dict(task.optimizers[0].state_dict())  # back to the device


def _until_done(batches: list[Any], turns: _InTurns) -> Iterator[tuple[Any]]:
    return ((batch,) for batch in itertools.takewhile(lambda _: not turns.is_done, itertools.cycle(batches)))


class _Step(L.LightningModule):
    """The step of a copy, and nothing else of its module."""

    def __init__(self, task: OwnTask) -> None:
        super().__init__()
        self._task = task

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._task.training_loss(batch[0], self._task.model)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._task.optimizers[0]


class _InTurns(FastLoop):
    """Takes every second stretch of batches; Lightning's own loop takes those between."""

    def __init__(self, length: int, until: float) -> None:
        super().__init__(not_finite=NotFinite.skip)
        self.length, self.until = length, until
        self.ms: tuple[list[float], list[float]] = ([], [])
        """Of a batch in each stretch: by Lightning's loop without its first, and by this one."""
        self.is_turn = self.is_done = False
        self._ended, self._at = 0, 0.0

    def _serves(self, optimizer: torch.optim.Optimizer) -> bool:
        return self.is_turn and super()._serves(optimizer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._ended += 1
        if self._ended % self.length:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        now = time.perf_counter()
        if self._at:
            self.ms[self.is_turn].append(1000 * (now - self._at) / self.length)
        rounds = len(self.ms[1]) - 1
        self.is_done = rounds >= MOST_ROUNDS or (rounds >= ROUNDS and now > self.until)
        self.is_turn, self._at = not self.is_turn, time.perf_counter()


def may_compile(module: nn.Module, evidence: Evidence) -> bool:
    """Whether a compiled step may be worth it, and is none already."""
    is_compiled = any(
        type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None for each in module.modules()
    )
    return evidence.share("forward", "backward") >= _COMPILES and not is_compiled


def compiled(was: Way, evidence: Evidence, until: float) -> Iterator[Way]:
    """The step compiled, where that is done in time; a note says how long it took, or why it is left out."""
    feed, began = was.feed, time.perf_counter()
    if until - began < _LEAST_COMPILE_S:
        return
    way = replace(was, cause="eager", override="torch.compile(module)", model=nn.Module())
    with importlib.import_module("torch._inductor.config").patch(compile_threads=1):  # no process is left behind
        why = why_not(feed.device)
        try:
            if not why:
                with _ended_after(max(_AGAIN_S, _COMPILE_SHARE * (until - time.perf_counter()))):
                    _compile(way)
        except _TooLong:
            why = f"it had not compiled after {time.perf_counter() - began:.0f} s"
        except Exception as error:  # of the compiler, or of what it found in the module's own code
            why = " ".join(str(error).split())[:200]
    evidence.compile_s = time.perf_counter() - began
    took = f"took {evidence.compile_s:.1f} s; only steps after it are compared"
    evidence.notes.append(f"torch.compile {f'was left out: {why}' if why else took}")
    if not why:
        yield way


def _compile(way: Way) -> None:
    """Take some steps, over batches as the loader gives them: other shapes are compiled again."""
    feed: Any = way.feed
    task, step = feed.task, cast(Any, way.model)
    vars(task.model)["log"] = vars(task.model)["log_dict"] = torch.compiler.disable(ignore)  # as Lightning's own would
    step.training_step = torch.compile(task.model.training_step, backend=_BACKEND)
    steps = Steps(task, way, endless(feed), task.build(step))
    try:
        steps.take(1 + ROWS_AROUND // (feed.plan.rows_per_batch * feed.plan.accumulate))
    finally:
        steps.close()


class _TooLong(BaseException):
    """Not one of the errors that a compiler answers by itself."""


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End a block by an alarm, but not in the middle of an import, which could not be repeated.

    What is raised while garbage is collected goes nowhere, so then it waits for the next alarm, too.
    """
    others_s, others_again = signal.getitimer(signal.ITIMER_REAL)
    if threading.current_thread() is not threading.main_thread() or 0 < others_s <= seconds:
        raise Refused("it could not be ended in time")

    def end(_: int, frame: FrameType | None) -> None:
        collecting = [getattr(each, "__code__", None) for each in gc.callbacks]
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith("<frozen importlib") or code.co_name == "__del__" or code in collecting:
                return  # until the next alarm
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise _TooLong

    before, began = signal.signal(signal.SIGALRM, end), time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if others_s:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, others_s - (time.perf_counter() - began)), others_again)
