"""Memory that does not suffice, planted: a batch of too many rows fails, in the forward pass or
later.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import lightning as L
import torch

from flatout.tasks.task import Task

WORDS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of"
    " which 1.2 GiB is free."
)


class Scarce(L.Callback):
    """Lets batches of more than `rows` rows fail in some optimizer steps, on one rank or on all.

    `where`: in the `forward` pass, as the `backward` pass begins, or when it reaches the weight of
    that name. `is_last`: only the last batch of a step, with which ranks exchange gradients.
    """

    def __init__(
        self,
        rows: int,
        steps: Collection[int] = range(10**6),
        where: str = "forward",
        rank: int | None = None,
        is_last: bool = False,
    ) -> None:
        self.rows = rows
        self.steps = frozenset(steps)
        self.where = where
        self.rank = rank
        self.is_last = is_last
        self.fired: list[int] = []
        """The steps, counted from 0, in which it failed."""
        self._is_too_large = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        self.plant(pl_module)

    def plant(self, task: Task) -> None:
        """Without a trainer's help."""
        if self.rank is not None and int(os.environ.get("RANK", "0")) != self.rank:
            return
        self.task = task
        task.model.register_forward_pre_hook(self._look)
        if self.where == "forward":
            task.model.register_forward_hook(lambda *_: self._fail())
        elif self.where == "backward":
            task.model.register_forward_hook(self._watch)
        else:
            task.get_parameter(self.where).register_hook(lambda gradient: self._fail())

    def _look(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        is_wanted = inputs[0].ends_step or not self.is_last
        is_wanted = is_wanted and module.training and self.task.trainer.global_step in self.steps
        self._is_too_large = is_wanted and inputs[0].num_rows > self.rows

    def _watch(
        self, module: torch.nn.Module, inputs: tuple[object, ...], outputs: torch.Tensor
    ) -> None:
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: self._fail())

    def _fail(self) -> None:
        if self._is_too_large:
            self.fired.append(self.task.trainer.global_step)
            raise torch.OutOfMemoryError(WORDS)
