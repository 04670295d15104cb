"""`ExactCheckpoint` with foreign modules and callbacks: what they keep, how they step, what they
count.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from torch import nn

from flatout import UserError
from flatout.callbacks import ExactCheckpoint
from flatout.checkpoints.folder import as_file
from flatout.engine import FastLoop
from tests.callbacks.plain import Small, loader
from tests.params import at_once
from tests.run_files import curve
from tests.same import same
from tests.trainers import QUIET, flat_weights, quiet_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:.*ended before the epoch ended.*",
    "ignore:.*callbacks used to create the checkpoint.*",
    "ignore:Experiment logs directory .* exists",
)


def fit(
    folder: Path,
    module: L.LightningModule,
    *callbacks: L.Callback,
    epochs: int = 2,
    resume: bool = False,
    **more: Any,
) -> L.Trainer:
    exact = ExactCheckpoint(folder / "kept", every_minutes=None)
    given: dict[str, Any] = {
        "num_sanity_val_steps": 0,
        "accelerator": "cpu",
        "max_epochs": epochs,
        "default_root_dir": folder,
    }
    trainer = L.Trainer(**(QUIET | given | more), callbacks=[*callbacks, exact])
    trainer.fit(module, loader(), loader(), ckpt_path=exact.latest() if resume else None)
    return trainer


def differs_after_resume(
    folder: Path, make: Callable[[], L.LightningModule], **settings: Any
) -> float:
    """The largest difference of a weight between a training of three epochs and one that was
    resumed after two.
    """
    weights = []
    for name, epochs in (("whole", [3]), ("cut", [2, 3])):
        for resumed, each in enumerate(epochs):
            L.seed_everything(3, verbose=False)
            module = make()
            fit(folder / name, module, epochs=each, resume=bool(resumed), **settings)
        weights.append(flat_weights(module))
    return float((weights[0] - weights[1]).abs().max())


class WithLBFGS(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(
            torch.nn.Linear(3, 101), torch.nn.Tanh(), torch.nn.Linear(101, 2)
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=5)


class TwoOptimizers(Small):
    """Manual optimisation that takes two steps a batch, as a GAN does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(3, 2)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            loss = torch.nn.functional.cross_entropy(
                (self.layer, self.other)[number](batch[0]), batch[1]
            )
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss.detach())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=1e-4) for each in (self.layer, self.other)]


class EveryThird(Small):
    """Manual optimisation that collects the gradients of three batches; the last of ten takes no
    step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % 3 == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class PlateauOfSteps(Small):
    """A schedule that looks at each validation for a plateau, and finds one each time."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
        return [optimizer], [
            {
                "scheduler": schedule,
                "interval": "step",
                "frequency": 10,
                "monitor": "val/loss",
            }
        ]


@pytest.mark.parametrize("validations", at_once(1.0, of=[1.0, 0], seconds=1))
@pytest.mark.parametrize(
    "make",
    at_once(
        *(TwoOptimizers, EveryThird),
        of=[WithLBFGS, TwoOptimizers, EveryThird, PlateauOfSteps],
        seconds=1,
    ),
)
def test_other_ways_to_step_resume_to_the_same_weights_bit_for_bit(tmp_path, make, validations):
    if make is PlateauOfSteps and not validations:
        pytest.skip("it has no loss to look at")
    assert differs_after_resume(tmp_path, make, limit_val_batches=validations) == 0.0


class Breaks(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            raise KeyError("planted")


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        ([], {"step-5", "step-7"}),
        ([WeightAveraging], {"step-5"}),
    ],
)
def test_a_step_that_a_mean_of_weights_has_not_seen_is_not_kept(tmp_path, others, kept):
    exact = ExactCheckpoint(tmp_path / "kept", every_minutes=None, every_steps=5)
    callbacks = [Breaks(), *(each() for each in others), exact]
    trainer = L.Trainer(
        callbacks=callbacks, accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, **QUIET
    )
    with pytest.raises(KeyError, match="planted"):
        trainer.fit(Small(), loader(), loader())
    assert {path.name for path in (tmp_path / "kept").glob("step-*")} == kept


def test_two_optimizers_log_after_a_resume_at_the_steps_they_would_have(tmp_path):
    steps = []
    for name, epochs in (("whole", [3]), ("cut", [2, 3])):
        for number, each in enumerate(epochs):
            logger = CSVLogger(str(tmp_path / name), name="", version=f"{number}")
            settings = {"logger": logger, "log_every_n_steps": 1, "epochs": each}
            fit(tmp_path / name, TwoOptimizers(), resume=bool(number), **settings)
        steps.append([step for step, _ in curve(Path(logger.log_dir), "loss")])
    assert steps[1] == steps[0][-10:]


def test_settings_of_a_module_that_are_no_plain_values_leave_the_others(tmp_path):
    class Own(Small):
        def __init__(self, where: Path, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()

    with pytest.warns(
        UserWarning, match=r"where is a PosixPath.* Checkpoints leave /hyper_parameters/where out"
    ):
        fit(tmp_path, Own(Path("rows.csv"), 3))
    found = Own.load_from_checkpoint(as_file(tmp_path / "kept" / "last"), where=Path("rows.csv"))
    assert found.hparams["width"] == 3


def test_settings_of_omegaconf_are_kept_as_plain_values(tmp_path):
    class Own(Small):
        def __init__(self, settings: DictConfig) -> None:
            super().__init__()
            self.save_hyperparameters(settings)

    fit(tmp_path, Own(OmegaConf.create({"sizes": [3, 4], "optim": {"lr": 0.1}})))
    fit(
        tmp_path,
        Own(OmegaConf.create({"sizes": [3, 4], "optim": {"lr": 0.1}})),
        epochs=3,
        resume=True,
    )


def test_the_best_can_be_loaded_by_lightning_s_own_load_from_checkpoint(tmp_path):
    class Own(Small):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.other = torch.nn.Linear(3, width)

    module = Own(5)
    fit(tmp_path, module)
    found = Own.load_from_checkpoint(as_file(tmp_path / "kept" / "last"))
    assert torch.equal(found.other.weight, module.other.weight)


def test_a_trainer_can_be_pickled_and_copied_after_training_and_after_a_resume(tmp_path):
    for resume in (False, True):
        trainer = fit(tmp_path, Small(), epochs=2 + resume, resume=resume)
        assert pickle.loads(pickle.dumps(trainer)).global_step == trainer.global_step
        assert copy.deepcopy(trainer).global_step == trainer.global_step


class StopsWithinAWindow(L.Callback):
    """Asks the training to stop at the fifth batch, the second of a step of three."""

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        trainer.should_stop = trainer.should_stop or batch_idx == 4


def test_a_stop_within_an_accumulation_window_waits_for_its_step(tmp_path):
    trainer = fit(tmp_path, Small(), StopsWithinAWindow(), epochs=1, accumulate_grad_batches=3)
    assert trainer.global_step == 2
    assert trainer.fit_loop.epoch_loop.batch_progress.current.completed == 6


class Normed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))


class KeepsPlace:
    """A loader that knows how many batches it has given."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return len(loader())

    def __iter__(self) -> Iterator[Any]:
        for batch in itertools.islice(loader(), self.given, None):
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@pytest.mark.parametrize("part", [[], [FastLoop]])
def test_a_validation_within_an_accumulation_window_is_saved_at_the_end_of_its_step(tmp_path, part):
    """Ten batches, four to a step, validated after 3, 6 and 9: steps 1, 2 and 3 are saved."""
    ended = {}
    kept = tmp_path / "kept"
    for name in (None, "step-1"):
        L.seed_everything(3, verbose=False)
        module = Normed()
        exact = ExactCheckpoint(kept, keep=9, every_minutes=None, monitor="val/loss")
        trainer = quiet_trainer(
            tmp_path,
            callbacks=[exact, *(each() for each in part)],
            accumulate_grad_batches=4,
            val_check_interval=3,
            num_sanity_val_steps=0,
            enable_checkpointing=True,
        )
        resume = None if name is None else kept / name
        trainer.fit(module, KeepsPlace(), loader(), ckpt_path=resume)
        ended[name] = module.state_dict()
        saved = sorted(path.name for path in kept.glob("step-*"))
        assert saved == ["step-1", "step-2", "step-3"]
        assert exact.best.resolve().name in saved
        assert same(ended[name], ended[None])


class AddsWhileSaving(Small):
    """Brings along what no file of ours can hold, and no one can know before it saves."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["tools"] = {"words": str.split}


@pytest.mark.filterwarnings("default:no checkpoint")
def test_what_a_hook_adds_while_saving_leaves_that_checkpoint_out_and_the_training_goes_on(
    tmp_path,
):
    with pytest.warns(
        UserWarning, match="no checkpoint: checkpoint: value /tools/words is a method_descriptor"
    ):
        trainer = fit(tmp_path, AddsWhileSaving())
    assert trainer.state.finished
    assert trainer.current_epoch == 2
    assert not list((tmp_path / "kept").glob("*"))


def test_several_ranks_end_where_one_of_them_cannot_save(tmp_path, monkeypatch):
    monkeypatch.setattr("flatout.checkpoints.exact.are_several", lambda: True)
    with pytest.raises(UserError, match="value /tools/words is a method_descriptor"):
        fit(tmp_path, AddsWhileSaving())


class Keeps(L.Callback):
    """A callback whose state is what it is given."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        self.state = state_dict


def test_arrays_and_keys_of_several_values_in_a_callback_s_state_come_back(tmp_path):
    state = {
        "counts": np.arange(6, dtype=np.int32).reshape(2, 3),
        ("a", 1): {2: (3.0, None)},
        "one": np.float64(0.5),
    }
    fit(tmp_path, Small(), Keeps(state))
    found = Keeps({})
    fit(tmp_path, Small(), found, epochs=3, resume=True)
    counts = found.state.pop("counts")
    assert counts.dtype == np.int32
    assert np.array_equal(counts, np.arange(6).reshape(2, 3))
    assert found.state == {("a", 1): {2: (3.0, None)}, "one": 0.5}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weights": torch.eye(3).to_sparse()}, "/weights is a sparse tensor"),
        ({torch.nn.Linear: 1}, "is a type"),
        ({"names": np.array([object()])}, "/names is a ndarray of object"),
    ],
)
def test_values_that_no_file_of_ours_can_hold_are_refused_in_one_sentence_before_training(
    tmp_path, state, words
):
    with pytest.raises(UserError, match=words):
        fit(tmp_path, Small(), Keeps(state))
    assert not (tmp_path / "kept").exists()
