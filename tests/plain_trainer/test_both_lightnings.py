"""The parts in a Trainer of `pytorch_lightning`, the other name of the same package.

These are a few cases of the default suite; `tests/soak/test_other_lightning.py` runs all tests of
this folder with the other package.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import pytorch_lightning
import torch
from torch import Tensor, nn

from flatout import BiLSTMConfig, HeadlinesConfig, attach, fit
from flatout.callbacks import ExactCheckpoint
from flatout.callbacks.loggers import RunPlace, build_loggers, chosen_loggers
from flatout.data import TextData
from flatout.distributed.both_lightnings import either
from flatout.engine import FastLoop
from flatout.engine.host_state import first_difference, state_of_module
from flatout.tasks import Classifier
from tests.callbacks.plain import loader
from tests.refusals import refused
from tests.trainers import QUIET, flat_weights

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*number of training batches.*",
    "ignore:.*isinstance.treespec, LeafSpec.*",
)
PACKAGES = {"lightning": L, "pytorch_lightning": pytorch_lightning}


class Steps(nn.Module):
    """What a module does, for the LightningModule of either package."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def module_of(package: Any) -> Any:
    return type("Own", (Steps, package.LightningModule), {})()


def train_by(package: Any, module: Any, folder: Path, *callbacks: Any, **more: Any) -> Tensor:
    settings = {"max_epochs": 2, "accelerator": "cpu", "num_sanity_val_steps": 0}
    trainer = package.Trainer(
        **(QUIET | settings), callbacks=list(callbacks), default_root_dir=folder
    )
    trainer.fit(module, **more)
    return flat_weights(module)


def test_the_parts_serve_a_trainer_of_the_other_package(tmp_path, capsys):
    weights = {}
    for name, package in PACKAGES.items():
        torch.manual_seed(3)
        folder = tmp_path / name
        exact = ExactCheckpoint(folder / "kept")
        loop = FastLoop()
        module = module_of(package)
        weights[name] = train_by(package, module, folder, loop, exact, train_dataloaders=loader())
        assert exact.latest() == folder / "kept" / "step-20"
        assert [path.name for path in folder.iterdir()] == ["kept"], "Lightning saved beside it"
        assert len(loop.losses.values) == 20, "the fast loop took no steps"
    assert "Lightning's own loop" not in capsys.readouterr().out
    assert torch.equal(weights["lightning"], weights["pytorch_lightning"])


def test_a_verdict_is_attached_to_a_trainer_of_the_other_package():
    trainer = pytorch_lightning.Trainer(**QUIET, accelerator="cpu", enable_checkpointing=False)
    verdict = attach(trainer)
    assert verdict in trainer.callbacks
    assert attach(trainer) is verdict
    with refused("attach", "takes a Trainer, not Linear"):
        attach(nn.Linear(1, 1))


def test_tasks_and_data_of_flatout_train_in_both_packages_in_one_process(tmp_path):
    weights = {}
    for name, package in {**PACKAGES, "lightning again": L}.items():
        L.seed_everything(3, verbose=False)
        data = TextData(sample=HeadlinesConfig(rows=120, eval_rows=40, classes=3), batch_size=32)
        task = Classifier(BiLSTMConfig(embedding=8, hidden=8, dropout=0.0))
        weights[name] = train_by(package, task, tmp_path / name, datamodule=data)
    assert torch.equal(weights["lightning"], weights["pytorch_lightning"])
    assert torch.equal(weights["lightning"], weights["lightning again"])


def test_the_runner_says_which_package_it_trains_with():
    with refused("task", "Own is a LightningModule of pytorch_lightning", fix="import lightning"):
        fit(task=module_of(pytorch_lightning))


def test_the_runner_takes_a_logger_of_the_other_package(tmp_path):
    logger = pytorch_lightning.loggers.CSVLogger(tmp_path)
    place = RunPlace(tmp_path / "run", "news")
    assert build_loggers(chosen_loggers(logger), place) == {"CSVLogger": logger}
    assert build_loggers(chosen_loggers({"mine": logger}), place) == {"mine": logger}
    assert build_loggers({}, place, more=logger) == {"trainer.logger 1": logger}
    with refused("logger", "Linear is no logger"):
        chosen_loggers(nn.Linear(1, 1))


def test_a_class_that_is_in_one_package_alone_is_answered_by_itself():
    assert either(Steps) == (Steps,)
    assert either(L.Trainer) == (L.Trainer, pytorch_lightning.Trainer)


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_an_object_of_either_package_that_a_module_holds_is_no_state_of_its_own(package):
    module = nn.Linear(2, 2)
    module.stopping = import_module(
        package.Callback.__module__.removesuffix(".callback")
    ).EarlyStopping("loss")
    before = state_of_module(module)
    module.stopping.wait_count = 1
    assert first_difference(before, state_of_module(module)) == ""
