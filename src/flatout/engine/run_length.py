"""How long a run is by its settings: batches of an epoch, optimizer steps, validations.

Lightning counts batches, and a step may accumulate several. `whole_steps` changes the Trainer's
settings so that epochs end, and validations come, after a whole step. Open this file if a run has
the wrong number of steps, or to see which settings of length are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flatout.data.batches.feed import Feed
from flatout.data.feeding import ROWS
from flatout.errors import require
from flatout.run_log import RunLog

EPOCHS = 8  # of a run without `trainer.max_epochs`
MANY_ROWS = 10_000  # training rows, from which on a run has batches of `ROWS` and `EPOCHS` epochs
STEPS = 500  # that a run of fewer rows should take at least
SIZES = (16, 32, 64, ROWS)  # batches that may be chosen
# From so many training rows on, that many rows a batch; below the last one, the smallest.
_FROM_SCRATCH = {MANY_ROWS: ROWS, 5_000: 64, 2_000: 32}
_PRETRAINED = {MANY_ROWS: ROWS, 5_000: 32}
# Fewest and most epochs; a pretrained encoder learns in few, unless classes have few rows: with 6
# rows for each of 41 classes a MiniLM is right 9 times of 100 after 10 epochs, and 21 after 20.
_EPOCHS_FROM_SCRATCH = (EPOCHS, 20)
_EPOCHS_PRETRAINED = (4, 10)
_EPOCHS_OF_RARE_CLASSES = (4, 20)
_ROWS_A_CLASS = 20  # fewer are few
# Recordings and chunks of them, of built-in and of real cells: 50 discharges answered an rmse of
# 0.092 after 500 steps or patience, and of 0.184 in 8 epochs of 64 rows. Windows of a forecast
# gained nothing: 500 to 8,500 of them were answered worse by more and smaller steps.
MANY_RECORDINGS = 5_000
_RECORDINGS = {MANY_RECORDINGS: 64, 2_000: 32}
_EPOCHS_OF_RECORDINGS = (EPOCHS, 100)


def choose_batch_of_recordings(rows: int) -> int:
    """Recordings or chunks of a step, by the number of those in training."""
    return next((size for least, size in _RECORDINGS.items() if rows >= least), SIZES[0])


def choose_epochs_of_recordings(rows: int, step_rows: int) -> int:
    """The epochs in which a run on recordings takes `STEPS` steps; patience may end it earlier.

    50 recordings in steps of 16 are 4 steps an epoch, so 100 epochs of at most so many.
    """
    least, most = _EPOCHS_OF_RECORDINGS
    wanted = math.ceil(STEPS / math.ceil(max(1, rows) / step_rows))
    return min(max(wanted, least), most)


def choose_batch(rows: int, *, pretrained: bool) -> int:
    """Rows of a step, by the number of training rows."""
    sizes = _PRETRAINED if pretrained else _FROM_SCRATCH
    return next((size for least, size in sizes.items() if rows >= least), SIZES[0])


def choose_epochs(rows: int, step_rows: int, classes: int, *, pretrained: bool) -> int:
    """The epochs in which a run takes `STEPS` steps, within the usual ones.

    500 rows in steps of 16 are 32 steps an epoch, so 16 epochs.
    """
    if rows >= MANY_ROWS:
        return EPOCHS
    least, most = _EPOCHS_FROM_SCRATCH
    if pretrained:
        is_rare = rows < _ROWS_A_CLASS * classes
        least, most = _EPOCHS_OF_RARE_CLASSES if is_rare else _EPOCHS_PRETRAINED
    wanted = math.ceil(STEPS * step_rows / max(1, rows))
    return min(max(wanted, least), most)


def whole_steps(trainer: dict[str, Any], feed: Feed, log: RunLog) -> dict[str, Any]:
    """Return the Trainer's settings with epochs and validations that end after whole steps.

    With 4 batches a step, `limit_train_batches=10` becomes 12, `val_check_interval=6` becomes 8.
    `overfit_batches` becomes limits of both splits.
    """
    accumulate = feed.plan.accumulate
    settings = dict(trainer)
    # The plan repeats its first epoch then, so limits are enough.
    if overfit := settings.pop("overfit_batches", 0):
        settings = {"limit_train_batches": overfit, "limit_val_batches": overfit, **settings}
    limit = settings.get("limit_train_batches")
    if limit is not None:
        batches = _round_up(_count(limit, len(feed)), accumulate)
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
        hint="Give a number of batches, or set data.accumulate=1: a time may end within a step.",
    )
    every_n_epochs = settings.get("check_val_every_n_epoch", 1)
    in_epoch = batches_in_epoch(settings, feed)
    require(
        every_n_epochs != 0, "trainer.check_val_every_n_epoch", "0", allowed="1 or more, or null"
    )
    # With null, Lightning counts batches across epochs: the interval may be longer than one.
    longest = max(1, in_epoch) if every_n_epochs else math.inf
    require(
        not isinstance(interval, int | float) or 0 < interval <= longest,
        "trainer.val_check_interval",
        f"{interval} of {in_epoch} batches an epoch",
        allowed=f"1 to {in_epoch}, or a share",
        hint="To count across epochs: +trainer.check_val_every_n_epoch=null.",
    )
    if accumulate > 1 and isinstance(interval, int | float) and interval != 1.0:
        typed = _count(interval, in_epoch)
        batches = _round_up(typed, accumulate)
        settings["val_check_interval"] = batches
        if batches != typed:
            evidence = f"{accumulate} batches make a step, {typed} were asked for"
            log.decision(
                "validation every", f"{batches} batches", "a step is never cut in two", evidence
            )
    return settings


def batches_in_epoch(trainer: dict[str, Any], feed: Feed) -> int:
    """Batches of one rank in each epoch."""
    limit = trainer.get("limit_train_batches")
    if limit is None:
        return len(feed)
    return min(len(feed), _count(limit, len(feed)))


def planned_steps(trainer: dict[str, Any], feed: Feed) -> int:
    """Optimizer steps of the whole run."""
    epochs = trainer.get("max_epochs") or EPOCHS
    most = trainer.get("max_steps")
    by_epochs = epochs * batches_in_epoch(trainer, feed) // feed.plan.accumulate
    if most is None or most == -1:
        return by_epochs
    require(most > 0, "trainer.max_steps", f"{most}", allowed="1 or more")
    # Lightning ends at the limit that comes first; -1 epochs are no limit.
    return int(most) if epochs == -1 else min(int(most), by_epochs)


def _count(limit: float, total: int) -> int:
    """A number of batches: an int is one already, a float is a share of `total`; true is 1.0."""
    if type(limit) is int:
        return limit
    return math.floor(float(limit) * total)


def _round_up(batches: int, accumulate: int) -> int:
    return -(-batches // accumulate) * accumulate


def validations(trainer: Mapping[str, Any]) -> int | None:
    """How many times a run validates if nothing stops it early.

    None if the settings count steps or batches, as that depends on the length of an epoch. Two
    epochs with `val_check_interval=0.25` validate 8 times.
    """
    epochs = trainer.get("max_epochs") or EPOCHS
    share = trainer.get("val_check_interval") or 1.0
    if epochs < 0 or not isinstance(share, float) or (trainer.get("max_steps") or -1) != -1:
        return None
    in_epoch = int(1 / share) if share < 1 else 1
    return max(1, epochs * in_epoch // int(trainer.get("check_val_every_n_epoch") or 1))
