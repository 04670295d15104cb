"""Curves of throughput: rows and tokens per second, padding, and model FLOPs utilisation (MFU).

Rows of a `FlatBatch` are its real rows, times the number of ranks. Rows of any other batch are the
length of its first tensor; its tokens are unknown, so there are no curves of tokens. MFU needs a
model with a method `training_flops(lengths)` and a device whose peak is known or given. A batch
costs four additions on the host. `FetchTimes` times how long a loader takes for a batch, without
Lightning's work between two batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor

from flatout.callbacks.clock import FIRST_STEPS
from flatout.callbacks.curve_source import CurveSource
from flatout.callbacks.running_sums import RunningSums, Sums
from flatout.data.batches.batch_rows import rows_of
from flatout.data.batches.flat_batch import FlatBatch
from flatout.engine.lightning_internals import set_fetch_hooks
from flatout.engine.peaks import Peak, known_peak, measured_peak
from flatout.models.contract import contract


@dataclass(slots=True)
class Volume(Sums):
    """Amounts of training, over all ranks."""

    steps: int = 0  # batches after which an optimizer stepped; two optimizers count once
    rows: int = 0
    tokens: int = 0
    computed: int = 0  # tokens with their padding
    flops: float = 0.0
    seconds: float = 0.0  # of training without validations

    def values(self) -> dict[str, float]:
        """Rates, under their curve names."""
        seconds = max(self.seconds, 1e-9)
        values = {"speed/rows_per_s": self.rows / seconds}
        if self.computed:
            values["speed/tokens_per_s"] = self.tokens / seconds
            values["speed/padding_share"] = 1 - self.tokens / self.computed
        return values


class Throughput(CurveSource):
    """Logs rows and tokens per second, the share of padding, and MFU."""

    def __init__(self, every_n_steps: int = 50, *, peak: Peak | None = None) -> None:
        """`peak`: of one device; None: looked up for known GPUs."""
        super().__init__(every_n_steps)
        self.peak = peak
        self.volume = RunningSums(Volume)
        self._world = 1
        self._lengths: list[Tensor] = []
        self._since = time.perf_counter()

    def mfu(self, volume: Volume) -> float | None:
        """FLOPs of the real tokens per second, over the peak of all devices; None if unknown."""
        if self.peak is None or not volume.flops or not volume.seconds:
            return None
        return volume.flops / volume.seconds / (self.peak.tflops * 1e12 * self._world)

    def measure_missing_peak(self, device: torch.device, precision: str) -> None:
        """Time what a device can do that no table has, where MFU needs it; after training."""
        if self.peak is None and self.volume.total.flops:
            self.peak = measured_peak(device, precision)

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._world = trainer.world_size
        self._count_flops = contract(getattr(pl_module, "model", pl_module)).training_flops
        self._count_computed = contract(pl_module).computed_tokens
        if self.peak is None:
            self.peak = known_peak(trainer.strategy.root_device, str(trainer.precision))
        self._since = time.perf_counter()

    def count(self, batch: object) -> None:
        now = self.volume.now
        world = self._world
        now.batches += 1
        if not isinstance(batch, FlatBatch):
            now.rows += world * rows_of(batch)
            return
        # Each rank counts its own batches, times the number of ranks. The plan balances rows and
        # tokens over ranks.
        now.rows += world * batch.num_real
        now.tokens += world * batch.num_tokens
        now.computed += world * self._count_computed(batch)
        self._lengths.append(batch.lengths[: batch.num_real])

    def count_stretch(self, batches: Sequence[object]) -> None:
        now = self.volume.now
        world = self._world
        now.batches += len(batches)
        now.steps += len(batches)
        # Stretches have flat batches only.
        flat = cast("Sequence[FlatBatch]", batches)
        now.rows += world * sum([batch.num_real for batch in flat])
        now.tokens += world * sum([batch.num_tokens for batch in flat])
        now.computed += world * sum(map(self._count_computed, flat))
        self._lengths += [batch.lengths[: batch.num_real] for batch in flat]

    def end_step(self, step: int) -> None:
        self.volume.now.steps += 1
        if step == FIRST_STEPS:
            self._close()
            self.volume.mark_first()

    def leave_out(self, seconds: float, *, is_validation: bool = False) -> None:
        self._since += seconds

    def settle(self) -> None:
        self._close()
        self.volume.flush()

    def take(self, trainer: L.Trainer) -> dict[str, float]:
        self._close()
        now = self.volume.flush()
        share = self.mfu(now)
        return now.values() | ({} if share is None else {"speed/mfu": share})

    def state_dict(self) -> dict[str, Any]:
        self._close()
        return self.volume.state_dict() | self.distance()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.volume.load_state_dict(state_dict)
        self.restore_distance(state_dict)

    def _close(self) -> None:
        """Add seconds and FLOPs since the last call.

        All FLOPs since then count with the layers that are trained now.
        """
        now = self.volume.now
        before = self._since
        self._since = time.perf_counter()
        now.seconds += self._since - before
        if self._lengths:
            now.flops += self._world * float(
                self._count_flops(torch.cat(self._lengths).numpy()) or 0.0
            )
            self._lengths = []


class FetchTimes(L.Callback):
    """Times each fetch of a training batch from the loader.

    The first fetch of an epoch counts from the start of the epoch: starting workers is part of it.
    """

    def __init__(self) -> None:
        self._fetched = 0
        self._seconds = 0.0
        self._asked = 0.0
        self._is_starting = False
        self.loader: Any = None  # the training's; a Trainer forgets it when it evaluates

    @property
    def ms(self) -> float | None:
        """Mean milliseconds of a fetch, without the first few; None if there were no others."""
        count = self._fetched - FIRST_STEPS
        return 1000 * self._seconds / count if count > 0 else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        set_fetch_hooks(trainer, self._ask, self._receive)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._asked = time.perf_counter()
        self._is_starting = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.loader = trainer.train_dataloader
        set_fetch_hooks(trainer, None, None)

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        set_fetch_hooks(trainer, None, None)

    def _ask(self) -> None:
        if not self._is_starting:
            self._asked = time.perf_counter()
        self._is_starting = False

    def _receive(self) -> None:
        self._fetched += 1
        if self._fetched > FIRST_STEPS:
            self._seconds += time.perf_counter() - self._asked
