"""Plan a run that ends within its budget: as many epochs as fit, the schedule at its end.

A short try of the run says what an epoch takes (`run/short_try.py`). Of 7.6 epochs that fit, 8 are
trained on 95 % of the batches each. So every epoch ends with a validation, and the last one ends
where the budget does. Each epoch draws other rows. At the start of each later epoch
`KeepBudget` plans the rest again by the pace of the steps so far, and the schedule with it.

What else a run does takes part of its budget, and must not come as a surprise. So the rival is
trained before the plan, and the verdict may try other ways for a small share of the time.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L

from flatout.config import RunConfig
from flatout.data.batches.feed import Feed
from flatout.data.batches.store_data import StoreData
from flatout.engine.lightning_internals import callbacks_of, set_callbacks, set_epoch_length
from flatout.engine.schedule import StepSchedule
from flatout.errors import require
from flatout.perf.tune.settings import is_typed
from flatout.price.costs import TRIES_SHARE_IN_BUDGET, Costs, PlannedLengths, expect
from flatout.price.expected_end import ExpectedEnd
from flatout.price.settings import Budget
from flatout.price.words import describe_seconds
from flatout.run.context import Run, RunContext, Settings, Training
from flatout.run.kinds import kind_of
from flatout.run.rival import rival_limit_s, scores_within
from flatout.run.short_try import STEPS_S, try_run
from flatout.run_log import RunLog

_LENGTH = ("max_epochs", "limit_train_batches")
_TRY_SHARE = 0.05  # of the budget, for the steps of the try
_HALVINGS = 40
_MOST_EPOCHS = 1e5


def settle_budget(config: RunConfig, context: RunContext, data: StoreData[Any, Any]) -> RunConfig:
    """The settings with the length that fits into the budget; a resumed run keeps its own."""
    if config.budget is None:
        return config
    for key in (f"trainer.{name}" for name in (*_LENGTH, "max_steps")):
        require(
            not is_typed(key, context.overrides),
            key,
            f"is set, and budget={config.budget} too",
            hint="Leave one of them out.",
        )
    require(
        not context.ranks.are_several,
        "budget",
        f"{config.budget}, which plans runs on one device",
        hint="Set trainer.devices=1, or +trainer.max_time.",
    )
    folder = context.folder
    before = folder.before.get("budget")
    if before is not None:
        words = str(before["value"])
        why = "as at the beginning of this run"
        evidence = str(before["evidence"])
    else:
        folder.say("budget: a short try of the run, in a process apart")
        words, evidence = _plan(config, context, data)
        why = f"ends within {config.budget}"
    folder.decision("budget", words, why, evidence)
    counts = dict(zip(_LENGTH, map(int, re.findall(r"\d+", words)), strict=True))
    return replace(config, trainer={**config.trainer, **counts})


def _plan(config: RunConfig, context: RunContext, data: StoreData[Any, Any]) -> tuple[str, str]:
    """The words that set the length, and what they rest on."""
    budget = Budget.of(str(config.budget), config.price)
    # the try is part of the run, and must be short beside it
    seconds = min(STEPS_S, _TRY_SHARE * budget.amount) if budget.unit == "s" else STEPS_S
    tried = try_run(config, context.begin, seconds=seconds)
    price = tried["price"]
    costs = Costs.of(price["costs"])
    plan = price["plan"]
    limit_s = budget.seconds(config.price, costs.watts)
    if tried["mixture"] is None:  # else the linear model that answers with the network is scored
        _score_rival(config, data, limit_s, context.folder)
    tries_share = TRIES_SHARE_IN_BUDGET if config.monitor.verdict else 0.0

    def seconds_of(epochs: float) -> float:
        lengths = PlannedLengths.of_plan(plan, epochs, tries_share=tries_share)
        return expect(costs, lengths, price["ratios"]).value_s

    begun_s = time.perf_counter() - context.began
    left_s = limit_s - begun_s
    least_s = seconds_of(1.0)
    require(
        least_s <= left_s,
        "budget",
        f"{config.budget}, but one epoch with its evaluation takes {describe_seconds(least_s)}"
        f" beside {describe_seconds(begun_s)} to begin",
        hint="Allow more, or take a smaller model or fewer rows.",
    )
    # The time grows with the epochs, but not evenly: what the verdict may try is bounded.
    low = 1.0
    high = _MOST_EPOCHS
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if seconds_of(middle) <= left_s:
            low = middle
        else:
            high = middle
    epochs = math.ceil(low)
    batches = max(1, math.floor(low / epochs * plan["steps_an_epoch"])) * config.data.batches(1)[1]
    words = f"trainer.max_epochs={epochs} trainer.limit_train_batches={batches}"
    return words, f"an epoch takes {describe_seconds(seconds_of(2.0) - least_s)}"


def _score_rival(config: RunConfig, data: StoreData[Any, Any], limit_s: float, log: RunLog) -> None:
    """Train the rival now; its scores are found in the cache when the run has ended."""
    rival = kind_of(config.data).rival
    if rival is not None and config.monitor.rival and "test" in data.store.splits:
        scores_within(rival, data, rival_limit_s(limit_s), log)


def keep_budget(run: Run, training: Training, end: ExpectedEnd) -> None:
    """Let a run with a budget plan its later epochs again."""
    feed = run.parts.train_feed()
    if feed is not None and run.settings.asked.budget is not None:
        callbacks = callbacks_of(training.trainer)
        set_callbacks(training.trainer, [*callbacks, KeepBudget(run.settings, feed, end)])


class KeepBudget(L.Callback):
    """Sets length and schedule of the epochs that are left, so that the run ends in time."""

    def __init__(self, settings: Settings, feed: Feed, end: ExpectedEnd) -> None:
        self.settings = settings
        self.feed = feed
        self.end = end

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        costs = self.end.costs()
        lengths = self.end.lengths
        if trainer.current_epoch == 0 or costs is None or lengths is None:
            return
        left_s = self._seconds_left(costs)
        feed = self.feed
        most = len(feed) // feed.plan.accumulate
        tokens = lengths.work.total / lengths.work.total_steps
        step_s = costs.pace.seconds(1, tokens)
        validation_s = costs.validation_s + costs.saves_a_validation * costs.save_s
        epochs = max(1, math.ceil(left_s / (most * step_s + validation_s)))
        steps = math.floor((left_s / epochs - validation_s) / step_s)
        steps = min(most, max(1, steps))
        total = trainer.global_step + epochs * steps
        set_epoch_length(trainer, steps * feed.plan.accumulate)
        trainer.fit_loop.max_epochs = trainer.current_epoch + epochs
        for config in trainer.lr_scheduler_configs:
            schedule = config.scheduler
            if isinstance(schedule, StepSchedule):
                schedule.rate_at = partial(self.settings.optim.lr_at, total_steps=total)
        self.end.lengths = replace(
            lengths,
            work=replace(lengths.work, total_steps=total),
            validations=self.end.clock.counts["validation"] + epochs,
        )

    def _seconds_left(self, costs: Costs) -> float:
        """Seconds of training that are left, without those of the evaluation."""
        asked = self.settings.asked
        watts = self.end.watts or asked.price.watts
        limit_s = Budget.of(str(asked.budget), asked.price).seconds(asked.price, watts)
        noted = self.end.noted or costs
        assert self.end.lengths is not None
        whole = expect(replace(costs, evaluation_s=noted.evaluation_s), self.end.lengths)
        return limit_s - (time.perf_counter() - self.end.began) - whole.parts_s["evaluation"]
