"""What a run of the user's own LightningModule does differently.

The fast loop, exact checkpoints, curves, loggers, the verdict and the report serve any module, with
a DataModule of its own or one of flatout. flatout does not know what its answers mean: there is no
`model/` folder, no calibration and no table of classes, and `tune` measures nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import lightning as L

from flatout.engine.lightning_internals import overrides
from flatout.errors import UserError, class_name, require
from flatout.models.contract import ModelConfig
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
        f"own parts: {names}, without what needs parts of flatout: tune, a model/ folder,"
        " calibrated probabilities, a table of classes"
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


def has_own(module: L.LightningModule, data: L.LightningDataModule, split: str) -> bool:
    """Whether module and DataModule define what judges a split, `val` or `test`."""
    step = "validation_step" if split == "val" else "test_step"
    has_step = overrides(module, step, L.LightningModule)
    return has_step and overrides(data, f"{split}_dataloader", L.LightningDataModule)


def require_picklable(task: object, data: object) -> None:
    """Refuse parts of the user's that cannot be sent to other processes."""
    for key, part in (("task", task), ("data", data)):
        try:
            ForkingPickler.dumps(part)
        except Exception as error:
            # Pickling runs methods of all its attributes, which may raise anything.
            kind = part if isinstance(part, type) else type(part)
            raise UserError(
                key,
                f"{class_name(kind)} cannot be sent to other processes: {error}",
                hint=(
                    "Make it picklable, or start one run with torchrun: each process then builds"
                    " its parts."
                ),
            ) from None


def metric_among(metrics: dict[str, float]) -> str | None:
    """The metric of a run whose settings name none: the validation loss, else the first by name."""
    names = [name.removeprefix("val/") for name in metrics if name.startswith("val/")]
    return next(iter(sorted(names, key="loss".__ne__)), None)


def plain_name(name: str, split: str) -> str:
    """The name of a metric without its split: `val_loss`, `val/loss`, `valid_loss` → `loss`."""
    return re.sub(rf"(?i)^{split}(id|idation)?[/_.-]+(?=.)", "", name)


class KeepResults(L.Callback):
    """After a validation, puts what the module logged where the curves look: `module.results`.

    `metric`: the logged name of `checkpoint.metric`, which must be among it.
    """

    def __init__(self, metric: str | None) -> None:
        self.metric = metric

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = trainer.callback_metrics
        require(
            self.metric is None or self.metric in logged,
            "checkpoint.metric",
            f"{self.metric!r} is not logged",
            allowed=", ".join(logged),
            hint="Log it in validation_step, or name another.",
        )
        results = {}
        for name, value in logged.items():
            plain = plain_name(name, "val")
            # others are of the training
            if plain != name or name == self.metric:
                results[plain] = float(value)
        # not by setattr: a module may have a property of that name
        vars(pl_module)["results"] = results


class NoAnswers:
    """Stands for a predictor: flatout does not know what the answers of the user's module mean."""

    def __init__(self, name: str) -> None:
        self.name = name

    def predict(self, rows: Sequence[Any]) -> list[Any]:
        raise UserError(
            "predict",
            f"{self.name} is your own",
            hint="Use trainer.predict in a script of your own.",
        )

    def save(self, folder: Path, model_config: ModelConfig) -> None:
        self.predict([])
