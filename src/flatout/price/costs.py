"""What a run costs, from what an earlier one or a short try has cost: parts, and a 90 % interval.

`Costs` holds what was measured, in seconds a step, a validation and so on. `expect` multiplies them
with the planned lengths. Ratios of earlier runs, of time taken over time expected, correct the sum;
the sum before that correction is kept as `raw_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.price.pace import StepPace, Work
from flatout.price.words import describe_correction, describe_span

Z_90 = 1.645  # standard deviations on each side of a 90 % interval
# Relative errors: of a part that was measured once, and of one that is guessed from the steps.
_ERROR = 0.2
_ERROR_OF_GUESS = 0.6
# So much the pace differs from one run to the next, until runs of this machine have shown how much.
# It counts as two of them. Threads on all cores wait for whatever else runs there: equal runs of
# two threads on two virtual cores took 6.9 to 8.8 s within minutes, and those of one 8.3 to 8.5 s.
_DRIFT = 0.2
_DRIFT_BESIDE_FREE_CORES = 0.05
_EARLIER = 2
# What the verdict tries at a run's end, as `perf/verdict/experiments.py` allows it: a share of the
# training, in short runs a larger one; how much of that it usually uses; beside other processes
# nothing is tried.
TRIES_SHARE = 0.1
TRIES_SHARE_IN_BUDGET = 0.03
_TRIES_MOST_S = 20.0
_TRIES_LEAST_S = 0.2
_SHORT_S = 3.0
_SHORT_SHARE = 0.3
_TRIES_USED = 0.7
_TOO_BUSY = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that parts of a run take."""

    start_s: float  # until the first step has ended
    pace: StepPace
    validation_s: float  # of one
    save_s: float  # of one checkpoint
    saves_a_validation: float = 1.0
    evaluation_s: float  # after training, without what the verdict tries
    watts: float | None = None  # while it trains
    is_guessed: bool = False  # whether validation and evaluation were not measured
    leaves_cores: bool = False  # whether other processes have cores of their own beside its threads

    @staticmethod
    def of(values: Mapping[str, Any]) -> Costs:
        """Costs from a mapping of their fields."""
        return Costs(**{**values, "pace": StepPace(**values["pace"])})


@dataclass(frozen=True, slots=True)
class PlannedLengths:
    """How much a run has to do."""

    work: Work
    validations: int
    save_every_s: float = math.inf
    # of the training's time, in which the verdict may try what would be faster; 0: it tries nothing
    tries_share: float = TRIES_SHARE
    # Rows of a validation, and of the evaluation, for each training row.
    validation_share: float = 0.1
    evaluation_share: float = 0.2

    @staticmethod
    def of_plan(
        plan: Mapping[str, Any], epochs: float | None = None, *, tries_share: float = TRIES_SHARE
    ) -> PlannedLengths:
        """The lengths that a summary keeps, or those of the same run with other `epochs`."""
        steps = plan["steps"]
        if epochs is not None:
            steps = math.ceil(epochs * plan["steps_an_epoch"])
        # sums are all that is asked of this work
        work = Work(steps, np.array([0.0, plan["computed_tokens"] / plan["steps"]]))
        validations = math.ceil(plan["validations"] * steps / plan["steps"])
        return PlannedLengths(work, validations, plan["save_every_s"] or math.inf, tries_share)


@dataclass(frozen=True, slots=True)
class Done:
    """How far a run is."""

    steps: int = 0
    validations: int = 0
    is_started: bool = False  # whether the start is over as well


@dataclass(frozen=True, slots=True)
class Expected:
    """A predicted time in seconds, with its 90 % interval."""

    value_s: float
    low_s: float
    high_s: float
    raw_s: float  # without what earlier runs correct
    parts_s: dict[str, float]

    def __str__(self) -> str:
        return describe_span(self.value_s, self.low_s, self.high_s)

    @property
    def correction(self) -> str:
        """`; 3.9 min without what earlier runs correct`; empty where they correct nothing."""
        return describe_correction(self.value_s, self.raw_s)


def expect(
    costs: Costs,
    lengths: PlannedLengths,
    ratios: Sequence[float] = (),
    *,
    done: Done | None = None,
    busy: float = 0.0,
) -> Expected:
    """The time of a run, or of its rest behind what is `done`.

    `busy`: the fraction of the machine's cores that other processes take.
    """
    work = lengths.work
    at = done or Done()
    steps = max(0, work.total_steps - at.steps)
    training_s = costs.pace.seconds(steps, max(0.0, work.total - work.up_to(at.steps)))
    validations = max(0, lengths.validations - at.validations)
    saves = validations * costs.saves_a_validation + training_s / lengths.save_every_s
    tries_s = 0.0
    if busy < _TOO_BUSY:
        whole_s = costs.pace.seconds(work.total_steps, work.total)
        tries_s = _TRIES_USED * _allowed_tries_s(whole_s, lengths.tries_share)
    parts = {
        "start": 0.0 if at.is_started else costs.start_s,
        "training": training_s,
        "validation": validations * costs.validation_s,
        "checkpoints": saves * costs.save_s,
        "evaluation": costs.evaluation_s + tries_s,
    }
    bias, drift = correction(ratios, _DRIFT_BESIDE_FREE_CORES if costs.leaves_cores else _DRIFT)
    error = _ERROR_OF_GUESS if costs.is_guessed else _ERROR
    errors = [
        training_s * math.hypot(costs.pace.spread, drift + busy / 2),
        error * parts["validation"],
        error * costs.evaluation_s + tries_s / 2,
        _ERROR * (parts["start"] + parts["checkpoints"]),
    ]
    raw_s = sum(parts.values())
    widening = 1 + Z_90 * math.hypot(*errors) / max(raw_s, 1e-9)
    value_s = bias * raw_s
    return Expected(value_s, value_s / widening, value_s * widening, raw_s, parts)


def _allowed_tries_s(training_s: float, share: float) -> float:
    seconds = min(share * training_s, _TRIES_MOST_S)
    if seconds < _TRIES_LEAST_S:
        return 0.0
    # in a short run they may take more, unless a budget bounds them
    more_s = min(_SHORT_S, _SHORT_SHARE * training_s) if share >= TRIES_SHARE else 0.0
    return max(seconds, more_s)


def correction(ratios: Sequence[float], drift: float) -> tuple[float, float]:
    """The usual ratio of taken over expected time, and its relative spread.

    `drift`: the spread that is taken for granted, with the weight of two runs. Without notes the
    answer is 1.0 and `drift`. One run that took 1.2 of its time counts a third: 1.06.
    """
    logs = [math.log(ratio) for ratio in ratios if ratio > 0]
    count = len(logs) + _EARLIER
    mean = sum(logs) / count
    squares = _EARLIER * drift**2 + sum((log - mean) ** 2 for log in logs)
    return math.exp(mean), math.sqrt(squares / count)
