"""A run that ran out of memory says so, trains the same weights, and the next one begins with what
fitted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from flatout import (
    BiLSTMConfig,
    CheckpointConfig,
    HeadlinesConfig,
    MonitorConfig,
    OptimConfig,
    TextDataConfig,
)
from flatout.data.batches.flat_batch import FlatBatch
from flatout.engine.fast_loop import fast_loop_of
from flatout.errors import UserError
from flatout.perf.notes import FOLDER, Limit, MicroBatches
from flatout.run.closing import Result
from flatout.tasks.task import Task
from tests.fitting import quiet_fit
from tests.run_files import model_weights
from tests.scarce import Scarce

HEADLINES = HeadlinesConfig(rows=203, eval_rows=51, classes=4)
OPTIM = OptimConfig(lr=3e-3, eps=1e-3, ema=0.9)
MODEL = BiLSTMConfig(hidden=8, embedding=8, dropout=0.0)


def train_small(folder: Path, callback: L.Callback | None = None, **given: Any) -> Result:
    data = TextDataConfig(sample=HEADLINES, batch_size=32, eval_batch_size=32)
    settings: dict[str, Any] = {"optim": OPTIM, "epochs": 2, "model": MODEL}
    callbacks = {} if callback is None else {"planted": callback}
    monitor = MonitorConfig(flush_every=1, progress=False)
    settings |= {"callbacks": callbacks, "monitor": monitor}
    return quiet_fit(data, folder=folder, **(settings | given))


def assert_same(one: Result, other: Result) -> None:
    found = model_weights(one.folder)
    torch.testing.assert_close(found, model_weights(other.folder), atol=1e-6, rtol=0)
    assert one.metrics == pytest.approx(other.metrics, abs=1e-5)


def notes() -> list[Path]:
    import os

    return list((Path(os.environ["FLATOUT_CACHE"]) / FOLDER).glob("*.json"))


def choices(result: Result) -> list[tuple[str, str]]:
    names = ("micro-batch", "evaluation batch")
    return [
        (each["name"], each["value"]) for each in result.summary["choices"] if each["name"] in names
    ]


@pytest.mark.soak(seconds=4)
def test_it_is_said_once_and_the_next_run_begins_with_what_fitted(tmp_path, capfd):
    plain = train_small(tmp_path / "plain")
    assert choices(plain) == []
    assert plain.summary["training"]["out_of_memory"] == 0
    scarce = Scarce(20, where="backward")
    first = train_small(tmp_path / "first", scarce)
    assert_same(first, plain)
    assert scarce.fired == [0]
    assert first.summary["training"]["out_of_memory"] == 1
    said = capfd.readouterr().out
    told = (
        "micro-batch: 16 rows (was 32) (out of memory at step 1, whose rows stay the same; CUDA out"
        " of memory."
    )
    assert said.count(told) == 1
    (note,) = notes()
    assert f"the next run like this one begins so; delete {note} to try whole batches again" in said
    scarce = Scarce(20, where="backward")
    second = train_small(tmp_path / "second", scarce)
    assert_same(second, plain)
    assert scarce.fired == []
    assert choices(second) == [("micro-batch", "16 rows of 32")]
    assert (
        f"an earlier run like this one ran out of memory; noted in {note}; delete it"
        in capfd.readouterr().out
    )
    other = train_small(tmp_path / "other", model=replace(MODEL, hidden=4))
    assert choices(other) == []
    note.unlink()
    assert choices(train_small(tmp_path / "anew")) == []


class ScarceValidation(L.Callback):
    """Lets batches of more than so many rows fail in validation and test."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.failed = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        pl_module.model.register_forward_hook(self._look)

    def _look(
        self, module: torch.nn.Module, inputs: tuple[FlatBatch], outputs: torch.Tensor
    ) -> None:
        if not module.training and inputs[0].num_rows > self.rows:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@pytest.mark.soak(seconds=3)
def test_validation_and_test_give_the_same_metrics_in_pieces(tmp_path):
    plain = train_small(tmp_path / "plain")
    scarce = ScarceValidation(9)
    found = train_small(tmp_path / "scarce", scarce)
    assert_same(found, plain)
    assert found.summary["calibration"] == pytest.approx(plain.summary["calibration"], abs=1e-3)
    assert scarce.failed >= 2
    assert choices(found)[0][0] == "evaluation batch"
    assert not any(name == "micro-batch" for name, _ in choices(found))


class Stop(L.Callback):
    """Ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.soak(seconds=5)
@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(3, id="before"),
        pytest.param(7, id="after"),
    ],
)
def test_a_resumed_run_is_cut_as_the_one_that_was_not_interrupted(tmp_path, stop):
    """With dropout, which draws other numbers for other pieces: the same bytes all the same."""
    given: dict[str, Any] = {
        "model": replace(MODEL, dropout=0.3),
        "checkpoint": CheckpointConfig(every_steps=1),
    }
    steps = range(5, 10**6)
    whole = train_small(tmp_path / "whole", Scarce(20, steps), **given)
    for note in notes():
        note.unlink()
    interrupted = [Scarce(20, steps), Stop(stop)]
    with pytest.raises(KeyboardInterrupt):
        train_small(tmp_path / "cut", Both(interrupted), **given)
    found = train_small(tmp_path / "cut", Scarce(20, steps), resume=str(tmp_path / "cut"), **given)
    assert found.summary["training"]["resumed_from"] == stop - 1
    for name, weight in model_weights(whole.folder).items():
        assert torch.equal(model_weights(found.folder)[name], weight)


class Both(L.Callback):
    """Two callbacks in one."""

    def __init__(self, callbacks: list[L.Callback]) -> None:
        self.callbacks = callbacks

    def on_fit_start(self, *given: Any) -> None:
        for callback in self.callbacks:
            callback.on_fit_start(*given)

    def on_train_batch_end(self, *given: Any) -> None:
        for callback in self.callbacks:
            callback.on_train_batch_end(*given)


class Unmendable(Scarce):
    """Fails where gradients are sent off in a way that is not known, so that nothing can be called
    back.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        fast_loop_of(trainer).side.has_several_ranks = True


@pytest.mark.soak(seconds=3)
def test_what_cannot_be_mended_ends_the_run_and_the_next_one_goes_on_in_pieces(tmp_path):
    given: dict[str, Any] = {"checkpoint": CheckpointConfig(every_steps=1)}
    plain = train_small(tmp_path / "plain", **given)
    steps = range(4, 10**6)
    with pytest.raises(
        UserError,
        match=r"memory ran out at step 5 while ranks exchanged gradients .*with resume=auto",
    ):
        train_small(tmp_path / "cut", Unmendable(20, steps, "backward"), **given)
    scarce = Unmendable(20, steps, "backward")
    found = train_small(tmp_path / "cut", scarce, resume=str(tmp_path / "cut"), **given)
    assert scarce.fired == []
    assert choices(found)[-1] == ("micro-batch", "16 rows of 32")
    assert found.summary["training"]["resumed_from"] == 4
    assert_same(found, plain)


def test_a_damaged_note_is_named_and_passed_over(tmp_path):
    noted = MicroBatches(tmp_path, {"model": "x"})
    assert noted.read() == ({}, "")
    noted.note("training rows", Limit(16))
    noted.note("evaluation rows", Limit(64, has_ended=True))
    assert noted.read() == (
        {"training rows": Limit(16), "evaluation rows": Limit(64, has_ended=True)},
        "",
    )
    assert MicroBatches(tmp_path, {"model": "y"}).read() == ({}, "")
    for text in (
        "",
        "[]",
        "{",
        '{"limits": {"training rows": {"most": 0, "has_ended": false}}}',
        '{"limits": 3}',
        "\x00",
    ):
        noted.path.write_text(text)
        found, word = noted.read()
        assert found == {}
        assert str(noted.path) in word
        assert "ignored" in word
    noted.note("training rows", Limit(8))
    assert json.loads(noted.path.read_text())["limits"] == {
        "training rows": {"most": 8, "has_ended": False}
    }
    assert [path.name for path in noted.path.parent.iterdir()] == [noted.path.name]
