"""What a run of the user's own LightningModule does another way, with the user's own DataModule or
one of flatout.

The fast loop, exact checkpoints, curves, loggers, the verdict and the report serve any module.
Flatout does not know its answers: there is no `model/` folder, no calibration and no table of
classes, and `tune` measures nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from flatout.engine.lightning_internals import overrides
from flatout.errors import UserError, require
from flatout.run.context import RunContext


def report_own_parts(
    module: L.LightningModule,
    data: L.LightningDataModule,
    metric: str | None,
    context: RunContext,
) -> None:
    """Say what serves the user's parts, and what does not; `metric`: of `checkpoint.metric`."""
    folder = context.folder
    names = f"{type(module).__name__} with {type(data).__name__}"
    folder.say(
        f"own parts: {names}; tune, model/, calibration and the table of classes do not serve them"
    )
    if context.ranks.are_several:
        folder.say(
            "own parts: metrics of all devices need self.log(…, sync_dist=True); others are the"
            " first device's"
        )
    if metric is None:
        follows = "the last weights are evaluated, and nothing ends training early"
        remedy = "set it to a name that your validation_step logs"
        folder.say(f"own parts: checkpoint.metric is not set: {follows}; {remedy}")


def has_own(module: Any, data: Any, split: str) -> bool:
    """Whether module and DataModule define what judges a split, `val` or `test`."""
    step = {"val": "validation_step", "test": "test_step"}[split]
    return overrides(module, step, L.LightningModule) and overrides(
        data, f"{split}_dataloader", L.LightningDataModule
    )


def metric_among(metrics: dict[str, float]) -> str | None:
    """The metric that stands for a run whose settings name none: the loss, else the
    first by name.
    """
    names = [name.removeprefix("val/") for name in metrics if name.startswith("val/")]
    return next(iter(sorted(names, key="loss".__ne__)), None)


def plain_name(name: str, split: str) -> str:
    """The name of a metric without its split: `val_loss`, `val/loss` and `valid_loss`
    are `loss`.
    """
    return re.sub(rf"(?i)^{split}(id|idation)?[/_.-]+(?=.)", "", name)


class KeepResults(L.Callback):
    """Keeps what the module logged in a validation where the curves look for it."""

    def __init__(self, metric: str | None) -> None:
        self.metric = metric

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        known = trainer.callback_metrics
        hint = "Log it in validation_step, or name another."
        is_logged = self.metric is None or self.metric in known
        require(
            is_logged,
            "checkpoint.metric",
            f"{self.metric!r} is not logged",
            allowed=", ".join(known),
            hint=hint,
        )
        plain = {name: plain_name(name, "val") for name in known}
        of_validation = {
            name: each for name, each in plain.items() if each != name or name == self.metric
        }
        vars(pl_module)["results"] = {
            each: float(known[name]) for name, each in of_validation.items()
        }


class NoAnswers:
    """Flatout does not know what the module's answers mean."""

    def __init__(self, name: str) -> None:
        self.name = name

    def predict(self, rows: Sequence[Any]) -> list[Any]:
        raise UserError(
            "predict",
            f"{self.name} is your own",
            hint="Use trainer.predict in a script of your own.",
        )

    def save(self, folder: Path, model_config: Any) -> None:
        self.predict([])
