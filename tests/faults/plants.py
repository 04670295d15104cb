"""Callbacks that do harm at a chosen place: a signal, an exception, an answer that is no number."""

from __future__ import annotations

import itertools
import os
import signal
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch

from flatout.checkpoints import folder

PLACES = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
)
"""Hooks in which a callback can do something."""
STEPS = "steps.txt"
"""Tells in the run's folder how many steps were done when the harm was done."""


class _Once(L.Callback, ABC):
    """Does something the first time that a hook comes in which so many steps are done,
    on one rank.
    """

    def __init__(self, place: str, step: int, rank: int = 0) -> None:
        assert place in PLACES
        self.place = place
        self.step = step
        self.rank = rank
        self.is_done = False

    def come(self, place: str, trainer: L.Trainer) -> None:
        if place != self.place or trainer.global_rank != self.rank:
            return
        if not self.is_done and trainer.state.fn == "fit" and trainer.global_step >= self.step:
            self.is_done = True
            Path(trainer.default_root_dir, STEPS).write_text(
                f"{trainer.global_step}", encoding="utf-8"
            )
            self.harm()

    @abstractmethod
    def harm(self) -> None:
        """What is done."""


def _hook(place: str) -> Any:
    return lambda self, trainer, *_: self.come(place, trainer)


for _place in PLACES:
    setattr(_Once, _place, _hook(_place))


class SignalAt(_Once):
    """Sends this process a signal."""

    def __init__(self, place: str, step: int, number: int, rank: int = 0) -> None:
        super().__init__(place, step, rank)
        self.number = number

    def harm(self) -> None:
        os.kill(os.getpid(), self.number)


class KillAt(SignalAt):
    """Ends this process as if the power had failed."""

    def __init__(self, place: str, step: int, rank: int = 0) -> None:
        super().__init__(place, step, signal.SIGKILL, rank)


class KillInSave(L.Callback):
    """Ends this process when half of a checkpoint's manifest is written, in the save of that
    number.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_start(self, *_: Any) -> None:
        write = folder.write_synced
        saves = itertools.count(1)

        def write_half(path: Path, data: bytes) -> None:
            if next(saves) == self.number:
                path.write_bytes(data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            write(path, data)

        mock.patch.object(folder, "write_synced", write_half).start()


class Planted(Exception):
    """An exception of somebody's callback."""


class RaiseAt(_Once):
    """Raises."""

    def harm(self) -> None:
        raise Planted


class NotANumberAt(L.Callback):
    """Spoils the model's outputs in training, in the optimizer step of that number,
    counted from 0.
    """

    def __init__(self, step: int, value: float, rank: int | None = None) -> None:
        self.step = step
        self.value = value
        self.rank = rank

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        model: Any = pl_module.model
        is_meant = self.rank is None or trainer.global_rank == self.rank

        def spoil(
            module: torch.nn.Module, inputs: tuple[object, ...], outputs: torch.Tensor
        ) -> Any:
            if is_meant and module.training and trainer.global_step == self.step:
                return outputs * self.value
            return outputs

        model.register_forward_hook(spoil)


class DrawsNumbers(L.Callback):
    """Uses Python's and numpy's random numbers in training, as a callback may, and remembers their
    sum.
    """

    def __init__(self) -> None:
        self.sum = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        import random

        import numpy as np

        self.sum += (
            random.random()
            + float(np.random.rand())
            + random.gauss(0, 1)
            + float(np.random.randn())
        )

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sum = state_dict["sum"]
