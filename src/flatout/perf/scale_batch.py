"""`ScaleBatch`: a callback that finds the fastest batch size that fits into memory.

It also scales the learning rate to that size, and works in any `L.Trainer`. A copy of the module is
timed with growing sizes, by the search of `tune=auto`. Sizes double until twice as many rows bring
less than `gain`, or do not fit. This happens just before Lightning builds the optimizer: module and
random numbers are as if the size had been set from the start. Several ranks are refused, as their
times differ, and so would their sizes.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from flatout.data.batches.feed import free_memory
from flatout.data.batches.store_data import StoreData
from flatout.engine.lightning_internals import datamodule_of, set_method, unset_method
from flatout.engine.optimizer import ScaleRate
from flatout.engine.precision import LIGHTNING_NAMES, by_lightning_name
from flatout.engine.random_state import random_state, restore_random_state
from flatout.errors import UserError, as_choice, require
from flatout.perf.measure.steps import held_bytes
from flatout.perf.tune.answers import Answers, AnswerStore
from flatout.perf.tune.probe import Here, Parts, ProbedSetting
from flatout.perf.tune.search import Search
from flatout.perf.tune.settings import StepRows, TuneConfig
from flatout.perf.tune.speeds import OpenSettings
from flatout.run_log import RunLog
from flatout.tasks.task import Task


class ScaleBatch(Callback):
    """Sets the batch size of flatout's DataModule before the first step.

    It scales the learning rate of the task, too.

    >>> trainer = L.Trainer(  # doctest: +SKIP
    ...     callbacks=[ScaleBatch(lr="sqrt", max_batch_size=1024)]
    ... )
    """

    def __init__(
        self,
        *,
        lr: str | None = "sqrt",
        max_batch_size: int | None = None,
        budget_s: float = 30.0,
        gain: float = 0.05,
        steps: int = 8,
        memory_margin: float = 0.1,
        log: RunLog | None = None,
    ) -> None:
        """Choose what is measured, and how long.

        `lr`: how the learning rate grows, "sqrt" or "linear"; None leaves it.
        `gain`: twice as many rows must be faster by this fraction.
        `steps`: how many are timed of each size; all of them take at most `budget_s` seconds.
        `memory_margin`: fraction of the memory that stays free.
        """
        super().__init__()
        self.scale_lr = as_choice(ScaleRate, lr or ScaleRate.none, "ScaleBatch.lr")
        _require_most(max_batch_size, 1, "1 or more")
        self.max_batch_size = max_batch_size
        self.settings = TuneConfig(
            enabled=True,
            effective_batch=StepRows.free,
            budget_s=budget_s,
            gain=gain,
            steps=steps,
            memory_margin=memory_margin,
        )
        self.run_log: RunLog = log or RunLog()
        self.batch_size: int | None = None  # the size in use, once it is decided
        self.learning_rate: float | None = None
        # Of the search; None if the decision comes from a checkpoint.
        self.answers: Answers | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        task, data = _parts_of(trainer, pl_module)

        def decide_and_build() -> Any:
            unset_method(task, "configure_optimizers")
            if self.batch_size is None:
                self._decide(trainer, task, data)
            if self.learning_rate is None:
                return task.configure_optimizers()
            return task.with_optim(task.optim.at_rate(self.learning_rate)).configure_optimizers()

        # The last moment before the optimizer. The network is built by now, and a checkpoint is
        # loaded, which may hold the decision.
        set_method(task, "configure_optimizers", decide_and_build)

    def state_dict(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "learning_rate": self.learning_rate}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Use a checkpoint's decision, before other callbacks count the steps of an epoch."""
        state = checkpoint["callbacks"].get(self.state_key)
        if trainer.state.fn == "fit" and state and state["batch_size"] is not None:
            _, data = _parts_of(trainer, pl_module)
            self._apply(data, int(state["batch_size"]), state["learning_rate"])

    def _decide(self, trainer: L.Trainer, task: Task, data: StoreData[Any, Any]) -> None:
        """Search the batch size and set it; the optimizer is built with the rate that it wants."""
        before = data.config.batch_size
        optim = task.optim
        device = trainer.strategy.root_device
        allowed = f"{before} or more, the DataModule's batch_size"
        _require_most(self.max_batch_size, before, allowed)
        random = random_state(device)
        try:
            rows = self._search(trainer, task, data, device)
        finally:
            restore_random_state(random, device)
        based = replace(optim, scale_lr=self.scale_lr, base_batch=before)
        rate = None if self.scale_lr is ScaleRate.none else based.scaled(rows).highest
        self._apply(data, rows, rate)
        self._report(before, optim.highest, rate)

    def _search(
        self, trainer: L.Trainer, task: Task, data: StoreData[Any, Any], device: torch.device
    ) -> int:
        """The batch size that is fastest for a copy of the task."""
        feed = data.feeds.train
        task_copy = copy.copy(task)
        # Callbacks have set these on the task itself.
        for name in ("configure_optimizers", "is_in_fast_loop"):
            unset_method(task_copy, name)
        task_copy = copy.deepcopy(task_copy)
        clip = float(trainer.gradient_clip_val or 0.0)
        precision = by_lightning_name(str(trainer.precision))
        parts = Parts(task_copy, feed.split, feed.plan, device, data.config.workers, clip)
        start = ProbedSetting(
            feed=feed.kind, precision=precision, rows=data.config.batch_size, accumulate=1
        )
        free_bytes = free_memory(device) + held_bytes(device)
        open_settings = OpenSettings(
            settings=self.settings,
            start=start,
            step_rows=start.rows,
            num_rows=feed.split.num_rows,
            most_rows=self.max_batch_size,
            planned_steps=1,
            settled=dict.fromkeys(("data.feed", "precision", "optim.lr", "compile"), ""),
            room_bytes=int(free_bytes * (1 - self.settings.memory_margin)),
            is_cpu=device.type == "cpu",
            counts_time=False,
        )
        search = Search(open_settings, Here(parts), AnswerStore(data.config.cache))
        self.answers = search.decide()
        return search.now.rows

    def _apply(self, data: StoreData[Any, Any], rows: int, rate: float | None) -> None:
        self.batch_size = rows
        self.learning_rate = rate
        data.config.batch_size = rows

    def _report(self, before: int, rate_before: float, rate: float | None) -> None:
        """Log both decisions with their reasons."""
        assert self.answers is not None
        # "tune" says why nothing was measured.
        choice = next(
            choice for choice in self.answers.choices if choice.name in ("micro-batch", "tune")
        )
        evidence = f"{choice.evidence}; {self.answers.seconds:.1f} s"
        self.run_log.decision(
            "data.batch_size", f"{before} → {self.batch_size}", choice.why, evidence
        )
        if rate is not None:
            self.run_log.decision(
                "optim.lr",
                f"{rate_before:g} → {rate:g}",
                f"scaled by {self.scale_lr.value}",
                f"{self.batch_size} rows for {before}",
            )


def _require_most(max_batch_size: int | None, least: int, allowed: str) -> None:
    is_sound = max_batch_size is None or max_batch_size >= least
    require(is_sound, "ScaleBatch.max_batch_size", f"{max_batch_size}", allowed=allowed)


def _parts_of(trainer: L.Trainer, module: L.LightningModule) -> tuple[Task, StoreData[Any, Any]]:
    """The task and the DataModule, if both are flatout's and the batch size may change."""
    data = datamodule_of(trainer)
    where = "ScaleBatch"
    if not (isinstance(module, Task) and isinstance(data, StoreData)):
        name = "no DataModule" if data is None else type(data).__name__
        raise UserError(
            where,
            f"{type(module).__name__} with {name}",
            allowed="a task and a DataModule of flatout",
            hint="Use Lightning's BatchSizeFinder for other modules.",
        )
    require(
        trainer.world_size == 1,
        where,
        f"{trainer.world_size} ranks",
        allowed="one rank",
        hint="Find the size on one device, then set batch_size.",
    )
    for name in ("tokens_per_batch", "effective_batch"):
        require(
            getattr(data.config, name) is None,
            where,
            f"data.{name} fixes the size of a batch",
            hint="Leave one of them out.",
        )
    precisions = LIGHTNING_NAMES.values()
    require(
        str(trainer.precision) in precisions,
        where,
        f"precision {trainer.precision}",
        allowed=", ".join(precisions),
        hint="Leave ScaleBatch out.",
    )
    return module, data
