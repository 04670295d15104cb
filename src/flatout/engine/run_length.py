"""How long a Trainer's settings train: batches of an epoch, steps of a run; validations fall
between steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flatout.data.batches.feed import Feed
from flatout.errors import require
from flatout.run_log import RunLog

EPOCHS = 8  # epochs of a run whose settings name no number


def whole_steps(trainer: dict[str, Any], feed: Feed, log: RunLog) -> dict[str, Any]:
    """A Trainer's settings with epochs and validations that end where an optimizer step does, never
    within one.
    """
    accumulate = feed.plan.accumulate
    settings = dict(trainer)
    # the plan repeats its first epoch, so a limit is enough
    if overfit := settings.pop("overfit_batches", 0):
        settings = {"limit_train_batches": overfit, "limit_val_batches": overfit, **settings}
    limit = settings.get("limit_train_batches")
    if limit is not None:
        batches = _whole(_count(limit, len(feed)), accumulate)
        require(
            batches > 0, "trainer.limit_train_batches", f"{limit}", allowed="at least one batch"
        )
        settings["limit_train_batches"] = min(batches, len(feed))
    interval = settings.get("val_check_interval")
    is_timed = interval is not None and not isinstance(interval, int | float)
    require(
        not is_timed or accumulate == 1,
        "trainer.val_check_interval",
        f"{interval}",
        hint="Count batches, or set data.accumulate=1: the clock knows no steps.",
    )
    every = settings.get("check_val_every_n_epoch", 1)
    most = batches_in_epoch(settings, feed)
    require(every != 0, "trainer.check_val_every_n_epoch", "0", allowed="1 or more, or null")
    fits = type(interval) is not int or 0 < interval <= (most if every else interval)
    require(
        fits,
        "trainer.val_check_interval",
        f"{interval} of {most} batches an epoch",
        allowed=f"1 to {most}, or a share",
        hint="Or count on: +trainer.check_val_every_n_epoch=null.",
    )
    if accumulate > 1 and isinstance(interval, int | float) and interval != 1.0:
        asked = _count(interval, most)
        settings["val_check_interval"] = batches = _whole(asked, accumulate)
        if batches != asked:
            evidence = f"{accumulate} batches make a step, {asked} were asked for"
            log.decision(
                "validation every", f"{batches} batches", "a step is never cut in two", evidence
            )
    return settings


def batches_in_epoch(trainer: dict[str, Any], feed: Feed) -> int:
    """Batches of one rank in each epoch."""
    limit = trainer.get("limit_train_batches")
    return len(feed) if limit is None else min(len(feed), _count(limit, len(feed)))


def planned_steps(trainer: dict[str, Any], feed: Feed) -> int:
    """Optimizer steps of the whole run."""
    epochs = trainer.get("max_epochs") or EPOCHS
    most = trainer.get("max_steps")
    whole = epochs * batches_in_epoch(trainer, feed) // feed.plan.accumulate
    if most is None or most == -1:
        return whole
    require(most > 0, "trainer.max_steps", f"{most}", allowed="1 or more")
    # Lightning ends at whichever comes first
    return int(most) if epochs == -1 else min(int(most), whole)


def _count(given: float, total: int) -> int:
    """A number of batches, given as such or as a share."""
    return (
        int(given)
        if isinstance(given, int) and not isinstance(given, bool)
        else math.floor(float(given) * total)
    )


def _whole(batches: int, accumulate: int) -> int:
    return -(-batches // accumulate) * accumulate


def validations(trainer: Mapping[str, Any]) -> int | None:
    """How many times a run validates, if nothing stops it early; None where that takes the batches
    of an epoch.
    """
    epochs = trainer.get("max_epochs") or EPOCHS
    share = trainer.get("val_check_interval") or 1.0
    if epochs < 0 or not isinstance(share, float) or (trainer.get("max_steps") or -1) != -1:
        return None
    in_epoch = int(1 / share) if isinstance(share, float) and share < 1 else 1
    return max(1, epochs * in_epoch // int(trainer.get("check_val_every_n_epoch") or 1))
