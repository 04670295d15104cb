"""Checkpoints of Lightning's own, written beside `ExactCheckpoint`, are those that a Trainer
without it writes. Plugins, wrapped loops, keys of states and other processes work as without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from flatout.callbacks import ExactCheckpoint
from flatout.checkpoints.folder import FolderCheckpointIO
from tests.callbacks.plain import Small, loader
from tests.same import same
from tests.trainers import QUIET, quiet_trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:.*ended before the epoch ended.*",
    "ignore:.*callbacks used to create the checkpoint.*",
    "ignore:.*Checkpoints leave .* out.*",
    "ignore:The dirpath has changed from.*",
)
ORDERS = ["none of ours", "ours first", "ours last"]


class Seen(Small):
    """Notes which batches train it."""

    def __init__(self, where: object = None, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batches: list[tuple[int, int, float]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.batches.append((self.trainer.current_epoch, batch_idx, float(batch[0][0, 0])))
        return super().training_step(batch, batch_idx)


def fit(
    folder: Path, order: str, *, where: object = None, resume: Path | None = None
) -> tuple[Seen, L.Trainer]:
    """A training of three epochs of ten batches whose files are written in the middle of the
    second.
    """
    theirs = ModelCheckpoint(folder / "theirs", "{step}", every_n_train_steps=7, save_top_k=-1)
    callbacks: list[L.Callback] = [theirs]
    if order != "none of ours":
        ours = ExactCheckpoint(folder / "ours", every_steps=4, every_minutes=None)
        callbacks = [ours, theirs] if order == "ours first" else [theirs, ours]
    L.seed_everything(3, verbose=False)
    module = Seen(where)
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(module, loader(), loader(), ckpt_path=resume, weights_only=False)
    return module, trainer


def read(path: Path, *, without: type[Checkpoint] = ExactCheckpoint) -> dict[str, Any]:
    """A file of Lightning's, less the state of our callback in it and the folder it was
    written to.
    """
    content: dict[str, Any] = torch.load(path, weights_only=False)
    content["callbacks"] = [key for key in content["callbacks"] if without.__name__ not in key]
    return content


@pytest.mark.parametrize("order", ORDERS[1:])
def test_files_of_lightning_s_own_hold_what_they_hold_without_ours(tmp_path, order):
    _, plain = fit(tmp_path / "plain", "none of ours", where=Path("rows.csv"))
    _, beside = fit(tmp_path / "beside", order, where=Path("rows.csv"))
    plain.save_checkpoint(tmp_path / "plain" / "theirs" / "end.ckpt")
    beside.save_checkpoint(tmp_path / "beside" / "theirs" / "end.ckpt")
    files = sorted(path.name for path in (tmp_path / "plain" / "theirs").iterdir())
    assert files == ["end.ckpt", "step=14.ckpt", "step=21.ckpt", "step=28.ckpt", "step=7.ckpt"]
    for name in files:
        one, other = (read(tmp_path / folder / "theirs" / name) for folder in ("plain", "beside"))
        assert one.keys() == other.keys()
        assert [key for key in one if not same(one[key], other[key])] == [], name
        assert other["hyper_parameters"] == {"where": Path("rows.csv"), "width": 3}


@pytest.mark.parametrize("order", ORDERS[1:])
def test_a_resume_from_lightning_s_file_trains_the_same_batches(tmp_path, order):
    plain = tmp_path / "plain"
    ours = tmp_path / "beside"
    fit(plain, "none of ours")
    fit(ours, order)
    file = Path("theirs") / "step=14.ckpt"
    left, _ = fit(tmp_path / "as plain", "none of ours", resume=plain / file)
    assert len(left.batches) == 30 - 14
    for folder, resumed in (
        (ours, "none of ours"),
        (plain, order),
        (ours, order),
    ):
        again, _ = fit(tmp_path / "again", resumed, resume=folder / file)
        assert again.batches == left.batches
        assert torch.equal(again.layer.weight, left.layer.weight)


@pytest.mark.parametrize("order", ORDERS[1:])
def test_our_own_folders_hold_the_step_they_are_named_by_whichever_callback_comes_first(
    tmp_path, order
):
    whole, _ = fit(tmp_path, order)
    left, _ = fit(tmp_path / "again", order, resume=tmp_path / "ours" / "step-30")
    assert left.batches == []
    assert torch.equal(left.layer.weight, whole.layer.weight)


def test_a_rate_finder_at_some_epochs_ends_and_training_continues(tmp_path):
    class Again(LearningRateFinder):
        """The fine-tuning finder of Lightning's page: it searches again at the start of some
        epochs.
        """

        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pass

        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 1 and not starts:
                starts.append(trainer.global_step)
                self.lr_find(trainer, pl_module)

    class Rated(Seen):
        lr = 1e-4

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    counts = []
    for folder, ours in (
        ("plain", []),
        ("beside", [ExactCheckpoint(tmp_path / "ours", every_minutes=None)]),
    ):
        starts: list[int] = []
        trainer = L.Trainer(
            max_epochs=3,
            accelerator="cpu",
            callbacks=[Again(num_training_steps=5), *ours],
            default_root_dir=tmp_path / folder,
            num_sanity_val_steps=0,
            **QUIET,
        )
        module = Rated()
        trainer.fit(module, loader(), loader())
        counts.append((starts, len(module.batches), trainer.global_step))
    assert counts[0] == counts[1]


class ByNames(TorchCheckpointIO):
    """A user's plugin, which takes by name what Lightning passes by name."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, *, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *, weights_only: bool | None = None) -> dict[str, Any]:
        return super().load_checkpoint(path, weights_only=weights_only)


def short_trainer(folder: Path, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    return quiet_trainer(
        folder,
        callbacks=list(callbacks),
        enable_checkpointing=True,
        limit_train_batches=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        **settings,
    )


def test_a_plugin_that_takes_options_by_name_saves_and_reads_its_own_files(tmp_path):
    ours = ExactCheckpoint(tmp_path / "ours", every_minutes=None)
    trainer = short_trainer(tmp_path, ours, plugins=[ByNames()])
    trainer.fit(Small(), loader(), loader())
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    trainer.validate(Small(), loader(), ckpt_path=tmp_path / "own.ckpt", verbose=False)
    assert trainer.validate(Small(), loader(), ckpt_path=ours.latest(), verbose=False)


def test_a_validation_that_someone_has_wrapped_is_called_and_stays_wrapped(tmp_path):
    trainer = short_trainer(tmp_path, ExactCheckpoint(tmp_path / "ours", every_minutes=None))
    loop = trainer.fit_loop.epoch_loop.val_loop
    plain = loop.run
    calls: list[int] = []

    def run() -> Any:
        calls.append(trainer.global_step)
        return plain()

    loop.run = run
    trainer.fit(Small(), loader(), loader())
    assert calls == [2]
    assert loop.run is run
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Small(), loader(), loader(), ckpt_path=tmp_path / "ours" / "step-2")
    assert calls == [2, 4]


def test_a_validation_from_a_checkpoint_warns_of_nothing_and_leaves_the_links(tmp_path):
    kept = tmp_path / "ours"
    ours = ExactCheckpoint(kept, every_minutes=None, monitor="val/loss")
    short_trainer(tmp_path, ours).fit(Small(), loader(), loader())
    best = ours.best.resolve()
    for other in (
        ExactCheckpoint(kept, monitor="val/accuracy"),
        ExactCheckpoint(tmp_path / "other", monitor="val/loss"),
    ):
        trainer = short_trainer(tmp_path, other)
        trainer.validate(Small(), loader(), ckpt_path=best, verbose=False)
        assert other.best_so_far.step == 2
    fresh = ExactCheckpoint(kept)
    fresh.load_state_dict(ours.state_dict())
    assert ours.best.resolve() == best


class ByClass(L.Callback):
    """A callback whose state stands under a class, as before Lightning 1.5."""

    state_key = Small

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]


@pytest.mark.filterwarnings("error:.*callbacks used to create the checkpoint.*")
@pytest.mark.parametrize("plugins", [[], [FolderCheckpointIO]])
def test_a_state_whose_key_is_a_class_comes_back(tmp_path, plugins):
    ours = ExactCheckpoint(tmp_path / "ours", every_minutes=None)
    settings = {"plugins": [each() for each in plugins]}
    short_trainer(tmp_path, ours, ByClass(5), **settings).fit(Small(), loader(), loader())
    again = ByClass(0)
    trainer = short_trainer(tmp_path, ours, again, max_epochs=2, **settings)
    trainer.fit(Small(), loader(), loader(), ckpt_path=ours.latest())
    assert again.count == 5


@pytest.mark.filterwarnings("ignore:.*sync_dist=True.*")
def test_a_training_in_another_process_ends_with_the_path_of_the_best(tmp_path):
    ours = ExactCheckpoint(tmp_path / "ours", every_minutes=None, monitor="val/loss")
    trainer = short_trainer(tmp_path, ours, strategy="ddp_fork", devices=1)
    trainer.fit(Small(), loader(), loader())
    assert Path(ours.best_model_path).resolve() == tmp_path / "ours" / "step-2"
