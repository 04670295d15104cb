"""`ExactCheckpoint` in a plain `L.Trainer`: a killed training continues to the same weights, bit
for bit.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from flatout import UserError
from flatout.callbacks import ExactCheckpoint
from flatout.checkpoints.folder import FolderCheckpointIO, require_whole
from flatout.checkpoints.kept import link, newest_first, shelve
from tests.callbacks.plain import Small
from tests.checkpoints.plain_training import loops, parts, train, train_until_killed
from tests.params import at_once
from tests.trainers import QUIET
from tests.warm import Command

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:.*ended before the epoch ended.*",
    "ignore:.*callbacks used to create the checkpoint.*",
)


def killed(kind: str, folder: Path, loop: str, batch: int) -> None:
    """A training in another process that SIGKILL ends inside an optimizer step."""
    process = Command(
        partial(train_until_killed, kind, folder, is_fast=loop == "fast", batch=batch)
    )
    said, _ = process.communicate(120)
    assert process.returncode == -signal.SIGKILL, said


def names(folder: Path) -> list[str]:
    return [path.name for path in newest_first(folder)]


class Stopped(RuntimeError):
    """What a callback raises to end a training."""


class StopAt(L.Callback):
    def __init__(self, batch: int, hook: str = "on_train_batch_start") -> None:
        self.batch = batch
        setattr(self, hook, self._stop)

    def _stop(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            raise Stopped


@pytest.mark.soak(seconds=7)
@pytest.mark.parametrize("loop", ["fast", "plain"])
def test_a_training_killed_inside_an_epoch_continues_to_the_same_weights(tmp_path, loop):
    whole = train("text", tmp_path / "whole", *loops(loop == "fast"))
    killed("text", tmp_path / "killed", loop, 27)
    assert all(require_whole(path) for path in newest_first(tmp_path / "killed"))
    assert names(tmp_path / "killed") == ["step-12", "step-10"]  # 20 batches an epoch, 2 a step
    resumed = train("text", tmp_path / "killed", *loops(loop == "fast"), resume=True)
    assert torch.equal(resumed, whole)


@pytest.mark.parametrize("loop", ["fast", *at_once(of=["plain"], seconds=1)])
def test_a_damaged_newest_checkpoint_is_printed_and_the_one_before_is_used(tmp_path, capfd, loop):
    whole = train("text", tmp_path / "whole", *loops(loop == "fast"))
    with pytest.raises(Stopped):
        train("text", tmp_path / "cut", *loops(loop == "fast"), StopAt(16))
    newest, before = newest_first(tmp_path / "cut")[:2]
    file = newest / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    exact = ExactCheckpoint(tmp_path / "cut")
    assert exact.latest() == before
    assert f"checkpoint {newest}: damaged: tensors.safetensors differ" in capfd.readouterr().out
    assert torch.equal(train("text", tmp_path / "cut", *loops(loop == "fast"), resume=True), whole)


def test_an_exception_between_two_steps_keeps_the_last_boundary(tmp_path):
    whole = train("text", tmp_path / "whole", every_steps=None)
    with pytest.raises(Stopped):
        train("text", tmp_path / "cut", StopAt(13, "on_train_batch_end"), every_steps=None)
    assert names(tmp_path / "cut") == ["step-7"]
    assert torch.equal(train("text", tmp_path / "cut", resume=True), whole)


def test_another_datamodule_is_exact_after_whole_epochs_and_says_what_it_cannot_keep(
    tmp_path, capfd
):
    whole = train("foreign", tmp_path / "whole", max_epochs=3, every_steps=None)
    said = capfd.readouterr().out
    assert (
        said.count(
            "the loader of SmallData has no state_dict, so its position inside an epoch cannot be"
            " kept"
        )
        == 1
    )
    train("foreign", tmp_path / "first", max_epochs=2, every_steps=None)
    resumed = train("foreign", tmp_path / "first", max_epochs=3, every_steps=None, resume=True)
    assert torch.equal(resumed, whole)


def test_another_datamodule_resumes_inside_an_epoch_with_the_batches_that_are_left(tmp_path):
    class Count(L.Callback):
        batches = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.batches += 1

    with pytest.raises(Stopped):
        train("foreign", tmp_path / "cut", StopAt(14))
    assert names(tmp_path / "cut")[0] == "step-7"
    count = Count()
    train("foreign", tmp_path / "cut", count, resume=True)
    assert count.batches == 20 - 14


def test_fast_loop_and_lightning_s_own_loop_read_each_other_s_checkpoints(tmp_path):
    for first, second in (("fast", "plain"), ("plain", "fast")):
        with pytest.raises(Stopped):
            train("text", tmp_path / first, *loops(first == "fast"), StopAt(15))
        train("text", tmp_path / first, *loops(second == "fast"), resume=True)
        assert names(tmp_path / first)[0] == "step-20"


def test_the_best_and_the_newest_are_kept_and_a_test_reads_the_best(tmp_path, caplog, monkeypatch):
    # A script with Hydra shows what Lightning logs: no line for each save.
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("lightning"), "propagate", True)
    caplog.set_level(logging.INFO, "lightning.pytorch")
    module, data = parts("text")
    exact = ExactCheckpoint(
        tmp_path / "kept", every_steps=1, keep=3, monitor="val/loss", mode="min"
    )
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[exact], default_root_dir=tmp_path, **QUIET
    )
    trainer.fit(module, datamodule=data)
    assert "weights_only" not in caplog.text
    last = trainer.global_step
    assert set(names(tmp_path / "kept")) >= {f"step-{last}", f"step-{last - 1}", f"step-{last - 2}"}
    assert exact.best.resolve().name == f"step-{exact.best_so_far.step}"
    trainer.test(datamodule=data, ckpt_path="best", verbose=False)
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    assert (tmp_path / "other.ckpt").is_file()


def test_a_longer_training_continues_where_patience_had_ended_one(tmp_path):
    def stopping() -> EarlyStopping:
        return EarlyStopping("val/loss", patience=2, mode="max", min_delta=1e9)

    train("text", tmp_path / "kept", stopping(), max_epochs=5)
    assert names(tmp_path / "kept")[0] == "step-30"
    train("text", tmp_path / "kept", stopping(), max_epochs=5, resume=True)
    assert names(tmp_path / "kept")[0] == "step-30"
    train("text", tmp_path / "kept", stopping(), max_epochs=6, resume=True)
    assert names(tmp_path / "kept")[0] == "step-40"


def test_hyperparameters_that_are_no_plain_values_are_left_out(tmp_path):
    class Odd(Small):
        def __init__(self, layer: object) -> None:
            super().__init__()
            self.save_hyperparameters()

    exact = ExactCheckpoint(tmp_path / "kept")
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[exact], default_root_dir=tmp_path, **QUIET
    )
    with pytest.warns(UserWarning, match="Checkpoints leave /hyper_parameters/layer out"):
        trainer.fit(Odd({1, 2}), datamodule=parts("foreign")[1])
    assert exact.latest() is not None


def test_a_checkpoint_of_other_steps_is_refused_in_one_sentence(tmp_path):
    train("text", tmp_path / "kept")
    with pytest.raises(
        UserError, match="another training: rows a step was 32 and is 64; steps an epoch was 10 and"
    ):
        train("text", tmp_path / "kept", resume=True, accumulate_grad_batches=4)


@pytest.mark.parametrize(
    ("monitor", "mode", "expected"),
    [
        *[
            ("val_loss", "auto", "min"),
            ("val/rmse", "auto", "min"),
            ("val_f1", "auto", "max"),
            (None, "auto", "max"),
        ],
        *[("val_loss", "max", "max"), ("val_f1", "min", "min")],
    ],
)
def test_an_error_is_better_lower_where_nothing_else_is_said(monitor, mode, expected, tmp_path):
    assert ExactCheckpoint(tmp_path, monitor=monitor, mode=mode).best_so_far.mode == expected


def test_settings_out_of_range_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"ExactCheckpoint\.every_steps: 0"):
        ExactCheckpoint(tmp_path, every_steps=0)
    with pytest.raises(UserError, match=r"ExactCheckpoint\.keep: 0"):
        ExactCheckpoint(tmp_path, keep=0)
    with pytest.raises(UserError, match=r"ExactCheckpoint\.mode: 'highest'"):
        ExactCheckpoint(tmp_path, mode="highest")


def test_a_training_that_begins_anew_leaves_the_checkpoints_of_another_one_alone(tmp_path):
    train("text", tmp_path / "kept", max_epochs=1)
    before = names(tmp_path / "kept")
    with pytest.raises(
        UserError, match=r"has checkpoints of another training.*ckpt_path=exact\.latest\(\)"
    ):
        train("text", tmp_path / "kept", max_epochs=1)
    assert names(tmp_path / "kept") == before


def test_files_of_lightning_stay_files_in_the_folder_of_exact_checkpoints(tmp_path):
    train(
        "text", tmp_path / "kept", ModelCheckpoint(tmp_path / "kept", save_last=True), max_epochs=1
    )
    assert (tmp_path / "kept" / "last.ckpt").is_file()
    assert torch.load(tmp_path / "kept" / "last.ckpt", weights_only=True)["global_step"] > 0


def test_the_best_stays_where_a_better_one_cannot_be_written(tmp_path):
    for step in (2, 3, 4):
        (tmp_path / f"step-{step}").mkdir()
    link(tmp_path, "best", 2)
    shelve(tmp_path, last=4, best=9, keep=1)
    assert (tmp_path / "best").resolve().name == "step-2"
    assert names(tmp_path) == [
        "step-4",
        "step-2",
    ]


def test_a_validation_inside_a_step_is_repeated_with_it(tmp_path):
    whole = train("text", tmp_path / "whole", val_check_interval=3)
    with pytest.raises(Stopped):
        train("text", tmp_path / "cut", StopAt(4), val_check_interval=3, every_steps=None)
    assert torch.equal(train("text", tmp_path / "cut", resume=True, val_check_interval=3), whole)


def test_milestones_keys_with_slashes_and_complex_numbers_come_back_as_they_were(tmp_path):
    state = {
        "milestones": Counter([2, 4, 4]),
        "a/b": torch.tensor(1.0),
        "a": {"b": torch.tensor(2.0)},
        "mean": np.array(0.5),
        "wave": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128),
    }
    FolderCheckpointIO().save_checkpoint(state, tmp_path / "step-1")
    found = FolderCheckpointIO().load_checkpoint(tmp_path / "step-1")
    assert type(found["milestones"]) is Counter
    assert found["milestones"] == state["milestones"]
    assert (float(found["a/b"]), float(found["a"]["b"])) == (1.0, 2.0)
    assert found["mean"].shape == ()
    assert found["wave"].dtype == torch.complex128
    assert torch.equal(found["wave"], state["wave"])
