"""Steps of every task and model on the device elsewhere, through the fast loop, with the branches
that a GPU takes.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from benchmarks.card.every_model import CASES
from lightning.pytorch.plugins.precision import MixedPrecision

from flatout.engine import FastLoop
from flatout.models.encoder import network
from tests.elsewhere.device import NAME, OneDevice, There, add_device
from tests.trainers import quiet_trainer

FAILURES = "failures.json"
# Models that decide on the host, in each forward pass, how rows are cut or joined.
_COPIES_PLACES = {"means of windows", "largest of windows"}


class AfterFirst(L.Callback):
    """The first batch may make the host wait, as columns are copied then; later ones may not.

    `may_copy`: whether the model's forward pass may copy from the host.
    """

    def __init__(self, *, may_copy: bool) -> None:
        self.may_copy = may_copy

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, *others: Any
    ) -> None:
        if not There.is_stepping and not self.may_copy:
            module.model.register_forward_pre_hook(_forbid_copies)
            module.model.register_forward_hook(_allow_copies, always_call=True)
        There.is_stepping = True

    def on_train_epoch_end(self, *others: Any) -> None:
        There.is_stepping = False  # the last losses may be read when all steps are over

    def on_exception(self, *others: Any) -> None:
        There.is_stepping = False


def _forbid_copies(*unused: Any) -> None:
    There.may_pin = False


def _allow_copies(*unused: Any) -> None:
    There.may_pin = True


def ending_with_1(act: Callable[[], None]) -> None:
    """End the process with 1 and the traceback where something fails."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        act()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def with_kernels_of_a_gpu() -> None:
    """Encoders choose what computes attention elsewhere as on a GPU."""
    choose = network.choose_kernel
    card = torch.device("cuda")

    def choose_there(device: torch.device, *rest: Any, **named: Any) -> Any:
        return (
            choose(card, *rest, capability=(8, 0), **named)
            if device.type == NAME
            else choose(device, *rest, **named)
        )

    network.choose_kernel = choose_there


def train_all(folder: Path) -> None:
    """Two steps of each case, one after the other; writes the traceback of each, empty where
    nothing failed.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    add_device()
    with_kernels_of_a_gpu()
    failures = dict.fromkeys(CASES, "")
    for name in CASES:
        There.called.clear()
        There.pinned.clear()
        try:
            _train(name)
        except Exception:  # of any class: the cases after it are looked at, too
            failures[name] = traceback.format_exc()
    (folder / FAILURES).write_text(json.dumps(failures), encoding="utf-8")


def _train(name: str) -> None:
    case = CASES[name]
    precision = CASES[name].precision
    scaler = torch.amp.GradScaler(NAME, init_scale=2.0**8) if precision == "fp16" else None
    names: dict[str, Any] = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
    plugins = [] if precision == "fp32" else [MixedPrecision(names[precision], NAME, scaler)]
    data, task = case.make(1)
    settings: dict[str, Any] = {
        "accelerator": "auto",
        "strategy": OneDevice(),
        "plugins": plugins,
    }
    watch = [] if case.waits else [AfterFirst(may_copy=name in _COPIES_PLACES)]
    trainer = quiet_trainer(
        Path(tempfile.mkdtemp()),
        max_steps=2,
        limit_val_batches=0,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[FastLoop(), *watch],
        **settings,
    )
    trainer.fit(task, datamodule=data)
    assert trainer.global_step == 2
    missing = set() if case.waits else {*case.calls, "_fused_adamw_"} - set(There.called)
    assert not missing, missing
    assert all(bool(weight.detach().isfinite().all()) for weight in task.parameters())
