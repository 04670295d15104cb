"""How fast a card trains: an encoder against transformers' Trainer at its best, an LSTM against the
usual loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pyarrow as pa
import torch

from benchmarks.bert import base_claims
from benchmarks.card.place import Place
from benchmarks.claim import Claim, at_least, in_turn, not_here, quiet
from benchmarks.sequences import Clock, Silent
from benchmarks.usual_sequences import CLIP, GraphedLoop, TunedLoop, UsualLoop, copy_windows
from flatout.callbacks.run_curves import RunCurves
from flatout.data.sequences.data import SequenceData
from flatout.engine.captures import CAPTURES, GraphUse
from flatout.engine.fast_loop import FastLoop
from flatout.engine.optimizer import OptimConfig
from flatout.models.rnn import RNNConfig
from flatout.tasks.sequences import SequenceRegressionConfig, SequenceRegressor

ENCODER_ROWS = (
    "BERT-base, texts: tokens a second, Trainer's best",
    "BERT-base, tweets: tokens a second, Trainer's best",
    "BERT-base: MFU of real tokens",
    "BERT-base: waits for the device in",
)
"""How the rows of `bench bert` for GPUs begin: 32 texts of some 128 tokens, 32 tweets, 16,384
tokens a pass."""


def encoder_claims(place: Place, shape: dict[str, Any] | None = None) -> Iterator[Claim]:
    """In one round; `--quick` leaves the compiled Trainer out.

    `shape`: another encoder than BERT-base.
    """
    yield from base_claims(
        place.folder, replace(place.options, asked_rounds=1), place.device, shape
    )


LSTM_ROWS = (
    "LSTM: training epoch against the usual loop",
    "LSTM: training epoch against a tuned loop",
    "LSTM: training epoch with replayed steps against plain ones",
    "LSTM: training epoch against a graphed tuned loop",
)
_HIDDEN = 32
_BATCH = 32
_LOOKBACK = 30


def lstm_claims(place: Place) -> Iterator[Claim]:
    """Windows of one long recording through the same LSTM at the same batch, all on the device."""
    settings = _long_recording(place)
    data = SequenceData(log=Silent(), **settings)
    data.setup()
    trained_samples = settings["split_at"][0]
    scaled = np.asarray(data.info.rows_of("train").values[:trained_samples])
    inputs, targets = copy_windows(scaled, _LOOKBACK, 3)
    device = str(place.device)
    usual, tuned = (
        kind(inputs, targets, _HIDDEN, _BATCH, device=device) for kind in (UsualLoop, TunedLoop)
    )

    def train(graph: GraphUse) -> float:
        clock = WaitingClock(place.device)
        task = SequenceRegressor(
            RNNConfig(hidden=_HIDDEN),
            SequenceRegressionConfig(baselines=False),
            OptimConfig(lr=1e-3),
        )
        with quiet():
            trainer_of(place, clock, graph).fit(
                task, datamodule=SequenceData(log=Silent(), **settings)
            )
        return clock.ended - clock.started

    ways = [
        partial(train, GraphUse.auto),
        usual.epoch,
        tuned.epoch,
        partial(train, GraphUse.off),
    ]
    graphed: GraphedLoop | None = None
    if place.device.type in CAPTURES:
        capture = CAPTURES[place.device.type](place.device)
        graphed = GraphedLoop(inputs, targets, _HIDDEN, _BATCH, capture, device)
        ways.append(graphed.epoch)
    fast, slow, less_slow, plain, *by_hand = in_turn(ways, place.options.rounds)
    note = (
        f"{len(inputs):,} windows of {_LOOKBACK}, batch {_BATCH}, hidden {_HIDDEN}, fp32, a second"
        " epoch"
    )
    others = ((slow, 10.0), (less_slow, 10.0), (plain, 1.0))
    if place.device.type not in CAPTURES:  # both sides of the last row are the same steps
        others = (*others[:2], (plain, 0.5))
    for row, (theirs, goal) in zip(LSTM_ROWS, others, strict=False):
        yield at_least(row, len(inputs) / fast, len(inputs) / theirs, "windows/s", goal, note)
    if not by_hand:
        yield not_here(LSTM_ROWS[-1], f"a {place.device.type.upper()} captures no steps")
    for theirs in by_hand:
        yield at_least(
            LSTM_ROWS[-1], len(inputs) / fast, len(inputs) / theirs, "windows/s", 0.8, note
        )


def _long_recording(place: Place) -> dict[str, Any]:
    """Settings of `SequenceData`: one recording of random walks, cut into windows."""
    samples = place.options.choose(20_000, 6_000, 400)
    walks = np.random.default_rng(0).standard_normal((samples, 4)).cumsum(0)
    columns = {name: walks[:, number] for number, name in enumerate(["a", "b", "c", "y"])}
    return {
        "source": pa.table(columns),
        "features": ["a", "b", "c"],
        "target": "y",
        "split_by": "time",
        "split_at": [int(samples * 0.98), samples],
        "batch_size": _BATCH,
        "lookback": _LOOKBACK,
        "cache": str(place.folder / "lstm"),
    }


def trainer_of(place: Place, clock: L.Callback, graph: GraphUse) -> L.Trainer:
    """Two epochs of ours, of which the clock times the second."""
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    callbacks = [clock, FastLoop(graph=graph), RunCurves([])]
    settings: dict[str, Any] = {
        "accelerator": place.accelerator,
        "devices": 1,
        "max_epochs": 2,
        "limit_val_batches": 0,
    }
    return L.Trainer(
        gradient_clip_val=CLIP,
        callbacks=callbacks,
        default_root_dir=place.folder,
        **settings,
        **off,
    )


class WaitingClock(Clock):
    """Waits at both ends of an epoch for what a GPU still computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.started = self._now()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ended = self._now()
