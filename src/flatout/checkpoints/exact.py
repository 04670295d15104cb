"""When a checkpoint is made, which ones are kept, and how training goes on from one.

Checkpoints lie between two optimizer steps: after each validation, every so many minutes or steps, when a signal asks
the run to end, when an exception ends it outside of an update, and at the end. `best` and `last` are links to two of
them; the one before the last is kept too, in case the last is damaged.
"""

from __future__ import annotations

import copy
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer

from flatout.callbacks.step_timer import Clock
from flatout.checkpoints.folder import ABOUT, MAKE_ROOM, OWN_FOLDER, as_plain, require_whole
from flatout.checkpoints.position import Position, loops_at
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.distributed.collectives import are_several, of_all_ranks
from flatout.distributed.signals import Signals, SignalWatch
from flatout.engine.fast_loop import FastLoop, fast_loop_of
from flatout.engine.lightning_internals import call_before_validation, callbacks_of, resume_after_batch
from flatout.engine.random_state import RandomState
from flatout.errors import UserError, out_of_space, require
from flatout.tasks.metrics import BEST_MODE
from flatout.tasks.task import Task

CHECKPOINTS = "checkpoints"
"""Their folder in a run's folder."""
_NAME = re.compile(r"step-(\d+)")


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """What counts as best, when to stop waiting for better, and how often a checkpoint is made."""

    metric: str | None = None
    """Validation metric to choose by, such as accuracy or macro_f1; null: the problem's usual one."""
    patience: int | None = 5
    """Validations without a better metric before training stops; null: never."""
    min_delta: float = 0.0
    """Least change that counts as better."""
    every_minutes: float | None = 10.0
    """Minutes between two checkpoints while training; null: only after validations."""
    every_steps: int | None = None
    """Optimizer steps between two checkpoints; null: minutes decide."""

    def __post_init__(self) -> None:
        ok = self.patience is None or self.patience >= 1
        require(ok, "checkpoint.patience", f"{self.patience}", allowed="1 or more, or null")
        require(self.min_delta >= 0, "checkpoint.min_delta", f"{self.min_delta}", allowed="0 or more")
        for name in ("every_minutes", "every_steps"):
            value = getattr(self, name)
            require(value is None or value > 0, f"checkpoint.{name}", f"{value}", allowed="above 0, or null")


class Checkpoints(Checkpoint):
    """Keeps the best checkpoint and the last two, stops where a signal asks to, and restores what it has saved."""

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        metric: str,
        *,
        feed: Feed,
        batches_in_epoch: int,
        about: dict[str, Any],
        signals: Signals,
        others_draw: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """`about` goes into each manifest; `others_draw`: somebody's callback may use Python's or numpy's numbers."""
        self.clock = clock or Clock()
        self.folder, self.settings, self.metric = folder, settings, metric
        self.feed, self.batches_in_epoch, self.about = feed, batches_in_epoch, about
        self.watch, self.others_draw = SignalWatch(signals), others_draw
        self.best_value: float | None = None
        self.best_step: int | None = None
        self.at = Position()
        """The last boundary between two steps."""
        self._random: RandomState | None = None
        self._before_validation: dict[str, Any] | None = None
        """What callbacks and losses were before a validation that has not ended: it will be made again."""
        self._saved: Position | None = None
        self.stopped_by = 0
        """The signal that has ended training, whichever rank it was sent to; 0: none."""
        self.seconds_before = 0.0
        """What earlier sittings of the run took."""
        self._began = time.monotonic()
        self._stops_early = self._asks_anew = False
        self._next_save = self._later()

    @property
    def best(self) -> Path:
        return self.folder / "best"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        call_before_validation(trainer, lambda: self._note(trainer))
        as_plain({each.state_key: each.state_dict() for each in callbacks_of(trainer)}, "/callbacks", {})
        if self._asks_anew:  # patience begins anew
            for stopping in (each for each in callbacks_of(trainer) if isinstance(each, EarlyStopping)):
                stopping.wait_count, stopping.patience = 0, self.settings.patience or stopping.patience
        self._next_save = self._later()
        self.stopped_by, self._stops_early = 0, False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: FlatBatch, batch_idx: int
    ) -> None:
        if not batch.ends_step:
            # Whoever asked to stop gets it, when the step is done.
            self._stops_early = self._stops_early or bool(trainer.should_stop)
            trainer.should_stop = False
            return
        if self._stops_early:
            trainer.should_stop = True
        taken = (batch_idx + 1) // self.feed.plan.accumulate
        self.at = Position(trainer.current_epoch, taken, trainer.global_step, self.at.validated)
        device = self.feed.device
        self._random = RandomState(device, with_others=self.others_draw)
        loop = self._loop(trainer)
        self.watch.shared = list(loop.passes.pieces.values())
        asked, is_due = self.watch.look(device, time.monotonic() >= self._next_save)
        if loop.exchanges:
            loop.passes.agree(self.watch.shared)
        every = self.settings.every_steps
        if asked or is_due or (every and self.at.step % every == 0):
            self._save(trainer)
        if asked:
            self._stop(asked)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        asked = self.watch.look(pl_module.device)[0]
        if asked:
            _put_back_weights(pl_module)
            if self._saved != self.at:
                self._save(trainer)
            self._stop(asked)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        value = float(trainer.callback_metrics[f"val/{self.metric}"])
        self._before_validation = None
        self.at = replace(self.at, validated=self.at.step)
        self._random = RandomState(pl_module.device)
        is_best = self._is_better(value)
        if is_best:
            self.best_value, self.best_step = value, self.at.step
        self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._saved != self.at and self.at.step:
            self._save(trainer)
        if asked := self.watch.agree(pl_module.device):
            self._stop(asked)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save the last boundary where the weights are still those it left; ranks that are gone cannot be asked."""
        is_ours = self.stopped_by or isinstance(exception, UserError | KeyboardInterrupt)
        if is_ours or trainer.state.fn != "fit" or are_several() or self._loop(trainer).is_torn():
            return
        _put_back_weights(pl_module)
        if trainer.global_step != self.at.step:  # the step was taken, and a callback before this one has failed
            taken = self.at.step_in_epoch + 1 if self.at.epoch == trainer.current_epoch else 1
            self.at = Position(trainer.current_epoch, taken, trainer.global_step, self.at.validated)
            self._random = RandomState(pl_module.device)
        if self.at.step and self._saved != self.at:
            try:
                self._save(trainer)
            except UserError as error:  # the exception that is under way is the one to tell
                warnings.warn(f"no checkpoint of step {self.at.step}: {error}", UserWarning, stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "best_value": self.best_value, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A best by another metric, or one that is damaged, is the best no more."""
        self.best_value, self.best_step = state_dict["best_value"], state_dict["best_step"]
        if self.feed.plan.rank != 0 or self.best_step is None:
            return
        try:
            if state_dict["metric"] != self.metric:
                raise UserError("checkpoint.metric", f"was {state_dict['metric']} and is {self.metric}")
            require_whole(self.folder / f"step-{self.best_step}")
            _link(self.folder, "best", self.best_step)
        except UserError as error:
            warnings.warn(f"the best checkpoint so far counts no more: {error}", UserWarning, stacklevel=2)
            self.best_value = self.best_step = None
            (self.folder / "best").unlink(missing_ok=True)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        assert self._random is not None
        del checkpoint["loops"]  # the position says it, for any number of ranks and micro-batches
        left = [each.time_remaining() for each in callbacks_of(trainer) if isinstance(each, Timer)]
        out_of_time = any(seconds is not None and seconds <= 0 for seconds in left)
        checkpoint["position"] = self.at.as_dict()
        checkpoint["should_stop"] = bool(trainer.should_stop) and not out_of_time
        now = self._before_validation or {"unread": self._unread(trainer)}
        checkpoint["callbacks"] = now.get("callbacks", checkpoint["callbacks"])
        checkpoint["ranks"] = of_all_ranks({"random": self._random.as_dict(), **now["unread"]})
        seconds = self.seconds_before + time.monotonic() - self._began
        checkpoint[ABOUT] = {**self.about, "position": self.at.as_dict(), "seconds": round(seconds, 2)}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.at = self._saved = Position(**checkpoint["position"])
        checkpoint["loops"] = loops_at(self.at, self.feed.plan.accumulate, self.batches_in_epoch)
        about = checkpoint[ABOUT]
        self._asks_anew = about.get("asked") != self.about.get("asked")
        self.seconds_before = float(about.get("seconds", 0.0))
        trainer.should_stop = checkpoint["should_stop"] and not self._asks_anew
        plan, states = self.feed.plan, checkpoint["ranks"]
        is_same_world = len(states) == plan.world
        self._loop(trainer).losses.load(states, plan.rank, is_same_world=is_same_world)
        self._loop(trainer).passes.load(states, plan.rank, is_same_world=is_same_world)
        if isinstance(pl_module, Task):
            pl_module.load_position_state(states, plan.rank)
        if not checkpoint.get("lr_schedulers"):  # checkpoints of 0.1 have none: the schedule is a function of the step
            checkpoint["lr_schedulers"] = [{"step": self.at.step}]
        device = trainer.strategy.root_device

        def restore() -> None:
            if is_same_world:
                RandomState.from_dict(states[plan.rank]["random"]).restore(device)
            else:
                torch.manual_seed(plan.seed + (self.at.step << 20) + plan.rank)
            self._random = RandomState(device)

        resume_after_batch(trainer, restore, is_validation_due=self.at.validated != self.at.step)

    def _note(self, trainer: L.Trainer) -> None:
        """Before a validation, and before anybody's hooks in it."""
        states = {each.state_key: copy.deepcopy(each.state_dict()) for each in callbacks_of(trainer)}
        kept = {key: state for key, state in states.items() if state}
        self._before_validation = {"callbacks": kept, "unread": self._unread(trainer)}

    def _is_better(self, value: float) -> bool:
        if self.best_value is None or self.best_value != self.best_value:
            return True
        gain = value - self.best_value if best_mode(self.metric) == "max" else self.best_value - value
        return gain > self.settings.min_delta

    def _save(self, trainer: L.Trainer) -> None:
        self._loop(trainer).require_sound()
        with self.clock.spending("checkpoint"):
            trainer.save_checkpoint(self.folder / f"step-{self.at.step}")
            self._saved = self.at
            self._next_save = self._later()
            if trainer.is_global_zero:
                shelve(self.folder, last=self.at.step, best=self.best_step)

    @staticmethod
    def _loop(trainer: L.Trainer) -> FastLoop:
        loop = fast_loop_of(trainer)
        assert loop is not None
        return loop

    def _unread(self, trainer: L.Trainer) -> dict[str, Any]:
        """What this rank has not read yet of the steps taken, and what its next step depends on."""
        loop, module = self._loop(trainer), trainer.lightning_module
        own = module.position_state() if isinstance(module, Task) else {}
        return {**loop.losses.state(), "pieces": dict(loop.passes.pieces), **own}

    def _later(self) -> float:
        minutes = self.settings.every_minutes
        return float("inf") if minutes is None else time.monotonic() + 60 * minutes

    def _stop(self, number: int) -> None:
        self.stopped_by = number
        raise SystemExit(128 + number)


def shelve(folder: Path, *, last: int, best: int | None) -> None:
    """Point the links at the last checkpoint and the best, keep both and the newest before the last, remove others."""
    if folder.is_symlink():
        raise UserError("checkpoint", f"{folder} is a link", hint=OWN_FOLDER)
    try:
        _link(folder, "last", last)
        _link(folder, "best", best)
        steps = [int(path.name.removeprefix("step-")) for path in newest_first(folder)]
        before = [step for step in steps if step < last][:1]
        for step in steps:
            if step not in (last, best, *before):  # one of more steps is of a sitting that was given up
                shutil.rmtree(folder / f"step-{step}")
        for path in folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise out_of_space(error, folder, None, "checkpoint", MAKE_ROOM) from None


def _link(folder: Path, name: str, step: int | None) -> None:
    """Point a link at a checkpoint in one step, so that it never dangles."""
    if step is None or not (folder / f"step-{step}").exists():
        return
    new = folder / f".{name}-new"
    new.unlink(missing_ok=True)
    new.symlink_to(f"step-{step}")
    new.replace(folder / name)


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of a folder, those of most steps first; links are none."""
    return sorted(_real_checkpoints(folder), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def _real_checkpoints(folder: Path) -> Iterator[Path]:
    if folder.is_dir() and not folder.is_symlink():
        yield from (path for path in folder.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink())


def best_mode(metric: str) -> str:
    """Whether a metric is better when higher (`max`) or lower (`min`)."""
    return "min" if metric == "loss" or metric.startswith("rmse_") else BEST_MODE[metric]


def _put_back_weights(module: L.LightningModule) -> None:
    if isinstance(module, Task):
        module.put_back_weights()
