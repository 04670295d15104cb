"""A training of the contract, with some of the parts, and all that there is to see of it."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
)
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from flatout.callbacks import (
    ExactCheckpoint,
    HardwareMonitor,
    ProfileSteps,
    StepTimer,
    Throughput,
    Verdict,
)
from flatout.engine import FastLoop
from tests.plain_trainer.contract_cases import CASES
from tests.trainers import QUIET, copies_of_gradients, make_values

PARTS: dict[str, Callable[[Path], list[L.Callback]]] = {
    "observers": lambda folder: [
        StepTimer(1),
        Throughput(2),
        HardwareMonitor(1, every_s=0.005),
        Verdict(),
    ],
    "fast loop": lambda folder: [FastLoop()],
    "exact checkpoint": lambda folder: [
        ExactCheckpoint(folder / "kept", every_minutes=None, keep=99)
    ],
    "all": lambda folder: [each for name in TOGETHER for each in PARTS[name](folder)],
    "profile": lambda folder: [ProfileSteps(wait=1, warmup=1, active=1, folder=folder, say=str)],
}
TOGETHER = ("observers", "fast loop", "exact checkpoint")
PREFIX = f"contract-{os.getpid()}-"
OURS = ("time/", "speed/", "host/", "gpu/")
HOOKS = [
    name
    for name in vars(L.Callback)
    if (name.startswith("on_") and "checkpoint" not in name) or name in ("setup", "teardown")
]
SAID_ONCE = re.compile("`training_step` returned `None`|Checkpoint directory")
"""Warnings that Lightning gives once in a process, or that name the folder."""


class InMemory(Logger):
    """What Lightning logs, with its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []
        self.hyperparameters = ""

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *arguments: Any, **more: Any) -> None:
        self.hyperparameters = str(arguments)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if kept := {name: value for name, value in metrics.items() if not name.startswith(OURS)}:
            self.rows.append((step, kept))


class Spy(L.Callback):
    """Notes each hook with the step, the counters and the gradients that it sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.outputs: list[Any] = []

    def note(self, name: str, trainer: L.Trainer, module: L.LightningModule, *rest: Any) -> None:
        is_of_step = name.startswith(("on_before", "on_after", "on_train_batch"))
        gradients = copies_of_gradients(module) if is_of_step else []
        self.seen.append(
            (name, trainer.global_step, counts_of(trainer) if is_of_step else (), gradients)
        )
        if name == "on_train_batch_end":
            self.outputs.append(copy.deepcopy(rest[0]))


def counts_of(trainer: L.Trainer) -> tuple[Any, ...]:
    """The counters that a step moves; all of them are compared at the end."""
    loop = trainer.fit_loop.epoch_loop
    steps = loop.automatic_optimization.optim_progress.optimizer
    counted = (
        loop.batch_progress,
        loop.manual_optimization.optim_step_progress,
        steps.step,
        steps.zero_grad,
    )
    return tuple(
        tuple(vars(part).values()) for each in counted for part in (each.current, each.total)
    )


def noting(name: str) -> Callable[..., None]:
    return lambda self, *arguments, **_: self.note(name, *arguments)


for _hook in HOOKS:
    setattr(Spy, _hook, noting(_hook))


@dataclass
class Training:
    """What there is to see of a training."""

    hooks: list[Any]
    outputs: list[Any]
    logged: list[Any]
    hyperparameters: str
    metrics: dict[str, Any]
    weights: dict[str, Tensor]
    counts: dict[str, Any]
    checkpoint: dict[str, Any] | None
    can_be_pickled: bool
    random: Tensor
    warned: list[str]
    error: str | None
    folder: Path


@cache
def train(name: str, part: str | None, *more: L.Callback, resume: Path | None = None) -> Training:
    asked = CASES[name]
    folder = Path(mkdtemp(prefix=PREFIX))
    logger = InMemory()
    spy = Spy()
    L.seed_everything(3, verbose=False)
    module = asked.module()
    theirs = asked.callbacks()
    ours = [] if part is None else PARTS[part](folder)
    given: dict[str, Any] = QUIET | {
        "max_epochs": 2,
        "accelerator": "cpu",
        "log_every_n_steps": 1,
        "logger": logger,
        "num_sanity_val_steps": 0,
    }
    given["enable_checkpointing"] = any(
        isinstance(each, ModelCheckpoint | ExactCheckpoint) for each in [*theirs, *ours]
    )
    given |= make_values(asked.settings)
    if given.get("barebones"):
        given = {"barebones": True, "max_epochs": 2, "accelerator": "cpu"}
    error = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = L.Trainer(
            **given, callbacks=[*ours, spy, *theirs, *more], default_root_dir=folder
        )
        try:
            trainer.fit(module, ckpt_path=resume)
        except Exception as raised:
            # Of any class: plain Lightning's training must end with the same one.
            error = f"{type(raised).__name__}: {raised}"
    can_save = (
        error is None and not given.get("barebones") and trainer.strategy.optimizers is not None
    )
    return Training(
        hooks=spy.seen,
        outputs=spy.outputs,
        logged=logger.rows,
        hyperparameters=logger.hyperparameters,
        metrics=dict(trainer.callback_metrics),
        weights=copy.deepcopy(module.state_dict()),
        counts=copy.deepcopy(trainer.fit_loop.state_dict()),
        checkpoint=checkpoint_of(trainer, folder) if can_save else None,
        can_be_pickled=can_be_pickled(trainer),
        random=torch.get_rng_state(),
        warned=[words for each in warned if not SAID_ONCE.search(words := str(each.message))],
        error=error,
        folder=folder,
    )


def checkpoint_of(trainer: L.Trainer, folder: Path) -> dict[str, Any]:
    """Lightning's own checkpoint, without the states of our parts in it."""
    file = folder / "end.ckpt"
    trainer.save_checkpoint(file)
    found: dict[str, Any] = torch.load(file, weights_only=False)
    ours = [type(each).__name__ for make in PARTS.values() for each in make(folder)]
    found["callbacks"] = {key for key in found["callbacks"] if not key.startswith(tuple(ours))}
    return found


def can_be_pickled(trainer: L.Trainer) -> bool:
    try:
        pickle.dump(trainer, io.BytesIO())
    except (AttributeError, TypeError, pickle.PicklingError):
        return False
    return True
