"""What is tried for a foreign module and loader: other loaders where training waited, else other
ways of a step.

Two tries need more than a step: the fast loop, which is raced in a Trainer, and a compiled step.
"""

from __future__ import annotations

import importlib
import itertools
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from flatout.distributed.limits import free_bytes
from flatout.engine.compile import why_not
from flatout.engine.fast_loop import FastLoop, fast_loop_of, reason_against
from flatout.engine.lightning_internals import disable_signal_handling
from flatout.engine.precision import LIGHTNING_NAMES, Precision, bf16_is_native_on_cpu
from flatout.engine.step_losses import NotFinite
from flatout.errors import first_line
from flatout.perf.measure.intervals import MOST_ROUNDS, speedup
from flatout.perf.measure.steps import Steps, TrainingWay, endless
from flatout.perf.verdict import experiments, ways
from flatout.perf.verdict.copies import OwnFeed, OwnTask, copy_of_loader, ignore, nothing_stays
from flatout.perf.verdict.evidence import LEAST_GAIN, Evidence, Tried
from flatout.perf.verdict.rules import starved
from flatout.perf.verdict.ways import Refused, most_fed, other_arithmetic

# how many times as many batches workers read ahead, where they keep up but for some slow batches
_AHEAD = 4
_LOOP_MS = 10.0
_LOOP_SHARE = 0.3
_SETUP_S = 0.5
"""The longest batch for which half a millisecond matters, which is what a loop may save; of the
time that is left, what the loops may take; a guess at what their Trainer takes to begin."""
_COMPILES = 0.3
_LEAST_COMPILE_S = 8.0
_COMPILE_SHARE = 0.7
"""Share of a model's passes from which on compiling is tried, the least time for it, and its share
of what is left."""
_BACKEND = "inductor"
_AGAIN_S = 0.05


def try_own(
    trainer: L.Trainer,
    module: L.LightningModule,
    loader: Any,
    evidence: Evidence,
    *,
    seconds: float,
    trained_s: float,
) -> None:
    """Fill in what other ways were worth, or why nothing was tried, in a tenth of `trained_s` and
    `seconds` at most.
    """
    device = trainer.strategy.root_device
    seconds = min(seconds, experiments.SHARE * trained_s)
    if trainer.world_size > 1:
        evidence.not_tried = "on several ranks nothing else is tried"
    elif seconds < experiments.LEAST_S:
        evidence.not_tried = "nothing was tried: the run was short"
    elif 4 * experiments.ROUNDS * evidence.total_ms * evidence.accumulate / 1000 > seconds:
        evidence.not_tried = "nothing was tried: a step takes too long for it"
    elif (found := starved(evidence)) is not None:
        # what is timed between turns of others means nothing
        evidence.not_tried = f"nothing was tried: {found.limit} would disturb it"
    else:
        until = time.perf_counter() + seconds
        with nothing_stays(module, device):
            experiments.try_safely(
                evidence, partial(_race, trainer, module, loader, evidence, until)
            )


def _race(
    trainer: L.Trainer, module: L.LightningModule, loader: Any, evidence: Evidence, until: float
) -> None:
    device = trainer.strategy.root_device
    precision = next(
        (ours for ours, theirs in LIGHTNING_NAMES.items() if theirs == str(trainer.precision)), None
    )
    if precision is None:
        raise Refused(f"steps of precision {trainer.precision} are not timed")
    if module.automatic_optimization and any(
        isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers
    ):
        raise Refused("LBFGS computes its loss again while it steps")
    task: Any = OwnTask(trainer, module, device)
    about: dict[str, Any] = {"rows": evidence.rows_per_batch, "accumulate": evidence.accumulate}
    about |= {"epochs": evidence.epochs, "batches": evidence.batches / max(evidence.epochs, 1e-9)}
    feed: Any = OwnFeed(loader=copy_of_loader(loader, trainer), task=task, **about)
    was = TrainingWay(feed=feed, precision=precision, model=task.model)
    evidence.native = _other_precision(precision, device)
    waits = evidence.share("wait") >= experiments.WAITS
    if waits and experiments.try_feeds(task, was, _other_loaders, evidence, until):
        return
    # what workers make is waited for, whatever computes
    here = replace(was, feed=feed.opened(num_workers=0))
    try_fast_loop(trainer, module, here, evidence, until)
    others = [*_larger_batches(here, evidence, until), *other_arithmetic(here, evidence)]
    # A compiled step may be worth it where the model is slow, and is none already.
    parts = list(module.modules())
    is_compiled = any(
        type(each).__name__ == "OptimizedModule" or each._compiled_call_impl for each in parts
    )
    compiles = evidence.share("forward", "backward") >= _COMPILES and not is_compiled
    experiments.try_models(
        task, [here, *others], evidence, (time.perf_counter() + until) / 2 if compiles else until
    )
    if compiles and (found := list(compiled(here, evidence, until))):
        experiments.try_models(task, [here, *found], evidence, until)


def _other_precision(precision: Precision, device: torch.device) -> str:
    if precision is not Precision.fp32:
        return "" if device.type == "cuda" else Precision.fp32.value
    if device.type == "cuda":
        return (
            Precision.bf16 if torch.cuda.get_device_capability(device) >= (8, 0) else Precision.fp16
        ).value
    return Precision.bf16.value if device.type == "cpu" and bf16_is_native_on_cpu() else ""


def _other_loaders(was: TrainingWay, evidence: Evidence) -> Iterator[TrainingWay]:
    feed: Any = was.feed
    if not feed.is_torchs:
        evidence.not_tried = f"other ways of reading {type(feed.loader).__name__} are not known"
        return
    for changed, threads in _changes(feed, was, evidence):
        if changed.get("num_workers", feed.num_workers) and evidence.epochs > 1:
            changed["persistent_workers"] = True
        made = feed.opened(**changed)
        is_more = (
            most_fed(made, feed, evidence.feed_alone) >= LEAST_GAIN * evidence.model_rows_per_s
        )
        if is_more or made.starts < feed.starts:
            words = ", ".join(f"{name}={value}" for name, value in changed.items())
            override = f"DataLoader({words})" + (f" threads={threads}" if threads else "")
            yield replace(
                was, cause="data", override=override, feed=made, threads=threads or was.threads
            )


def _changes(
    feed: OwnFeed, was: TrainingWay, evidence: Evidence
) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Arguments of a DataLoader, and threads where workers need their cores."""
    now = feed.num_workers
    is_cpu = feed.device.type == "cpu"
    is_busy = (evidence.feed_cores or 0.0) >= ways.BUSY
    if now and evidence.epochs > 1 and feed.starts == 1.0:
        yield {"persistent_workers": True}, None
    model_ms = max(evidence.model_ms, 1e-3)
    needed = 1 + round((evidence.ms.get("wait", 0.0) + model_ms) / model_ms)
    # each would give a whole stream
    most = 1 if feed.is_stream else evidence.cores if is_busy else ways.MOST_WORKERS
    workers = min(most, needed * max(1, now))
    if is_cpu and is_busy and not now:  # more of either would take turns on one core
        workers = max(1, evidence.cores // 2)
        threads = max(1, evidence.cores - workers)
        yield {"num_workers": workers}, threads if threads < was.threads else None
    elif workers > now:
        yield {"num_workers": workers}, None
    if now:
        yield {"prefetch_factor": _AHEAD * feed.prefetch}, None
        yield {"num_workers": 0}, None
    if not is_cpu and not feed.loader.pin_memory:
        yield {"num_workers": max(1, workers), "pin_memory": True}, None


def _larger_batches(was: TrainingWay, evidence: Evidence, until: float) -> Iterator[TrainingWay]:
    """The batches of a step in one, where there are several; else larger ones, where these are
    small.
    """
    feed: Any = was.feed
    rows, parts = feed.plan.rows_per_batch, evidence.accumulate
    # Batches can be put together where they are read row by row.
    may_grow = feed.rows_of_batches is not None and feed.loader.batch_sampler is not None
    if not may_grow or (feed.device.type == "cpu" and free_bytes() < ways.FREE_BYTES):
        return
    if parts > 1 and rows * parts <= ways.SMALL_ROWS:
        override = f"DataLoader(batch_size={rows * parts}) ++trainer.accumulate_grad_batches=1"
        yield replace(was, cause="accumulation", override=override, feed=feed.grown(parts))
    if parts > 1 or rows >= ways.SMALL_ROWS:
        return
    left_s = until - time.perf_counter()
    for times in (16, 4):
        is_quick = times * evidence.model_ms / 1000 < left_s / (4 * experiments.ROUNDS)
        if is_quick and times * rows <= min(
            feed.num_rows // ways.LEAST_STEPS_AN_EPOCH, 4 * ways.SMALL_ROWS
        ):
            override = f"DataLoader(batch_size={times * rows})"
            yield replace(was, cause="batch", override=override, feed=feed.grown(times))


def try_fast_loop(
    trainer: L.Trainer,
    module: L.LightningModule,
    was: TrainingWay,
    evidence: Evidence,
    until: float,
) -> None:
    """Fill in what the fast loop saves of each batch, where batches are so short that it is worth
    it.
    """
    feed: Any = was.feed
    step_s, left_s = evidence.total_ms * evidence.accumulate / 1000, until - time.perf_counter()
    length = evidence.accumulate * math.ceil(experiments.ROUND_S / max(step_s, 1e-6))
    needed_s = 2 * (experiments.ROUNDS + 1) * length * evidence.total_ms / 1000 + _SETUP_S
    whole_ms = evidence.model_ms + evidence.ms.get("other", 0.0)
    is_worth_it = whole_ms <= _LOOP_MS and needed_s <= _LOOP_SHARE * left_s
    if fast_loop_of(trainer) is not None or not is_worth_it or reason_against(trainer, module):
        return
    turns = _InTurns(length, time.perf_counter() + _LOOP_SHARE * left_s)
    try:
        _train(trainer, feed.task, experiments.some_batches(feed), turns)
    except Refused:
        raise
    except Exception as error:
        # your own step may raise anything; the other ways are raced all the same
        evidence.notes.append(f"the fast loop was left out: {first_line(error)}")
        return
    # Milliseconds carry over to the run, whose steps have more around them; ratios do not.
    saved = [slow - fast for slow, fast in zip(turns.ms[0], turns.ms[1][1:], strict=False)]
    gain = speedup(
        [1.0] * len(saved), [whole_ms / max(whole_ms - each, 0.1 * whole_ms) for each in saved]
    )
    fix: dict[str, Any] = {"cause": "loop", "override": "Trainer(callbacks=[FastLoop()])"}
    sizes: dict[str, Any] = {
        "rows_per_batch": evidence.rows_per_batch,
        "batches_per_step": evidence.accumulate,
    }
    evidence.tried.append(Tried.by(gain, 1000 * evidence.rows_per_batch / whole_ms, **fix, **sizes))


def _train(trainer: L.Trainer, task: OwnTask, batches: list[Any], turns: _InTurns) -> None:
    """Train a copy in a Trainer that has nothing but both loops."""
    device = task.device
    interrupt = signal.getsignal(signal.SIGINT)
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    same = ("precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
    settings: dict[str, Any] = off | {name: getattr(trainer, name) for name in same}
    devices: Any = 1 if device.type == "cpu" else [device.index or 0]
    inner = L.Trainer(accelerator=device.type, devices=devices, max_epochs=1, **settings)
    vars(inner)["callbacks"] = [turns]  # none that a factory adds
    disable_signal_handling(inner)
    given = (
        (batch,)
        for batch in itertools.takewhile(lambda _: not turns.is_done, itertools.cycle(batches))
    )
    try:
        inner.fit(_Step(task), given)
    except SystemExit:  # Lightning's answer to Ctrl-C, which it then ignores
        signal.signal(signal.SIGINT, interrupt)
        raise KeyboardInterrupt from None
    finally:
        task.optimizers[0].zero_grad()
        task.optimizers[0].load_state_dict(task.optimizers[0].state_dict())  # back to the device


class _Step(L.LightningModule):
    def __init__(self, task: OwnTask) -> None:
        super().__init__()
        self._task = task

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._task.training_loss(batch[0], self._task.model)

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
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
        self.is_turn = False
        self.is_done = False
        self._ended = 0
        self._at = 0.0

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
        self.is_done = rounds >= MOST_ROUNDS or (rounds >= experiments.ROUNDS and now > self.until)
        self.is_turn = not self.is_turn
        self._at = time.perf_counter()


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
