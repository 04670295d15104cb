"""The way of the data: how fast batches come, what a step costs, how large a table may be."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.claim import (
    Claim,
    Options,
    at_least,
    bounded,
    in_turn,
    measured_apart,
    peak_memory_gb,
)
from flatout.callbacks.run_curves import RunCurves
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import BatchLayout, Plan, PlanSettings
from flatout.data.feeding import FeedKind
from flatout.data.problem import Problem
from flatout.data.samples.headlines import HeadlinesConfig
from flatout.data.store.store import Column, Store, StoreSplit, StoreWriter
from flatout.data.texts.data import TextData
from flatout.data.texts.settings import TextDataConfig
from flatout.distributed.limits import keep_freed_memory
from flatout.engine.fast_loop import FastLoop
from flatout.engine.optimizer import OptimConfig
from flatout.tasks.classification import ClassificationConfig, Classifier, Labels
from flatout.tasks.task import Task

_ROWS = 60_000
_BATCH = 512
_OUR_EPOCHS = 40
_CLIP = 0.5


def claims(options: Options) -> Iterator[Claim]:
    """Batches, framework cost, and the ten-million-row table."""
    keep_freed_memory()  # as every run on a CPU does; the other side has it too
    with tempfile.TemporaryDirectory() as folder:
        split = random_split(Path(folder) / "rows", options.choose(_ROWS, _ROWS, 2 * _BATCH))
        yield from batches(split, options)
        yield from framework(Path(folder), options)
    yield from many_rows(options.choose(10_000_000, 1_000_000, 2_000))


def batches(split: StoreSplit, options: Options) -> Iterator[Claim]:
    """Store to padded batches, against `datasets` with a DataLoader and a padding collate."""
    import datasets

    column = split.ragged("tokens")
    pieces = np.split(column.values.astype(np.int64), column.offsets[1:-1])
    rows = datasets.Dataset.from_dict(
        {"input_ids": [piece.tolist() for piece in pieces], "label": split.fixed("targets")}
    )
    feed = Feed(
        split,
        PlanSettings(rows_per_batch=_BATCH, layout=BatchLayout.padded),
        kind=FeedKind.resident,
    )
    epochs = iter(range(1, 10_000))
    num_rows = split.num_rows

    def epoch() -> Iterator[object]:
        feed.set_epoch(next(epochs))
        return (batch.padded() for batch in feed)

    def ours() -> float:
        # Many epochs, so that both sides run for about as long.
        return _rows_per_s(
            (batch for _ in range(_OUR_EPOCHS) for batch in epoch()), _OUR_EPOCHS * num_rows
        )

    def theirs(workers: int) -> Callable[[], float]:
        loader = DataLoader(
            rows, batch_size=_BATCH, shuffle=True, collate_fn=_pad, num_workers=workers
        )
        return lambda: _rows_per_s(iter(loader), num_rows)

    ours()
    fast, *usual = in_turn([ours, *(theirs(workers) for workers in (0, 1, 2))], options.rounds)
    listed = ", ".join(f"{workers}: {rate:,.0f}" for workers, rate in enumerate(usual))
    note = f"{num_rows:,} rows of 11 tokens, batches of {_BATCH}; theirs by workers {listed}"
    yield at_least(
        "store to padded batches, against datasets", fast, max(usual), "rows/s", 50.0, note
    )


def _pad(examples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    rows = [torch.tensor(example["input_ids"]) for example in examples]
    labels = torch.tensor([example["label"] for example in examples])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), labels


def _rows_per_s(batches: Iterator[object], rows: int) -> float:
    started = time.perf_counter()
    for _ in batches:
        pass
    return rows / (time.perf_counter() - started)


class TinyModel(nn.Module):
    """So small that a step is nothing but the framework around it."""

    layout = "flat"

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.output = nn.Linear(8, 4)

    def forward(self, batch: FlatBatch) -> Tensor:
        return self.output(self.embedding(batch.tokens[: batch.num_rows]))

    def computed_tokens(self, batch: FlatBatch) -> int:
        return batch.num_tokens


class PlainTask(L.LightningModule):
    """The same model as Lightning's pages show it: one `self.log` a step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyModel()

    def training_step(self, batch: FlatBatch, batch_idx: int) -> Tensor:
        assert batch.targets is not None
        loss = nn.functional.cross_entropy(self.model(batch), batch.targets)
        self.log("loss", loss, batch_size=batch.num_rows, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)

    def transfer_batch_to_device(
        self, batch: FlatBatch, device: torch.device, dataloader_idx: int
    ) -> FlatBatch:
        return batch


def framework(folder: Path, options: Options) -> Iterator[Claim]:
    """Microseconds a step above a bare loop over the same batches that clips, sets its rate and
    steps alike.
    """
    steps = options.choose(3000, 1000, 20)
    split = random_split(folder / "tiny", 8 * steps)
    feed = Feed(split, PlanSettings(rows_per_batch=8), kind=FeedKind.resident)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sides = [
            lambda: bare_step(tiny_task(feed), feed),
            lambda: our_step(tiny_task(feed), feed, folder),
            lambda: _plain_step(feed, folder),
            lambda: _lightning_step(tiny_task(feed), feed, folder, [], gradient_clip_val=_CLIP),
        ]
        for side in sides:
            side()
        bare, ours, plain, alone = in_turn(sides, options.rounds)
    finally:
        torch.set_num_threads(threads)
    note = (
        f"bare loop {bare:.0f} µs a step; plain Lightning with one self.log {plain - bare:.0f} µs"
        " above it"
    )
    most = round(0.6 * (plain - bare), 1)
    yield bounded(
        "framework cost a step above a bare loop", ours - bare, "µs", most=most, note=note
    )
    cost, theirs = alone - bare, plain - bare
    note = "our module with its one self.log, no fast loop; against a module of Lightning's pages"
    claim = "framework cost a step of our module in a plain Trainer"
    yield Claim(claim, cost, theirs, "µs", cost / max(theirs, 1e-9), "", True, note)


def tiny_task(feed: Feed) -> Classifier:
    labels = Labels(Problem.single, ["a", "b", "c", "d"], [1, 1, 1, 1], 4)
    optim = OptimConfig(clip=_CLIP)
    return Classifier(
        TinyModel(), ClassificationConfig(), optim, labels=labels, total_steps=len(feed)
    )


def bare_step(task: Task, feed: Feed) -> float:
    """Microseconds a step of a loop that does what a step must: loss, clipping, learning rate,
    optimizer.
    """
    model, optim = task.model, task.optim
    optimizer = optim.build(model)
    parameters = list(model.parameters())
    started = time.perf_counter()
    for number, batch in enumerate(_one_epoch(feed)):
        task.loss(model(batch), batch).backward()
        for group in optimizer.param_groups:
            group["lr"] = optim.lr_at(number, len(feed))
        nn.utils.clip_grad_norm_(parameters, _CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return 1e6 * (time.perf_counter() - started) / len(feed)


def our_step(task: Task, feed: Feed, folder: Path) -> float:
    """Microseconds a step of the same task in a run of ours."""
    return _lightning_step(task, feed, folder, [FastLoop(), RunCurves([])], gradient_clip_val=_CLIP)


def _plain_step(feed: Feed, folder: Path) -> float:
    return _lightning_step(PlainTask(), feed, folder, [])


class _Clock(L.Callback):
    started = 0.0
    ended = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ended = time.perf_counter()


def _lightning_step(
    task: L.LightningModule, feed: Feed, folder: Path, callbacks: list[L.Callback], **settings: Any
) -> float:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = _Clock()
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[clock, *callbacks],
        **settings,
    )
    feed.set_epoch(feed.epoch + 1)
    trainer.fit(task, train_dataloaders=feed)
    return 1e6 * (clock.ended - clock.started) / len(feed)


def _one_epoch(feed: Feed) -> Iterator[FlatBatch]:
    feed.set_epoch(feed.epoch + 1)
    return iter(feed)


def many_rows(rows: int) -> Iterator[Claim]:
    """A large sample: memory of building its store, time to plan and to open it; in a process of
    its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = measured_apart("benchmarks.spine:build_many", {"rows": rows, "folder": folder})
    note = f"{rows:,} rows, {found['tokens']:,} tokens, built in {found['build_s']:.0f} s"
    yield bounded("peak memory of building the store", found["peak_gb"], "GB", most=1.5, note=note)
    yield bounded("planning an epoch of it", found["plan_s"], "s", most=10.0)
    yield bounded("opening it", found["open_s"], "s", most=0.2)


def build_many() -> None:
    """The child's side of `many_rows`: settings on standard input, figures on the last line of
    standard output.
    """
    settings = json.loads(sys.stdin.read())
    data = TextDataConfig(sample=HeadlinesConfig(rows=settings["rows"]), cache=settings["folder"])
    started = time.perf_counter()
    built = TextData.of(data).open_store()
    build_s = time.perf_counter() - started
    peak_gb = peak_memory_gb()
    started = time.perf_counter()
    Plan(
        built.store.splits["train"].ragged("tokens").lengths,
        PlanSettings(rows_per_batch=512, layout=BatchLayout.padded),
    )
    plan_s = time.perf_counter() - started
    started = time.perf_counter()
    Store(built.store.folder)
    open_s = time.perf_counter() - started
    tokens = built.facts["splits"]["train"]["tokens"]
    print(
        json.dumps(
            {
                "build_s": build_s,
                "peak_gb": peak_gb,
                "plan_s": plan_s,
                "open_s": open_s,
                "tokens": tokens,
            }
        )
    )


def random_split(folder: Path, rows: int) -> StoreSplit:
    """Short rows of random tokens, as a store on disk."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.normal(10.9, 3.6, rows), 1, 34).astype(np.int32)
    folder.mkdir()
    writer = StoreWriter(folder)
    split = writer.split(
        "train", {"tokens": Column("uint16", ragged=True), "targets": Column("int32")}
    )
    split.append(
        tokens=(random.integers(0, 50, int(lengths.sum())), lengths),
        targets=random.integers(0, 4, rows),
    )
    writer.close({})
    return Store(folder).splits["train"]
