"""Stretches: many captured steps in one turn of Lightning's loop, where no callback needs each one.

Lightning's own work for a batch takes the host longer than a small step takes a card. A turn of its
loop trains on one batch. Here a turn begins with the replays of the batches before that one:

    a turn    fetch 49 batches | 49 replays | tell who counts them | Lightning's turn of the 50th

In the last part Lightning calls all hooks: curves are written, checkpoints saved, validations
begun, epochs ended, layers thawed. So a stretch has no rules for these. It ends one step before the
next of them (`_steps_at_once`), and before a batch whose step is not captured.

Parts of flatout hear of a stretch at its end (`HearsAtOnce`). If any other callback overrides a
hook of batches, each batch has a turn of its own. Learning rates are computed ahead: schedules on
the host are stepped for the whole stretch, and the steps read their rates from a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.plugins.precision import Precision
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flatout.engine import lightning_internals as internals

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch
    from flatout.data.batches.shapes import Shape
    from flatout.engine.step_graph import CapturedStep, StepGraphs

    RunStretch = Callable[
        [Sequence[FlatBatch], Sequence[CapturedStep[Shape]], Sequence[list[float]]], None
    ]

PLACES = 50  # steps of a turn
_BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")


@runtime_checkable
class HearsAtOnce(Protocol):
    """A callback that can hear of many batches at their end."""

    def steps_to_hook(self, trainer: L.Trainer) -> int:
        """How many steps there are up to the next whose batch hook it needs; 1: the coming one."""

    def end_stretch(self, trainer: L.Trainer, batches: Sequence[object]) -> None:
        """Called behind the steps of these batches, in place of their `on_train_batch_end`."""


class Stretches:
    """Takes the turns of one training."""

    def __init__(
        self,
        trainer: L.Trainer,
        graphs: StepGraphs[Shape, FlatBatch],
        run: RunStretch,
    ) -> None:
        """`run`: takes captured steps of these batches, with the rates of each step."""
        self._trainer = trainer
        self._graphs = graphs
        self._run = run
        self._parts = list[object]()  # of the latest turn
        self._hearing = list[Callback]()  # of these, who hears of batches
        self._why_alone = ""  # because of one of them

    def take_turn(self, fetcher: _DataFetcher) -> None:
        """Stand for `advance` of Lightning's epoch loop."""
        reason = self._reason_against()
        most = 0 if reason else self._steps_at_once()
        taken: list[tuple[FlatBatch, CapturedStep[Shape]]] = []
        usual: Any = fetcher
        for batch in itertools.islice(internals.batches_of(fetcher), most):
            step = self._graphs.captured_step(batch)
            if step is None:
                usual = internals.FetchedBefore(batch, fetcher)
                break
            taken.append((batch, step))
        if most:
            internals.count_fetched(fetcher, len(taken) + (usual is not fetcher))
        if taken:
            self._take(taken)
        self._graphs.why_alone = reason or "at the end of one"
        internals.take_usual_turn(self._trainer, usual)

    def _reason_against(self) -> str:
        """`reason_against`; parts are looked at where they are others than in the turn before."""
        trainer = self._trainer
        parts = _parts_that_may_change(trainer)
        if parts != self._parts:
            self._parts = parts
            self._hearing = _that_hear(trainer)
            self._why_alone = _reason_against_parts(trainer, self._hearing)
        return self._why_alone or _reason_against_schedules(trainer)

    def _steps_at_once(self) -> int:
        """How many steps may be taken before the next one that needs Lightning's turn."""
        trainer = self._trainer
        if internals.takes_usual_turns(trainer) or not self._graphs.may_replay_many():
            return 0
        steps = min(PLACES, internals.batches_to_next_hook(trainer))
        for callback in self._hearing:
            steps = min(steps, cast(HearsAtOnce, callback).steps_to_hook(trainer))
        if self._graphs.thaws is not None:
            steps = self._graphs.thaws.steps_to_next(steps)
        return max(0, steps - 1)

    def _take(self, taken: Sequence[tuple[FlatBatch, CapturedStep[Shape]]]) -> None:
        """Take captured steps of batches, and tell who counts them."""
        trainer = self._trainer
        batches = [batch for batch, _ in taken]
        steps = [step for _, step in taken]
        groups = trainer.optimizers[0].param_groups
        schedules = list[LRScheduler]()
        for config in internals.step_schedules(trainer):
            # `reason_against` lets no other kind pass, which would want a metric
            assert not isinstance(config.scheduler, ReduceLROnPlateau)
            schedules.append(config.scheduler)
        rates = list[list[float]]()
        for _ in batches:
            rates.append([group["lr"] for group in groups])
            for schedule in schedules:
                schedule.step()
        self._run(batches, steps, rates)
        internals.count_steps(trainer, len(batches))
        for callback in self._hearing:
            cast(HearsAtOnce, callback).end_stretch(trainer, batches)
        internals.end_counted_steps(trainer)


def reason_against(trainer: L.Trainer) -> str:
    """Why each step needs a turn of Lightning's loop now; empty where it does not."""
    reason = _reason_against_parts(trainer, _that_hear(trainer))
    return reason or _reason_against_schedules(trainer)


def _parts_that_may_change(trainer: L.Trainer) -> list[object]:
    """What hears of batches: a callback may replace any of it in a training."""
    module: L.LightningModule = trainer.lightning_module
    hooks = [getattr(module, name) for name in _BATCH_HOOKS]
    return [*internals.callbacks_of(trainer), *hooks, internals.profiler_of(trainer)]


def _reason_against_parts(trainer: L.Trainer, hearing: Sequence[Callback]) -> str:
    for callback in hearing:
        is_ours = type(callback).__module__.startswith("flatout.")
        if not (is_ours and isinstance(callback, HearsAtOnce)):
            return f"as {type(callback).__name__} hears of each batch"
    if internals.overridden_hooks(_BATCH_HOOKS, trainer.lightning_module, []):
        return "as the module hears of each batch"
    if internals.is_profiled(trainer):
        return "as a profiler times each batch"
    data = internals.datamodule_of(trainer)
    if not type(data).__module__.startswith("flatout."):
        return "as a DataModule of flatout's is missing"
    if internals.overrides(trainer.precision_plugin, "convert_input", Precision):
        return "as the precision converts each batch"
    return ""


def _reason_against_schedules(trainer: L.Trainer) -> str:
    # Lightning's weight averaging puts its own in their place
    for schedule in internals.step_schedules(trainer):
        if schedule.reduce_on_plateau or schedule.frequency != 1:
            return "as a schedule does not step with each batch"
    return ""


def _that_hear(trainer: L.Trainer) -> list[Callback]:
    """The callbacks that override a hook of batches."""
    heard = list[Callback]()
    for callback in internals.callbacks_of(trainer):
        if any(internals.overrides(callback, hook, Callback) for hook in _BATCH_HOOKS):
            heard.append(callback)
    return heard
