"""Each callback alone in a plain Trainer, with a module and a loader that know nothing of it."""

from __future__ import annotations

import gzip
import threading
import time
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    TQDMProgressBar,
)
from torch.utils.data import DataLoader

from flatout.callbacks import (
    HardwareMonitor,
    ProfileSteps,
    ProgressLine,
    StepTimer,
    Throughput,
    each_second,
    run_curves,
)
from flatout.callbacks.clock import PARTS
from flatout.callbacks.device_reads import DeviceReads
from flatout.callbacks.gpu import CURVES
from flatout.callbacks.step_timer import _others
from flatout.data.batches.batch_rows import rows_of
from flatout.data.batches.flat_batch import FlatBatch, flat_batch
from flatout.engine.peaks import Peak
from flatout.errors import UserError
from tests.callbacks.plain import BATCH, ROWS, Small, TwoOptimizers, loader, train
from tests.params import at_once
from tests.run_files import curve, read_csv
from tests.trainers import QUIET, quiet_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
SLOW_S = 0.04
SLOWEST_S = 0.2
SEVEN = {"limit_train_batches": 7}
"""Slow enough to stand out on a machine that others load."""


def split_of(timer: StepTimer) -> dict[str, float]:
    """Milliseconds of each part of training for each batch; a machine warms up in the
    first steps.
    """
    return {
        name: value
        for name, value in timer.times.counted().values().items()
        if value and name != "time/validation_ms"
    }


@pytest.mark.parametrize(
    "part", at_once("backward", of=["forward", "backward", "optimizer"], seconds=1)
)
def test_the_step_timer_finds_the_slow_phase_of_a_plain_module(tmp_path, part):
    timer = StepTimer(4)
    train(tmp_path, [timer], Small(**{part: SLOWEST_S}), **SEVEN)
    split = split_of(timer)
    assert max(split, key=split.get) == f"time/{part}_ms"
    assert split[f"time/{part}_ms"] > 1000 * SLOWEST_S
    assert [step for step, _ in curve(tmp_path, f"time/{part}_ms")] == [3, 6]


def test_the_step_timer_finds_a_slow_loader(tmp_path):
    timer = StepTimer()
    train(tmp_path, [timer], slow_s=SLOWEST_S / BATCH, limit_val_batches=0, **SEVEN)
    split = split_of(timer)
    assert max(split, key=split.get) == "time/wait_ms"
    assert split["time/wait_ms"] > 1000 * SLOWEST_S
    assert "time/transfer_ms" not in read_csv(tmp_path / "metrics.csv")[0]  # not known apart


class Sleeps(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(SLOWEST_S)

    def on_before_optimizer_step(self, *_: Any) -> None:
        time.sleep(SLOWEST_S)


@pytest.mark.parametrize("is_first", at_once(of=[True, False], seconds=2))
def test_the_step_timer_counts_a_slow_callback_once_wherever_it_stands(tmp_path, is_first):
    timer = StepTimer()
    slow = Sleeps()
    train(tmp_path, [slow, timer] if is_first else [timer, slow], **SEVEN)
    split = split_of(timer)
    assert split["time/callbacks_ms"] > 2000 * SLOWEST_S
    assert (
        sum(value for name, value in split.items() if name != "time/callbacks_ms")
        < split["time/callbacks_ms"]
    )
    assert set(timer.clock.callbacks) == {"Sleeps"}
    assert "on_train_batch_end" not in vars(slow)


def test_the_step_timer_names_callbacks_of_lightning_and_hooks_that_were_set_on_one(tmp_path):
    timer = StepTimer()
    slow = LambdaCallback(on_train_batch_end=lambda *_: time.sleep(SLOWEST_S))
    train(tmp_path, [timer, slow, LearningRateMonitor("step")], logger=True, **SEVEN)
    assert split_of(timer)["time/callbacks_ms"] > 1000 * SLOWEST_S
    assert max(timer.clock.callbacks, key=timer.clock.callbacks.__getitem__) == "LambdaCallback"
    assert timer.clock.callbacks.keys() >= {"LambdaCallback", "LearningRateMonitor"}


def test_the_step_timer_counts_checkpoints_of_lightning_and_validations(tmp_path):
    class SlowToSave(Small):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            time.sleep(SLOW_S)

    timer = StepTimer(4)
    saving = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=5)
    module = SlowToSave(validation=SLOW_S)
    began = time.perf_counter()
    trainer = train(
        tmp_path, [timer, saving], module, enable_checkpointing=True, val_check_interval=5
    )
    wall_s = time.perf_counter() - began
    assert timer.clock.counts["checkpoint"] == 2 == timer.clock.counts["validation"]
    assert timer.clock.spent["checkpoint"] > 2 * SLOW_S
    assert timer.clock.spent["validation"] > 2 * ROWS / BATCH * SLOW_S
    # validations are no time of training
    assert timer.times.total.seconds < wall_s - timer.clock.spent["validation"]
    assert "save_checkpoint" not in vars(trainer)


def test_the_parts_of_a_plain_training_add_up_to_its_time(tmp_path):
    timer = StepTimer(3)
    train(tmp_path, [timer], Small(forward=0.002))
    parts = timer.times.total.split()
    assert set(parts) == set(PARTS)
    assert sum(seconds for name, seconds in parts.items() if name != "validation") == pytest.approx(
        timer.times.total.seconds
    )
    assert parts["other"] < 0.5 * timer.times.total.seconds


def test_a_step_ends_where_lightning_accumulates_to(tmp_path):
    timer = StepTimer(1)
    throughput = Throughput(1)
    train(
        tmp_path, [timer, throughput], Small(forward=0.005), accumulate_grad_batches=2, max_epochs=4
    )
    assert [step for step, _ in curve(tmp_path, "speed/rows_per_s")] == list(range(20))
    assert timer.step_times.percentile(0.5) * 1000 > 10
    assert throughput.volume.total.rows == 4 * ROWS


def test_manual_optimization_with_two_backward_passes_is_timed(tmp_path):
    class Manual(Small):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                loss = super().training_step(batch, batch_idx)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    timer = StepTimer()
    train(tmp_path, [timer], Manual())
    split = split_of(timer)
    assert min(split[f"time/{phase}_ms"] for phase in ("forward", "backward", "optimizer")) > 0


def test_a_step_of_two_optimizers_is_one_step_of_the_profile_and_of_the_throughput(tmp_path):
    said: list[str] = []
    throughput = Throughput(1)
    profile = ProfileSteps(wait=3, warmup=1, active=3, folder=tmp_path / "profile", say=said.append)
    trainer = train(tmp_path, [profile, throughput], TwoOptimizers())
    assert trainer.global_step == 20
    assert (
        throughput.volume.total.steps,
        throughput.volume.total.rows,
    ) == (10, ROWS)
    assert said[0].startswith("profile: 3 steps, 5 to 7: ")
    rows = read_csv(tmp_path / "profile" / "operators.csv")
    assert {row["operator"]: row["calls"] for row in rows}["aten::addmm"] == str(3 * 2)


def test_callbacks_of_one_class_are_numbered_among_themselves():
    callbacks = [LambdaCallback(), LearningRateMonitor(), LambdaCallback(), LambdaCallback()]
    trainer = L.Trainer(callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=False)
    names = [name for name in _others(trainer) if "Lambda" in name]
    assert names == ["LambdaCallback", "LambdaCallback 2", "LambdaCallback 3"]


def test_the_line_of_a_stream_has_no_end():
    line = ProgressLine(say=str)
    line.on_train_start(SimpleNamespace(global_step=0, estimated_stepping_batches=-1), Small())
    (task,) = line._bar.tasks
    assert line._total is None
    assert line._bar.columns[2].render(task).plain == "0  "
    line.close()


def test_throughput_counts_rows_of_any_batch(tmp_path):
    throughput = Throughput(5)
    train(tmp_path, [throughput], max_epochs=2)
    assert throughput.volume.total.rows == 2 * ROWS
    names = set(read_csv(tmp_path / "metrics.csv")[0])
    assert "speed/rows_per_s" in names
    assert not names & {
        "speed/tokens_per_s",
        "speed/padding_share",
        "speed/mfu",
    }
    assert [step for step, _ in curve(tmp_path, "speed/rows_per_s")] == [4, 9, 14, 19]


ONE = torch.zeros(6, 2)
BATCHES = [
    ONE,
    [ONE, 3],
    (["text"], ONE),
    {"x": ONE},
    UserDict(ids=ONE),
    [{"x": [ONE]}],
    [torch.zeros(6), torch.zeros(2)],
]


@pytest.mark.parametrize("batch", BATCHES)
def test_rows_are_the_length_of_the_first_tensor(batch):
    assert rows_of(batch) == 6


@pytest.mark.parametrize("batch", [None, "text", ["text"], 3, []])
def test_a_batch_without_a_tensor_has_no_rows(batch):
    assert rows_of(batch) == 0


class Tokens(Small):
    """Reads flat batches, and knows what a row costs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(1, 2)
        self.model.training_flops = lambda lengths: float(1e6 * np.sum(lengths))

    def training_step(self, batch: FlatBatch, batch_idx: int) -> torch.Tensor:
        return self.model(batch.tokens.float().unsqueeze(1)).square().mean()

    def computed_tokens(self, batch: FlatBatch) -> int:
        return batch.longest() * batch.num_rows


def test_flat_batches_have_tokens_padding_and_mfu(tmp_path):
    throughput = Throughput(2, peak=Peak(0.5, "made up"))
    batches = DataLoader([[1], [1, 2, 3]] * 6, 2, collate_fn=flat_batch)
    trainer = quiet_trainer(callbacks=[throughput])
    trainer.fit(Tokens(), batches)
    total = throughput.volume.total
    assert (total.rows, total.tokens, total.computed) == (12, 24, 36)
    assert total.values()["speed/padding_share"] == pytest.approx(1 / 3)
    assert throughput.mfu(total) == pytest.approx(24e6 / total.seconds / 0.5e12)


def threads_that_watch() -> list[threading.Thread]:
    """Those that do not end by themselves: a monitor waits no longer than `every_s` for its own."""
    threads = [thread for thread in threading.enumerate() if thread.name == "watch"]
    for thread in threads:
        thread.join(5)
    return [thread for thread in threads if thread.is_alive()]


def test_the_hardware_monitor_logs_the_host_and_leaves_no_thread(tmp_path):
    train(tmp_path, [HardwareMonitor(4, every_s=0.01)], Small(forward=SLOW_S))
    assert all(value > 0 for _, value in curve(tmp_path, "host/process_memory_gb"))
    assert len(curve(tmp_path, "host/process_cpu_cores")) >= 2
    assert threads_that_watch() == []


def test_an_error_in_training_ends_the_monitor_and_gives_hooks_back(tmp_path):
    class Breaks(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise RuntimeError("broken")

    breaking = Breaks()
    timer = StepTimer()
    with pytest.raises(RuntimeError, match="broken"):
        train(tmp_path, [HardwareMonitor(every_s=0.01), timer, breaking])
    assert threads_that_watch() == []
    assert "on_train_batch_end" not in vars(breaking)
    assert "on_before_backward" not in vars(timer)


@pytest.mark.parametrize(
    ("metric", "shown"),
    [
        ("recall", ["recall"]),
        ("loss", ["f1", "auroc", "mae"]),
        (None, ["f1", "auroc", "mae"]),
    ],
)
def test_a_line_shows_the_metric_that_decides_wherever_it_stands_and_no_loss_twice(metric, shown):
    said: list[str] = []
    line = ProgressLine(metric=metric, say=said.append)
    line.on_validation(
        1, 1.0, {f"val/{name}": 0.5 for name in ("loss", "f1", "auroc", "mae", "recall")}
    )
    assert said == [
        "epoch  1.00  step     1  val loss 0.5000  "
        + "  ".join(f"val {name} 0.5000" for name in shown)
    ]


def test_the_progress_line_takes_the_place_of_lightnings_bar(tmp_path):
    said: list[str] = []
    line = ProgressLine(2, say=said.append)
    trainer = train(tmp_path, [line], enable_progress_bar=True, max_epochs=2)
    assert trainer.progress_bar_callback is line
    assert not [each for each in trainer.callbacks if isinstance(each, TQDMProgressBar)]
    assert len(said) == 2
    assert said[1].startswith("epoch  2.00  step    20  train loss ")
    train(tmp_path / "again", [line], enable_progress_bar=True, max_epochs=1)
    assert line._total == 10
    assert "nan" not in said[1]
    assert "val loss" in said[1]


def test_the_live_line_moves_between_flushes_and_knows_the_time_left(tmp_path, monkeypatch):
    monkeypatch.setattr(each_second, "_SHOWN_EACH_S", 0.0)
    line = ProgressLine(50, say=str)
    seen: list[float] = []
    left_s: list[float | None] = []

    class Looks(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            (task,) = line._bar.tasks
            seen.append(task.completed)
            left_s.append(task.time_remaining)

    train(tmp_path, [line, Looks()])
    assert seen == list(range(1, 11))
    assert None not in left_s[2:]
    curves = run_curves.RunCurves([], 50)
    curves.each_second.append(seen.append)
    train(tmp_path / "run", [curves])
    assert seen == [*range(1, 11), *range(1, 11)]


@pytest.mark.parametrize("metric", ["accuracy", "micro_f1"])
def test_a_lasting_line_fits_80_columns(metric):
    said: list[str] = []
    line = ProgressLine(metric=metric, say=said.append)
    line.on_flush(12_345, 88.0, {"train/loss": 1.25})
    line.on_validation(12_345, 88.0, {"val/loss": 0.5, f"val/{metric}": 0.5})
    assert len(said[0]) <= 80


def test_the_profile_goes_to_the_folder_of_the_logger(tmp_path):
    said: list[str] = []
    train(tmp_path, [ProfileSteps(wait=2, warmup=1, active=3, say=said.append)])
    train(
        tmp_path / "other",
        [ProfileSteps(wait=2, active=3, folder=tmp_path / "new" / "one", say=said.append)],
    )
    assert (tmp_path / "new" / "one" / "operators.csv").is_file()
    assert said[0] == "profile: 3 steps, 4 to 6: trace.json.gz for ui.perfetto.dev, operators.csv"
    with gzip.open(tmp_path / "trace.json.gz", "rt", encoding="utf-8") as trace:
        assert "ProfilerStep#3" in trace.read()
    assert "aten::addmm" in (tmp_path / "operators.csv").read_text(encoding="utf-8")


def test_all_of_them_together_log_beside_what_the_module_logs(tmp_path):
    class Logs(Small):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train/own", loss)
            return loss

    parts = [
        HardwareMonitor(2, every_s=0.01),
        StepTimer(2),
        Throughput(2),
        ProgressLine(2, say=lambda line: None),
    ]
    train(
        tmp_path,
        [*parts, ProfileSteps(wait=0, folder=tmp_path, say=lambda line: None)],
        Logs(forward=0.01),
    )
    rows = read_csv(tmp_path / "metrics.csv")
    names = {name for row in rows for name, value in row.items() if value}
    assert {
        "train/own",
        "val/loss",
        "speed/rows_per_s",
        "time/forward_ms",
        "host/process_memory_gb",
    } <= names
    assert {
        name for name in names if name.partition("/")[0] in ("speed", "time", "host")
    } <= CURVES.keys()
    # each one's writing is known to the timer
    assert parts[1].clock.counts["logging"] >= 3 * (ROWS // BATCH // 2)
    assert parts[1].clock.spent["logging"] > 0


def test_no_callback_reads_a_number_of_the_device_in_a_step(tmp_path):
    def reads(callbacks: list[L.Callback], folder: str) -> int:
        with DeviceReads() as found:
            train(tmp_path / folder, callbacks, max_epochs=2, limit_val_batches=0)
        return found.count

    timed = [
        HardwareMonitor(every_s=0.01),
        StepTimer(),
        Throughput(),
        ProgressLine(say=lambda line: None),
    ]
    assert reads(timed, "timed") == reads([], "bare")


def test_a_monitor_that_looks_every_0_seconds_is_refused():
    with pytest.raises(UserError, match=r"every_s: 0 \(more than 0\)"):
        HardwareMonitor(every_s=0)


@pytest.mark.parametrize("kind", [StepTimer, Throughput, HardwareMonitor, ProgressLine])
def test_a_flush_every_0_steps_is_refused(kind):
    with pytest.raises(UserError, match=r"every_n_steps: 0 \(1 or more\)"):
        kind(0)


def test_a_resumed_training_goes_on_counting(tmp_path):
    def callbacks() -> list[L.Callback]:
        return [StepTimer(4), Throughput(4), ModelCheckpoint(tmp_path / "kept", save_last=True)]

    first = callbacks()
    train(tmp_path / "first", first, enable_checkpointing=True)
    again = callbacks()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        num_sanity_val_steps=0,
        callbacks=again,
        **QUIET,
    )
    trainer.fit(
        Small(), loader(), loader(), ckpt_path=tmp_path / "kept" / "last.ckpt", weights_only=False
    )
    assert again[1].volume.total.rows == 2 * ROWS == 2 * first[1].volume.total.rows
    assert again[0].times.total.batches == 2 * ROWS // BATCH
    assert again[0].step_times.first == first[0].step_times.first


def test_the_line_names_metrics_in_full_and_parts_of_an_epoch(tmp_path):
    class Logs(Small):
        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            self.log("valid_loss", 0.5)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
            self.log("interval", 1.0)
            return super().training_step(batch, batch_idx)

    said: list[str] = []
    train(tmp_path, [ProgressLine(2, say=said.append)], module=Logs(), val_check_interval=5)
    assert said[0].startswith("epoch  0.50  step     5")
    assert said[1].startswith("epoch  1.00  step    10")
    assert said[0].endswith("val valid_loss 0.5000")
    assert "interval" not in said[0]
