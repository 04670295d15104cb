"""What a sweep takes: some of its trials are priced, and pruning leaves out a part of the others.

How much a pruner leaves out depends on the curves of the trials, which nobody knows before. So the
sweep's own pruner is asked about curves that are drawn at random: each trial has a level, and its
validations come nearer to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import optuna
from optuna.samplers import RandomSampler
from optuna.trial import TrialState

from flatout.sweep.settings import Pruner
from flatout.sweep.space import Space
from flatout.sweep.study import make_pruner, quiet_optuna

_SWEEPS = 9  # that are drawn
_NOISE = 1.0  # of the first validation, against the spread of the levels


@dataclass(frozen=True, slots=True)
class TrainedShare:
    """The fraction of all validations that trials reach, of the drawn sweeps."""

    median: float
    least: float
    most: float


def draw_trials(space: Space, count: int, seed: int) -> list[dict[str, str]]:
    """Settings of some trials, drawn from the space at random; each once."""
    trials: list[dict[str, str]] = []
    with quiet_optuna():
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(sampler=RandomSampler(seed))
        for _ in range(count):
            trial = study.ask()
            chosen = {key: part.suggest(trial, key) for key, part in space.items()}
            if chosen not in trials:
                trials.append(chosen)
    return trials


def share_trained(pruner: Pruner, validations: int, trials: int) -> TrainedShare:
    """How much of `trials` is trained where each has so many validations unless it is pruned."""
    shares = [_share_of_one(pruner, validations, trials, seed) for seed in range(_SWEEPS)]
    return TrainedShare(float(np.median(shares)), min(shares), max(shares))


def _share_of_one(pruner: Pruner, validations: int, trials: int, seed: int) -> float:
    random = np.random.default_rng(seed)
    reached = 0
    with quiet_optuna():
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(
            direction="maximize",
            pruner=make_pruner(pruner, validations, trials),
            sampler=RandomSampler(seed),
        )
        for _ in range(trials):
            trial = study.ask()
            level = random.normal()
            state = TrialState.COMPLETE
            for count in range(1, validations + 1):
                reached += 1
                trial.report(level + random.normal() * _NOISE / count, count)
                if count < validations and trial.should_prune():
                    state = TrialState.PRUNED
                    break
            study.tell(trial, level if state is TrialState.COMPLETE else None, state=state)
    return reached / (trials * validations)
