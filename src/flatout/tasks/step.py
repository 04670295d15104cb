"""The training step every task shares: backward, clip, learning rate, optimizer, and not one wait for the device.

Optimisation is manual because it is cheaper (Lightning's automatic way costs twice as much a step) and because the
loss is already divided by the rows of the whole optimizer step, over all ranks and micro-batches: the gradients of
micro-batches simply add up to those of the full batch. Losses stay on the device until `take_losses` brings a run of
them over in one transfer.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from flatout.data.batch import FlatBatch
from flatout.optim import OptimConfig, clip_gradients

PHASES = ("forward", "backward", "optimizer")


class StepTask(L.LightningModule):
    """A model, a loss and an optimizer; subclasses say what the loss and the metrics are."""

    def __init__(self, model: nn.Module, optim: OptimConfig, *, total_steps: int, clip: float = 0.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.optim, self.total_steps, self.clip = optim, total_steps, clip
        self.phase_s = dict.fromkeys(PHASES, 0.0)
        """Host seconds in each phase: true on CPU, the time to enqueue the work elsewhere."""
        self._losses: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._trained: list[nn.Parameter] = []
        self._window_loss: Tensor | None = None
        self._is_plain = False
        self._stepper: list[LightningOptimizer] = []  # in a list, so that it is no submodule and no state

    @abstractmethod
    def loss(self, outputs: Tensor, batch: FlatBatch) -> Tensor:
        """Sum of the losses of the real rows, divided by `batch.step_rows`."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets this name before and after each of five hooks a step, and Module.__setattr__ searches
        # parameters, buffers and submodules each time: 35 µs a step on a fast core.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A fused step cannot be un-scaled and clipped, which fp16 needs.
        return self.optim.build(self.model, fused=self.trainer.precision != "16-mixed")

    def on_fit_start(self) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        self._stepper[:] = [optimizer]
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._is_plain = isinstance(self.trainer.strategy, SingleDeviceStrategy) and self._scaler() is None

    def transfer_batch_to_device(self, batch: FlatBatch, device: torch.device, dataloader_idx: int) -> FlatBatch:
        """Feeds place their batches; one made by hand is moved."""
        return batch if batch.tokens.device == device else batch.to(device)

    def training_step(self, batch: FlatBatch, batch_idx: int) -> None:
        started = time.perf_counter()
        loss = self.loss(self.model(batch), batch)
        forwarded = time.perf_counter()
        self._backward(loss, batch.ends_step)
        backwarded = time.perf_counter()
        detached = loss.detach()
        self._window_loss = detached if self._window_loss is None else self._window_loss + detached
        if batch.ends_step:
            self._losses.append(self._window_loss)
            self._window_loss = None
            self._step()
        phase_s = self.phase_s
        phase_s["forward"] += forwarded - started
        phase_s["backward"] += backwarded - forwarded
        phase_s["optimizer"] += time.perf_counter() - backwarded

    def take_losses(self) -> tuple[list[float], list[float]]:
        """Losses and gradient lengths of the steps since the last call. The one place that waits for the device."""
        if not self._losses:
            return [], []
        both = torch.stack([*self._losses, *self._norms]).tolist()
        count = len(self._losses)
        self._losses, self._norms = [], []
        return both[:count], both[count:]

    def _backward(self, loss: Tensor, ends_step: bool) -> None:
        if self._is_plain:
            loss.backward()
            return
        # Ranks average their gradients, but each loss is already a share of the whole step's.
        loss = loss * self.trainer.world_size
        with nullcontext() if ends_step else _gradients_kept_apart(self.trainer):
            self.manual_backward(loss)

    def _step(self) -> None:
        stepper = self._stepper[0]
        optimizer = stepper.optimizer
        lr = self.optim.lr_at(self.trainer.global_step, self.total_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if self.clip:
            if (scaler := self._scaler()) is not None:
                scaler.unscale_(optimizer)
            self._norms.append(clip_gradients(self._trained, self.clip))
        stepper.step()
        optimizer.zero_grad()

    def _scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)


def _gradients_kept_apart(trainer: L.Trainer) -> Any:
    """Within an accumulation window ranks need not exchange gradients."""
    blocked = getattr(trainer.strategy, "block_backward_sync", None)
    return blocked() if blocked else nullcontext()
