"""Train to the end: `trainer.fit`, what its errors mean to the user, and why it ended early.

Open this file to change what is printed when patience, a signal or a mistake in the user's module
ends training. The steps themselves are in `engine/fast_loop.py`.
"""

from __future__ import annotations

import math
import signal
import warnings
from contextlib import suppress
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from flatout.checkpoints.kept import Start
from flatout.checkpoints.odd_state import is_of_checkpoint
from flatout.data.checks.findings import counted
from flatout.distributed.ranks import others_watched
from flatout.distributed.signals import requeue_with_slurm
from flatout.errors import UserError, class_name, first_line, require
from flatout.price.words import describe_seconds
from flatout.report.run_report import EARLY_END
from flatout.run.context import OurParts, Run, Training
from flatout.run.lightning_advice import without_lightning_advice
from flatout.run.run_folder import RunFolder

# how RuntimeErrors of Lightning begin that a setting or a module of the user causes
_MISTAKES = ("Training with multiple optimizers", "Early stopping conditioned on metric")


def fit_to_end(run: Run, training: Training, start: Start | None) -> None:
    """Train to the last step, or until patience ends it; `start`: the checkpoint to resume."""
    # the Trainer may drop its callbacks, so the list is kept to close files in any case
    listeners = list(training.curves.listeners)
    folder = run.folder
    run.parts.report_start(run)
    with without_lightning_advice(), others_watched(), training.checkpoints.when.signals.waiting():
        for pattern in run.parts.expected_warnings():
            warnings.filterwarnings("ignore", message=pattern)
        try:
            _fit(run, training, start)
        finally:
            for listener in listeners:
                with suppress(OSError):
                    listener.close()
            if training.trainer.global_step > (0 if start is None else start.step):
                folder.replaced.clear()  # the run has gone on: what it was before is past
    require(
        training.trainer.global_step > 0,
        "trainer",
        "not one step was planned",
        hint="Give it rows, epochs and time.",
    )
    folder.note_trained()
    report_early_end(training, folder)
    _report_skipped(training, folder)


def _report_skipped(training: Training, folder: RunFolder) -> None:
    skipped_steps = training.loop.skipped
    if skipped_steps:
        # the rows of the first one are enough to look at: later ones are often the same rows
        rows = training.loop.losses.describe_rows(skipped_steps[0])
        folder.say(
            f"{len(skipped_steps)} steps were skipped, their gradient was not finite: the"
            f" first{rows}"
        )


def report_start(run: Run, ours: OurParts) -> None:
    """Say how many weights a task trains, and in how many steps."""
    count = sum(weight.numel() for weight in ours.task.model.parameters())
    plan = ours.feeds.train.plan
    rows = plan.rows_per_batch * plan.parts
    steps = counted(run.settings.total_steps or 0, "step")
    run.folder.say(f"training: {count:,} parameters, {steps} of {counted(rows, 'row')}")


def _fit(run: Run, training: Training, start: Start | None) -> None:
    """Lightning's `fit`; its errors become ours."""
    trainer = training.trainer
    checkpoint = None if start is None else start.checkpoint
    try:
        trainer.fit(run.parts.module, datamodule=run.parts.data, ckpt_path=checkpoint)
    except SystemExit:
        signal_number = training.checkpoints.when.stopped_by
        if signal_number:
            report_signal(signal_number, training, run.folder)
        elif trainer.interrupted:  # Lightning turns Ctrl-C into exit code 1
            raise KeyboardInterrupt from None
        raise
    except MisconfigurationException as error:
        raise _user_error(error, run) from None
    except UserError:
        raise
    except Exception as error:
        # no narrower class: odd values of a checkpoint raise any, and Lightning has none of its own
        # for some mistakes of settings
        if isinstance(error, RuntimeError) and str(error).startswith(_MISTAKES):
            raise _user_error(error, run) from None
        if checkpoint is None or not is_of_checkpoint(error):
            raise
        raise UserError(
            f"checkpoint {checkpoint}",
            f"its state does not fit ({class_name(type(error))}: {first_line(error)})",
            hint="It was changed, or is of another run: resume another checkpoint.",
        ) from error


def _user_error(error: Exception, run: Run) -> UserError:
    return UserError(run.parts.blames, " ".join(str(error).split()))


def report_early_end(training: Training, folder: RunFolder) -> None:
    """Report after which epoch patience, a target or a limit of time has ended training.

    A run that reached its last epoch has nothing to report.
    """
    trainer = training.trainer
    if trainer.current_epoch == (trainer.max_epochs or -1):
        return
    for stopping in trainer.early_stopping_callbacks:
        value = float(trainer.callback_metrics.get(stopping.monitor, 0.0))
        if is_reached(stopping, value):
            _report_target(stopping, value, training, folder)
            return
        has_ended = not math.isfinite(value) or stopping.wait_count >= stopping.patience
        if trainer.should_stop and has_ended:
            _report_stopping(stopping, value, training, folder)
            return
    callbacks = cast(Any, trainer).callbacks  # Lightning sets the list without declaring it
    timers = [each for each in callbacks if isinstance(each, Timer)]
    if any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers):
        moment = f"after {counted(trainer.global_step, 'step')}"
        why = "trainer.max_time, or a Timer of yours, was over"
        folder.decision(EARLY_END, moment, why, _kept_weights(training))


def is_reached(stopping: EarlyStopping, value: float) -> bool:
    """Whether a value is at least as good as the one at which training ends."""
    threshold = stopping.stopping_threshold
    return threshold is not None and bool(stopping.monitor_op(torch.tensor(value), threshold))


def _report_target(
    stopping: EarlyStopping, value: float, training: Training, folder: RunFolder
) -> None:
    """The decision `early end` where the value of `until` is reached: after which step."""
    steps = counted(training.trainer.global_step, "step")
    seconds = training.curves.timer.times.total.seconds
    target = f"until={stopping.monitor}:{stopping.stopping_threshold:g}"
    why = f"{stopping.monitor} is {value:.4f}, {target}"
    evidence = f"it took {describe_seconds(seconds)} of training"
    folder.decision(EARLY_END, f"after {steps}", why, evidence)


def _report_stopping(
    stopping: EarlyStopping, value: float, training: Training, folder: RunFolder
) -> None:
    """The decision `early end`: after which epoch, by which setting, and whose weights stay."""
    trainer: L.Trainer = training.trainer
    last_epoch = trainer.max_epochs or -1
    moment = f"after epoch {trainer.current_epoch}"
    if last_epoch > 0:
        moment += f" of {last_epoch}"
    if math.isfinite(value):
        reason = f"was no better in {counted(stopping.wait_count, 'validation')}"
    else:
        reason = "is not finite"
    setting = "your EarlyStopping with patience="
    if stopping in training.stopping:
        setting = "checkpoint.patience="
    why = f"{stopping.monitor} {reason}, {setting}{stopping.patience}"
    folder.decision(EARLY_END, moment, why, _kept_weights(training))


def _kept_weights(training: Training) -> str:
    """Whose weights a run that ended early keeps, in words."""
    best = training.checkpoints.best_so_far
    if best.value is None:
        return "the last weights are kept"
    best_moment = f"step {best.step}" if best.epoch is None else f"epoch {best.epoch}"
    return f"{best.value:.4f} after {best_moment}, which is kept"


def report_signal(number: int, training: Training, folder: RunFolder) -> None:
    """Say where a signal stopped training, and how to resume; SLURM is asked to start it again."""
    name = signal.Signals(number).name
    step = training.checkpoints.boundary.at.step
    folder.say(f"stopped by {name} after step {step}: {folder.advise_resume('resumes there')}")
    if folder.is_first:
        answer = requeue_with_slurm(number)
        if answer:
            folder.say(answer)
