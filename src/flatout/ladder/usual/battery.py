"""An LSTM on windows of recordings, as usually written.

A copy of the table for each column, windows copied out, a new state and a log line a batch,
transfers that wait.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.ladder.usual.program import Case, Stopwatch, UsualProgram

log = logging.getLogger("usual.battery")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatteryOptions:
    # numbers read off the device for each batch: the loss and the worst error, or the loss alone
    reads: int = 2
    transfers: str = "blocking"  # blocking, or async from pinned memory
    log_every: int = 1  # batches between two log lines, in training and in validation
    state: str = "per batch"  # per batch: allocated each time; kept: allocated once
    compiled: bool = False
    graphs: bool = False  # whether the compiled model is replayed as a CUDA graph


class UsualLSTM(nn.Module):
    """LSTM layers and a line at the last sample."""

    def __init__(
        self, inputs: int, outputs: int, sizes: Mapping[str, Any], keeps_state: bool
    ) -> None:
        super().__init__()
        self.layers = sizes["layers"]
        self.hidden = sizes["hidden"]
        self.keeps_state = keeps_state
        self.lstm = nn.LSTM(inputs, self.hidden, self.layers, batch_first=True)
        self.output = nn.Linear(self.hidden, outputs)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, windows_BLF: Tensor) -> Tensor:
        states, _ = self.lstm(windows_BLF, self.first_state(len(windows_BLF), windows_BLF.device))
        return self.output(states[:, -1])

    def first_state(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        shape = (self.layers, rows, self.hidden)
        if not self.keeps_state:
            return torch.zeros(shape).to(device), torch.zeros(shape).to(device)
        if self.state is None or self.state[0].shape[1] != rows:
            self.state = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        return self.state


class BatteryProgram(UsualProgram[BatteryOptions]):
    def __init__(self, case: Case, how: BatteryOptions) -> None:
        super().__init__(case, how)
        frame = pd.read_csv(case.rows("train"))
        names = [*case.reading["features"], *case.reading["targets"]]
        self.shift = frame[names].mean()
        self.factor = frame[names].std(ddof=0)
        inputs, targets = self.windows("train")
        pinned = how.transfers == "async" and torch.cuda.is_available()
        self.loader: Any = DataLoader(
            TensorDataset(inputs, targets), case.batch, shuffle=True, pin_memory=pinned
        )
        model = UsualLSTM(inputs.shape[2], targets.shape[1], case.model, how.state == "kept").to(
            self.device
        )
        self.model: Any = model
        if how.compiled:
            self.model = torch.compile(model, mode="reduce-overhead" if how.graphs else None)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr)

    def windows(self, split: str) -> tuple[Tensor, Tensor]:
        """`[N, L, F]` windows and `[N, K]` targets, scaled, copied out recording by recording."""
        frame = pd.read_csv(self.case.rows(split))
        reading = self.case.reading
        for name in [*reading["features"], *reading["targets"]]:
            frame = frame.copy()
            frame[name] = (frame[name] - self.shift[name]) / self.factor[name]
        inputs = []
        targets = []
        length = reading["lookback"]
        for _, part in frame.groupby("recording", sort=False):
            features = part[reading["features"]].to_numpy()
            answers = part[reading["targets"]].to_numpy()
            for end in range(length, len(part) + 1):
                inputs.append(features[end - length : end])
                targets.append(answers[end - 1])
        windows = torch.from_numpy(np.array(inputs, np.float32))
        return windows, torch.from_numpy(np.array(targets, np.float32))

    def train_epoch(self, watch: Stopwatch) -> None:
        how = self.how
        total = 0.0
        worst = 0.0
        self.model.train()
        for number, batch in enumerate(watch.batches(self.loader), 1):
            inputs, targets = (
                part.to(self.device, non_blocking=how.transfers == "async") for part in batch
            )
            answers = self.model(inputs)
            loss = nn.functional.mse_loss(answers, targets)
            loss.backward()
            self.update(self.model)
            total += loss.item()
            if how.reads == 2:
                worst = max(worst, (answers - targets).abs().max().item())
            if number % how.log_every == 0:
                log.info(
                    "batch %d of %d: loss %.5f, worst %.5f",
                    number,
                    len(self.loader),
                    total / number,
                    worst,
                )
            samples = inputs.shape[0] * inputs.shape[1]
            watch.step(len(inputs), samples, samples)

    @torch.no_grad()
    def test(self) -> dict[str, float]:
        """Share of the variance of the targets that is explained."""
        self.model.eval()
        inputs, targets = self.windows("test")
        parts = [self.model(part.to(self.device)).cpu() for part in inputs.split(512)]
        squared_errors = (torch.cat(parts) - targets) ** 2
        squared_distances = (targets - targets.mean(0)) ** 2
        unexplained = squared_errors.sum(0) / squared_distances.sum(0)
        return {"r2": float((1 - unexplained).mean())}


# The ladder finds both under these names in each usual program.
OPTIONS = BatteryOptions
PROGRAM = BatteryProgram
