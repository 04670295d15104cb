"""`ScaleBatch` in a plain `L.Trainer`: what it finds, and that the training is the one that was
given it at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from flatout import BiLSTMConfig, HeadlinesConfig, OptimConfig, UserError
from flatout.callbacks import ExactCheckpoint, ScaleBatch
from flatout.data import TextData
from flatout.engine import FastLoop
from flatout.perf.tune import probe
from flatout.perf.tune.answers import NoAnswer
from flatout.perf.tune.probe import ANSWERS, SettingMeasurement
from flatout.tasks import Classifier
from tests.callbacks.plain import Small, loader
from tests.params import at_once
from tests.refusals import refused
from tests.trainers import QUIET, flat_weights

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:You defined a `validation_step`",
)
NETWORK = BiLSTMConfig(embedding=8, hidden=8, dropout=0.3)
LR = 0.002


class Log:
    """Keeps decisions."""

    def __init__(self) -> None:
        self.decisions: dict[str, tuple[str, str, str]] = {}

    def say(self, text: str) -> None:
        return

    def decision(self, name: str, value: object, why: str, evidence: str) -> None:
        self.decisions[name] = (str(value), why, evidence)


class EndsInSecondEpoch(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            raise RuntimeError("ended")


def text_data(rows: int = 8, **settings: Any) -> TextData:
    return TextData(
        sample=HeadlinesConfig(rows=600, eval_rows=60, classes=4),
        batch_size=rows,
        seed=3,
        **settings,
    )


def train(
    folder: Path,
    *callbacks: L.Callback,
    rows: int = 8,
    lr: float = LR,
    data: TextData | None = None,
    ckpt_path: Path | None = None,
    **settings: Any,
) -> torch.Tensor:
    """Weights after an epoch."""
    L.seed_everything(3, verbose=False)
    task = Classifier(NETWORK, optim=OptimConfig(lr=lr))
    data = data or text_data(rows)
    saves = any(isinstance(each, ExactCheckpoint) for each in callbacks)
    given: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "default_root_dir": folder,
        "enable_checkpointing": saves,
    }
    trainer = L.Trainer(**(QUIET | given | settings), callbacks=list(callbacks))
    trainer.fit(task, datamodule=data, ckpt_path=ckpt_path)
    return flat_weights(task)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of a few steps."""
    monkeypatch.setattr(probe, "_LEAST_TIMED_S", 0.02)


def rates(
    by_rows: dict[int, float], monkeypatch: pytest.MonkeyPatch, *, memory_from: int = 1 << 20
) -> list[int]:
    """Let probes answer so many rows a second; the sizes that were asked for."""
    asked: list[int] = []

    def measure(
        parts: object, setting: Any, steps: int, until: float
    ) -> SettingMeasurement | NoAnswer:
        asked.append(setting.rows)
        if setting.rows >= memory_from:
            raise torch.OutOfMemoryError
        torch.rand(3)
        rate = by_rows[setting.rows]
        return SettingMeasurement(
            step_s=setting.rows / rate,
            rows_per_s=rate,
            tokens_per_s=rate,
            wait_share=0.0,
            peak_bytes=1000 * setting.rows,
            steps=steps,
            warm_s=0.0,
        )

    monkeypatch.setitem(ANSWERS, "measure", measure)
    return asked


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("how", "power"), [("sqrt", 0.5), *at_once(of=[("linear", 1.0), (None, 0.0)], seconds=2)]
)
def test_the_weights_are_those_of_a_training_that_was_given_the_size_and_the_rate(
    tmp_path, how, power
):
    scale = ScaleBatch(lr=how, max_batch_size=32, gain=0.0, log=Log())
    found = train(tmp_path, scale, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert scale.answers is not None
    assert scale.batch_size in (8, 16, 32)
    assert "16 × 1" in {row.value for row in scale.answers.tried}
    rows = scale.batch_size
    rate = LR * (scale.batch_size / 8) ** power
    given = train(tmp_path, rows=rows, lr=rate, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert torch.equal(found, given)


def test_sizes_double_until_twice_as_many_rows_are_hardly_faster(tmp_path, monkeypatch):
    asked = rates(
        {
            8: 100,
            16: 190,
            32: 300,
            64: 305,
        },
        monkeypatch,
    )
    log = Log()
    found = train(tmp_path, ScaleBatch(log=log), FastLoop())
    assert asked == [8, 16, 32, 64]
    value, why, evidence = log.decisions["data.batch_size"]
    assert value == "8 → 32"
    assert "twice as many bring less than 5%" in why
    assert "rows/s by rows at once: 1: " not in evidence
    assert "8: 100, 16: 190, 32: 300, 64: 305" in evidence
    assert log.decisions["optim.lr"] == ("0.002 → 0.004", "scaled by sqrt", "32 rows for 8")
    assert torch.equal(found, train(tmp_path, FastLoop(), rows=32, lr=0.004))


def test_a_size_that_does_not_fit_ends_the_search(tmp_path, monkeypatch):
    rates({8: 100, 16: 200, 32: 400}, monkeypatch, memory_from=32)
    log = Log()
    scale = ScaleBatch(lr=None, log=log)
    train(tmp_path, scale)
    assert scale.batch_size == 16
    assert log.decisions["data.batch_size"][1].startswith("32 do not fit; ")


def test_a_resumed_training_keeps_the_size_and_measures_nothing(tmp_path, monkeypatch):
    asked = rates({8: 100, 16: 200, 32: 201}, monkeypatch)
    two: dict[str, Any] = {"max_epochs": 2}
    whole = train(tmp_path / "whole", ScaleBatch(log=Log()), **two)
    with pytest.raises(RuntimeError, match="ended"):
        train(
            tmp_path / "cut",
            ScaleBatch(log=Log()),
            EndsInSecondEpoch(),
            ExactCheckpoint(tmp_path / "kept"),
            **two,
        )
    asked.clear()
    exact = ExactCheckpoint(tmp_path / "kept")
    scale = ScaleBatch(log=Log())
    resumed = train(tmp_path / "cut", scale, exact, ckpt_path=exact.latest(), **two)
    assert (scale.batch_size, asked) == (16, [])
    assert torch.equal(resumed, whole)


def test_what_it_cannot_serve_is_one_sentence(tmp_path):
    settings: dict[str, Any] = {
        "logger": False,
        "accelerator": "cpu",
        "default_root_dir": tmp_path,
        "max_epochs": 1,
    }
    trainer = L.Trainer(callbacks=[ScaleBatch()], enable_checkpointing=False, **settings)
    with refused("ScaleBatch", "Small", allowed="a task and a DataModule of flatout"):
        trainer.fit(Small(), loader())
    with pytest.raises(UserError, match=r"data\.tokens_per_batch fixes the size of a batch"):
        train(tmp_path, ScaleBatch(), data=text_data(tokens_per_batch=600))
    with refused("ScaleBatch.max_batch_size", 4, allowed="8 or more, the DataModule's batch_size"):
        train(tmp_path, ScaleBatch(max_batch_size=4))
    with pytest.raises(UserError, match=r"ScaleBatch\.lr: .*cubic"):
        ScaleBatch(lr="cubic")
