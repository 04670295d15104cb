"""`ScaleBatch`: the batch size that is fastest and fits into memory, and the learning rate for it,
in any `L.Trainer`.

Training steps of growing size are timed on a copy of the module, by the same search that
`tune=auto` uses: sizes double until twice as many rows bring less than `gain`, or would not fit. It
happens just before Lightning builds the optimizer, so nothing must be undone: module and random
numbers are as if the size had been set from the start. A training on several ranks is refused: rank
by rank the times differ, and so would the sizes.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from flatout.data.batches.feed import free_memory
from flatout.data.store_data import StoreData
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
    """Sets the batch size of a DataModule of flatout before the first step, and scales the learning
    rate of its task.

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
        """`lr`: sqrt, linear, or None to leave the rate alone; `gain`: how much faster twice as
        many rows must be.

        `steps` are timed of each size, at most `budget_s` seconds of all; `memory_margin` of the
        memory stays free.
        """
        super().__init__()
        self.scale_lr = as_choice(ScaleRate, lr or ScaleRate.none, "ScaleBatch.lr")
        is_sound = max_batch_size is None or max_batch_size >= 1
        require(is_sound, "ScaleBatch.max_batch_size", f"{max_batch_size}", allowed="1 or more")
        self.max_batch_size = max_batch_size
        asked: dict[str, Any] = {
            "budget_s": budget_s,
            "gain": gain,
            "steps": steps,
            "memory_margin": memory_margin,
        }
        self.settings = TuneConfig(enabled=True, effective_batch=StepRows.free, **asked)
        self.run_log: RunLog = log or RunLog()
        self.batch_size: int | None = None  # the size in use, once it is decided
        self.learning_rate: float | None = None
        # what was tried; None where a checkpoint has brought the decision
        self.answers: Answers | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        task, data = _parts_of(trainer, pl_module)
        build = task.configure_optimizers

        def decide_and_build() -> Any:
            unset_method(task, "configure_optimizers")
            if self.batch_size is None:
                self._decide(trainer, task, data)
            return build()

        # The last moment before the optimizer: the network is built, and a checkpoint has brought
        # its decision.
        set_method(task, "configure_optimizers", decide_and_build)

    def state_dict(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "learning_rate": self.learning_rate}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the decision over before other callbacks count the steps of an epoch."""
        state = checkpoint["callbacks"].get(self.state_key)
        if trainer.state.fn == "fit" and state and state["batch_size"] is not None:
            self._apply(
                *_parts_of(trainer, pl_module), int(state["batch_size"]), state["learning_rate"]
            )

    def _decide(self, trainer: L.Trainer, task: Task, data: StoreData[Any, Any]) -> None:
        before = data.config.batch_size
        optim = task.optim
        device = trainer.strategy.root_device
        allowed = f"{before} or more, the DataModule's batch_size"
        is_sound = self.max_batch_size is None or self.max_batch_size >= before
        require(is_sound, "ScaleBatch.max_batch_size", f"{self.max_batch_size}", allowed=allowed)
        random = random_state(device)
        try:
            rows = self._search(trainer, task, data, device)
        finally:
            restore_random_state(random, device)
        based = replace(optim, scale_lr=self.scale_lr, base_batch=before)
        rate = None if self.scale_lr is ScaleRate.none else based.scaled(rows).highest
        self._apply(task, data, rows, rate)
        self._report(before, optim.highest, rate)

    def _search(
        self, trainer: L.Trainer, task: Task, data: StoreData[Any, Any], device: torch.device
    ) -> int:
        feed = data.feeds.train
        alone = copy.copy(task)
        # what callbacks put into it, which must not be shared
        for name in ("configure_optimizers", "is_in_fast_loop"):
            unset_method(alone, name)
        alone = copy.deepcopy(alone)
        alone.total_steps = alone.total_steps or 1  # the rate does not matter here
        clip = float(trainer.gradient_clip_val or 0.0)
        precision = by_lightning_name(str(trainer.precision))
        parts = Parts(alone, feed.split, feed.plan, device, data.config.workers, clip)
        start = ProbedSetting(
            feed=feed.kind, precision=precision, rows=data.config.batch_size, accumulate=1
        )
        asked = OpenSettings(
            settings=self.settings,
            start=start,
            step_rows=start.rows,
            num_rows=feed.split.num_rows,
            most_rows=self.max_batch_size,
            planned_steps=1,
            kept=dict.fromkeys(("data.feed", "precision", "optim.lr", "compile"), ""),
            room_bytes=int(
                (free_memory(device) + held_bytes(device)) * (1 - self.settings.memory_margin)
            ),
            is_cpu=device.type == "cpu",
            counts_time=False,
        )
        search = Search(asked, Here(parts), AnswerStore(data.config.cache))
        self.answers = search.decide()
        return search.now.rows

    def _apply(self, task: Task, data: StoreData[Any, Any], rows: int, rate: float | None) -> None:
        self.batch_size, self.learning_rate = rows, rate
        data.config.batch_size = rows
        if rate is not None:
            task.optim = replace(task.optim, lr=rate)

    def _report(self, before: int, rate_before: float, rate: float | None) -> None:
        assert self.answers is not None
        choice = next(each for each in self.answers.choices if each.name in ("micro-batch", "tune"))
        evidence = f"{choice.evidence}; {self.answers.seconds:.1f} s"
        self.run_log.decision(
            "data.batch_size", f"{before} → {self.batch_size}", choice.why, evidence
        )
        if rate is not None:
            why, growth = f"scaled by {self.scale_lr.value}", f"{self.batch_size} rows for {before}"
            self.run_log.decision("optim.lr", f"{rate_before:g} → {rate:g}", why, growth)


def _parts_of(trainer: L.Trainer, module: L.LightningModule) -> tuple[Task, StoreData[Any, Any]]:
    data = datamodule_of(trainer)
    where = "ScaleBatch"
    if not (isinstance(module, Task) and isinstance(data, StoreData)):
        names = (
            f"{type(module).__name__} with"
            f" {type(data).__name__ if data is not None else 'no DataModule'}"
        )
        hint, allowed = (
            "Use Lightning's BatchSizeFinder for other modules.",
            "a task and a DataModule of flatout",
        )
        raise UserError(where, names, allowed=allowed, hint=hint)
    require(
        trainer.world_size == 1,
        where,
        f"{trainer.world_size} ranks",
        allowed="one rank",
        hint="Find the size on one device, then set batch_size.",
    )
    for name in ("tokens_per_batch", "effective_batch"):
        is_open = getattr(data.config, name) is None
        require(
            is_open, where, f"data.{name} fixes the size of a batch", hint="Leave one of them out."
        )
    known = ", ".join(LIGHTNING_NAMES.values())
    is_known = str(trainer.precision) in LIGHTNING_NAMES.values()
    require(
        is_known,
        where,
        f"precision {trainer.precision}",
        allowed=known,
        hint="Leave ScaleBatch out.",
    )
    return module, data
