"""Foreign modules on the device elsewhere: with captured steps, and in a Trainer without the fast
loop.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.precision import MixedPrecision

from flatout.callbacks import ExactCheckpoint
from flatout.data.batches.signatures import change_tensors
from flatout.engine import FastLoop
from tests.elsewhere.device import OneDevice
from tests.elsewhere.graphs import NAMES, RESULTS, begin_elsewhere, compare_each
from tests.plain_trainer.foreign_modules import CASES, COUNTED, Case, Decays
from tests.trainers import flat_weights, quiet_trainer

EPOCHS = 3


RESUMED = "a training that is resumed"
PARTS = ("losses", "logged", "outputs", "gradients", "counts")


class Seen(L.Callback):
    """What each batch leaves for others to see: outputs, logged values, gradients, counters."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.logged: list[dict[str, float]] = []
        self.outputs: list[list[str]] = []
        self.gradients: list[float] = []
        self.counts: dict[str, Any] = {}

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *others: Any
    ) -> None:
        if outputs:
            self.losses.append(float(outputs["loss"].cpu()))
            kept = change_tensors(outputs, lambda tensor: tensor.detach().cpu())
            self.outputs.append(sorted(f"{name} {value}" for name, value in kept.items()))
        metrics = trainer.callback_metrics
        self.logged.append({name: float(value.cpu()) for name, value in metrics.items()})
        gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
        self.gradients.append(sum(float(gradient.sum().cpu()) for gradient in gradients))

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        self.logged.append({name: float(value.cpu()) for name, value in metrics.items()})

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop
        self.counts = loop.automatic_optimization.optim_progress.state_dict()


def train(
    case: Case, callbacks: Sequence[L.Callback], epochs: int = EPOCHS, resume: Path | None = None
) -> tuple[Seen, L.LightningModule, str]:
    """What is seen of a training, its module, and what was printed."""
    COUNTED[0] = 0
    L.seed_everything(3, verbose=False)
    module = case.make()
    settings = dict(case.settings)
    precision = settings.pop("precision", "fp32")
    if precision != "fp32":
        scaler = torch.amp.GradScaler("elsewhere", init_scale=2.0**8)
        kept = scaler if precision == "fp16" else None
        settings["plugins"] = [MixedPrecision(NAMES[precision], "elsewhere", kept)]
    seen = Seen()
    trainer = quiet_trainer(
        Path(tempfile.mkdtemp()),
        max_epochs=epochs,
        enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
        accelerator="auto",
        strategy=OneDevice(),
        log_every_n_steps=1,
        callbacks=[*callbacks, seen],
        **settings,
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        trainer.fit(module, ckpt_path=resume)
    return seen, module, said.getvalue()


def compare_all(folder: Path) -> None:
    """Facts of each case, or why it is refused, or an error."""
    begin_elsewhere()
    results = compare_each(CASES, _compare)
    results[RESUMED] = _resume(folder)
    (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")


def _compare(name: str) -> dict[str, Any]:
    loop = FastLoop(graph="on")
    ours, our_module, said = train(CASES[name], [loop])
    others = [FastLoop(graph="off")] if CASES[name].is_clipped else []
    theirs, their_module, _ = train(CASES[name], others)
    return {
        "said": said,
        "replayed": loop.graph_facts.get("replayed_steps", 0),
        "steps": len(ours.losses),
        "has_equal_weights": _have_equal_weights(our_module, their_module),
        "differing": [part for part in PARTS if vars(ours)[part] != vars(theirs)[part]],
        "different_losses": len(set(ours.losses)),
    }


def _resume(folder: Path) -> dict[str, Any]:
    """A training that was ended after an epoch and resumed, beside a whole one."""
    case = Case(Decays)
    seen, module, _ = train(case, [FastLoop(graph="on")])
    replayed = []
    kept = folder / "kept"
    for epochs in (EPOCHS - 1, EPOCHS):
        loop = FastLoop(graph="on")
        exact = ExactCheckpoint(kept, every_minutes=None)
        resumed, resumed_module, _ = train(case, [loop, exact], epochs, exact.latest())
        replayed.append(loop.graph_facts["replayed_steps"])
    return {
        "replayed": replayed,
        "has_equal_weights": _have_equal_weights(module, resumed_module),
        "has_equal_losses": seen.losses[-len(resumed.losses) :] == resumed.losses,
        "losses": len(resumed.losses),
    }


def _have_equal_weights(module: L.LightningModule, other: L.LightningModule) -> bool:
    return torch.equal(flat_weights(module).cpu(), flat_weights(other).cpu())
