"""Timer, throughput, hardware, profile and progress in somebody's Trainer: they log, and change
nothing else.
"""

from __future__ import annotations

import copy
import pickle
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner

from flatout.callbacks import HardwareMonitor, ProfileSteps, ProgressLine, StepTimer, Throughput
from flatout.callbacks.hardware_watch import Host
from flatout.callbacks.run_curves import RunCurves
from tests.callbacks.plain import Rows, Small, TwoOptimizers, loader, train
from tests.run_files import curve
from tests.trainers import QUIET

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:You defined a `validation_step`.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*callbacks used to create the checkpoint.*",
)


class Own(L.Callback):
    """A callback of the user's, which the timer watches."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Rated(Small):
    lr = 1e-4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Rows(), 4)


class LogsEachStep(Small):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss.detach())
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_own", 1.0)


class BothLogging(TwoOptimizers, LogsEachStep):
    """Two optimizers, whose steps log twice."""


def watching() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "watch"]


def test_a_tuner_leaves_the_hooks_of_watched_callbacks_as_they_were(tmp_path):
    own = Own()
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[StepTimer(), own],
        default_root_dir=tmp_path,
        **QUIET,
    )
    module = Rated()
    Tuner(trainer).lr_find(module, num_training=20)
    assert "on_train_batch_end" not in vars(own)
    assert "save_checkpoint" not in vars(trainer)
    trainer.fit(module)
    assert trainer.state.finished
    assert "on_train_batch_end" not in vars(own)


def test_methods_that_a_user_has_set_on_an_object_stay_set(tmp_path):
    calls: list[str] = []
    own = Own()
    timer = StepTimer()

    def hook(*_: object) -> None:
        calls.append("hook")

    own.on_train_batch_end = hook
    saving = ModelCheckpoint(tmp_path / "kept")
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[timer, own, saving],
        default_root_dir=tmp_path,
        **QUIET,
    )
    plain = trainer.save_checkpoint

    def save(*arguments: Any, **more: Any) -> None:
        calls.append("save")
        plain(*arguments, **more)

    trainer.save_checkpoint = save
    trainer.fit(Small(), loader())
    assert trainer.save_checkpoint is save
    assert own.on_train_batch_end is hook
    assert calls == ["hook"] * 10 + ["save"]
    assert timer.clock.counts["checkpoint"] == 1


class Copies(L.Callback):
    """Copies and pickles all callbacks while they work."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        if batch_idx == 3:
            self.copies = [
                copy.deepcopy(trainer.callbacks),
                pickle.loads(pickle.dumps(trainer.callbacks)),
            ]


def test_observers_can_be_copied_and_pickled_in_training_and_with_their_trainer(tmp_path):
    copies = Copies()
    monitor = HardwareMonitor(every_s=0.01, sources=[Host()])
    parts = [monitor, StepTimer(), Throughput(), ProgressLine(2, say=print)]
    trainer = train(tmp_path, [*parts, copies], Small(forward=0.01))
    for found in copies.copies:
        assert [type(each) for each in found] == [type(each) for each in trainer.callbacks]
        assert found[2].volume.total.rows == 0
        assert found[2].volume.now.rows == 16
    again = pickle.loads(pickle.dumps(trainer))
    assert again.callbacks[0].summary() == {}
    assert again.global_step == 10
    assert copy.deepcopy(trainer).callbacks[1].times.total.batches == 10
    train(tmp_path / "again", [copy.deepcopy(monitor)], Small(forward=0.01))


@pytest.mark.parametrize("where", ["on_fit_start", "on_train_epoch_start"])
def test_the_monitor_s_thread_ends_with_a_search_that_fails(tmp_path, where):
    class Fails(Rated):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
            if not any(isinstance(each, HardwareMonitor) for each in self.trainer.callbacks):
                raise RuntimeError("the search fails")
            return super().training_step(batch, batch_idx)

    class Finder(LearningRateFinder):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if where == "on_fit_start":
                self.lr_find(trainer, pl_module)

        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.lr_find(trainer, pl_module)

    # A search before the training leaves no thread at all; one within it ends with the next look.
    monitor = HardwareMonitor(every_s=1.0 if where == "on_fit_start" else 0.01)
    callbacks = [monitor, Finder(num_training_steps=3)]
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=callbacks, default_root_dir=tmp_path, **QUIET
    )
    with pytest.raises(RuntimeError, match="the search fails"):
        trainer.fit(Fails(), loader())
    if where == "on_train_epoch_start":
        time.sleep(0.2)
    assert not watching()


@pytest.mark.parametrize("make", [LogsEachStep, BothLogging])
def test_curves_stand_at_the_steps_of_what_the_module_logs(tmp_path, make):
    timer = StepTimer(1)
    throughput = Throughput(3)
    train(tmp_path, [timer, throughput], make(), max_epochs=2, accumulate_grad_batches=1)
    steps = [step for step, _ in curve(tmp_path, "own")]
    assert steps == list(range(20)) == [step for step, _ in curve(tmp_path, "time/forward_ms")]
    assert [step for step, _ in curve(tmp_path, "speed/rows_per_s")] == [2, 5, 8, 9, 12, 15, 18, 19]
    assert [step for step, _ in curve(tmp_path, "val_own")] == [9, 19]
    # its warm-up is five batches, however many optimizers step
    assert timer.times.first.batches == 5


class LogsEachEpoch(Small):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss.detach(), on_step=False, on_epoch=True)
        return loss


def test_a_curve_at_the_end_of_an_epoch_stands_where_lightning_s_own_values_of_it_do(tmp_path):
    parts = [StepTimer(50), Throughput(4)]
    train(tmp_path, parts, LogsEachEpoch(), max_epochs=2, limit_val_batches=0)
    assert [step for step, _ in curve(tmp_path, "own")] == [9, 19]
    assert [step for step, _ in curve(tmp_path, "time/forward_ms")] == [9, 19]
    assert [step for step, _ in curve(tmp_path, "speed/rows_per_s")] == [3, 7, 9, 13, 17, 19]


@pytest.mark.parametrize("make", [LogsEachStep, BothLogging])
def test_a_validation_before_the_first_flush_shows_the_loss_where_there_is_one(tmp_path, make):
    said: list[str] = []
    train(tmp_path, [ProgressLine(say=said.append)], make())
    loss = f"train loss {curve(tmp_path, 'own')[-1][1]:.4f}  "
    expected = f"step    10  {loss}" if make is LogsEachStep else "step    20  "
    assert said == [f"epoch  1.00  {expected}val own 1.0000"]


def test_two_of_one_callback_are_one_with_a_line(tmp_path, capsys):
    profiles = [
        ProfileSteps(wait=1, warmup=1, active=2, folder=tmp_path, say=print) for _ in range(2)
    ]
    train(
        tmp_path,
        [HardwareMonitor(4), HardwareMonitor(4, every_s=0.01), *profiles],
        Small(forward=0.01),
    )
    said = capsys.readouterr().out
    assert said.count("another one samples already; this one logs nothing") == 1
    assert said.count("steps, 3 to 4: trace.json.gz") == 1


def test_a_second_training_is_profiled_too(tmp_path):
    said: list[str] = []
    profile = ProfileSteps(wait=1, warmup=1, active=2, folder=tmp_path, say=said.append)
    for folder in ("one", "two"):
        train(tmp_path / folder, [profile])
    assert len([line for line in said if line.startswith("profile: 2 steps, 3 to 4")]) == 2


def test_the_curves_of_a_run_take_an_endless_stream(tmp_path):
    class Keeps:
        epochs: ClassVar[list[float]] = []

        def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
            self.epochs.append(epoch)

        on_validation = on_flush
        close = on_flush

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([Rows()[number] for number in range(40)])

    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[RunCurves([Keeps()], 5)],
        default_root_dir=tmp_path,
        **QUIET,
    )
    trainer.fit(Small(), torch.utils.data.DataLoader(Stream(), 4))
    assert Keeps.epochs == [0.0, 0.0]


def test_observers_work_in_barebones_mode(tmp_path):
    timer = StepTimer()
    throughput = Throughput()
    trainer = L.Trainer(
        barebones=True,
        max_epochs=1,
        accelerator="cpu",
        callbacks=[timer, throughput, HardwareMonitor()],
        default_root_dir=Path(tmp_path),
    )
    trainer.fit(Small(), loader())
    assert throughput.volume.total.rows == 40
    assert timer.times.total.batches == 10
