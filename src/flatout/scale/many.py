"""A list of trials, from first to last: what `-m` with several values asks for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

from rich.console import Console

from flatout.checkpoints import best_mode
from flatout.errors import RunBroke
from flatout.kinds import usual_metric
from flatout.metrics import BEST_MODE, require_metric
from flatout.scale.board import Board
from flatout.scale.durations import seconds
from flatout.scale.slots import slots
from flatout.scale.trials import Ending, Status, Trial, endings


def run_all(trials: list[Trial], *, parallel: int = 1, limit: str | None = None) -> list[Ending]:
    """How each trial ended, in their order. Where some failed the others still run; then they are named."""
    metric = metric_of(trials)
    mode = best_mode(metric)
    board = Board(trials[0].config.experiment, f"val/{metric}", mode, len(trials), print)
    waiting = iter(trials)
    limit_s = seconds(limit, "launcher.limit")
    running = endings(lambda: next(waiting, None), slots(parallel), board, metric=metric, limit_s=limit_s)
    with closing(board), closing(running):
        found = {trial.number: ending for trial, ending in running}
    Console(highlight=False).print(board.table())
    failed = [number for number, ending in found.items() if ending.status is Status.failed]
    if failed:
        words = "\n".join(f"trial {number}: {found[number].note}" for number in sorted(failed))
        folder = trials[0].folder.parent
        raise RunBroke(
            f"{words}\n{len(failed)} of {len(trials)} trials failed. What each printed: {folder}/*/output.txt"
        )
    return [found[trial.number] for trial in trials]


def metric_of(trials: Iterable[Trial]) -> str:
    """The metric that trials are compared by; the first one's, where they differ."""
    config = next(iter(trials)).config
    metric = config.checkpoint.metric or usual_metric(config.data)
    require_metric(metric, [*BEST_MODE, "loss"], "checkpoint.metric")
    return metric
