"""Whole runs on the device elsewhere: train, validate, test, tune answers, export, resume, predict,
try other ways.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.card.every_model import BITS, CELLS, HEADLINES, SMALL

from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    BitsDataConfig,
    MonitorConfig,
    OptimConfig,
    PeopleConfig,
    Result,
    RNNConfig,
    SequenceDataConfig,
    TaggedTweetsConfig,
    TextDataConfig,
    TransformerConfig,
    fit,
)
from flatout.bits.task import GramsConfig
from flatout.distributed.ranks import Ranks
from flatout.perf.verdict.experiments import alone_ms
from flatout.run import closing
from flatout.run.context import OurParts
from flatout.tasks.masked_language import MaskedLanguageConfig
from tests.elsewhere.device import OneDevice, add_device
from tests.elsewhere.steps import ending_with_1, with_kernels_of_a_gpu

Parts = tuple[Any, Any, dict[str, Any]]
NO_DROPOUT: dict[str, Any] = {
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "head_dropout": 0.0,
}


def _texts() -> Parts:
    return (
        TextDataConfig(sample=HEADLINES, batch_size=8),
        BiLSTMConfig(embedding=8, hidden=8, dropout=0.0),
        {},
    )


def _tags() -> Parts:
    data = TextDataConfig(
        problem="tags", sample=TaggedTweetsConfig(rows=64, eval_rows=20), batch_size=8
    )
    return data, TransformerConfig(**SMALL, **NO_DROPOUT), {}


def _masked_words() -> Parts:
    data = TextDataConfig(sample=HEADLINES, problem="none", batch_size=8)
    return data, TransformerConfig(**SMALL, **NO_DROPOUT), {"task": MaskedLanguageConfig()}


def _cells() -> Parts:
    data = SequenceDataConfig(sample=CELLS, lookback=12, stride=10, batch_size=8)
    return data, RNNConfig(hidden=8, residual="ridge"), {}


def _chunks() -> Parts:
    return (
        SequenceDataConfig(sample=CELLS, chunk=20, batch_size=2),
        RNNConfig(hidden=8, smoothing="ema"),
        {},
    )


def _bits() -> Parts:
    task = GramsConfig(exposure=False)
    data = BitsDataConfig(sample=PeopleConfig(rows=100), batch_size=16, **BITS)
    return data, BitMLPConfig(widths=[8], dropout=0.0), {"task": task}


CASES: dict[str, Callable[[], Parts]] = {
    "texts": _texts,
    "tags": _tags,
    "masked words": _masked_words,
    "windows of recordings": _cells,
    "chunks of recordings": _chunks,
    "bits": _bits,
}


EXPORTED = ("tags",)


def train(name: str, folder: Path) -> None:
    """Two epochs on the CPU, then one and a resumed one elsewhere; ends the process with 1 where
    they differ.
    """
    ending_with_1(lambda: _compare(name, folder))


def _compare(name: str, folder: Path) -> None:
    alone: list[float] = []

    def try_alone(ours: OurParts, *rest: Any) -> None:
        alone.append(alone_ms(ours.task, ours.feeds, 0.01))

    closing.judge = try_alone  # which tries nothing where the machine is busy
    device = add_device()  # before the first backward pass, which counts devices
    expected = _fit(name, folder / "here", 2)
    Ranks.device = lambda *unused: device
    Ranks.lightning_settings = lambda *unused: {"strategy": OneDevice()}
    with_kernels_of_a_gpu()
    _fit(name, folder / "there", 1)
    found = _fit(name, folder / "there", 2, resume=str(folder / "there"))
    assert found.predictor.device == device, found.predictor.device
    assert len(alone) == 3, alone
    assert min(alone) > 0, alone
    if name == "masked words":  # a device masks by random numbers of its own
        assert found.metrics["test/loss"] == pytest.approx(expected.metrics["test/loss"], rel=0.02)
    else:
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-4)
    if name == "texts":
        asked = ["one", "two words"]
        ours, theirs = (result.predictor.predict(asked) for result in (found, expected))
        assert [row.label for row in ours] == [row.label for row in theirs]
    if name in EXPORTED:  # the files that a run elsewhere has left are anybody's
        lines = found.predictor.export_run(
            folder / "there", _empty(folder / "out"), folder / "out", onnx=False
        )
        assert any("largest difference" in line for line in lines), lines


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _fit(name: str, folder: Path, epochs: int, **settings: Any) -> Result:
    data, model, others = CASES[name]()
    optim = OptimConfig(lr=0.003, ema=0.5, schedule="constant", warmup=0.0, eps=1e-6)
    quiet = MonitorConfig(progress=False)
    given: dict[str, Any] = {
        "precision": "fp32",
        "logger": "none",
        "monitor": quiet,
        "optim": optim,
        "seed": 3,
    }
    return fit(data, model, folder=folder, epochs=epochs, **given, **others, **settings)
