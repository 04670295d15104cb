"""What an exact checkpoint keeps: where training stands, and all that the next step depends on.

The plan is a pure function, so a position is three numbers: the epoch, the optimizer steps taken in
it, and all optimizer steps. It holds for any number of ranks and micro-batches that make the same
steps. A position lies between two optimizer steps, never inside one. `ExactCheckpoint` decides when
to save; everything else of a resume is here.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, cast, runtime_checkable

import lightning as L
import torch

from flatout.checkpoints.odd_state import require_fitting_states
from flatout.data.batches.feed import Feed
from flatout.data.batches.store_data import StoreData
from flatout.distributed.collectives import of_all_ranks, share_of, whole
from flatout.engine.lightning_internals import callbacks_of, datamodule_of, resume_after_batch
from flatout.engine.random_state import random_state, restore_random_state, state_of_others
from flatout.engine.run_length import batches_in_epoch
from flatout.errors import UserError


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two optimizer steps, as counts of epochs and steps."""

    epoch: int = 0  # the epoch that is under way, counted from 0
    step_in_epoch: int = 0  # optimizer steps taken in it
    step: int = 0  # optimizer steps taken in all
    # step of the last validation; what is due at this step is still to be done if it is another
    validated: int = -1
    batches_stepped: int | None = None
    """Batches that ended with a step, by which Lightning's loggers count; fewer than steps with
    several optimizers."""


@dataclass(frozen=True, slots=True)
class Batches:
    """The position in batches of one rank, as Lightning counts them."""

    in_epoch: int  # batches taken in the epoch that is under way
    in_all: int  # batches taken in all epochs
    is_last: bool  # whether none is left in the epoch
    # states of the loaders; empty where they have none
    loaders: list[Any] = field(default_factory=list)


@runtime_checkable
class KeepsPosition(Protocol):
    """A module or callback with a state of its own on each rank, beyond `state_dict`, that the next
    step needs.
    """

    def position_state(self) -> dict[str, Any]: ...
    def load_position_state(self, of_ranks: list[dict[str, Any]], rank: int) -> None: ...


class Boundary:
    """The last place between two optimizer steps, with all that the next step depends on."""

    def __init__(self, *, others_draw: bool = True) -> None:
        """`others_draw`: whether any part may use random numbers of Python or numpy."""
        self.at = Position()
        self._others_draw = others_draw
        self._batches: Batches | None = None  # for a DataModule that does not keep its position
        self._random: dict[str, Any] = {}
        self._taken = 0  # batches that had ended, in all epochs
        self._before_validation: tuple[dict[str, Any], dict[str, Any]] | None = None
        """States of the callbacks and of `KeepsPosition` before a validation that has not ended."""

    def begin(self, trainer: L.Trainer) -> None:
        """Take the place where a training starts, which may be a file of Lightning's."""
        self._taken = _batches_ended(trainer)
        if self.at.step == trainer.global_step:  # a checkpoint of ours has set it
            return
        epochs: Any = trainer.fit_loop.epoch_progress.current
        # Lightning keeps the counts of an epoch that has ended until the next one begins.
        is_under_way = epochs.ready > epochs.processed
        self.take(trainer)
        self.at = self.at if is_under_way else replace(self.at, step_in_epoch=0)

    def is_passed(self, trainer: L.Trainer) -> bool:
        """Whether a batch has ended since, after which there may be a checkpoint."""
        if trainer.lightning_module.automatic_optimization:
            return trainer.global_step != self.at.step
        # In manual optimisation the module alone knows when it steps, or never does: the gradients
        # that it collects are part of the checkpoint.
        return self.is_inside_step(trainer)

    def take(self, trainer: L.Trainer) -> None:
        """The batch that has just ended was the last of its step."""
        loop: Any = trainer.fit_loop.epoch_loop
        # `processed` counts a batch before the hooks that save; `completed` after them.
        steps = -(-loop.batch_progress.current.processed // trainer.accumulate_grad_batches)
        # `_batches_that_stepped` counts it after them, so the batch that has just ended is added.
        stepped = loop._batches_that_stepped + 1
        self.at = Position(
            trainer.current_epoch, steps, trainer.global_step, self.at.validated, stepped
        )
        self._taken = _batches_ended(trainer)
        self._before_validation = None
        self._batches = _batches_taken(trainer) if store_data(trainer) is None else None
        # Now, not when it is saved: a validation draws, too, and a resumed run repeats it. The copy
        # with which the next step begins (`StepStart`) is another: a loader may draw in between.
        self._random = random_state(trainer.strategy.root_device, with_others=self._others_draw)

    def is_behind_loader(self, trainer: L.Trainer) -> bool:
        """Whether a loader that has a state was read further: it cannot say where the
        boundary was.
        """
        return (
            self._batches is not None
            and self._batches != _batches_taken(trainer)
            and bool(loader_states(trainer))
        )

    def begin_validation(self, trainer: L.Trainer) -> None:
        """Keep what a validation changes: a run that ends inside of it begins it again."""
        states = {}
        for each in callbacks_of(trainer):
            if state := each.state_dict():
                states[each.state_key] = copy.deepcopy(state)
        self._before_validation = (states, _position_states(trainer))

    def is_inside_step(self, trainer: L.Trainer) -> bool:
        """Whether a batch has ended since, of a step that has not."""
        return self._taken != _batches_ended(trainer)

    def end_validation(self, trainer: L.Trainer) -> None:
        self._before_validation = None
        self.at = replace(self.at, validated=self.at.step)
        self._random = random_state(trainer.strategy.root_device)

    def save(self, checkpoint: dict[str, Any], trainer: L.Trainer) -> None:
        """Add the boundary to Lightning's own state of weights, optimizers and callbacks.

        On every rank.
        """
        module = trainer.lightning_module
        data = store_data(trainer)
        # it counts batches, of this many ranks and micro-batches; a resume may have others
        del checkpoint["loops"]
        checkpoint["position"] = asdict(self.at)
        if self._batches is not None:
            checkpoint["batches"] = asdict(self._batches)
        # With manual optimisation a checkpoint may lie between two batches of one step.
        if not module.automatic_optimization:
            weights = module.named_parameters()
            checkpoint["gradients"] = {
                name: whole(each.grad) for name, each in weights if each.grad is not None
            }
        if self._before_validation is None:
            states = _position_states(trainer)
        else:
            checkpoint["callbacks"], states = self._before_validation
        if self.at.validated == self.at.step:  # callbacks read them at the end of the epoch
            checkpoint["metrics"] = dict(trainer.callback_metrics)
        assert self._random, "taken before the first batch"
        of_rank = {
            "random": state_of_others() | self._random,
            "loaders": loader_states(trainer) if data is None else [],
        }
        # Lightning writes the dictionary of the first rank only
        checkpoint["ranks"] = of_all_ranks({**of_rank, **states})

    def load(self, checkpoint: dict[str, Any], trainer: L.Trainer) -> None:
        """Set all parts to the boundary of a checkpoint; random numbers follow just before the next
        batch.
        """
        states = checkpoint["ranks"]
        rank = trainer.global_rank
        data = store_data(trainer)
        has_same_ranks = len(states) == trainer.world_size
        self.at = Position(**checkpoint["position"])
        # Our data find any place by arithmetic, on other ranks and micro-batches, too:
        #
        #     step 3 of an epoch, 2 batches a step    →    6 batches consumed
        if data is not None:
            count = batches_of(trainer, data.feeds.train)
            epoch = self.at.epoch
            done = min(self.at.step_in_epoch * trainer.accumulate_grad_batches, count)
            loader = {"epoch": epoch, "consumed": done}
            batches = Batches(done, epoch * count + done, done >= count, [loader])
            self._batches = batches
            # A module that asks for the number of steps opens the loaders before Lightning does.
            data.load_state_dict(loader)
        # Other loaders bring a state of their own, which belongs to the rank that saved it.
        elif "batches" in checkpoint:
            loaders = states[rank].get("loaders", []) if has_same_ranks else []
            batches = Batches(**{**checkpoint["batches"], "loaders": loaders})
            self._batches = batches
        else:
            raise UserError(
                "ExactCheckpoint",
                "the checkpoint was saved with a DataModule of flatout, and this training has none",
                hint="Pass the same DataModule: trainer.fit(module, datamodule=data, ckpt_path=…).",
            )
        checkpoint["loops"] = loops_at(self.at, batches)
        for part in _parts_with_position(trainer):
            part.load_position_state(states, rank)

        def restore() -> None:
            require_fitting_states(trainer.optimizers)
            device = trainer.strategy.root_device
            if has_same_ranks:
                restore_random_state(states[rank]["random"], device)
            else:
                # no rank can continue another's numbers: new ones, the same in each such resume
                torch.manual_seed((0 if data is None else data.seed) + (self.at.step << 20) + rank)
            self._random = random_state(device)
            trainer.callback_metrics.update(checkpoint.get("metrics", {}))
            for name, weight in trainer.lightning_module.named_parameters():
                if (gradient := checkpoint.get("gradients", {}).get(name)) is not None:
                    weight.grad = share_of(gradient.to(weight.device), weight)

        # Not now: Lightning itself and the hooks at the start of training draw random numbers after
        # this.
        resume_after_batch(trainer, restore, is_validation_due=self.at.validated != self.at.step)


def _parts_with_position(trainer: L.Trainer) -> list[KeepsPosition]:
    return [
        each
        for each in (*callbacks_of(trainer), trainer.lightning_module)
        if isinstance(each, KeepsPosition)
    ]


def _position_states(trainer: L.Trainer) -> dict[str, Any]:
    return {
        name: value
        for each in _parts_with_position(trainer)
        for name, value in each.position_state().items()
    }


def store_data(trainer: L.Trainer) -> StoreData[Any, Any] | None:
    """The trainer's datamodule, where it is one of flatout, which keeps its position."""
    data = datamodule_of(trainer)
    return data if isinstance(data, StoreData) else None


def batches_of(trainer: L.Trainer, feed: Feed) -> int:
    """Batches of one rank in each epoch, before Lightning has counted them."""
    return batches_in_epoch({"limit_train_batches": trainer.limit_train_batches}, feed)


def loader_states(trainer: L.Trainer) -> list[Any]:
    return list(trainer.fit_loop.state_dict()["state_dict"].get("combined_loader", []))


def _batches_ended(trainer: L.Trainer) -> int:
    return int(cast(Any, trainer.fit_loop.epoch_loop.batch_progress.total).processed)


def _batches_taken(trainer: L.Trainer) -> Batches:
    """Where another DataModule stands, without the states of its loaders."""
    loop = trainer.fit_loop.epoch_loop
    done = loop.batch_idx + 1
    is_last = loop.batch_progress.is_last_batch or done >= trainer.num_training_batches
    return Batches(done, loop.total_batch_idx + 1, is_last)


def loops_at(position: Position, batches: Batches) -> dict[str, Any]:
    """Lightning's account of its loops at a position: from these counts it finds the hook a
    checkpoint was made in.
    """
    taken = dict.fromkeys(("ready", "started", "processed", "completed"), batches.in_epoch)
    taken_in_all = dict.fromkeys(taken, batches.in_all)
    # Inside an epoch: it has begun, and is neither processed nor completed. `current_epoch` reads
    # `processed`.
    epochs = dict.fromkeys(("ready", "started"), position.epoch + 1)
    epochs |= dict.fromkeys(("processed", "completed"), position.epoch)
    # `global_step` reads `total`. `current` matters to no one, and Lightning sets it to 0 in the
    # next epoch.
    steps = {"ready": position.step, "completed": position.step}
    zeroed = {**steps, "started": position.step}
    # After a validation the batch was counted as stepped; otherwise the resume ends this batch, and
    # counts it.
    is_validated = position.validated == position.step
    stepped = position.step if position.batches_stepped is None else position.batches_stepped

    def twice(counts: dict[str, int]) -> dict[str, dict[str, int]]:
        return {"total": dict(counts), "current": dict(counts)}

    return {
        "fit_loop": {
            # Lightning gives each loader its state when it sets the loaders up.
            "state_dict": {"combined_loader": batches.loaders},
            "epoch_progress": twice(epochs),
            "epoch_loop.state_dict": {"_batches_that_stepped": stepped - (not is_validated)},
            "epoch_loop.batch_progress": {
                "total": taken_in_all,
                "current": taken,
                "is_last_batch": batches.is_last,
            },
            # schedules have their own state; this only counts
            "epoch_loop.scheduler_progress": twice(steps),
            # A module has one of these two: the other's counts are never read.
            "epoch_loop.automatic_optimization.optim_progress": {
                "optimizer": {"step": twice(steps), "zero_grad": twice(zeroed)}
            },
            "epoch_loop.manual_optimization.optim_step_progress": twice(steps),
        }
    }
