"""`Verdict` in somebody's Trainer: what it says of a run, and that it leaves the run as it was, to
the bit.
"""

from __future__ import annotations

import gc
import json
import pickle
import random
import signal
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import BertConfig, BertForSequenceClassification

import flatout
from flatout.callbacks import HardwareMonitor, StepTimer, Throughput, Verdict
from flatout.callbacks.clock import FIRST_STEPS
from flatout.callbacks.throughput import FetchTimes
from flatout.engine import FastLoop
from flatout.perf.verdict import (
    anywhere,
    compiled_step,
    experiments,
    loop_race,
    own_tries,
    ways,
)
from flatout.perf.verdict.anywhere import in_python
from flatout.perf.verdict.rules import verdict as judged
from tests.callbacks.plain import Rows, Small
from tests.perf.verdict.test_verdict import QUIET as QUIET_RUN
from tests.trainers import QUIET

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:You defined a `validation_step`.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*running in `Trainer.barebones=True.*",
)


class Notes:
    """A log that is read afterwards."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def decision(self, name: str, value: object, why: str, evidence: str) -> None:
        self.say(f"{name}: {value}")


@pytest.fixture
def long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs are long enough to race, in few rounds, whatever else this machine does."""
    monkeypatch.setattr(experiments, "SHARE", 1000.0)
    monkeypatch.setattr(own_tries, "starved", lambda evidence: None)
    monkeypatch.setattr(ways, "FREE_BYTES", 0)
    for name, value in {
        "ROWS_AROUND": 16,
        "_CALM_S": 0.05,
        "MOST_ROUNDS": 5,
        "_FED_S": 0.02,
    }.items():
        monkeypatch.setattr(experiments, name, value)
    for name, number in {"MOST_ROUNDS": 5, "_LOOP_MS": 1000.0}.items():
        monkeypatch.setattr(loop_race, name, number)
    monkeypatch.setattr(own_tries, "_COMPILES", 2.0)


@pytest.fixture
def everything_races(long_enough: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the split says, all ways are tried; a compiler that is quick stands for
    torch's own.
    """
    for name, value in {"_LEAST_COMPILE_S": 0.0, "_BACKEND": "eager"}.items():
        monkeypatch.setattr(compiled_step, name, value)
    monkeypatch.setattr(own_tries, "_COMPILES", 0.0)
    monkeypatch.setattr(loop_race, "MOST_ROUNDS", 2)
    monkeypatch.setattr(compiled_step, "why_not", lambda device: "")
    monkeypatch.setattr(own_tries, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(experiments, "_MOSTLY_WAITS", 1.1)


class Drawing(Dataset[Any]):
    """Rows with noise from every kind of generator, its own too."""

    def __init__(self, rows: int = 80) -> None:
        self.rows = rows
        self.own = np.random.default_rng(5)
        self.read = 0
        self.table = torch.arange(100_000, dtype=torch.float32)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, number: int) -> Any:
        self.read += 1
        noise = self.own.normal() + np.random.normal() + random.random()
        return self.table[number : number + 3] / self.rows + noise + torch.randn(3), number % 2


class Noisy(Small):
    """Draws in its step, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(
            torch.nn.Linear(3, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(),
            torch.nn.Linear(8, 2),
        )
        self.kept: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer_of(folder: Path, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    given = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "default_root_dir": folder,
    }
    return L.Trainer(callbacks=list(callbacks), **(QUIET | given | settings))


@pytest.mark.soak(seconds=40)
@pytest.mark.parametrize(("workers", "raced"), [(0, ["loop", "eager"]), (1, ["prefetch_factor=8"])])
def test_nothing_of_the_run_is_changed_to_the_bit(
    workers, raced, tmp_path, everything_races, monkeypatch
):
    """Weights, statistics, gradients, optimizer, random numbers, the loader's order and what its
    data set notes.
    """
    if workers:  # the other case compiles
        monkeypatch.setattr(own_tries, "_COMPILES", 2.0)
    states = []
    notes = Notes()
    for callbacks in ([], [Verdict(seconds=60, log=notes)]):
        L.seed_everything(3, verbose=False)
        module = Noisy()
        data = Drawing()
        loader = DataLoader(
            data, 2, shuffle=True, generator=torch.Generator().manual_seed(1), num_workers=workers
        )
        files = ModelCheckpoint(
            tmp_path / str(len(callbacks)), every_n_train_steps=40, save_top_k=-1
        )
        trainer = trainer_of(tmp_path, *callbacks, files, enable_checkpointing=True)
        trainer.fit(module, loader)
        (path, *_) = sorted(Path(str(files.dirpath)).iterdir())
        checkpoint = torch.load(path, weights_only=False)
        of_lightning = {
            name: checkpoint[name] for name in ("state_dict", "optimizer_states", "global_step")
        }
        kept = [
            path.name,
            sorted(checkpoint["callbacks"]),
            json.dumps(checkpoint["loops"], default=str),
        ]
        draws = [
            loader.generator.get_state(),
            torch.get_rng_state(),
            data.own.normal(),
            np.random.normal(),
        ]
        gradients = [
            weight.grad.clone() for weight in module.parameters() if weight.grad is not None
        ]
        found = [
            *module.state_dict().values(),
            *gradients,
            *draws,
            random.random(),
            data.read,
            module.kept,
        ]
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader)
        after = [list(module.state_dict().values()), trainer.optimizers[0].state_dict()["state"]]
        states.append([kept, of_lightning, found, after])
    (kept_plain, *plain), (kept_judged, *judged) = states
    assert kept_judged == kept_plain
    torch.testing.assert_close(judged, plain, rtol=0, atol=0)
    tried = " ".join(f"{each.cause} {each.override}" for each in callbacks[0].evidence.tried)
    assert all(each in tried for each in raced), (tried, notes.lines)
    assert sum("ms a batch" in line for line in notes.lines) >= 2


@pytest.mark.soak(seconds=9)
def test_a_slow_loader_is_named_after_some_steps_and_other_workers_race_at_the_end(
    tmp_path, long_enough
):
    notes = Notes()
    verdict = Verdict(seconds=4, log=notes)
    trainer_of(tmp_path, verdict, max_epochs=6).fit(Small(), DataLoader(Rows(slow_s=0.002), 4))
    assert "after 35 steps" in notes.lines[0] and "limited by waiting for data" in notes.lines[1]
    assert verdict.verdict is not None and verdict.verdict["cause"] == "data"
    assert any(
        each.override.startswith("DataLoader(num_workers=") for each in verdict.evidence.tried
    )
    verdict.save(tmp_path / "verdict.json")
    kept = json.loads((tmp_path / "verdict.json").read_text())
    assert kept["verdict"]["sentence"] in notes.lines[-1]
    assert kept["evidence"]["feed_alone"] < 1000


@pytest.mark.soak(seconds=5)
def test_small_batches_are_raced_in_larger_ones_and_the_fix_is_words_of_python(
    tmp_path, long_enough
):
    verdict = Verdict(seconds=5, log=Notes())
    trainer_of(tmp_path, verdict, max_epochs=4, accumulate_grad_batches=2).fit(
        Small(), DataLoader(Drawing(), 2)
    )
    assert [each.override for each in verdict.evidence.tried if each.cause == "accumulation"] == [
        "DataLoader(batch_size=4) ++trainer.accumulate_grad_batches=1"
    ]
    words = json.dumps(
        [verdict.verdict["fix"], *(each["fix"] for each in verdict.verdict["others"])]
    )
    assert "++trainer" not in words


@pytest.mark.soak(seconds=3)
def test_the_fast_loop_trains_beside_it(tmp_path, long_enough):
    weights = []
    for callbacks in ([], [Verdict(seconds=10, log=Notes())]):
        L.seed_everything(3, verbose=False)
        module = Noisy()
        trainer_of(tmp_path, FastLoop(), *callbacks).fit(module, DataLoader(Drawing(), 2))
        weights.append(list(module.state_dict().values()))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    assert callbacks[0].evidence.tried and callbacks[0].evidence.ms["backward"] > 0


class Bursts(Rows):
    """Every 32nd row is the first of a file that takes long to open."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, number: int) -> Any:
        time.sleep(0.2 if number % 32 == 0 else 0.0)
        return super().__getitem__(number % 40)


@pytest.mark.soak(seconds=12)
def test_workers_that_keep_up_but_for_bursts_are_raced_with_more_read_ahead(
    tmp_path, long_enough, monkeypatch
):
    monkeypatch.setattr(own_tries, "LEAST_GAIN", 0.0)
    verdict = Verdict(seconds=30, log=Notes())
    loader = DataLoader(Bursts(), 4, num_workers=1, persistent_workers=True)
    trainer_of(tmp_path, verdict, max_epochs=1).fit(Small(forward=0.01), loader)
    tried = {each.override: each for each in verdict.evidence.tried}
    ahead = next(
        (each for words, each in tried.items() if words.startswith("DataLoader(prefetch_factor=8")),
        None,
    )
    assert ahead is not None, (
        list(tried),
        verdict.evidence.not_tried,
        verdict.evidence.share("wait"),
    )
    assert 0 < ahead.speedup.low <= ahead.speedup.value <= ahead.speedup.high


@pytest.mark.soak(seconds=2)
def test_the_fast_loop_is_raced_where_the_framework_takes_its_share(tmp_path, long_enough):
    verdict = Verdict(seconds=30, log=Notes())
    trainer_of(tmp_path, verdict).fit(Small(), DataLoader(Rows(), 1))
    (loop,) = (each for each in verdict.evidence.tried if each.cause == "loop")
    assert loop.override == "Trainer(callbacks=[FastLoop()])"
    assert 0 < loop.speedup.low <= loop.speedup.value <= loop.speedup.high
    assert not verdict.evidence.notes


def compiles_for_ever(graph: Any, inputs: Any) -> Any:
    time.sleep(60)


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def collects_for_ever(graph: Any, inputs: Any) -> Any:
    """What is raised while a collector's callback, or a weak reference's, runs is lost."""
    gc.callbacks.append(lambda phase, about: time.sleep(0.03))
    try:
        for _ in range(300):
            watched = weakref.ref(Cycle(), lambda _: time.sleep(0.1))
            gc.collect()
            assert watched() is None
            time.sleep(0.01)
    finally:
        gc.callbacks.pop()


def compiles_nothing(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("backend", "seconds", "why"),
    [
        pytest.param(
            compiles_for_ever, 3, "it had not compiled after", marks=pytest.mark.soak(seconds=3)
        ),
        pytest.param(
            collects_for_ever, 3, "it had not compiled after", marks=pytest.mark.soak(seconds=3)
        ),
        pytest.param(
            compiles_nothing, 60, "no such instruction", marks=pytest.mark.soak(seconds=3)
        ),
    ],
)
def test_what_does_not_compile_here_or_in_time_is_left_out_with_a_line(
    backend, seconds, why, tmp_path, everything_races, monkeypatch
):
    monkeypatch.setattr(compiled_step, "_BACKEND", backend)
    notes = Notes()
    verdict = Verdict(seconds=seconds, log=notes)
    before = signal.getsignal(signal.SIGALRM)
    left_s = signal.getitimer(signal.ITIMER_REAL)[0]
    trainer_of(tmp_path, verdict).fit(Small(), DataLoader(Rows(), 1))
    (line,) = (each for each in notes.lines if "torch.compile" in each)
    assert line.startswith("verdict: torch.compile was left out") and why in line
    assert signal.getsignal(signal.SIGALRM) is before
    # an alarm of yours comes in its time
    assert left_s - 20 < signal.getitimer(signal.ITIMER_REAL)[0] <= left_s
    # of yours, afterwards
    assert torch.compile(torch.neg, backend="eager")(torch.ones(2)).sum() == -2


def test_the_races_end_in_time(tmp_path, long_enough, monkeypatch):
    monkeypatch.setattr(experiments, "SHARE", 0.5)
    verdict = Verdict(log=Notes())
    began = anywhere.time.perf_counter()
    trainer_of(tmp_path, verdict, max_epochs=8).fit(Small(), DataLoader(Rows(slow_s=0.001), 4))
    assert anywhere.time.perf_counter() - began < 2.5 * verdict._trained_s + 1


class Texts(Dataset[Any]):
    """Batches of a tokenizer: mappings of tensors."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, number: int) -> Any:
        return {"input_ids": torch.arange(8) + number % 5, "labels": torch.tensor(number % 2)}


class OfTransformers(Small):
    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
        }
        self.layer = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.layer(labels=batch.pop("labels"), **batch).loss}


class TwoOptimizers(Small):
    """Manual optimisation, which asks its Trainer for what it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, layer in zip(self.optimizers(), (self.layer, self.other), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(layer(batch[0]).square().mean() + 0 * self.trainer.current_epoch)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.logger.experiment.add_scalar("loss", 1.0)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (self.layer, self.other)]


@pytest.mark.parametrize(
    ("module", "data"),
    [
        pytest.param(OfTransformers, Texts, marks=pytest.mark.soak(seconds=4)),
        (TwoOptimizers, Drawing),
    ],
)
def test_foreign_modules_are_raced(module, data, tmp_path, long_enough):
    verdict = Verdict(seconds=4, log=Notes())
    logger = L.pytorch.loggers.logger.DummyLogger()
    trainer_of(tmp_path, verdict, logger=logger).fit(module(), DataLoader(data(), 2))
    assert verdict.evidence.tried, verdict.evidence.not_tried


def endless_rows() -> Any:
    while True:
        yield torch.rand(4, 3), torch.ones(4).long()


class Once(IterableDataset[Any]):
    """Rows of a stream that has one position."""

    def __init__(self) -> None:
        self.rows = (row for row in range(200))

    def __iter__(self) -> Any:
        return ((torch.full((3,), float(row)), row % 2) for row in self.rows)


class OfSeveral(Small):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[0], batch_idx)


class ByLBFGS(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=2)


class Locked(Small):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Sharing(Small):
    """Its step computes with the weights of the module that it was made with, whatever
    copies it.
    """

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.Linear(3, 2)
        self.layer = torch.nn.Sequential(layer)
        self.layer.forward = lambda numbers: layer(numbers)


@pytest.mark.parametrize(
    ("module", "loader", "why"),
    [
        (Small, lambda: DataLoader(Once(), 2), "its loader can be read once"),
        (Small, endless_rows, "its loader can be read once"),
        (OfSeveral, lambda: [DataLoader(Rows(), 1)], "several loaders are read at once"),
        (ByLBFGS, lambda: DataLoader(Rows(), 1), "LBFGS computes its loss again while it steps"),
        (
            Locked,
            lambda: DataLoader(Rows(), 1),
            "its module cannot be copied (cannot pickle '_thread.lock' object)",
        ),
        (
            Sharing,
            lambda: DataLoader(Rows(), 1),
            "its steps reach the module itself, not a copy of it",
        ),
    ],
)
def test_what_cannot_be_copied_is_said_in_one_sentence_and_the_run_keeps_its_verdict(
    module, loader, why, tmp_path, long_enough
):
    weights = []
    for callbacks in ([], [Verdict(log=Notes())]):
        L.seed_everything(3, verbose=False)
        trained = module()
        trainer_of(tmp_path, *callbacks, max_steps=40).fit(trained, loader())
        weights.append(list(trained.state_dict().values()))
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    assert callbacks[0].evidence.not_tried == f"nothing was tried: {why}"
    assert callbacks[0].verdict["sentence"].endswith(f"[nothing was tried: {why}]")


def test_a_run_of_five_steps_has_no_verdict_and_says_so(tmp_path):
    notes = Notes()
    verdict = Verdict(log=notes)
    trainer_of(tmp_path, verdict, max_steps=5).fit(Small(), DataLoader(Rows(), 4))
    why = "a verdict needs 30 steps after the first 5, this training had 5"
    assert notes.lines == [f"verdict: none, {why}"]
    verdict.save(tmp_path / "verdict.json")
    assert json.loads((tmp_path / "verdict.json").read_text())["why_none"] == why


def test_a_barebones_trainer_and_a_second_verdict_get_one_sentence_each(tmp_path):
    notes = Notes()
    bare = {"barebones": True, "max_epochs": 1, "accelerator": "cpu", "default_root_dir": tmp_path}
    L.Trainer(callbacks=[Verdict(log=notes)], **bare).fit(Small(), DataLoader(Rows(), 1))
    assert notes.lines == ["verdict: none, the Trainer is barebones, and runs without clocks"]
    first, second = Verdict(seconds=0, log=Notes()), Verdict(seconds=0, log=Notes())
    trainer_of(tmp_path, first, second).fit(Small(), DataLoader(Rows(), 1))
    assert second._log.lines == ["verdict: none, another one judges this training"]
    assert first.verdict is not None and second.verdict is None


def test_a_trainer_that_somebody_else_built_gets_all_four_once(tmp_path):
    with pytest.raises(flatout.UserError, match="attach: takes a Trainer, not Small"):
        flatout.attach(Small())
    trainer = trainer_of(tmp_path)
    verdict = flatout.attach(trainer)
    assert flatout.attach(trainer) is verdict
    kinds = [type(each) for each in trainer.callbacks]
    assert kinds[:4] == [StepTimer, Throughput, HardwareMonitor, Verdict] and len(
        set(kinds)
    ) == len(kinds)
    verdict.seconds = 0
    trainer.fit(Small(forward=0.002), DataLoader(Rows(), 1))
    assert verdict.verdict is not None and verdict.timer is trainer.callbacks[0]
    assert verdict.evidence.ms["forward"] > 1.5


def test_a_timer_that_has_counted_trainings_before_says_nothing_of_them_to_the_verdict(tmp_path):
    timer = StepTimer()
    verdict = Verdict(seconds=0, log=Notes())
    files = ModelCheckpoint(tmp_path / "kept", save_last=True)
    slow = trainer_of(tmp_path, timer, verdict, files, enable_checkpointing=True)
    slow.fit(Small(forward=0.006), DataLoader(Rows(), 1), DataLoader(Rows(), 40))
    assert verdict.evidence.ms["forward"] > 5 and verdict.evidence.counts["validation"] == 2
    again = trainer_of(tmp_path, timer, verdict, files, max_epochs=3, enable_checkpointing=True)
    again.fit(
        Small(forward=0.001),
        DataLoader(Rows(), 1),
        DataLoader(Rows(), 40),
        ckpt_path=files.last_model_path,
    )
    assert verdict.evidence.batches == 40 and verdict.evidence.counts["validation"] == 1
    assert 1 < verdict.evidence.ms["forward"] < 5 and timer.times.total.batches == 120
    trainer_of(tmp_path, timer, verdict).fit(Small(forward=0.001), DataLoader(Rows(), 1))
    assert 1 < verdict.evidence.ms["forward"] < 5


def test_it_can_be_sent_to_another_process():
    sent = pickle.loads(pickle.dumps(Verdict(seconds=3)))
    assert (
        sent.seconds == 3
        and sent.verdict is None
        and pickle.loads(pickle.dumps(FetchTimes())).ms is None
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("~callbacks.TQDMProgressBar", "Trainer(enable_progress_bar=False)"),
        ("~callbacks.MyProgressBar", "leaving MyProgressBar out of Trainer(callbacks=…)"),
        ("~callbacks.Slow", "leaving Slow out of Trainer(callbacks=…)"),
        ("~callbacks.Slow 2", "leaving Slow 2 out of Trainer(callbacks=…)"),
        ("++trainer.val_check_interval=1.0", "Trainer(val_check_interval=1.0)"),
        ("++trainer.a=1.0 ++trainer.b=1", "Trainer(a=1.0, b=1)"),
        (
            "DataLoader(num_workers=1) threads=1",
            "DataLoader(num_workers=1) torch.set_num_threads(1)",
        ),
        ("precision=bf16", 'Trainer(precision="bf16-mixed")'),
        ("compile=false", "leaving out torch.compile"),
        (
            "checkpoint.every_steps=null checkpoint.every_minutes=10",
            "ModelCheckpoint(every_n_epochs=1), or ExactCheckpoint()",
        ),
    ],
)
def test_words_of_the_command_line_become_python(words, said):
    assert in_python(words) == said


def test_the_advice_is_said_in_python_too():
    evidence = replace(QUIET_RUN, host={"machine_cpu_share": 1.0, "process_cpu_cores": 0.7})
    told = judged(evidence, in_python)
    assert told["fix"] == "end or move what else runs; until then torch.set_num_threads(1)"
    often = replace(
        QUIET_RUN,
        ms={"forward": 9.0, "validation": 27.1},
        counts={"validation": 40, "checkpoint": 41},
    )
    advised = judged(often, in_python)["fix"]
    assert advised == "Trainer(val_check_interval=1.0, check_val_every_n_epoch=1)"
    L.Trainer(val_check_interval=1.0, check_val_every_n_epoch=1, **QUIET)


@pytest.mark.parametrize("steps", [40, 20])
def test_steps_are_counted_where_accumulation_does_not_divide_the_epoch(
    steps, tmp_path, monkeypatch
):
    """Ten batches an epoch are one step, not ten sixteenths of one."""
    monkeypatch.setattr(own_tries, "starved", lambda evidence: None)
    verdict = Verdict(seconds=0, log=Notes())
    trainer = trainer_of(tmp_path, verdict, max_epochs=steps, accumulate_grad_batches=16)
    trainer.fit(Small(), DataLoader(Rows(), 4))
    assert trainer.global_step == steps
    if steps < 30:
        assert verdict.evidence is None and verdict.why_none.endswith("this training had 20")
    else:
        assert verdict.evidence.steps == steps - FIRST_STEPS
