"""Recordings: epochs against the usual loop and a tuned one, memory of windows, framework cost,
errors on real data.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from benchmarks.claim import (
    Claim,
    Options,
    at_least,
    at_most,
    bounded,
    in_turn,
    measured_apart,
    peak_memory_gb,
    quiet,
)
from benchmarks.usual_sequences import CLIP, TunedLoop, UsualLoop, copy_windows
from flatout.callbacks.run_curves import RunCurves
from flatout.checkpoints.settings import CheckpointConfig
from flatout.config import MonitorConfig
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.samples.cells import CellsConfig
from flatout.data.sequences.data import SequenceData
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.distributed.limits import keep_freed_memory
from flatout.engine.fast_loop import FastLoop
from flatout.engine.optimizer import OptimConfig
from flatout.models.rnn import RNNConfig
from flatout.models.window_mlp import WindowMLPConfig
from flatout.run.closing import Result
from flatout.run.launch import fit
from flatout.tasks.sequences import SequenceRegressionConfig, SequenceRegressor

HIDDEN = 32
BATCH = 32
LOOKBACK = 30
_FEATURES = ["voltage", "current", "temperature"]


def claims(options: Options) -> Iterator[Claim]:
    """Speed, memory, framework cost, then errors."""
    keep_freed_memory()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        yield from epochs(Path(folder), options)
        yield from framework(Path(folder), options)
        yield from memory(Path(folder), options)
        torch.set_num_threads(threads)
        yield from cells(Path(folder), options)
        if options.data is None:
            print("    errors on published recordings need --data FOLDER")
            return
        yield from nasa_battery(options.data / "nasa_battery", Path(folder), options)
        yield from etth1(options.data / "etth1" / "ETTh1.csv", Path(folder), options)


class Clock(L.Callback):
    """When the last epoch began and ended."""

    started = 0.0
    ended = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ended = time.perf_counter()


class Silent:
    """A log that prints nothing."""

    def say(self, text: str) -> None:
        return

    def decision(self, name: str, value: object, why: str, evidence: str) -> None:
        return


def _trainer(folder: Path, clock: L.Callback, **settings: Any) -> L.Trainer:
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    defaults: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "limit_val_batches": 0}
    callbacks = [clock, FastLoop(), RunCurves([])]
    defaults |= {"gradient_clip_val": CLIP, "callbacks": callbacks}
    return L.Trainer(**{**defaults, **off, "default_root_dir": str(folder), **settings})


def epochs(folder: Path, options: Options) -> Iterator[Claim]:
    """Windows of one long recording through the same LSTM at the same batch, on one thread.

    Ours is the second epoch of a fit. Before it, as before theirs, windows, network and optimizer
    state are there. Their windows are copied out and their columns added beforehand, which no
    figure here counts.
    """
    samples = options.choose(20_000, 6_000, 400)
    random = np.random.default_rng(0)
    values = random.standard_normal((samples, 4)).cumsum(0)
    table = pa.table({name: values[:, number] for number, name in enumerate(["a", "b", "c", "y"])})
    cut = {
        "split_by": "time",
        "split_at": [int(samples * 0.98), samples],
        "batch_size": BATCH,
        "lookback": LOOKBACK,
    }
    config = {"features": ["a", "b", "c"], "target": "y", "cache": str(folder / "epochs"), **cut}
    data = SequenceData(source=table, log=Silent(), **config)
    data.setup()
    scaled = np.asarray(data.info.rows_of("train").values[: int(samples * 0.98)])
    inputs, targets = copy_windows(scaled, LOOKBACK, 3)
    usual = UsualLoop(inputs, targets, HIDDEN, BATCH)
    tuned = TunedLoop(inputs, targets, HIDDEN, BATCH)

    def ours() -> float:
        clock = Clock()
        own = SequenceData(source=table, log=Silent(), **config)
        task = SequenceRegressor(
            RNNConfig(hidden=HIDDEN),
            SequenceRegressionConfig(baselines=False),
            OptimConfig(lr=1e-3),
        )
        with quiet():
            _trainer(folder, clock, max_epochs=2).fit(task, datamodule=own)
        return clock.ended - clock.started

    fast, slow, less_slow, least = in_turn(
        [ours, usual.epoch, tuned.epoch, tuned.passes], options.rounds
    )
    count = len(inputs)
    shown = (
        f"{count:,} windows of {LOOKBACK}, batch {BATCH}, hidden {HIDDEN}, one thread, a second"
        " epoch"
    )
    for name, theirs, goal in (("the usual", slow, 3.0), ("a tuned", less_slow, 1.3)):
        note = (
            f"{shown}; its LSTM's own passes are {least / theirs:.0%} of it, so at most"
            f" {theirs / least:.2f}×"
        )
        yield at_least(
            f"training epoch against {name} loop",
            count / fast,
            count / theirs,
            "windows/s",
            goal,
            note,
        )
    yield from each_step(data, table, config, folder, count / slow, options)


def each_step(
    data: SequenceData,
    table: pa.Table,
    config: dict[str, Any],
    folder: Path,
    usual: float,
    options: Options,
) -> Iterator[Claim]:
    """The same samples in chunks that carry their state: each sample goes through the
    network once.
    """
    chunked = {**config, "lookback": None, "chunk": 100, "batch_size": 8}
    cells = {name: np.asarray(table[name])[: len(table) // 8 * 8] for name in table.column_names}
    cells["part"] = np.repeat(np.arange(8), len(table) // 8)
    source = pa.table(cells)
    chunked = {**chunked, "group": ["part"], "split_by": "auto", "split_at": None}

    def ours() -> float:
        clock = Clock()
        own = SequenceData(source=source, log=Silent(), **chunked)
        task = SequenceRegressor(
            RNNConfig(hidden=HIDDEN),
            SequenceRegressionConfig(baselines=False),
            OptimConfig(lr=1e-3),
        )
        with quiet():
            _trainer(folder, clock, max_epochs=2).fit(task, datamodule=own)
        samples = own.info.facts["splits"]["train"]["samples"]
        return samples / (clock.ended - clock.started)

    (found,) = in_turn([ours], options.rounds)
    note = (
        "chunks of 100 samples with a carried state against windows of the usual loop; answers a"
        " second"
    )
    yield at_least("answers trained, in chunks", found, usual, "answers/s", 3.0, note)


class TinyNetwork(nn.Module):
    """So small that a step is nothing but the framework around it."""

    layout = "flat"

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(3, 1)

    def forward(self, batch: FlatBatch) -> Tensor:
        return self.output(batch.tokens[batch.offsets[1:] - 1, :3])


class PlainTask(L.LightningModule):
    """The same network, loss and optimizer with one `self.log` a step."""

    def __init__(self, task: SequenceRegressor) -> None:
        super().__init__()
        self.task = task
        self.model = task.model

    def training_step(self, batch: FlatBatch, number: int) -> Tensor:
        loss = self.task.loss(self.model(batch), batch)
        self.log("train/loss", loss, batch_size=batch.num_rows)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.task.optim.build(self.model)


def framework(folder: Path, options: Options) -> Iterator[Claim]:
    """Microseconds a step above a bare loop, against plain Lightning."""
    config: dict[str, Any] = {
        "sample": CellsConfig(cells=options.choose(8, 4, 1), cycles=3),
        "lookback": 4,
    }
    data = SequenceData(batch_size=8, cache=str(folder / "tiny"), log=Silent(), **config)
    data.setup()
    feed = data.train_dataloader()

    def task() -> SequenceRegressor:
        made = SequenceRegressor(
            TinyNetwork(), SequenceRegressionConfig(baselines=False), total_steps=len(feed)
        )
        made.take_info(data.info)
        return made

    def bare() -> float:
        own = task()
        optimizer = own.optim.build(own.model)
        feed.set_epoch(feed.epoch + 1)
        started = time.perf_counter()
        for batch in feed:
            own.loss(own.model(batch), batch).backward()
            nn.utils.clip_grad_norm_(own.model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        return 1e6 * (time.perf_counter() - started) / len(feed)

    def lightning(module: L.LightningModule, **settings: Any) -> float:
        clock = Clock()
        feed.set_epoch(feed.epoch + 1)
        callbacks = {"callbacks": [clock], "profiler": None} if settings else {}
        with quiet():
            _trainer(folder, clock, **callbacks).fit(module, train_dataloaders=feed)
        return 1e6 * (clock.ended - clock.started) / len(feed)

    sides = [bare, lambda: lightning(task()), lambda: lightning(PlainTask(task()), plain=True)]
    least, ours, plain = in_turn(sides, options.rounds)
    note = f"bare loop {least:.0f} µs a step; both above it"
    yield at_most(
        "framework cost a step against plain Lightning",
        ours - least,
        plain - least,
        "µs",
        0.5,
        note,
    )


def memory(folder: Path, options: Options) -> Iterator[Claim]:
    """What a process holds to train on windows of very many samples, in a process of its own."""
    samples = options.choose(10_000_000, 1_000_000, 20_000)
    lookback = 200
    path = folder / "long.parquet"
    random = np.random.default_rng(0)
    columns = {
        name: random.standard_normal(samples).astype(np.float32) for name in ("a", "b", "c", "y")
    }
    pq.write_table(pa.table(columns), path, compression="none")
    settings = {"source": str(path), "cache": str(folder / "long"), "lookback": lookback}
    measured_apart("benchmarks.sequences:open_long", settings)  # builds the store
    found = measured_apart("benchmarks.sequences:open_long", settings)
    copied = samples * lookback * 3 * 4 / 1e6
    note = (
        f"{samples:,} samples, lookback {lookback}; theirs: windows of three features copied out,"
        " computed"
    )
    yield at_least("memory of windows", copied / found["megabytes"], 1.0, "times less", 50.0, note)
    note = f"the first batch after {found['first_s']:.2f} s, which plans the epoch"
    yield bounded("opening them again", found["open_s"], "s", most=0.2, note=note)
    pa_csv.write_csv(pa.table(columns), path := folder / "long.csv")
    built = measured_apart("benchmarks.sequences:open_long", {**settings, "source": str(path)})
    size = path.stat().st_size / 1e6
    note = (
        f"one csv of {size:,.0f} MB, {samples:,} rows, in {built['open_s']:.1f} s; peak above the"
        " start"
    )
    yield bounded("memory to read them", built["peak_megabytes"], "MB", most=250, note=note)


def open_long() -> None:
    """The child's side of `memory`: settings on standard input, figures on the last line of
    standard output.
    """
    settings = json.loads(sys.stdin.read())
    cut = {"features": ["a", "b", "c"], "target": "y", "split_by": "time", "batch_size": 64}
    process = psutil.Process()
    before = process.memory_info().rss
    began = time.perf_counter()
    data = SequenceData(log=Silent(), **cut, **settings)
    with quiet():
        data.setup()
    started = time.perf_counter()
    open_s, peak = started - began, peak_memory_gb() * 1000 - before / 1e6
    next(iter(data.train_dataloader()))
    first_s = time.perf_counter() - started
    held = process.memory_info()
    megabytes = max(1.0, (held.rss - before) / 1e6)
    print(
        json.dumps(
            {"megabytes": megabytes, "open_s": open_s, "first_s": first_s, "peak_megabytes": peak}
        )
    )


def cells(folder: Path, options: Options) -> Iterator[Claim]:
    """The built-in cells against the error that no model can go below; settings are those of the
    experiments.
    """
    size: dict[str, Any] = {
        "cells": options.choose(16, 16, 2),
        "samples": options.choose(360, 360, 60),
    }
    charge = CellsConfig(**size)
    quiet_sensors = {"current_noise": 0.0, "soc_noise": 0.0}
    voltage = CellsConfig(**size, voltage_noise=0.01, **quiet_sensors)
    seen = {"target": "voltage", "features": ["current", "temperature", "soc"]}
    for name, sample, columns, floor, epochs, ema in (
        ("state of charge", charge, {}, charge.soc_noise, options.choose(30, 30, 1), 0.0),
        ("voltage", voltage, seen, voltage.voltage_noise, options.choose(250, 250, 1), 0.98),
    ):
        data = SequenceDataConfig(
            sample=sample, batch_size=16, chunk=90, cache=str(folder / "cells"), **columns
        )
        result = _run(data, RNNConfig(hidden=32), OptimConfig(lr=2e-2, ema=ema), epochs, folder, 0)
        baselines = result.summary["baseline"]["metrics"]
        note = f"ridge on the window {baselines['test/rmse']:.4f}, {epochs} epochs"
        claim = f"built-in cells, RMSE of the {name} against the known floor"
        yield at_most(claim, result.metrics["test/rmse"], floor, "", 1.15, note)


def nasa_battery(source: Path, folder: Path, options: Options) -> Iterator[Claim]:
    """State of charge of real cells that took no part in training."""
    columns = {
        "features": [*_FEATURES, "ambient"],
        "target": "soc",
        "time": "time_s",
        "group": ["cell", "cycle"],
    }
    integral = {"cumulate": ["current"], "step": 10.0}
    data = SequenceDataConfig(
        source=str(source), batch_size=16, cache=str(folder / "nasa"), **integral, **columns
    )
    optim = OptimConfig(lr=5e-3, ema=0.98)
    epochs = options.choose(12, 4, 1)
    seeds = options.choose(3, 1, 1)
    results = [
        _run(data, RNNConfig(hidden=64), optim, epochs, folder, seed) for seed in range(seeds)
    ]
    found = [result.metrics["test/rmse"] for result in results]
    baseline = results[0].summary["baseline"]["metrics"]["test/rmse"]
    listed = ", ".join(f"{value:.3f}" for value in found)
    theirs = "theirs: ridge on the window of the same columns"
    note = (
        f"seeds {listed}, the epoch chosen on validation; the charge drawn is a column"
        f" (data.cumulate); {theirs}"
    )
    ours = statistics.mean(found)
    claim = "nasa_battery, test RMSE of the state of charge"
    yield Claim(claim, ours, baseline, "", ours / baseline, "≤ 0.08", ours <= 0.080, note)


def etth1(source: Path, folder: Path, options: Options) -> Iterator[Claim]:
    """The usual forecast of seven series."""
    columns = {"target": ["HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"], "time": "date"}
    cut = {
        "split_by": "time",
        "split_at": [8640, 11520, 14400],
        "lookback": 96,
        "cache": str(folder / "etth1"),
    }
    for horizon, goal in ((24, 0.310), (96, 0.383)):
        data = SequenceDataConfig(
            source=str(source), problem="forecast", horizon=horizon, **columns, **cut
        )
        model = WindowMLPConfig(widths=[64], dropout=0.2, shared=True, residual="ridge")
        result = _run(data, model, OptimConfig(lr=1e-3), options.choose(5, 2, 1), folder, 0)
        found, ridge = (
            each["test/mse_scaled"]
            for each in (result.metrics, result.summary["baseline"]["metrics"])
        )
        note = (
            "scaled MSE over all windows; theirs: ridge;"
            f" {result.summary['training']['seconds']:.0f} s"
        )
        claim = f"ETTh1, seven series, horizon {horizon}"
        yield Claim(claim, found, ridge, "", found / ridge, f"≤ {goal:g}", found <= goal, note)


def _run(
    data: SequenceDataConfig, model: Any, optim: OptimConfig, epochs: int, folder: Path, seed: int
) -> Result:
    settings: dict[str, Any] = {
        "precision": "fp32",
        "logger": "none",
        "output": str(folder),
        "seed": seed,
    }
    settings |= {"checkpoint": CheckpointConfig(patience=None)}
    settings |= {"monitor": MonitorConfig(progress=False, verdict=False, rival=False)}
    with quiet():
        return fit(data, model, optim=optim, max_epochs=epochs, **settings)
