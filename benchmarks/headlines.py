"""A BiLSTM on headlines: our epochs against the usual loop's, at the same accuracy.

The reference case in the small: 41 classes, a word vocabulary, about seven million parameters where
the vocabulary is full, batches of 512. Speed is taken from whole epochs, in turn; accuracy from
three seeds of both.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.claim import Claim, Options, at_least, bounded, in_turn, quiet
from benchmarks.usual import (
    Collate,
    Example,
    UsualBiLSTM,
    accuracy,
    collate,
    collate_texts,
    train_epoch,
)
from flatout.checkpoints.settings import CheckpointConfig
from flatout.data.samples.headlines import HeadlinesConfig, HeadlinesTable
from flatout.data.texts.settings import TextDataConfig
from flatout.engine.optimizer import OptimConfig, Schedule
from flatout.ladder.usual.headlines import WordVocabulary
from flatout.models.bilstm import BiLSTMConfig
from flatout.run.closing import Result
from flatout.run.launch import fit

_BATCH = 512
_CLASSES = 41
_LR = 2e-3
_CLIP = 0.5
_MODEL = BiLSTMConfig(embedding=200, hidden=256, dropout=0.3)


def claims(options: Options) -> Iterator[Claim]:
    """Speed, waiting and accuracy of both."""
    with tempfile.TemporaryDirectory() as folder:
        bench = HeadlinesBench(
            Path(folder), options.choose(30_000, 8_000, 600), options.choose(4_000, 4_000, 60)
        )
        yield from bench.speed(options)
        yield from bench.quality(seeds=options.choose(3, 1, 1), epochs=options.choose(6, 2, 1))


class HeadlinesBench:
    """Both sides over the same rows."""

    def __init__(self, folder: Path, rows: int, eval_rows: int) -> None:
        self.folder = folder
        self.sample = HeadlinesConfig(rows=rows, eval_rows=eval_rows, classes=_CLASSES)
        self.texts, self.targets, self.names = _read(self.sample, "train")
        self.test_texts, self.test_targets, _ = _read(self.sample, "test", self.names)
        self.vocabulary = WordVocabulary(self.texts)
        encoded = [self.vocabulary.encode(text) for text in self.texts]
        self.tokenised = [
            Example(words, target) for words, target in zip(encoded, self.targets, strict=True)
        ]
        self.raw = [
            Example(text, target) for text, target in zip(self.texts, self.targets, strict=True)
        ]

    def speed(self, options: Options) -> Iterator[Claim]:
        waits: list[float] = []
        shares: list[float] = []

        def ours() -> float:
            result = self.ours(seed=0, epochs=1)
            steps = result.summary["speed"]["step_ms"]
            waits.append(
                steps["wait"] / sum(value for value in steps.values() if value is not None)
            )
            shares.append(result.summary["speed"]["padding_share"])
            return float(result.summary["speed"]["rows_per_s"])

        def in_loop() -> float:
            timing = self.usual_epoch(in_loop=True)
            tokenising.append(timing[1])
            return timing[0]

        tokenising: list[float] = []
        sides = [ours, lambda: self.usual_epoch(in_loop=False)[0], in_loop]
        fast, usual, slow = in_turn(sides, options.rounds)
        note = (
            f"batch {_BATCH}, {len(self.texts):,} rows, {len(self.vocabulary):,} words, packed"
            " LSTM, fp32, .item()"
        )
        yield at_least("BiLSTM epoch, against the usual loop", fast, usual, "rows/s", 3.0, note)
        note = (
            f"the usual loop waits {statistics.median(tokenising):.0%} of its time for tokenising"
        )
        yield at_least("the same, against tokenising in the loop", fast, slow, "rows/s", 3.0, note)
        yield bounded(
            "share of a step that waits for data", 100 * statistics.median(waits), "%", most=1.0
        )
        yield bounded(
            "tokens computed that were padding", 100 * statistics.median(shares), "%", most=3.0
        )

    def quality(self, seeds: int, epochs: int) -> Iterator[Claim]:
        ours = [100 * self.ours(seed, epochs).metrics["test/accuracy"] for seed in range(seeds)]
        theirs = [100 * self.usual_accuracy(seed, epochs) for seed in range(seeds)]
        mine, usual = statistics.mean(ours), statistics.mean(theirs)
        note = f"{epochs} epochs, {seeds} seeds; ours {_listed(ours)}, usual {_listed(theirs)}"
        yield Claim(
            "test accuracy, ours no more than 0.5 below",
            mine,
            usual,
            "%",
            mine / usual,
            "≥ -0.5",
            mine >= usual - 0.5,
            note,
        )

    def ours(self, seed: int, epochs: int) -> Result:
        """A whole run, as `python -m train` makes it."""
        data = TextDataConfig(
            sample=self.sample, batch_size=_BATCH, cache=str(self.folder / "cache")
        )
        optim = OptimConfig(lr=_LR, clip=_CLIP, schedule=Schedule.constant, warmup=0.0)
        with quiet():
            return fit(
                data,
                _MODEL,
                optim=optim,
                epochs=epochs,
                seed=seed,
                checkpoint=CheckpointConfig(patience=None),
                output=str(self.folder / "runs"),
            )

    def usual_epoch(self, *, in_loop: bool) -> tuple[float, float]:
        """Rows a second of one epoch of the usual loop, and the share of it that waited
        for data.
        """
        torch.manual_seed(0)
        model, optimizer = self._usual_model()
        how = collate_texts(self.vocabulary) if in_loop else collate
        rows = self.raw if in_loop else self.tokenised
        timing = train_epoch(model, optimizer, _loader(rows, how), clip=_CLIP)
        return timing.rows_per_s, timing.waiting / timing.seconds

    def usual_accuracy(self, seed: int, epochs: int) -> float:
        torch.manual_seed(seed)
        model, optimizer = self._usual_model()
        test = [
            Example(self.vocabulary.encode(text), target)
            for text, target in zip(self.test_texts, self.test_targets, strict=True)
        ]
        loader = _loader(self.tokenised, collate)
        for _ in range(epochs):
            train_epoch(model, optimizer, loader, clip=_CLIP)
        return accuracy(model, _loader(test, collate, shuffle=False))

    def _usual_model(self) -> tuple[UsualBiLSTM, torch.optim.Optimizer]:
        model = UsualBiLSTM(
            len(self.vocabulary), _CLASSES, _MODEL.embedding, _MODEL.hidden, _MODEL.dropout
        )
        return model, torch.optim.AdamW(model.parameters(), lr=_LR)


def _loader(rows: list[Example], how: Collate, *, shuffle: bool = True) -> DataLoader[Example]:
    dataset = cast(Dataset[Example], rows)  # a list has all that a DataLoader asks of a Dataset
    return DataLoader(dataset, batch_size=_BATCH, shuffle=shuffle, collate_fn=how)


def _read(
    sample: HeadlinesConfig, split: str, names: list[str] | None = None
) -> tuple[list[str], list[int], list[str]]:
    table = pa.Table.from_batches(HeadlinesTable(sample, split).blocks(["text", "label"]))
    labels = table["label"].to_pylist()
    names = names or sorted(set(labels))
    return table["text"].to_pylist(), [names.index(label) for label in labels], names


def _listed(values: list[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)
