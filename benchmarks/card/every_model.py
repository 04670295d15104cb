"""Every task and model, each with small data: what steps on a device are tried with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import numpy as np

from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    CellsConfig,
    EncodingConfig,
    HeadlinesConfig,
    OptimConfig,
    PeopleConfig,
    RNNConfig,
    TaggedTweetsConfig,
    TextCNNConfig,
    TransformerConfig,
    VocabularyConfig,
)
from flatout.bits import BitData, GramDecoder
from flatout.bits.task import GramsConfig
from flatout.data import SequenceData, TagData, TextData
from flatout.models.encoder.windows import Windows
from flatout.models.window_mlp import WindowMLPConfig
from flatout.tasks import (
    Classifier,
    MaskedLanguageModel,
    SequenceLabeller,
    SequenceRegressor,
    Tagger,
)

OPTIM = OptimConfig(lr=0.01, ema=0.9)
SMALL: dict[str, Any] = {"hidden": 16, "layers": 2, "heads": 2}
HEADLINES = HeadlinesConfig(rows=64, eval_rows=20, classes=4)
CELLS = CellsConfig(cells=3, cycles=3, samples=60)
BITS: dict[str, Any] = {"encoding": EncodingConfig(size=64, hashes=2), "vocabulary": 50}
PIECES: dict[str, Any] = {"vocabulary": VocabularyConfig(kind="wordpiece"), "batch_size": 8}
FLASH = "_flash_attention_forward"
EFFICIENT = "_efficient_attention_forward"
Parts = tuple[L.LightningDataModule, L.LightningModule]


@dataclass(frozen=True, slots=True)
class Case:
    """Data and task of one model."""

    make: Callable[[int], Parts]
    """Takes how many times as many rows there shall be as in the smallest data."""
    precision: str = "bf16"
    calls: tuple[str, ...] = ()
    """Operators that a GPU's step calls, besides the optimizer's."""
    waits: bool = False
    """Whether the host has to know if a gradient is finite, as the optimizer cannot be told to
    leave a step out."""


def _text(times: int, model: Any) -> Parts:
    sample = replace(HEADLINES, rows=64 * times)
    return TextData(sample=sample, batch_size=8), Classifier(model, optim=OPTIM)


def _encoder(times: int, optim: OptimConfig = OPTIM, **settings: Any) -> Parts:
    data = TextData(sample=replace(HEADLINES, rows=64 * times), max_length=24, **PIECES)
    return data, Classifier(TransformerConfig(**SMALL, **settings), optim=optim)


def _windows(times: int, how: str) -> Parts:
    cut: dict[str, Any] = {"long": "windows", "window": 8, "overlap": 2, "max_length": 24}
    data = TextData(sample=replace(HEADLINES, rows=64 * times), **cut, **PIECES)
    return data, Classifier(TransformerConfig(**SMALL, windows=Windows(how)), optim=OPTIM)


def _cells(times: int, model: Any, **settings: Any) -> Parts:
    sample = replace(CELLS, cycles=3 * times)
    return SequenceData(sample=sample, batch_size=2, **settings), SequenceRegressor(
        model, optim=OPTIM
    )


def _words(times: int) -> Parts:
    data = TextData(sample=replace(HEADLINES, rows=64 * times), problem="none", **PIECES)
    return data, MaskedLanguageModel(TransformerConfig(**SMALL), optim=OPTIM)


def _tags(times: int) -> Parts:
    data = TagData(sample=TaggedTweetsConfig(rows=64 * times, eval_rows=20), batch_size=8)
    return data, Tagger(TransformerConfig(**SMALL), optim=OPTIM)


def _bits(times: int) -> Parts:
    data = BitData(sample=PeopleConfig(rows=100 * times), batch_size=16, **BITS)
    return data, GramDecoder(BitMLPConfig(widths=[8]), GramsConfig(exposure=False), OPTIM)


def _labels(times: int) -> Parts:
    place = np.arange(20)
    parts = [
        {"run": n, "a": np.sin(place * (1 + n % 2) + n), "kind": "ab"[n % 2]}
        for n in range(60 * times)
    ]
    rows = {
        name: np.concatenate([np.broadcast_to(part[name], 20) for part in parts])
        for name in parts[0]
    }
    data = SequenceData(
        source=rows, features=["a"], target="kind", group=["run"], problem="label", batch_size=8
    )
    return data, SequenceLabeller(RNNConfig(hidden=8, bidirectional=True), optim=OPTIM)


def _forecast(times: int) -> Parts:
    noise: dict[str, Any] = {"noise": {"voltage": 0.1}, "offset": {"voltage": 0.1}}
    model = RNNConfig(hidden=8, residual="ridge")
    return _cells(times, model, problem="forecast", lookback=12, horizon=3, **noise)


CASES: dict[str, Case] = {
    "bilstm": Case(lambda times: _text(times, BiLSTMConfig(embedding=8, hidden=8))),
    "bilstm in fp16": Case(
        lambda times: _text(times, BiLSTMConfig(embedding=8, hidden=8, pooling="attention")), "fp16"
    ),
    "textcnn": Case(lambda times: _text(times, TextCNNConfig(embedding=8, filters=4))),
    "bert": Case(_encoder, calls=(FLASH,)),
    "bert in fp32": Case(
        lambda times: _encoder(times, attention_dropout=0.0), "fp32", (EFFICIENT,)
    ),
    "an optimizer that is not fused": Case(
        lambda times: _encoder(times, OptimConfig(name="muon")), "fp16", (FLASH,), True
    ),
    "modernbert": Case(lambda times: _encoder(times, family="modernbert"), calls=(FLASH,)),
    "deberta": Case(
        lambda times: _encoder(times, family="deberta-v2", gradient_checkpointing=True)
    ),
    "mpnet": Case(lambda times: _encoder(times, family="mpnet"), "fp32"),
    "eurobert": Case(lambda times: _encoder(times, family="eurobert"), calls=(FLASH,)),
    "means of windows": Case(lambda times: _windows(times, "mean"), calls=(FLASH,)),
    "largest of windows": Case(lambda times: _windows(times, "max"), calls=(FLASH,)),
    "padded rows": Case(lambda times: _encoder(times, compute="padded")),
    "tags": Case(_tags, calls=(FLASH,)),
    "masked words": Case(_words, calls=(FLASH,)),
    "bits": Case(_bits),
    "rnn": Case(lambda times: _cells(times, RNNConfig(hidden=8, smoothing="ema"))),
    "rnn with a carried state": Case(lambda times: _cells(times, RNNConfig(hidden=8), chunk=20)),
    "gru": Case(
        lambda times: _cells(
            times, RNNConfig(hidden=8, cell="gru", layers=2), lookback=12, stride=5
        ),
        "fp16",
    ),
    "forecast": Case(_forecast),
    "labels of recordings": Case(_labels),
    "window mlp": Case(
        lambda times: _cells(
            times,
            WindowMLPConfig(),
            lookback=12,
            stride=5,
            low_pass={"voltage": 0.5},
            feed="threaded",
        ),
        "fp32",
    ),
}
