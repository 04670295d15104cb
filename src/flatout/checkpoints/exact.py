"""`ExactCheckpoint`: checkpoints from which training continues bit for bit, in any `L.Trainer`.

A checkpoint lies between two optimizer steps: after each validation, every so many minutes or steps, when a signal asks
the run to end, when an exception ends it outside of an update, and at the end. It holds everything the next step
depends on: weights, optimizer, schedules, callbacks, the position in the data, and all random numbers of each rank.
It is a folder with checksums and appears whole or not at all.

DataModules of flatout keep their position inside an epoch. A loader without `state_dict` starts its epoch again; a
line says so once. FastLoop and Task add what they have not reported yet.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Mapping, MutableSequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, Timer

from flatout.callbacks.clock import Clock
from flatout.checkpoints.best import Best
from flatout.checkpoints.folder import ABOUT, as_plain, require_whole
from flatout.checkpoints.kept import find_newest_whole, link, shelve
from flatout.checkpoints.position import Batches, Position, loops_at
from flatout.checkpoints.routing import route_folders
from flatout.checkpoints.same_training import batches_of, facts_of, require_same_training
from flatout.data.store_data import StoreData
from flatout.distributed.collectives import are_several, of_all_ranks
from flatout.distributed.signals import Signals, SignalWatch
from flatout.distributed.slices import share_of, whole
from flatout.engine.fast_loop import FastLoop, fast_loop_of
from flatout.engine.lightning_internals import call_before_validation, callbacks_of, resume_after_batch
from flatout.engine.random_state import RandomState
from flatout.errors import UserError, require
from flatout.run_log import PrintLog, RunLog
from flatout.tasks.task import Task

_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_BEFORE_0_2 = "Checkpoints"
"""The name under which earlier versions kept the state of this callback."""


class ExactCheckpoint(Checkpoint):
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
        mode: str = "max",
        min_delta: float = 0.0,
        about: dict[str, Any] | None = None,
        signals: Signals | None = None,
        others_draw: bool = True,
        log: RunLog | None = None,
    ) -> None:
        """`monitor`: the logged metric of the best checkpoint; `min_delta`: the least change that counts as better.

        `about` replaces the facts in each manifest that a resumed training is compared with; its caller compares then.
        `others_draw`: whether any part may use random numbers of Python or numpy.
        """
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_minutes", every_minutes)):
            require(value is None or value > 0, f"ExactCheckpoint.{name}", f"{value}", allowed="above 0, or None")
        require(keep >= 1, "ExactCheckpoint.keep", f"{keep}", allowed="1 or more")
        self.folder, self.every_steps, self.every_minutes, self.keep = Path(folder), every_steps, every_minutes, keep
        self.best_so_far = Best(monitor, mode, min_delta)
        self.about, self.run_log = about, PrintLog() if log is None else log
        self.watch, self.others_draw = SignalWatch(signals or Signals()), others_draw
        self.clock = Clock()
        self.at = Position()
        """The last boundary between two steps."""
        self._batches: Batches | None = None
        """The same in batches, for a DataModule that does not keep its position."""
        self._random: RandomState | None = None
        self._before_validation: dict[str, Any] | None = None
        """What callbacks and losses were before a validation that has not ended: a resumed run repeats it."""
        self._saved: Position | None = None
        self._is_saving = False
        self.stopped_by = 0
        """The signal that has ended training, on whichever rank it arrived; 0: none."""
        self.seconds_before = 0.0
        """Seconds of the training before it was resumed."""
        self._began = time.monotonic()
        self._stops_early = self._is_extended = self._has_warned = False
        self._patience: dict[str, int] = {}
        self._loop: FastLoop | None = None
        self._next_save = self._later()

    @property
    def best(self) -> Path:
        """The link to the best checkpoint."""
        return self.folder / "best"

    @property
    def best_model_path(self) -> str:
        """For Lightning's `ckpt_path="best"`; empty while there is none."""
        return str(self.best) if self.best.exists() else ""

    def latest(self) -> Path | None:
        """The newest whole checkpoint, for `ckpt_path`; None where there is none. Prints which ones are damaged."""
        found, lines = find_newest_whole(self.folder)
        for line in lines:
            self.run_log.say(line)
        return None if found is None else found[0]

    # Hooks

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer, self._loop = trainer, fast_loop_of(trainer)
        route_folders(trainer, self.folder)
        others = [each for each in callbacks_of(trainer) if each is not self]
        clocks = (getattr(each, "clock", None) for each in others)
        self.clock = next((each for each in clocks if isinstance(each, Clock)), self.clock)
        self._patience = {each.state_key: each.patience for each in others if isinstance(each, EarlyStopping)}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.at.step != trainer.global_step:  # used with another Trainer before
            self._begin_at(trainer)
        call_before_validation(trainer, lambda: self._note(trainer))
        as_plain({each.state_key: each.state_dict() for each in callbacks_of(trainer)}, "/callbacks", {})
        if self._is_extended:
            for stopping in (each for each in callbacks_of(trainer) if isinstance(each, EarlyStopping)):
                stopping.wait_count, stopping.patience = 0, self._patience.get(stopping.state_key, stopping.patience)
        if _store_data(trainer) is None and not _loader_states(trainer) and trainer.is_global_zero:
            name = type(_datamodule(trainer) or pl_module).__name__
            self.run_log.say(
                f"ExactCheckpoint: the loader of {name} has no state_dict, so its position inside an epoch cannot be"
                " kept; a checkpoint after a whole epoch is exact"
            )
        self._next_save = self._later()
        self.stopped_by, self._stops_early = 0, False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._has_passed_boundary(trainer):
            # A request to stop waits until the step is complete.
            self._stops_early = self._stops_early or bool(trainer.should_stop)
            trainer.should_stop = False
            return
        if self._stops_early:
            trainer.should_stop = True
        self.at = self._position(trainer)
        self._batches = _batches_taken(trainer) if _store_data(trainer) is None else None
        device = pl_module.device
        self._random = RandomState(device, with_others=self.others_draw)
        loop = self._loop
        self.watch.shared = [] if loop is None else list(loop.passes.pieces.values())
        asked, is_due = self.watch.look(device, time.monotonic() >= self._next_save)
        if loop is not None and loop.exchanges:
            loop.passes.agree(self.watch.shared)
        if asked or is_due or (self.every_steps and self.at.step % self.every_steps == 0):
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
        self._before_validation = None
        self.at = replace(self.at, validated=self.at.step)
        self._random = RandomState(pl_module.device)
        self.best_so_far.judge(trainer, self.at.step)
        self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._saved != self.at and self.at.step:
            self._save(trainer)
        if asked := self.watch.agree(pl_module.device):
            self._stop(asked)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Save the last boundary if the weights are still the same; ranks that have ended cannot take part."""
        is_ours = self.stopped_by or isinstance(exception, UserError | KeyboardInterrupt)
        if is_ours or trainer.state.fn != "fit" or are_several() or _is_torn(trainer, self._loop):
            return
        _put_back_weights(pl_module)
        if self._has_passed_boundary(trainer):  # the step was taken, and a callback before this one has failed
            self.at = self._position(trainer)
            self._batches = _batches_taken(trainer) if _store_data(trainer) is None else None
            self._random = RandomState(pl_module.device)
        elif self._batches is not None and self._batches != _batches_taken(trainer) and _loader_states(trainer):
            return  # a loader stands behind the boundary, and cannot say where that was
        if self.at.step and self._saved != self.at:
            try:
                self._save(trainer)
            except UserError as error:  # the exception under way is the one to report
                warnings.warn(f"no checkpoint of step {self.at.step}: {error}", UserWarning, stacklevel=2)

    # State

    def state_dict(self) -> dict[str, Any]:
        return self.best_so_far.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A best by another metric, or one that is damaged, is the best no more."""
        best = self.best_so_far
        best.load_state_dict(state_dict)
        if not self._trainer.is_global_zero or best.step is None:
            return
        before = state_dict.get("monitor") or f"val/{state_dict.get('metric')}"  # 0.1 kept the name without its split
        try:
            if before != best.monitor:
                was, now = (str(name).removeprefix("val/") for name in (before, best.monitor))
                hint = f"To keep the best so far, set checkpoint.metric={was}."
                raise UserError("checkpoint.metric", f"was {was} and is {now}", hint=hint)
            require_whole(self.folder / f"step-{best.step}")
            link(self.folder, "best", best.step)
        except UserError as error:
            warnings.warn(f"the best checkpoint so far counts no more: {error}", UserWarning, stacklevel=2)
            best.forget()
            self.best.unlink(missing_ok=True)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._is_saving:  # a file of another callback, which Lightning alone reads: it keeps its own account
            return
        assert self._random is not None  # of the boundary that is saved
        left = [each.time_remaining() for each in callbacks_of(trainer) if isinstance(each, Timer)]
        out_of_time = any(seconds is not None and seconds <= 0 for seconds in left)
        data = _store_data(trainer)
        del checkpoint["loops"]  # the position says it, for any number of ranks and micro-batches
        checkpoint["position"] = self.at.as_dict()
        if data is None and self._batches is not None:
            checkpoint["batches"] = self._batches.as_dict()
        if not pl_module.automatic_optimization:
            checkpoint["gradients"] = _gradients(pl_module)
        checkpoint["should_stop"] = bool(trainer.should_stop) and not out_of_time
        now = self._before_validation or {"unread": self._unread(trainer)}
        checkpoint["callbacks"] = now.get("callbacks", checkpoint["callbacks"])
        if self.at.validated == self.at.step:  # callbacks read them at the end of the epoch
            checkpoint["metrics"] = dict(trainer.callback_metrics)
        own = {"random": self._random.as_dict(), "loaders": _loader_states(trainer) if data is None else []}
        checkpoint["ranks"] = of_all_ranks({**own, **now["unread"]})
        about = facts_of(trainer, data) if self.about is None else self.about
        seconds = self.seconds_before + time.monotonic() - self._began
        checkpoint[ABOUT] = {**about, "position": self.at.as_dict(), "seconds": round(seconds, 2)}
        self._leave_out_foreign_values(checkpoint)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if "position" not in checkpoint or trainer.state.fn != "fit":
            return
        states, about, data = checkpoint["ranks"], checkpoint[ABOUT], _store_data(trainer)
        self.at = self._saved = Position(**checkpoint["position"])
        facts = facts_of(trainer, data) if self.about is None else self.about
        if self.about is None:
            require_same_training(about, facts)
        self._batches = _batches_at(self.at, checkpoint, trainer, data, states)
        checkpoint["loops"] = loops_at(self.at, self._batches)
        if data is not None:  # a module that asks for the number of steps opens the loaders before Lightning does
            data.load_state_dict(self._batches.loaders[0])
        callbacks = checkpoint["callbacks"]
        callbacks.setdefault(self.state_key, callbacks.pop(_BEFORE_0_2, {**self.state_dict()}))
        self._is_extended = about.get("asked") != facts.get("asked")
        self.seconds_before = float(about.get("seconds", 0.0))
        trainer.should_stop = checkpoint["should_stop"] and not self._is_extended
        if isinstance(pl_module, Task) and not checkpoint.get("lr_schedulers"):
            checkpoint["lr_schedulers"] = [{"step": self.at.step}]  # 0.1 kept none: they follow from the step
        self._load_unread(trainer, pl_module, states)
        seed, metrics = 0 if data is None else data.seed, checkpoint.get("metrics", {})

        def restore() -> None:
            self._restore_random_numbers(trainer, states, seed)
            trainer.callback_metrics.update(metrics)
            _put_back_gradients(pl_module, checkpoint.get("gradients", {}))

        resume_after_batch(trainer, restore, is_validation_due=self.at.validated != self.at.step)

    def _load_unread(self, trainer: L.Trainer, module: L.LightningModule, states: list[dict[str, Any]]) -> None:
        rank, is_same_world = trainer.global_rank, len(states) == trainer.world_size
        loop = self._loop
        if loop is not None and "losses" in states[0]:
            loop.losses.load(states, rank, is_same_world=is_same_world)
            loop.passes.load(states, rank, is_same_world=is_same_world)
        if isinstance(module, Task):
            module.load_position_state(states, rank)

    def _restore_random_numbers(self, trainer: L.Trainer, states: list[dict[str, Any]], seed: int) -> None:
        rank, device = trainer.global_rank, trainer.strategy.root_device
        if len(states) == trainer.world_size:
            RandomState.from_dict(states[rank]["random"]).restore(device)
        else:
            torch.manual_seed(seed + (self.at.step << 20) + rank)
        self._random = RandomState(device)

    def _leave_out_foreign_values(self, checkpoint: dict[str, Any]) -> None:
        """Hyperparameters of other modules may be any objects; those are not needed to continue."""
        checkpoint.pop("hparams_type", None)  # the class of OmegaConf's mapping, which is kept as a plain one
        for name in _HYPERPARAMETERS:
            for key, value in (values := _plain_settings(checkpoint.pop(name, {}))).items():
                try:
                    as_plain(value, f"/{name}/{key}", {})
                except UserError as error:
                    values = {other: each for other, each in values.items() if other != key}
                    if not self._has_warned:
                        warnings.warn(f"{error} Checkpoints leave /{name}/{key} out.", UserWarning, stacklevel=2)
                    self._has_warned = True
            if values:
                checkpoint[name] = values

    def _note(self, trainer: L.Trainer) -> None:
        """Keep all states before a validation, and before any hook in it."""
        states = {each.state_key: copy.deepcopy(each.state_dict()) for each in callbacks_of(trainer)}
        kept = {key: state for key, state in states.items() if state}
        self._before_validation = {"callbacks": kept, "unread": self._unread(trainer)}

    def _begin_at(self, trainer: L.Trainer) -> None:
        """Take a new training, or one that continues from a file of Lightning's, which needs no checkpoint yet."""
        epochs: Any = trainer.fit_loop.epoch_progress.current
        # Lightning keeps the counts of an epoch that has ended until the next one begins.
        is_under_way = epochs.ready > epochs.processed
        position = self._position(trainer)
        self.at = self._saved = position if is_under_way else replace(position, step_in_epoch=0)
        self._batches = _batches_taken(trainer) if _store_data(trainer) is None else None
        self._random = RandomState(trainer.strategy.root_device)

    def _has_passed_boundary(self, trainer: L.Trainer) -> bool:
        """Whether a batch has ended that a checkpoint may follow."""
        if trainer.lightning_module.automatic_optimization:
            return trainer.global_step != self.at.step
        # The module alone knows when it steps, or never does: gradients it collects are part of the checkpoint.
        return replace(self._position(trainer), validated=self.at.validated) != self.at

    def _position(self, trainer: L.Trainer) -> Position:
        loop: Any = trainer.fit_loop.epoch_loop
        steps = -(-loop.batch_progress.current.processed // trainer.accumulate_grad_batches)
        # Lightning counts a batch as stepped after the hooks that save.
        stepped = loop._batches_that_stepped + 1
        return Position(trainer.current_epoch, steps, trainer.global_step, self.at.validated, stepped)

    def _save(self, trainer: L.Trainer) -> None:
        if getattr(trainer, "fast_dev_run", False):
            return
        if self._loop is not None:
            self._loop.require_sound()
        with self.clock.spending("checkpoint"):
            self._is_saving = True
            try:
                trainer.save_checkpoint(self.folder / f"step-{self.at.step}")
            finally:
                self._is_saving = False
            self._saved = self.at
            self._next_save = self._later()
            if trainer.is_global_zero:
                shelve(self.folder, last=self.at.step, best=self.best_so_far.step, keep=self.keep)

    def _unread(self, trainer: L.Trainer) -> dict[str, Any]:
        """What this rank has not read yet of the steps taken, and what its next step depends on."""
        loop, module = self._loop, trainer.lightning_module
        own = module.position_state() if isinstance(module, Task) else {}
        if loop is None or not loop.is_serving:
            return own
        return {**loop.losses.state(), "pieces": dict(loop.passes.pieces), **own}

    def _later(self) -> float:
        minutes = self.every_minutes
        return float("inf") if minutes is None else time.monotonic() + 60 * minutes

    def _stop(self, number: int) -> None:
        self.stopped_by = number
        raise SystemExit(128 + number)


def _plain_settings(value: Any) -> Any:
    """Mappings and lists of OmegaConf as plain ones, without an import of it."""
    if isinstance(value, Mapping):
        return {key: _plain_settings(item) for key, item in value.items()}
    return [_plain_settings(item) for item in value] if isinstance(value, MutableSequence) else value


def _gradients(module: L.LightningModule) -> dict[str, torch.Tensor]:
    return {name: whole(each.grad) for name, each in module.named_parameters() if each.grad is not None}


def _put_back_gradients(module: L.LightningModule, gradients: dict[str, torch.Tensor]) -> None:
    for name, weight in module.named_parameters():
        if name in gradients:
            weight.grad = share_of(gradients[name].to(weight.device), weight)


def _is_torn(trainer: L.Trainer, loop: FastLoop | None) -> bool:
    """Whether the weights may no longer be those that the last step has left."""
    if loop is not None and loop.is_serving:
        return loop.is_torn()
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.started != batches.processed)


def _store_data(trainer: L.Trainer) -> StoreData[Any, Any] | None:
    """The trainer's datamodule, where it is one of flatout, which keeps its position."""
    data = _datamodule(trainer)
    return data if isinstance(data, StoreData) else None


def _datamodule(trainer: L.Trainer) -> Any:
    """The datamodule, which Lightning sets without declaring it."""
    return getattr(trainer, "datamodule", None)


def _loader_states(trainer: L.Trainer) -> list[Any]:
    """States of the training loaders that have one."""
    return list(trainer.fit_loop.state_dict()["state_dict"].get("combined_loader", []))


def _batches_taken(trainer: L.Trainer) -> Batches:
    """Where another DataModule stands, without the states of its loaders."""
    loop = trainer.fit_loop.epoch_loop
    done = loop.batch_idx + 1
    is_last = loop.batch_progress.is_last_batch or done >= trainer.num_training_batches
    return Batches(done, loop.total_batch_idx + 1, is_last)


def _batches_at(
    position: Position,
    checkpoint: dict[str, Any],
    trainer: L.Trainer,
    data: StoreData[Any, Any] | None,
    states: list[dict[str, Any]],
) -> Batches:
    if data is not None:
        return Batches.of(position, trainer.accumulate_grad_batches, batches_of(trainer, data.feeds.train))
    if "batches" not in checkpoint:
        hint = "Pass the same DataModule: trainer.fit(module, datamodule=data, ckpt_path=…)."
        what = "the checkpoint was saved with a DataModule of flatout, and this training has none"
        raise UserError("ExactCheckpoint", what, hint=hint)
    batches = Batches(**checkpoint["batches"])
    if len(states) != trainer.world_size or "loaders" not in states[trainer.global_rank]:
        return batches
    return replace(batches, loaders=states[trainer.global_rank]["loaders"])


def _put_back_weights(module: L.LightningModule) -> None:
    if isinstance(module, Task):
        module.put_back_weights()
