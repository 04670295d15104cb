"""The usual way with recordings: windows copied into memory, a Dataset, a DataLoader, and a loop
that reads the loss.

`UsualLoop` makes a window a row of a Dataset, allocates the hidden state in each batch, reads two
numbers and writes a log line a batch. `TunedLoop` has its windows as tensors, takes batches by
index, reads one number a batch and writes no line. In both, columns are added and windows copied
out beforehand: no epoch counts that. `GraphedLoop` is the tuned one with its step in a CUDA graph.
"""

from __future__ import annotations

import io
import logging
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flatout.engine.captures import Capture, Replayable
from flatout.ladder.usual.battery import UsualLSTM

CLIP = 0.5


def copy_windows(values: NDArray[np.float32], lookback: int, inputs: int) -> tuple[Tensor, Tensor]:
    """`[N, L, F]` windows and `[N, 1]` targets, copied out."""
    windows = np.lib.stride_tricks.sliding_window_view(values, lookback, axis=0)
    inputs_NLF = np.ascontiguousarray(windows[:, :inputs].transpose(0, 2, 1))
    return torch.from_numpy(inputs_NLF), torch.from_numpy(
        np.ascontiguousarray(values[lookback - 1 :, inputs:])
    )


class _Windows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.inputs[number], self.targets[number]


class UsualLoop:
    """An epoch as it is usually written."""

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        hidden: int,
        batch: int,
        lr: float = 1e-3,
        device: str = "cpu",
    ) -> None:
        self.device = device
        self.model = UsualLSTM(
            inputs.shape[2], 1, {"hidden": hidden, "layers": 1}, keeps_state=False
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.loader = DataLoader(_Windows(inputs, targets), batch_size=batch, shuffle=True)
        self.log = logging.getLogger("usual")
        self.log.handlers = [logging.StreamHandler(io.StringIO())]
        self.log.propagate = False
        self.log.setLevel(logging.INFO)

    def epoch(self) -> float:
        """Seconds."""
        started = time.perf_counter()
        total = 0.0
        worst = 0.0
        for number, batch in enumerate(self.loader):
            inputs, targets = (part.to(self.device) for part in batch)
            self.optimizer.zero_grad()
            answers = self.model(inputs)
            loss = nn.functional.mse_loss(answers, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            total += loss.item()
            worst = max(worst, (answers - targets).abs().max().item())
            self.log.info(
                "batch %d of %d: loss %.5f, worst %.5f", number, len(self.loader), total, worst
            )
        return time.perf_counter() - started


class TunedLoop:
    """An epoch without what is easily left out."""

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        hidden: int,
        batch: int,
        lr: float = 1e-3,
        device: str = "cpu",
    ) -> None:
        self.inputs = inputs.to(device)
        self.targets = targets.to(device)
        self.batch = batch
        self.model = UsualLSTM(
            inputs.shape[2], 1, {"hidden": hidden, "layers": 1}, keeps_state=False
        ).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def passes(self) -> float:
        """Seconds of the LSTM's own forward and backward passes in an epoch: no loop can be faster
        with this LSTM.
        """
        started = time.perf_counter()
        lstm = self.model.lstm
        for windows_BLF in self.inputs.split(self.batch):
            zeros = windows_BLF.new_zeros(1, len(windows_BLF), self.model.hidden)
            states_BLH, _ = lstm(windows_BLF, (zeros, zeros))
            states_BLH[:, -1].sum().backward()
        self.optimizer.zero_grad()
        return time.perf_counter() - started

    def epoch(self) -> float:
        """Seconds."""
        started = time.perf_counter()
        total = 0.0
        order = torch.randperm(len(self.inputs), device=self.inputs.device)
        for chosen in order.split(self.batch):
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(self.inputs[chosen]), self.targets[chosen])
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            total += loss.item()
        return time.perf_counter() - started


class GraphedLoop(TunedLoop):
    """A tuned loop whose whole step is captured: the fastest that is written by hand."""

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        hidden: int,
        batch: int,
        capture: Capture,
        device: str = "cpu",
    ) -> None:
        super().__init__(inputs, targets, hidden, batch, device=device)
        is_cpu = device == "cpu"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, fused=True, capturable=not is_cpu
        )
        self.batch_inputs = self.inputs[:batch].clone()
        self.batch_targets = self.targets[:batch].clone()
        self.total = torch.zeros((), device=self.inputs.device)
        self._capture = capture
        self._step: Replayable | None = None

    def epoch(self) -> float:
        """Seconds; the step is captured before the first epoch."""
        if self._step is None:
            for _ in range(3):  # libraries choose kernels, and the optimizer makes its state
                self.take_step()
            self.optimizer.zero_grad()
            self._step = self._capture.capture(self.take_step)
        started = time.perf_counter()
        self.total.zero_()
        order = torch.randperm(len(self.inputs), device=self.inputs.device)
        # The last rows make no whole batch: a graph has one shape.
        for chosen in order[: len(order) // self.batch * self.batch].split(self.batch):
            torch.index_select(self.inputs, 0, chosen, out=self.batch_inputs)
            torch.index_select(self.targets, 0, chosen, out=self.batch_targets)
            self._step.replay()
        self.total.item()
        return time.perf_counter() - started

    def take_step(self) -> None:
        """A step on the rows in its buffers."""
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.batch_inputs), self.batch_targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, foreach=True)
        self.optimizer.step()
        self.total += loss.detach()
