"""Evaluate a trained run: the best checkpoint, on the validation rows and on any test rows.

`load_best` puts the best weights into the module. `evaluate` tunes the answers (thresholds,
temperature), lets Lightning judge each split, and adds intervals to the scores of the test rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor

from flatout.checkpoints.folder import read_weights
from flatout.distributed.ranks import others_watched
from flatout.errors import UserError
from flatout.report.run_report import RunReport
from flatout.run.context import OurParts, Run, Training
from flatout.run.lightning_advice import without_lightning_advice
from flatout.run.run_folder import RunFolder
from flatout.tasks.score_intervals import LEAST_ROWS, describe_drawn_groups


def load_best(run: Run, training: Training) -> None:
    """Put the weights of the best checkpoint into the module; of the last one, without a best."""
    strategy = training.trainer.strategy
    with others_watched():
        strategy.barrier()  # the first rank may still be linking it
    run.parts.take_weights(_read_best_weights(training), strategy)


def _read_best_weights(training: Training) -> dict[str, Tensor] | None:
    """Weights of the best checkpoint, else of the last one.

    None if no undamaged checkpoint is on this machine.
    """
    for name in ("best", "last"):
        path = training.checkpoints.folder / name
        try:
            if path.exists():
                return read_weights(path)
        except UserError as error:  # damaged since it was written
            warnings.warn(f"{error}; passed over", UserWarning, stacklevel=2)
    return None


def evaluate(run: Run, training: Training) -> dict[str, float]:
    """Metrics by name: `val/…`, and `test/…` where there are test rows."""
    device = training.trainer.strategy.root_device
    parts = run.parts
    parts.tune_answers(run, device)
    metrics: dict[str, float] = {}
    for split in ("val", "test"):
        if parts.can_judge(split):
            scores = parts.scores_of(split, _judge_split(run, training, split))
            metrics |= {f"{split}/{name}": value for name, value in scores.items()}
    # Lightning has taken it to the host once more, and the next stages compute on the device
    parts.module.to(device)
    parts.report_test(run)
    run.folder.summary.set("metrics", metrics)
    return metrics


def _judge_split(run: Run, training: Training, split: str) -> list[Mapping[str, float]]:
    """What Lightning logs of one split, for each loader."""
    trainer = training.trainer
    judge = trainer.validate if split == "val" else trainer.test
    with without_lightning_advice(), others_watched():
        try:
            return judge(run.parts.module, datamodule=run.parts.data, verbose=False)
        except SystemExit:
            if trainer.interrupted:  # Lightning turns Ctrl-C into exit code 1
                raise KeyboardInterrupt from None
            raise


def metric_among(metrics: dict[str, float]) -> str | None:
    """The metric of a run whose settings name none: the validation loss, else the first by name."""
    names = [name.removeprefix("val/") for name in metrics if name.startswith("val/")]
    return next(iter(sorted(names, key="loss".__ne__)), None)


def add_intervals(ours: OurParts, folder: RunFolder) -> None:
    """Write the 95 % intervals of the test scores into the summary; say why there are none."""
    intervals = ours.task.intervals()
    ends = {f"test/{name}": list(interval) for name, interval in intervals.items()}
    folder.summary.set("intervals", ends)
    num_groups = ours.task.num_groups
    if num_groups is not None:
        folder.say(f"test: {describe_drawn_groups(num_groups, 'data.group')}")
    elif not intervals:
        folder.say(
            f"test: no 95 % intervals. They need at least {LEAST_ROWS} test rows or recordings,"
            " and some errors in the answers"
        )


def add_truncation(ours: OurParts, run: Run) -> None:
    """Write into the summary how test rows that were cut scored beside whole ones, if any were.

    The metric of the run compares them.
    """
    truncation = ours.task.truncation(run.settings.metric)
    if truncation:
        run.folder.summary.set("truncation", truncation)
        run.folder.say(RunReport(run.folder.summary.values).truncation)
