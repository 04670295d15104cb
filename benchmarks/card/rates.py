"""How fast a card trains six models, and what it does meanwhile.

That is rates for a table, launches a step, the share of the time in which it computes, and memory.

A training is timed over whole epochs, from the first that begins after 30 steps, for 100 steps and
more. So captures and the choices of libraries lie before it. No callback has to hear of each step,
which would keep steps from following each other in stretches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.bert import joined_tweets
from benchmarks.card.place import Place
from benchmarks.claim import Claim, quiet, reaching
from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    CellsConfig,
    EncodingConfig,
    HeadlinesConfig,
    OptimConfig,
    PeopleConfig,
    RNNConfig,
    TransformerConfig,
    TweetsConfig,
    VocabularyConfig,
)
from flatout.bits import BitData, GramDecoder
from flatout.bits.task import GramsConfig
from flatout.callbacks.run_curves import RunCurves
from flatout.data import SequenceData, TextData
from flatout.engine.captures import GraphUse
from flatout.engine.fast_loop import FastLoop
from flatout.tasks import Classifier, SequenceRegressor

WARM = 30
STEPS = 100
_EPOCHS = 1_000  # more than any of these trainings has; the clock ends them
ROWS_OF_TOKENS = {750: 32, 4_096: 32, 16_384: 128}
"""Rows a step: 32 tweets, 32 texts of some 128 tokens, or 128 of these."""
BASE: dict[str, Any] = {"hidden": 768, "layers": 12, "heads": 12}
_SMALL: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2}
_OPTIM = OptimConfig(lr=1e-4)
# Names in a trace of torch's profiler; compiled kernels are launched by the driver.
_ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync")

Parts = tuple[Any, Any]  # a datamodule and a task


@dataclass(frozen=True, slots=True)
class Workload:
    """A model with data for it."""

    make: Callable[[Place], Parts]
    unit: str
    """What is counted: tokens, or rows by their name."""


def base_source(tokens: int, *, is_tiny: bool) -> dict[str, Any]:
    """Rows for steps of about so many tokens: tweets, or several of them joined."""
    if is_tiny:
        return {"sample": TweetsConfig(rows=60, eval_rows=20)}
    if tokens == 750:
        return {"sample": TweetsConfig(rows=4_200, eval_rows=100)}
    return {"train": joined_tweets(2, 11, tweets=60_000)}


def base_shape(place: Place) -> dict[str, Any]:
    """The sizes of BERT-base; tiny, of another encoder."""
    return _SMALL if place.options.tiny else BASE


def _base_encoder(place: Place, tokens: int) -> Parts:
    """BERT-base with about so many tokens a step."""
    is_tiny = place.options.tiny
    data = TextData(
        **base_source(tokens, is_tiny=is_tiny),
        vocabulary=VocabularyConfig(kind="wordpiece", size=500 if is_tiny else 30_522),
        max_length=512,
        batch_size=4 if is_tiny else ROWS_OF_TOKENS[tokens],
        cache=str(place.folder / "cache"),
    )
    return data, Classifier(TransformerConfig(**base_shape(place)), optim=_OPTIM)


def _lstm(place: Place) -> Parts:
    """Windows of 30 samples, 32 a step."""
    sample = CellsConfig(cells=4, cycles=6, samples=place.options.choose(900, 900, 60))
    data = SequenceData(
        sample=sample,
        batch_size=32,
        lookback=30,
        stride=1,
        cache=str(place.folder / "cache"),
    )
    return data, SequenceRegressor(RNNConfig(hidden=32), optim=_OPTIM)


def _bilstm(place: Place) -> Parts:
    """Headlines, 512 a step."""
    rows = place.options.choose(140_000, 60_000, 300)
    data = TextData(
        sample=HeadlinesConfig(rows=rows),
        batch_size=place.options.choose(512, 512, 8),
        cache=str(place.folder / "cache"),
    )
    return data, Classifier(BiLSTMConfig(), optim=_OPTIM)


def _bits(place: Place) -> Parts:
    """Bloom filters, 128 records a step."""
    is_tiny = place.options.tiny
    data = BitData(
        sample=PeopleConfig(rows=300 if is_tiny else 20_000),
        batch_size=8 if is_tiny else 128,
        encoding=EncodingConfig(size=64, hashes=2) if is_tiny else EncodingConfig(),
        cache=str(place.folder / "cache"),
    )
    model = BitMLPConfig(widths=[8]) if is_tiny else BitMLPConfig()
    return data, GramDecoder(model, GramsConfig(exposure=False), _OPTIM)


WORKLOADS = {
    "BERT-base, 750 tokens a step": Workload(partial(_base_encoder, tokens=750), "tokens"),
    "BERT-base, 4,096 tokens a step": Workload(partial(_base_encoder, tokens=4_096), "tokens"),
    "BERT-base, 16,384 tokens a step": Workload(partial(_base_encoder, tokens=16_384), "tokens"),
    "LSTM, 32 windows a step": Workload(_lstm, "windows"),
    "BiLSTM, 512 headlines a step": Workload(_bilstm, "headlines"),
    "bits, 128 records a step": Workload(_bits, "records"),
}
RATE_ROWS = tuple(f"{name}: {workload.unit} a second" for name, workload in WORKLOADS.items())


def rate_claims(place: Place) -> Iterator[Claim]:
    """A row a model, with no goal; the note says how many steps were replayed."""
    for row, workload in zip(RATE_ROWS, WORKLOADS.values(), strict=True):
        timed = train(place, workload)
        count = timed.tokens if workload.unit == "tokens" else timed.rows
        note = f"{timed.steps} steps of {1e3 * timed.step_s:.2f} ms; {timed.replayed}"
        yield reaching(row, count / timed.seconds, f"{workload.unit}/s", least=None, note=note)


@dataclass(slots=True)
class Timed:
    """What a training did after its first steps."""

    seconds: float
    steps: int
    rows: int
    tokens: int
    memory_bytes: int = 0
    """The most that torch has reserved on a card, also before."""
    graphs: dict[str, Any] = field(default_factory=dict)
    """`FastLoop.graph_facts`."""

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    @property
    def replayed(self) -> str:
        """How many steps of the whole training were replayed, in words."""
        if not self.graphs:
            return "plain steps"
        facts = self.graphs
        return f"{facts['replayed_steps']} replayed, {facts['steps_in_stretches']} in stretches"


def train(
    place: Place,
    workload: Workload,
    graph: GraphUse = GraphUse.auto,
    *others: L.Callback,
    clock: EpochClock | None = None,
) -> Timed:
    """Train a workload until enough steps were timed. `others`: further callbacks."""
    data, task = workload.make(place)
    clock = clock or EpochClock(place)
    loop = FastLoop(graph=graph)
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    settings: dict[str, Any] = {"precision": "bf16-mixed"} if place.is_gpu else {}
    if place.is_gpu:
        torch.cuda.reset_peak_memory_stats(place.device)
    with quiet():
        trainer = L.Trainer(
            accelerator=place.accelerator,
            devices=1,
            max_epochs=_EPOCHS,
            limit_val_batches=0,
            gradient_clip_val=1.0,
            callbacks=[loop, RunCurves([]), clock, *others],
            default_root_dir=place.folder,
            **settings,
            **off,
        )
        trainer.fit(task, datamodule=data)
    feed = data.feeds.train
    rows = clock.epochs * len(feed.split.lengths("tokens"))
    tokens = clock.epochs * int(feed.split.lengths("tokens").sum())
    timed = Timed(clock.ended - clock.started, clock.steps, rows, tokens, graphs=loop.graph_facts)
    if place.is_gpu:
        timed.memory_bytes = torch.cuda.max_memory_reserved(place.device)
    return timed


class HearsEachBatch(L.Callback):
    """Keeps steps from following each other in stretches, as callbacks of others do."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        return


class EpochClock(L.Callback):
    """Times whole epochs behind the first steps, and ends the training."""

    def __init__(self, place: Place) -> None:
        self.started = 0.0
        self.ended = 0.0
        self.steps = 0
        self.epochs = 0
        self._place = place
        self._warm = place.options.choose(WARM, WARM, 1)
        self._least = place.options.choose(STEPS, STEPS, 2)
        self._first: int | None = None

    def begin(self) -> None:
        """Called where the timed epochs begin."""
        self.started = self._now()

    def end(self) -> None:
        """Called where they end."""
        self.ended = self._now()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._first is None and trainer.global_step >= self._warm:
            self._first = trainer.global_step
            self.begin()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._first is None:
            return
        self.epochs += 1
        self.steps = trainer.global_step - self._first
        if self.steps >= self._least:
            self.end()
            trainer.should_stop = True

    def _now(self) -> float:
        if self._place.is_gpu:
            torch.cuda.synchronize(self._place.device)
        return time.perf_counter()


class ProfiledEpochs(EpochClock):
    """Runs torch's profiler over the timed epochs; it slows the host, so their time is no rate."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        activities = [ProfilerActivity.CUDA] if place.is_gpu else [ProfilerActivity.CPU]
        self._profiler = profile(activities=activities, acc_events=True)
        self.path = place.folder / "trace.json"

    def begin(self) -> None:
        super().begin()
        self._profiler.start()

    def end(self) -> None:
        super().end()
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self.path))


@dataclass(frozen=True, slots=True)
class OnCard:
    """What a card did in some steps."""

    busy_s: float
    """In which it computed or copied."""
    launches: int
    """What the host asked it for."""


def profile_steps(place: Place, workload: Workload, graph: GraphUse) -> tuple[OnCard, int]:
    """What the card does in the timed steps of a training, and how many these are."""
    clock = ProfiledEpochs(place)
    timed = train(place, workload, graph, clock=clock)
    return read_trace(clock.path), timed.steps


def read_trace(path: Path) -> OnCard:
    """What a card did, by a trace of torch's profiler.

    Kernels of two streams that overlap count once: 0 to 3 and 2 to 5 µs are 5 µs.
    """
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = list[tuple[float, float]]()
    launches = 0
    for event in events:
        if event.get("cat") in _ON_CARD:
            spans.append((event["ts"], event["ts"] + event["dur"]))
        elif str(event.get("cat", "")).startswith("cuda_"):
            launches += event["name"].startswith(_LAUNCHES)
    busy_us = 0.0
    until = float("-inf")
    for begin, end in sorted(spans):
        busy_us += max(0.0, end - max(begin, until))
        until = max(until, end)
    return OnCard(busy_us / 1e6, launches)
