"""Every task and model, each with small data: what steps on a device are tried with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

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
PIECES: dict[str, Any] = {"vocabulary": VocabularyConfig(kind="wordpiece")}
FLASH = "_flash_attention_forward"
EFFICIENT = "_efficient_attention_forward"
Parts = tuple[L.LightningDataModule, L.LightningModule]
FEW_ROWS = 8  # in a batch of texts


class MakeParts(Protocol):
    """Makes data and task of a model."""

    def __call__(self, times: int, rows: int = FEW_ROWS) -> Parts:
        """`times` as many batches as in the smallest data. `rows`: of a batch of texts; other data
        look up no table, and have batches of their own size.
        """


@dataclass(frozen=True, slots=True)
class Case:
    """Data and task of one model."""

    make: MakeParts
    precision: str = "bf16"
    calls: tuple[str, ...] = ()
    """Operators that a GPU's step calls, besides the optimizer's."""
    waits: bool = False
    """Whether the host has to know if a gradient is finite, as the optimizer cannot be told to
    leave a step out."""


def _headlines(times: int, rows: int) -> HeadlinesConfig:
    """Eight batches, or `times` as many."""
    return replace(HEADLINES, rows=8 * rows * times)


def _text(model: Any, times: int, rows: int = FEW_ROWS) -> Parts:
    data = TextData(sample=_headlines(times, rows), batch_size=rows)
    return data, Classifier(model, optim=OPTIM)


def _encoder(
    times: int, rows: int = FEW_ROWS, optim: OptimConfig = OPTIM, **settings: Any
) -> Parts:
    sample = _headlines(times, rows)
    data = TextData(sample=sample, max_length=24, batch_size=rows, **PIECES)
    return data, Classifier(TransformerConfig(**SMALL, **settings), optim=optim)


def _windows(how: str, times: int, rows: int = FEW_ROWS) -> Parts:
    cut: dict[str, Any] = {"long": "windows", "window": 8, "overlap": 2, "max_length": 24}
    data = TextData(sample=_headlines(times, rows), batch_size=rows, **cut, **PIECES)
    return data, Classifier(TransformerConfig(**SMALL, windows=Windows(how)), optim=OPTIM)


def _cells(model: Any, times: int, rows: int = FEW_ROWS, **settings: Any) -> Parts:
    sample = replace(CELLS, cycles=3 * times)
    return SequenceData(sample=sample, batch_size=2, **settings), SequenceRegressor(
        model, optim=OPTIM
    )


def _words(times: int, rows: int = FEW_ROWS) -> Parts:
    data = TextData(sample=_headlines(times, rows), problem="none", batch_size=rows, **PIECES)
    return data, MaskedLanguageModel(TransformerConfig(**SMALL), optim=OPTIM)


def _tags(times: int, rows: int = FEW_ROWS) -> Parts:
    sample = TaggedTweetsConfig(rows=8 * rows * times, eval_rows=20)
    return TagData(sample=sample, batch_size=rows), Tagger(TransformerConfig(**SMALL), optim=OPTIM)


def _bits(times: int, rows: int = FEW_ROWS) -> Parts:
    data = BitData(sample=PeopleConfig(rows=100 * times), batch_size=16, **BITS)
    return data, GramDecoder(BitMLPConfig(widths=[8]), GramsConfig(exposure=False), OPTIM)


def _labels(times: int, rows: int = FEW_ROWS) -> Parts:
    place = np.arange(20)
    parts: list[dict[str, Any]] = [
        {"run": n, "a": np.sin(place * (1 + n % 2) + n), "kind": "ab"[n % 2]}
        for n in range(60 * times)
    ]
    columns = {
        name: np.concatenate([np.broadcast_to(part[name], 20) for part in parts])
        for name in parts[0]
    }
    data = SequenceData(
        source=columns, features=["a"], target="kind", group=["run"], problem="label", batch_size=8
    )
    return data, SequenceLabeller(RNNConfig(hidden=8, bidirectional=True), optim=OPTIM)


def _forecast(times: int, rows: int = FEW_ROWS) -> Parts:
    noise: dict[str, Any] = {"noise": {"voltage": 0.1}, "offset": {"voltage": 0.1}}
    model = RNNConfig(hidden=8, residual="ridge")
    return _cells(model, times, problem="forecast", lookback=12, horizon=3, **noise)


CASES: dict[str, Case] = {
    "bilstm": Case(partial(_text, BiLSTMConfig(embedding=8, hidden=8))),
    "bilstm in fp16": Case(
        partial(_text, BiLSTMConfig(embedding=8, hidden=8, pooling="attention")), "fp16"
    ),
    "textcnn": Case(partial(_text, TextCNNConfig(embedding=8, filters=4))),
    "bert": Case(_encoder, calls=(FLASH,)),
    "bert in fp32": Case(partial(_encoder, attention_dropout=0.0), "fp32", (EFFICIENT,)),
    "an optimizer that is not fused": Case(
        partial(_encoder, optim=OptimConfig(name="muon")), "fp16", (FLASH,), True
    ),
    "modernbert": Case(partial(_encoder, family="modernbert"), calls=(FLASH,)),
    "deberta": Case(partial(_encoder, family="deberta-v2", gradient_checkpointing=True)),
    "mpnet": Case(partial(_encoder, family="mpnet"), "fp32"),
    "eurobert": Case(partial(_encoder, family="eurobert"), calls=(FLASH,)),
    "means of windows": Case(partial(_windows, "mean"), calls=(FLASH,)),
    "largest of windows": Case(partial(_windows, "max"), calls=(FLASH,)),
    "padded rows": Case(partial(_encoder, compute="padded")),
    "tags": Case(_tags, calls=(FLASH,)),
    "masked words": Case(_words, calls=(FLASH,)),
    "bits": Case(_bits),
    "rnn": Case(partial(_cells, RNNConfig(hidden=8, smoothing="ema"))),
    "rnn with a carried state": Case(partial(_cells, RNNConfig(hidden=8), chunk=20)),
    "gru": Case(
        partial(_cells, RNNConfig(hidden=8, cell="gru", layers=2), lookback=12, stride=5),
        "fp16",
    ),
    "forecast": Case(_forecast),
    "labels of recordings": Case(_labels),
    "window mlp": Case(
        partial(
            _cells,
            WindowMLPConfig(),
            lookback=12,
            stride=5,
            low_pass={"voltage": 0.5},
            feed="threaded",
        ),
        "fp32",
    ),
}
