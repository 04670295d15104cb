"""Loaders of windows against those that they take the place of: windows a second, memory, and a
model's epoch.

Sides take turns in one process for speed; each has a process of its own for memory. What a library
does when it is built is in no figure of speed; notes say how long it took.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.claim import (
    Claim,
    Options,
    at_least,
    in_turn,
    measured_apart,
    not_here,
    peak_memory_gb,
    quiet,
)
from benchmarks.usual_loaders import (
    BATCH,
    HORIZON,
    LOOKBACK,
    NEEDS,
    OURS,
    THEIRS,
    forecasting_set,
    is_installed,
    make_table,
)


def claims(options: Options) -> Iterator[Claim]:
    """For each kind of loader: windows a second, memory, an epoch."""
    warnings.filterwarnings("ignore")
    for name in ("darts", "lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = options.choose(1_000_000, 200_000, 2_000)
    table = make_table(rows, options.choose(1000, 1000, 200))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for side in NEEDS:
        if not is_installed(side):
            yield not_here(f"windows a second, against {side}", f"{side} is not installed")
            continue
        yield speed(side, table, options)
        yield memory(side, len(table), options)
        yield training(side, table, options)
    torch.set_num_threads(threads)


def _windows_per_s(batches: Iterator[Any], count: int) -> Callable[[], float]:
    """Of the next `count` batches of an epoch that has begun."""

    def measure() -> float:
        started = time.perf_counter()
        taken = sum(1 for _ in itertools.islice(batches, count))
        return taken * BATCH / (time.perf_counter() - started)

    return measure


def speed(side: str, table: pd.DataFrame, options: Options) -> Claim:
    """Batches of the same table, one after the other."""
    started = time.perf_counter()
    theirs = itertools.chain.from_iterable(itertools.repeat(THEIRS[side](table)))
    next(theirs)
    middle = time.perf_counter()
    ours = itertools.chain.from_iterable(itertools.repeat(OURS[side](table)))
    next(ours)
    built = (
        f"built, with the first batch, in {time.perf_counter() - middle:.1f} s, theirs in"
        f" {middle - started:.1f} s"
    )
    few, many = options.choose(60, 20, 2), options.choose(1500, 300, 4)
    fast, slow = in_turn([_windows_per_s(ours, many), _windows_per_s(theirs, few)], options.rounds)
    note = (
        f"{len(table):,} rows, lookback {LOOKBACK}, horizon {HORIZON}, batch {BATCH}, in this"
        f" process; {built}"
    )
    return at_least(f"windows a second, against {side}", fast, slow, "windows/s", 20.0, note)


def memory(side: str, rows: int, options: Options) -> Claim:
    """What a process needs for the loader, above the table and the libraries."""
    each = options.choose(1000, 1000, 200)
    found = {
        whose: measured_apart(
            "benchmarks.loaders:hold", {"side": side, "whose": whose, "rows": rows, "each": each}
        )
        for whose in ("ours", "theirs")
    }
    held, theirs_held = (found[whose]["held"] for whose in ("ours", "theirs"))
    note = (
        f"peak above the table, built and read; held afterwards {held:.0f} MB, theirs"
        f" {theirs_held:.0f} MB"
    )
    least, most = found["ours"]["peak"], found["theirs"]["peak"]
    return Claim(
        f"memory of a loader, against {side}",
        least,
        most,
        "MB",
        most / least,
        "≥ 20× less",
        most / least >= 20,
        note,
    )


def hold() -> None:
    """The child's side of `memory`: settings on standard input, figures on the last line of
    standard output.
    """
    settings = json.loads(sys.stdin.read())
    warnings.filterwarnings("ignore")
    side = {"ours": OURS, "theirs": THEIRS}[settings["whose"]][settings["side"]]
    for _ in itertools.islice(side(make_table(400, 200)), 2):
        pass  # what is imported and compiled is there before
    table = make_table(settings["rows"], settings["each"])
    process = psutil.Process()
    if (peaks := Path("/proc/self/clear_refs")).exists():
        peaks.write_text("5", encoding="ascii")  # the peak counts from here
    before = process.memory_info().rss / 1e6
    loader = side(table)
    for _ in itertools.islice(loader, 50):
        pass
    held, peak = process.memory_info().rss / 1e6 - before, peak_memory_gb() * 1000 - before
    print(json.dumps({"held": max(held, 0.1), "peak": max(peak, 0.1)}))


class Forecaster(L.LightningModule):
    """A plain LSTM on the three columns."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 16, batch_first=True)
        self.head = nn.Linear(16, HORIZON)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.lstm(x)[0][:, -1]), y[..., 0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


_OFF = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Seconds:
    """From the second batch on; with the callbacks of whichever package of Lightning a library
    uses.
    """

    started = 0.0
    ended = 0.0

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ended = time.perf_counter()
        self.started = self.ended if batch_idx == 0 else self.started


def train_rows(loader: DataLoader[Any], table: pd.DataFrame, batches: int) -> float:
    return _fit(Forecaster(), loader, batches)


def train_forecasting(loader: DataLoader[Any], table: pd.DataFrame, batches: int) -> float:
    from pytorch_forecasting import TemporalFusionTransformer

    about = forecasting_set(table.head(2000))
    module = TemporalFusionTransformer.from_dataset(
        about, hidden_size=8, hidden_continuous_size=4, log_interval=-1
    )
    return _fit(module, loader, batches)


def train_darts(loader: DataLoader[Any], table: pd.DataFrame, batches: int) -> float:
    import pytorch_lightning
    from darts.models import TiDEModel

    clock: Any = type("Clock", (Seconds, pytorch_lightning.Callback), {})()
    settings = {"limit_train_batches": batches, "accelerator": "cpu", "callbacks": [clock], **_OFF}
    sizes = {"hidden_size": 16, "decoder_output_dim": 4, "temporal_decoder_hidden": 8}
    model = TiDEModel(
        LOOKBACK, HORIZON, batch_size=BATCH, n_epochs=1, pl_trainer_kwargs=settings, **sizes
    )
    how = {
        "collate_fn": loader.collate_fn,
        "sampler": loader.sampler,
        "shuffle": False,
        "pin_memory": False,
    }
    with quiet():
        model.fit_from_dataset(loader.dataset, dataloader_kwargs=how)
    return (batches - 1) * BATCH / (clock.ended - clock.started)


class Clock(Seconds, L.Callback):
    """In a Trainer of lightning."""


def _fit(module: L.LightningModule, loader: DataLoader[Any], batches: int) -> float:
    clock = Clock()
    with quiet():
        settings: dict[str, Any] = {
            "max_epochs": 1,
            "limit_train_batches": batches,
            "accelerator": "cpu",
            **_OFF,
        }
        L.Trainer(callbacks=[clock], **settings).fit(module, train_dataloaders=loader)
    return (batches - 1) * BATCH / (clock.ended - clock.started)


TRAIN = {
    "a Dataset of rows": (train_rows, "an LSTM, 16 wide"),
    "pytorch-forecasting": (train_forecasting, "its TemporalFusionTransformer, 8 wide"),
    "darts": (train_darts, "its TiDEModel, 16 wide, in fit_from_dataset"),
}


def training(side: str, table: pd.DataFrame, options: Options) -> Claim:
    """The same small model from the same table, part of an epoch, on one thread."""
    train, what = TRAIN[side]
    theirs = THEIRS[side](table)
    ours = OURS[side](table)
    batches = options.choose(150, 40, 3)
    sides = [lambda: train(ours, table, batches), lambda: train(theirs, table, batches)]
    fast, slow = in_turn(sides, options.choose_rounds(3, 3, 1))
    return at_least(
        f"training, against {side}",
        fast,
        slow,
        "windows/s",
        1.0,
        f"{what}; {batches} batches, one thread",
    )
