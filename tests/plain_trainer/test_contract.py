"""The contract of the parts: a training with some of them is the training without them.

Small modules and settings of a Trainer, each trained plain and with observers, with the fast loop,
with exact checkpoints and with all of them, and resumed from a checkpoint. Compared are the hooks
in their order with the step, the counters and the gradients that each sees, logged values with
their steps, outputs, Lightning's own checkpoint, weights, random numbers, warnings and errors: all
to the bit, those of the fast loop to 1e-6. `docs/attached.md` lists what differs on purpose.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.params import at_once
from tests.plain_trainer.contract_cases import CASES
from tests.plain_trainer.contract_trainings import PARTS, PREFIX, Training, train
from tests.same import same

PROFILED = ("plain", "accumulation", "a stream", "two optimizers")
"""Each start of torch's profiler takes long."""


WITH_FAST_LOOP = ("fast loop", "all")
LEFT_TO_LIGHTNING = {
    *("LBFGS", "an optimizer that asks twice", "no optimizer", "own precision", "own strategy"),
    *(
        "two optimizers",
        "manual",
        "manual, every third batch",
        "own optimizer_step",
        "own zero_grad",
    ),
}
"""Whose steps Lightning's own loop takes although a fast loop is there."""
REFUSED = {("barebones", "exact checkpoint"), ("barebones", "all")}
"""Lightning itself refuses them."""


@pytest.fixture(scope="module", autouse=True)
def without_folders() -> Iterator[None]:
    yield
    for folder in Path(gettempdir()).glob(f"{PREFIX}*"):
        shutil.rmtree(folder)


def differences(one: Training, other: Training, tolerance: float = 0.0) -> list[str]:
    """The names of what differs between two trainings."""
    names = [name for name in vars(one) if name != "folder"]
    limits = {"rtol": tolerance, "atol": tolerance, "float_rtol": 10 * tolerance}
    return [name for name in names if not same(getattr(one, name), getattr(other, name), **limits)]


class Meddles(L.Callback):
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        torch.rand(1)


def test_the_suite_sees_what_differs():
    found = differences(train("plain", None, Meddles()), train("plain", None))
    assert found == ["hooks", "outputs", "logged", "metrics", "weights", "checkpoint", "random"]


EACH = [(name, part) for name in CASES for part in PARTS if part != "profile" or name in PROFILED]


@pytest.mark.parametrize(
    ("name", "part"),
    at_once(
        *[each for each in EACH if each[1] == "all"][::4],
        *(each for each in EACH if each[0] in PROFILED),
        of=EACH,
        seconds=1,
    ),
)
def test_a_part_changes_nothing(name, part, capsys):
    plain = train(name, None)
    capsys.readouterr()
    if (name, part) in REFUSED:
        with pytest.raises(
            MisconfigurationException, match="found `ModelCheckpoint` in callbacks list"
        ):
            train(name, part)
        return
    found = train(name, part)
    assert [each[:2] for each in found.hooks] == [each[:2] for each in plain.hooks]
    assert differences(found, plain, 1e-6 if part in WITH_FAST_LOOP else 0.0) == []
    assert bool(plain.error) == name.startswith("an error")
    is_left = "Lightning's own loop trains" in capsys.readouterr().out
    assert is_left == (part in WITH_FAST_LOOP and name in LEFT_TO_LIGHTNING)


def without_loops(training: Training) -> dict[str, Any]:
    """The checkpoint of a training, less the counts of its loops."""
    checkpoint = training.checkpoint or {}
    return {name: value for name, value in checkpoint.items() if name != "loops"}


RESUMED = [name for name, asked in CASES.items() if asked.resumes]


@pytest.mark.parametrize("name", at_once(*RESUMED[::4], of=RESUMED, seconds=1))
def test_a_training_resumed_after_an_epoch_ends_as_the_whole_one(name):
    whole = train(name, "exact checkpoint")
    kept = sorted(
        int(path.name.removeprefix("step-")) for path in (whole.folder / "kept").glob("step-*")
    )
    again = train(name, "exact checkpoint", resume=whole.folder / "kept" / f"step-{kept[0]}")
    assert again.error is None
    assert len(kept) > 1
    for part in ("weights", "metrics", "random"):
        assert same(getattr(again, part), getattr(whole, part)), part
    # counts within an epoch are set to those of its end, which nothing reads
    assert same(without_loops(again), without_loops(whole))
    for part in ("logged", "outputs"):
        found = getattr(again, part)
        wanted = getattr(whole, part)
        assert 0 < len(found) < len(wanted), part
        assert same(found, wanted[len(wanted) - len(found) :]), part
