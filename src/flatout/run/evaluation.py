"""Evaluate a trained run: the best checkpoint, on the validation rows and on any test rows.

`load_best` puts the best weights into the module. `evaluate` tunes the answers (thresholds,
temperature), lets Lightning judge each split, and adds intervals to the scores of the test rows.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

from torch import Tensor

from flatout.checkpoints.folder import read_weights
from flatout.data.store_data import StoreData
from flatout.distributed.ranks import others_watched
from flatout.errors import UserError
from flatout.report.closing import truncation_text
from flatout.run.context import OurParts, RunParts
from flatout.run.own_parts import has_own, plain_name
from flatout.run.run_folder import RunFolder
from flatout.run.trainer import Training, without_lightning_advice
from flatout.tasks.score_intervals import LEAST_ROWS, describe_drawn_groups


def load_best(training: Training, parts: RunParts) -> None:
    """Put the weights of the best checkpoint into the module; of the last one, without a best."""
    ours = parts.ours
    with others_watched():
        training.trainer.strategy.barrier()  # the first rank may still be linking it
    state = _read_best_weights(training)
    if ours is not None and ours.task.is_sharded:
        strategy = cast(Any, training.trainer.strategy)
        strategy.hand_out(ours.task, state)
    elif state is not None:
        parts.module.load_state_dict(state)


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


def evaluate(
    training: Training, parts: RunParts, folder: RunFolder, metric: str | None
) -> dict[str, float]:
    """Metrics by name: `val/…`, and `test/…` where there are test rows.

    `metric`: the one by which rows that were cut are compared with whole ones.
    """
    device = training.trainer.strategy.root_device
    ours = parts.ours
    if ours is not None:
        ours.task.to(device)  # Lightning has taken it back to the host
        folder.put(ours.task.tune_answers(ours.feeds, folder))
        if ours.task.held_out is not None:
            folder.summary.set("abstention", ours.task.held_out.facts())
    metrics: dict[str, float] = {}
    for split in ("val", "test"):
        if _can_judge(parts, split):
            scores = _judge_split(training, parts, split)
            metrics |= {f"{split}/{name}": value for name, value in scores.items()}
    # Lightning has taken it to the host once more, and the next stages compute on the device
    parts.module.to(device)
    if ours is not None and ours.feeds.test is not None:
        _add_intervals(ours, folder)
        _add_truncation(ours, folder, metric)
    folder.summary.set("metrics", metrics)
    return metrics


def _can_judge(parts: RunParts, split: str) -> bool:
    """Whether there are rows of a split, `val` or `test`, and steps that judge them."""
    # Our stores know their splits. Of your own data only the hooks that they define are known.
    data = parts.data
    has_rows = split == "val" or not isinstance(data, StoreData) or split in data.store.splits
    return has_rows and has_own(parts.module, data, split)


def _judge_split(training: Training, parts: RunParts, split: str) -> dict[str, float]:
    """Metrics of one split, by plain name (`loss`)."""
    trainer = training.trainer
    judge = trainer.validate if split == "val" else trainer.test
    with without_lightning_advice(), others_watched():
        logged = judge(parts.module, datamodule=parts.data, verbose=False)
    if parts.ours is not None:
        task = parts.ours.task
        if split == "val":
            task.count_answers()
        return task.results
    # A module of your own logs under names of its choice, and may have several loaders a split.
    scores = {}
    for metrics_of_loader in logged:
        for name, value in metrics_of_loader.items():
            scores[plain_name(name, split)] = float(value)
    return scores


def _add_intervals(ours: OurParts, folder: RunFolder) -> None:
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


def _add_truncation(ours: OurParts, folder: RunFolder, metric: str | None) -> None:
    """Write into the summary how test rows that were cut scored beside whole ones, if any were."""
    truncation = ours.task.truncation(metric)
    if truncation:
        folder.summary.set("truncation", truncation)
        folder.say(truncation_text(folder.summary.values))
