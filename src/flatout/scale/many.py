"""A list of trials, from first to last: what `-m` with several values asks for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from rich.console import Console

from flatout.checkpoints import best_mode
from flatout.errors import RunBroke, require
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
    _require_new_folders(trials)
    shares, limit_s = slots(parallel), seconds(limit, "launcher.limit")
    board = Board(trials[0].config.experiment, f"val/{metric}", mode, len(trials), print)
    waiting = iter(trials)
    running = endings(lambda: next(waiting, None), shares, board, metric=metric, limit_s=limit_s)
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


def _require_new_folders(trials: list[Trial]) -> None:
    """Nothing that lies there is overwritten, and no two trials write to one place."""
    seen: set[Path] = set()
    for trial in trials:
        is_new = not trial.folder.exists() or not any(trial.folder.iterdir())
        mend = "Choose another hydra.sweep.dir."
        require(is_new, "hydra.sweep.dir", f"{trial.folder} holds something already", mend=mend)
        mend = "Let hydra.sweep.subdir be another for each trial."
        require(trial.folder not in seen, "hydra.sweep.subdir", f"{trial.folder} twice", mend=mend)
        seen.add(trial.folder)


def metric_of(trials: Iterable[Trial]) -> str:
    """The metric that trials are compared by; the first one's, where they differ."""
    config = next(iter(trials)).config
    metric = config.checkpoint.metric or usual_metric(config.data)
    require_metric(metric, [*BEST_MODE, "loss"], "checkpoint.metric")
    return metric
