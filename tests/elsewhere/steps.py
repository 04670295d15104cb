"""Steps of every task and model on the device elsewhere, through the fast loop, with the branches that a GPU takes."""

from __future__ import annotations

import logging
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

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
from flatout.engine import FastLoop
from flatout.models.encoder import network
from flatout.models.window_mlp import WindowMLPConfig
from flatout.tasks import Classifier, MaskedLanguageModel, SequenceLabeller, SequenceRegressor, Tagger
from tests.elsewhere.device import NAME, OneDevice, There, add_device
from tests.tasks.test_plain_trainer import quiet_trainer

OPTIM = OptimConfig(lr=0.01, ema=0.9)
SMALL: dict[str, Any] = {"hidden": 16, "layers": 2, "heads": 2}
HEADLINES = HeadlinesConfig(rows=64, eval_rows=20, classes=4)
CELLS = CellsConfig(cells=3, cycles=3, samples=60)
BITS: dict[str, Any] = {"encoding": EncodingConfig(size=64, hashes=2), "vocabulary": 50}
PIECES: dict[str, Any] = {"vocabulary": VocabularyConfig(kind="wordpiece"), "batch_size": 8}
Parts = tuple[L.LightningDataModule, L.LightningModule]


def _text(model: Any, **settings: Any) -> Parts:
    return TextData(sample=HEADLINES, batch_size=8, **settings), Classifier(model, optim=OPTIM)


def _encoder(**settings: Any) -> Parts:
    model = TransformerConfig(**SMALL, **settings)
    return TextData(sample=HEADLINES, max_length=24, **PIECES), Classifier(model, optim=OPTIM)


def _cells(model: Any, **settings: Any) -> Parts:
    return SequenceData(sample=CELLS, batch_size=2, **settings), SequenceRegressor(model, optim=OPTIM)


def _words() -> Parts:
    data = TextData(sample=HEADLINES, problem="none", **PIECES)
    return data, MaskedLanguageModel(TransformerConfig(**SMALL), optim=OPTIM)


def _tags() -> Parts:
    data = TagData(sample=TaggedTweetsConfig(rows=64, eval_rows=20), batch_size=8)
    return data, Tagger(TransformerConfig(**SMALL), optim=OPTIM)


def _bits() -> Parts:
    data = BitData(sample=PeopleConfig(rows=100), batch_size=16, **BITS)
    return data, GramDecoder(BitMLPConfig(widths=[8]), GramsConfig(exposure=False), OPTIM)


def _labels() -> Parts:
    place = np.arange(20)
    parts = [{"run": n, "a": np.sin(place * (1 + n % 2) + n), "kind": "ab"[n % 2]} for n in range(60)]
    rows = {name: np.concatenate([np.broadcast_to(part[name], 20) for part in parts]) for name in parts[0]}
    data = SequenceData(source=rows, features=["a"], target="kind", group=["run"], problem="label", batch_size=8)
    return data, SequenceLabeller(RNNConfig(hidden=8, bidirectional=True), optim=OPTIM)


CASES: dict[str, tuple[Callable[[], Parts], str, set[str]]] = {
    "bilstm": (lambda: _text(BiLSTMConfig(embedding=8, hidden=8)), "bf16", set()),
    "bilstm in fp16": (lambda: _text(BiLSTMConfig(embedding=8, hidden=8, pooling="attention")), "fp16", set()),
    "textcnn": (lambda: _text(TextCNNConfig(embedding=8, filters=4)), "bf16", set()),
    "bert": (_encoder, "bf16", {"_flash_attention_forward"}),
    "bert in fp32": (lambda: _encoder(attention_dropout=0.0), "fp32", {"_efficient_attention_forward"}),
    "modernbert": (lambda: _encoder(family="modernbert"), "bf16", {"_flash_attention_forward"}),
    "padded rows": (lambda: _encoder(compute="padded"), "bf16", set()),
    "tags": (_tags, "bf16", {"_flash_attention_forward"}),
    "masked words": (_words, "bf16", {"_flash_attention_forward"}),
    "bits": (_bits, "bf16", set()),
    "rnn": (lambda: _cells(RNNConfig(hidden=8, smoothing="ema")), "bf16", set()),
    "rnn with a carried state": (lambda: _cells(RNNConfig(hidden=8), chunk=20), "bf16", set()),
    "gru": (lambda: _cells(RNNConfig(hidden=8, cell="gru", layers=2), lookback=12, stride=5), "fp16", set()),
    "forecast": (
        lambda: _cells(
            RNNConfig(hidden=8, residual="ridge"),
            problem="forecast",
            lookback=12,
            horizon=3,
            noise={"voltage": 0.1},
            offset={"voltage": 0.1},
        ),
        "bf16",
        set(),
    ),
    "labels of recordings": (_labels, "bf16", set()),
    "window mlp": (
        lambda: _cells(WindowMLPConfig(), lookback=12, stride=5, low_pass={"voltage": 0.5}, feed="threaded"),
        "fp32",
        set(),
    ),
}
"""Data and task, precision, and operators that a step must call besides the fused optimizer's."""


class AfterFirst(L.Callback):
    """The first batch may make the host wait, as columns are copied then; later ones may not."""

    def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
        There.is_stepping = True

    def on_train_end(self, *others: Any) -> None:
        There.is_stepping = False

    def on_exception(self, *others: Any) -> None:
        There.is_stepping = False


def ending_with_1(act: Callable[[], None]) -> None:
    """End the process with 1 and the traceback where something fails."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        act()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def with_kernels_of_a_gpu() -> None:
    """Encoders choose what computes attention elsewhere as on a GPU."""
    choose, card = network.choose_kernel, torch.device("cuda")

    def choose_there(device: torch.device, *rest: Any, **named: Any) -> Any:
        return (
            choose(card, *rest, capability=(8, 0), **named) if device.type == NAME else choose(device, *rest, **named)
        )

    network.choose_kernel = choose_there


def train(name: str) -> None:
    """Three steps; ends the process with 1 where one of them fails."""
    ending_with_1(lambda: _train(name))


def _train(name: str) -> None:
    make, precision, wanted = CASES[name]
    add_device()
    with_kernels_of_a_gpu()
    scaler = torch.amp.GradScaler(NAME, init_scale=2.0**8) if precision == "fp16" else None  # type: ignore[attr-defined]
    names: dict[str, Any] = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
    plugins = [] if precision == "fp32" else [MixedPrecision(names[precision], NAME, scaler)]
    data, task = make()
    settings: dict[str, Any] = {"accelerator": "auto", "strategy": OneDevice(), "plugins": plugins}
    trainer = quiet_trainer(
        Path(tempfile.mkdtemp()),
        max_steps=3,
        limit_val_batches=0,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[FastLoop(), AfterFirst()],
        **settings,
    )
    trainer.fit(task, datamodule=data)
    assert trainer.global_step == 3
    missing = (wanted | {"_fused_adamw_"}) - set(There.called)
    assert not missing, missing
    assert all(bool(weight.detach().isfinite().all()) for weight in task.parameters())
