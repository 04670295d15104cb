"""`ExactCheckpoint`: checkpoints from which training continues exactly, in any `L.Trainer`.

On a CPU that is bit for bit; on a GPU with `Trainer(deterministic=True)`, as its kernels add in any
order without.

A checkpoint lies between two optimizer steps: after each validation, every so many minutes or
steps, and at the end. The end may be a signal, or an exception outside of an update. Here is
*when*; `position.py` has *what* a checkpoint keeps, `kept.py` which checkpoints stay, `folder.py`
how one is written, `same_run.py` which run may continue from it.

DataModules of flatout keep their position inside an epoch. A loader without `state_dict` is read
from its start for the rest of the epoch, as in Lightning.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.plugins.precision import DoublePrecision

from flatout.callbacks.clock import Clock, find_clock
from flatout.callbacks.curve_source import CurveSource
from flatout.checkpoints.folder import (
    ABOUT,
    Unwritable,
    as_plain,
    by_texts,
    leave_out_settings,
    require_whole,
    route_folders,
)
from flatout.checkpoints.kept import Best, find_checkpoint, link, newest_first, shelve
from flatout.checkpoints.odd_state import is_like, require_own_paths
from flatout.checkpoints.position import Boundary, Position, batches_of, loader_states, store_data
from flatout.checkpoints.same_run import plan_facts, require_same_training
from flatout.checkpoints.settings import CheckpointConfig
from flatout.distributed.both_lightnings import InBothLightnings, either
from flatout.distributed.collectives import SharedMaximum, are_several, largest_of_ranks
from flatout.distributed.signals import Signals
from flatout.engine.fast_loop import FastLoop, fast_loop_of
from flatout.engine.lightning_internals import (
    call_before_validation,
    callbacks_of,
    datamodule_of,
    is_dry_run,
    is_fitting,
    overrides,
)
from flatout.errors import UserError, require
from flatout.run_log import RunLog
from flatout.tasks.task import Task

_MOST_STEPS = 1_000_000  # stands for a checkpoint that is due after no number of steps


class SaveSchedule:
    """When a checkpoint is due, and when training ends before its time."""

    def __init__(
        self, every_steps: int | None, every_minutes: float | None, signals: Signals
    ) -> None:
        for name, value in (("every_steps", every_steps), ("every_minutes", every_minutes)):
            require(
                value is None or value > 0,
                f"ExactCheckpoint.{name}",
                f"{value}",
                allowed="above 0, or None",
            )
        self._every_steps = every_steps
        self._every_s = float("inf") if every_minutes is None else 60 * every_minutes
        self.signals = signals
        self._of_ranks = SharedMaximum()
        # the signal that has ended training, on whichever rank it arrived; 0: none
        self.stopped_by = 0
        self.restart()

    def restart(self) -> None:
        """Count the minutes from now."""
        self._next_save = time.monotonic() + self._every_s

    def look(self, device: torch.device, step: int) -> tuple[int, bool]:
        """The signal that some rank was sent, or 0, and whether a checkpoint is due.

        On every rank.
        """
        # Lightning's own way is a broadcast before each batch: a wait for the device, blind to
        # signals to other ranks. Clocks differ, and to save is a collective call: the first clock
        # that is due decides for all ranks.
        values = self._of_ranks.look(
            [self.signals.number, time.monotonic() >= self._next_save], device
        )
        asked, is_due = values or (0, False)
        return int(asked), bool(
            asked or is_due or (self._every_steps and step % self._every_steps == 0)
        )

    def steps_to_save(self, step: int) -> int:
        """How many steps there are up to the next with a checkpoint; many where minutes decide."""
        every = self._every_steps
        return _MOST_STEPS if every is None else every - step % every

    def stop(self, number: int) -> None:
        self.stopped_by = number
        raise SystemExit(128 + number)


class ExactCheckpoint(InBothLightnings, Checkpoint):
    """Keeps the newest checkpoints and the best one, and restores them.

    >>> exact = ExactCheckpoint("checkpoints", every_steps=500)  # doctest: +SKIP
    >>> trainer = L.Trainer(callbacks=[exact])  # doctest: +SKIP
    >>> trainer.fit(module, datamodule=data, ckpt_path=exact.latest())  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = 10.0,
        keep: int = 2,
        monitor: str | None = None,
        mode: str = "auto",
        min_delta: float = 0.0,
        about: dict[str, Any] | None = None,
        signals: Signals | None = None,
        others_draw: bool = True,
        log: RunLog | None = None,
    ) -> None:
        """`monitor`: the logged metric of the best checkpoint; `mode`: min, max, or auto, by the
        metric's name.

        `about` replaces the facts in each manifest that a resumed training is compared with; its
        caller compares then. `others_draw`: whether any part may use random numbers of Python or
        numpy.
        """
        super().__init__()
        require(keep >= 1, "ExactCheckpoint.keep", f"{keep}", allowed="1 or more")
        self.folder = Path(folder)
        self.keep = keep
        self.about = about
        self.run_log = RunLog() if log is None else log
        by_name = CheckpointConfig().mode_of(monitor or "")
        self.best_so_far = Best(monitor, by_name if mode == "auto" else mode, min_delta)
        self.when = SaveSchedule(every_steps, every_minutes, signals or Signals())
        self.boundary = Boundary(others_draw=others_draw)
        self.clock = Clock()
        self.seconds_before = 0.0  # seconds of the training before it was resumed
        self._began = time.monotonic()
        self._saved: Position | None = None
        self._loop: FastLoop | None = None
        self._is_saving = False
        self._may_link = False
        self._is_extended = False
        self._has_warned = False
        self._is_stop_asked = False
        self._must_judge = False  # at the end of the step in which a validation was
        self._patience: dict[str, int] = {}

    @property
    def best(self) -> Path:
        """The link to the best checkpoint."""
        return self.folder / "best"

    @property
    def best_model_path(self) -> str:
        """The path that Lightning takes for `ckpt_path="best"`; empty before a best checkpoint."""
        return str(self.best) if self.best.exists() else ""

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        """Called by Lightning after training in other processes (`ddp_spawn`), with their answer.

        The link is on the disk, where this process sees it, too.
        """

    def latest(self) -> Path | None:
        """The newest whole checkpoint, for `ckpt_path`; None where there is none.

        Prints which ones are damaged.
        """
        start, lines = find_checkpoint(self.folder)
        for line in lines:
            self.run_log.say(line)
        return None if start is None else start.checkpoint

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Links are compared and set again by the first rank of a fit alone: a validation or a
        # prediction from a checkpoint changes nothing in the folder.
        self._may_link = stage == "fit" and trainer.is_global_zero
        self._loop = fast_loop_of(trainer)
        route_folders(trainer, self.folder)
        others = [each for each in callbacks_of(trainer) if each is not self]
        self.clock = find_clock(others) or self.clock
        # A checkpoint brings the patience of its own training along.
        self._patience = {
            each.state_key: each.patience
            for each in others
            if isinstance(each, either(EarlyStopping))
        }

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The boundary is known if a checkpoint of ours was restored. A training from the beginning
        # must not find another one's checkpoints, as it would remove them one by one.
        is_known = self.boundary.at.step == trainer.global_step
        is_fresh = not trainer.global_step and not is_dry_run(trainer)
        require(
            not (is_fresh and newest_first(self.folder)),
            "ExactCheckpoint",
            f"{self.folder} has checkpoints of another training, which this one would remove",
            hint="Pass ckpt_path=exact.latest() to continue it, or name another folder.",
        )
        if (
            self.best_so_far.monitor is not None
            and not trainer.enable_validation
            and trainer.is_global_zero
        ):
            self.run_log.say(
                f"ExactCheckpoint: no validation, so no best by {self.best_so_far.monitor}"
            )
        self.boundary.begin(trainer)
        # where a training begins it needs no checkpoint
        self._saved = self._saved if is_known else self.boundary.at
        call_before_validation(trainer, partial(self.boundary.begin_validation, trainer))
        # Now, not after an hour: a state that cannot be written would end training at the first
        # save.
        states = {callback.state_key: callback.state_dict() for callback in callbacks_of(trainer)}
        as_plain(by_texts(states), "/callbacks", {})
        # More epochs than before were asked for: patience starts again, and may have changed.
        if self._is_extended:
            for callback in callbacks_of(trainer):
                if isinstance(callback, either(EarlyStopping)):
                    callback.wait_count = 0
                    callback.patience = self._patience.get(callback.state_key, callback.patience)
        if store_data(trainer) is None and not loader_states(trainer) and trainer.is_global_zero:
            name = type(datamodule_of(trainer) or pl_module).__name__
            line = (
                f"the loader of {name} has no state_dict, so its position inside an epoch cannot be"
                " kept"
            )
            self.run_log.say(f"ExactCheckpoint: {line}; a checkpoint after a whole epoch is exact")
        self.when.stopped_by = 0
        self._is_stop_asked = False
        self._must_judge = False
        self.when.restart()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not self.boundary.is_passed(trainer):
            # A callback's request to stop waits until the step is complete: gradients of half a
            # step would be lost.
            self._is_stop_asked = self._is_stop_asked or bool(trainer.should_stop)
            trainer.should_stop = False
            return
        trainer.should_stop = trainer.should_stop or self._is_stop_asked
        self.boundary.take(trainer)
        asked, is_due = self.when.look(pl_module.device, self.boundary.at.step)
        if self._must_judge:
            self._judge(trainer)
        elif is_due:
            self._save(trainer)
        if asked:
            self.when.stop(asked)

    def steps_to_hook(self, trainer: L.Trainer) -> int:
        """How many steps there are up to the next with a checkpoint."""
        return self.when.steps_to_save(trainer.global_step)

    def end_stretch(self, trainer: L.Trainer, batches: Sequence[object]) -> None:
        """Called after batches whose steps were taken at once: here a checkpoint may lie."""
        self.boundary.take(trainer)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any
    ) -> None:
        if is_fitting(trainer) and (
            asked := self.when.look(pl_module.device, trainer.global_step)[0]
        ):
            # a validation judges their running mean; the resume begins it again
            _put_back_weights(pl_module)
            if not (_is_torn(trainer, self._loop) or self.boundary.is_behind_loader(trainer)):
                self._save_if_new(trainer)
            self.when.stop(asked)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not is_fitting(trainer):
            return
        # With 4 batches a step and a validation after 6, half of a step is done, which no resume
        # could repeat. The checkpoint waits for its end, so it is one step on.
        self._must_judge = self.boundary.is_inside_step(trainer)
        if not self._must_judge:
            self.boundary.end_validation(trainer)
            self._judge(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            call_before_validation(trainer, None)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save_if_new(trainer)
        if asked := int(largest_of_ranks([self.when.signals.number], pl_module.device)[0]):
            self.when.stop(asked)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save the last boundary if the weights are still the same; ranks that have ended cannot
        take part.
        """
        call_before_validation(trainer, None)
        # Our own errors say that nothing is worth keeping, or that it is kept; to save is a
        # collective call.
        is_ours = self.when.stopped_by or isinstance(exception, UserError | KeyboardInterrupt)
        if is_ours or trainer.state.fn != "fit" or are_several() or _is_torn(trainer, self._loop):
            return
        _put_back_weights(pl_module)
        # the weights are one step on where a callback before this one has failed
        if self.boundary.is_passed(trainer):
            counts = [
                each
                for each in callbacks_of(trainer)
                if overrides(each, "on_train_batch_end", L.Callback)
            ]
            if any(
                each.state_dict() and not isinstance(each, (*either(Checkpoint), CurveSource))
                for each in counts
            ):
                return  # one that may not have seen the last batch, such as a mean of weights
            self.boundary.take(trainer)
        elif self.boundary.is_behind_loader(trainer):
            return
        try:
            self._save_if_new(trainer)
        except UserError as error:  # the exception under way is the one to report
            warnings.warn(
                f"no checkpoint of step {self.boundary.at.step}: {error}", UserWarning, stacklevel=2
            )

    def state_dict(self) -> dict[str, Any]:
        return self.best_so_far.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A best by another metric, or one that is damaged, is the best no more."""
        best = self.best_so_far
        best.load_state_dict(state_dict)
        if not self._may_link or best.step is None:
            return
        try:
            if state_dict["monitor"] != best.monitor:
                was, now = (
                    str(name).removeprefix("val/") for name in (state_dict["monitor"], best.monitor)
                )
                raise UserError(
                    "checkpoint.metric",
                    f"was {was} and is {now}",
                    hint=f"To keep the best so far, set checkpoint.metric={was}.",
                )
            require_whole(self.folder / f"step-{best.step}")
            link(self.folder, "best", best.step)
        except UserError as error:
            warnings.warn(
                f"the best checkpoint so far counts no more: {error}", UserWarning, stacklevel=2
            )
            best.value = None
            best.step = None
            best.epoch = None
            self.best.unlink(missing_ok=True)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # a file of another callback, which Lightning alone reads: it keeps its own account
        if not self._is_saving:
            return
        self.boundary.save(checkpoint, trainer)
        # Time that has run out is no reason to stop: a resumed training may have more of it.
        left = [
            each.time_remaining()
            for each in callbacks_of(trainer)
            if isinstance(each, either(Timer))
        ]
        out_of_time = any(seconds is not None and seconds <= 0 for seconds in left)
        checkpoint["should_stop"] = bool(trainer.should_stop) and not out_of_time
        seconds = round(self.seconds_before + time.monotonic() - self._began, 2)
        checkpoint[ABOUT] = {
            **self._facts(trainer),
            "position": checkpoint["position"],
            "seconds": seconds,
        }
        for why in leave_out_settings(checkpoint)[: not self._has_warned]:  # the first one, once
            warnings.warn(why, UserWarning, stacklevel=2)
            self._has_warned = True

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if "position" not in checkpoint or trainer.state.fn != "fit":
            return
        about = checkpoint[ABOUT]
        facts = self._facts(trainer)
        if self.about is None:
            require_same_training(about, facts)
        if isinstance(trainer.precision_plugin, either(DoublePrecision)):
            # Lightning has loaded the weights into a module of fp32, which rounds them, and
            # converts it later.
            pl_module.double().load_state_dict(
                checkpoint["state_dict"], strict=pl_module.strict_loading
            )
        for callback in callbacks_of(trainer):
            # parts of your own may keep other states than they begin with
            is_ours = type(callback).__module__.startswith("flatout.")
            key = callback.state_key
            if isinstance(callback, either(ModelCheckpoint)) and key in checkpoint["callbacks"]:
                require_own_paths(checkpoint["callbacks"][key], callback.dirpath, key)
            if is_ours and key in checkpoint["callbacks"]:
                require(
                    is_like(checkpoint["callbacks"][key], callback.state_dict()),
                    "checkpoint",
                    f"the state of {key} does not fit",
                    hint="It was changed, or is of another run: resume another checkpoint.",
                )
        self.boundary.load(checkpoint, trainer)
        self._saved = self.boundary.at
        self.seconds_before = float(about.get("seconds", 0.0))
        # A training that was extended starts patience again.
        self._is_extended = about.get("asked") != facts.get("asked")
        trainer.should_stop = checkpoint["should_stop"] and not self._is_extended

    def _facts(self, trainer: L.Trainer) -> dict[str, Any]:
        if self.about is not None:
            return self.about
        asked = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
        # the position in other people's data counts the batches of one rank
        if (data := store_data(trainer)) is None:
            return {"data": None, "plan": {"devices": trainer.world_size}, "asked": asked}
        plan = plan_facts(data.feeds.train, batches_of(trainer, data.feeds.train))
        return {"data": data.info.key, "plan": plan, "asked": asked}

    def _judge(self, trainer: L.Trainer) -> None:
        """Save a checkpoint for a validation that has ended; note whether it is the best."""
        self._must_judge = False
        self.best_so_far.judge(trainer, self.boundary.at.step)
        self._save(trainer)

    def _save_if_new(self, trainer: L.Trainer) -> None:
        if self.boundary.at.step and self._saved != self.boundary.at:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        if is_dry_run(trainer):
            return
        if self._loop is not None and self._loop.losses.may_be_broken:
            # names the step that is not finite: it must not become a checkpoint
            self._loop.take_losses()
        step = self.boundary.at.step
        with self.clock.spending("checkpoint"):
            self._is_saving = True
            try:
                # without the second argument Lightning logs a line at each save
                trainer.save_checkpoint(self.folder / f"step-{step}", weights_only=False)
            except Unwritable as error:  # a hook adds it at each save: nothing before could tell
                if are_several():  # the other ranks wait for this one to have saved
                    raise
                warnings.warn(f"no checkpoint: {error}", UserWarning, stacklevel=2)
                return
            finally:
                self._is_saving = False
            self._saved = self.boundary.at
            self.when.restart()
            # after the save: a crash in between leaves one checkpoint too many, not too few
            if trainer.is_global_zero:
                shelve(self.folder, last=step, best=self.best_so_far.step, keep=self.keep)


def _is_torn(trainer: L.Trainer, loop: FastLoop | None) -> bool:
    if loop is not None and loop.is_active:
        return loop.is_state_partial()
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.started != batches.processed)


def _put_back_weights(module: L.LightningModule) -> None:
    if isinstance(module, Task):
        module.put_back_weights()
