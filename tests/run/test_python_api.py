"""What `fit` and `RunConfig` take from Python: a table by its name, settings as mappings; else one
sentence.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from flatout import (
    BiLSTMConfig,
    HeadlinesConfig,
    OptimConfig,
    TextCNNConfig,
    TextDataConfig,
    UserError,
    fit,
)
from flatout.callbacks import ProgressLine
from flatout.config import RunConfig
from flatout.data import TextData
from flatout.report.summary import read_summary
from flatout.tasks import Classifier
from tests.refusals import refused


def test_settings_may_be_mappings_and_a_model_a_name():
    given: Any = {
        "optim": {"lr": 0.01},
        "checkpoint": {"patience": 3},
        "monitor": {"profile": {"active": 2}},
    }
    config = RunConfig(model="bilstm", **given)
    assert config.optim == OptimConfig(lr=0.01)
    assert config.checkpoint.patience == 3
    assert config.monitor.profile.active == 2
    assert config.model == BiLSTMConfig()


def test_a_table_by_its_name_is_trained_on(tmp_path, monkeypatch):
    shown: list[int] = []
    monkeypatch.setattr(ProgressLine, "show_step", lambda line, step: shown.append(step))
    rows = [
        f"{word} {number},{label}"
        for number in range(60)
        for word, label in (("goal", "a"), ("soup", "b"))
    ]
    (tmp_path / "news.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    quiet: Any = {
        "tune": "off",
        "logger": "none",
        "output": tmp_path,
        "trainer": {"accelerator": "cpu"},
    }
    result = fit(
        str(tmp_path / "news.csv"), BiLSTMConfig(hidden=4, embedding=4), max_epochs=1, **quiet
    )
    assert result.summary["training"]["steps"] == 7  # of 16 rows
    assert shown[0] == 1, "the progress line moves without waiting for a flush"
    assert result.summary["data"]["rows"]["train"] > 60


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optim": {"lrr": 1}}, "OptimConfig.lrr: no such setting. Did you mean 'lr'?"),
        (
            {"optim": {"learning_rate": 1}},
            "OptimConfig.learning_rate: no such setting. Did you mean 'lr'?",
        ),
        (
            {"checkpoint": {"monitor": "x"}},
            "CheckpointConfig.monitor: no such setting. Did you mean 'metric'?",
        ),
        ({"checkpoint": {"zzz": 1}}, "CheckpointConfig.zzz: no such setting. It has metric,"),
        ({"optim": "adamw"}, "OptimConfig: 'adamw' does not belong here"),
        ({"optim": {"lr": "x"}}, "optim.lr: 'x' is no number (above 0, or null)"),
        (
            {"data": 3},
            "data: int is no LightningDataModule (one of your own, or settings of flatout)",
        ),
        ({"data": Classifier(BiLSTMConfig())}, "data: Classifier is no LightningDataModule"),
        ({"model": {"hidden": 3}}, "model: dict is no Module"),
        ({"model": "lstm"}, "no model 'lstm'"),
        ({"task": "x"}, "task: str is no LightningModule"),
        ({"trainer": "cpu"}, "trainer: 'cpu' is no mapping. Write fit(trainer={…: …})."),
        (
            {"trainer": {"max_epochs": 1.5}},
            "trainer.max_epochs: 1.5 (a whole number, 1 or more)",
        ),
        (
            {"trainer": {"max_epochs": "ten"}},
            "trainer.max_epochs: ten (a whole number, 1 or more)",
        ),
        ({"callbacks": [3]}, "callbacks: [3] is no mapping"),
        ({"epoch": 2}, "Did you mean 'epochs'?"),
        ({"epochs": 2, "trainer": {"max_epochs": 3}}, "fit: epochs=2, and trainer has max_epochs"),
        ({"epochs": 2, "budget": "20min"}, "fit: epochs=2, and budget=20min, too"),
        ({"lr": 1e-3}, "It is one of optim: write fit(…, optim={'lr': …})."),
        (
            {"data": [{"text": "a", "label": "b"}], "batch_size": 8},
            "It is one of TextDataConfig: write TextDataConfig(batch_size=…).",
        ),
    ],
)
def test_what_cannot_be_served_is_one_sentence(given, words):
    with pytest.raises(UserError) as raised:
        fit(**given)
    assert words in str(raised.value)


@pytest.mark.parametrize("epochs", [0, -2])
def test_epochs_that_cannot_be_leave_no_folder(tmp_path, epochs):
    with pytest.raises(UserError, match=rf"trainer\.max_epochs: {epochs} "):
        fit(TextDataConfig(), BiLSTMConfig(), epochs=epochs, folder=tmp_path / "run")
    assert not list(tmp_path.iterdir())


class _Looks(L.Callback):
    """What the summary on the disk says of the machine at each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen = list[Any]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(read_summary(self.folder)["hardware"]["cores"])


def test_who_looks_at_a_run_that_trains_knows_its_machine(tmp_path):
    looks = _Looks(tmp_path / "run")
    sample = HeadlinesConfig(rows=100, eval_rows=20)
    quiet = {"logger": "none", "trainer": {"accelerator": "cpu"}}
    model = BiLSTMConfig(hidden=4, embedding=4)
    given = {"callbacks": {"looks": looks}, "epochs": 1, **quiet}
    result = fit(TextDataConfig(sample=sample), model, folder=looks.folder, **given)
    assert looks.seen
    assert set(looks.seen) == {result.summary["hardware"]["cores"]} != {None}


@pytest.mark.parametrize("make", [TextData, TextDataConfig])
def test_a_number_as_a_text_is_refused(make):
    with refused("data.batch_size", "'32'", allowed="1 or more, or null"):
        make(batch_size="32")


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (TextDataConfig, "lable", "label"),
        (TextCNNConfig, "filtrs", "filters"),
        (OptimConfig, "weight_dcay", "weight_decay"),
    ],
)
def test_a_mistyped_setting_of_a_config_names_the_one_that_was_meant(kind, name, meant):
    with refused(f"{kind.__name__}.{name}", "no such setting", fix=f"Did you mean '{meant}'?"):
        kind(**{name: 3})
    assert meant in inspect.signature(kind).parameters
