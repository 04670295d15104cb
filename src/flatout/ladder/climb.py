"""Climb a ladder within a budget: each rung measured in turn, round after round, beside its neighbours.

The first round measures the foot and the top, then what lies between. Later rounds go up and down, so that neighbours
are measured one right after the other and a slow minute of the machine hits both. A ratio is made inside of a round.
A rung whose needs this machine does not have is left out, with the reason.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from flatout.engine.compile import why_not
from flatout.engine.precision import bf16_is_native_on_cpu
from flatout.ladder.compare_runs import Estimate
from flatout.ladder.measure import Measured, Program, measure_apart
from flatout.ladder.rungs import LEARNING, OTHER, STARTUP, Ladder, Rung
from flatout.perf.measure.apart import Failed
from flatout.perf.measure.intervals import speedup

ROUNDS = 5  # most rounds, and the usual ones; more would show nothing new
_LEAST_ROUNDS = 3  # fewer rounds give no bounds that are worth printing
_LONGEST_S, _SHORTEST_S = 5.0, 1.0  # of one measurement
_OF_BUDGET = 0.4  # share of the budget that is training; the rest is preparing
TOO_SHORT = "left out: the budget was over"

Make = Callable[[Rung, float], Program]  # the program of a rung that trains for so many seconds


@dataclass(slots=True)
class Step:
    """A rung and what was measured of it, round by round."""

    rung: Rung
    found: dict[int, Measured] = field(default_factory=dict)  # by the number of the round
    skipped: str = ""  # why it was not measured

    @property
    def rates(self) -> list[float]:
        return [each.rows_per_s for each in self.found.values()]

    def middle(self, name: str) -> float | None:
        """The median of a figure over rounds."""
        known = [value for each in self.found.values() if (value := getattr(each, name)) is not None]
        return median(known) if known else None

    @property
    def spread(self) -> float | None:
        """Half the range of the rounds, as a fraction of their median."""
        return (max(self.rates) - min(self.rates)) / (2 * median(self.rates)) if len(self.found) > 1 else None


def seconds_of_measurement(budget_s: float, rungs: int) -> float:
    """How long one measurement trains, so that the usual number of rounds fits."""
    return min(_LONGEST_S, max(_SHORTEST_S, _OF_BUDGET * budget_s / (rungs * ROUNDS)))


def top_of(rungs: Sequence[Rung]) -> int:
    """The place of the last rung that learns what those below it learn."""
    return max((place for place, rung in enumerate(rungs) if rung.measures != OTHER), default=0)


def rounds_of(count: int, top: int | None = None) -> Iterator[list[int]]:
    """The order of rungs in each round: the foot and the top first, then down and up again."""
    top = count - 1 if top is None else top
    yield [0, *([top] if top else []), *(place for place in range(1, count) if place != top)]
    for number in range(1, ROUNDS):
        yield list(range(count))[:: -1 if number % 2 else 1]


def climb(ladder: Ladder, make: Make, folder: Path, *, budget_s: float, say: Callable[[str], None]) -> list[Step]:
    """Measure all rungs that can be measured here, as often as the budget allows."""
    until = time.monotonic() + budget_s
    untimed = "not timed: it changes what a step learns, not its time"
    why_skipped = [untimed if rung.measures == LEARNING else find_missing(rung.needs) for rung in ladder.rungs]
    steps = [Step(rung, skipped=why) for rung, why in zip(ladder.rungs, why_skipped, strict=True)]
    open_steps = [step for step in steps if not step.skipped]
    seconds = seconds_of_measurement(budget_s, len(open_steps))
    longest, top = dict[str, float](), top_of([step.rung for step in open_steps])
    for number, order in enumerate(rounds_of(len(open_steps), top)):
        for place in order:
            step = open_steps[place]
            is_end = number == 0 and place in (0, top)  # without its ends a ladder has no result
            is_over = time.monotonic() + longest.get(step.rung.name, seconds) > until and not is_end
            if step.skipped or is_over:
                continue
            began = time.monotonic()
            at = folder / "measurements" / f"{ladder.rungs.index(step.rung):02d}-{number}"
            try:
                limit_s = max(3 * seconds, until - began) + 60
                found = measure_apart(make(step.rung, seconds), seconds, at, limit_s=limit_s)
            except Failed as failed:
                step.skipped = f"failed: {failed}"
                say(f"{step.rung.name}: {step.skipped}")
                continue
            step.found[number] = found
            longest[step.rung.name] = time.monotonic() - began
            say(f"round {number + 1}, {step.rung.name}: {found.rows_per_s:,.0f} rows/s")
    for step in steps:
        if not step.found and not step.skipped:
            step.skipped = TOO_SHORT
    return steps


def ratio(below: Step, above: Step, measures: str = "training") -> Estimate:
    """How much faster a rung is: over the rounds that measured both, else by medians; too few rounds bound nothing."""
    both = sorted(set(below.found) & set(above.found))
    if not both:
        return Estimate(median(above.rates) / median(below.rates))
    before, after = ([step.found[number] for number in both] for step in (below, above))
    if measures == STARTUP:  # its inverse: larger is better
        gain = speedup(*([1 / max(each.startup_s, 1e-9) for each in side] for side in (before, after)))
    else:
        gain = speedup(*([each.rows_per_s for each in side] for side in (before, after)))
    return Estimate(gain.value, gain.low, gain.high) if len(both) >= _LEAST_ROUNDS else Estimate(gain.value)


GPU, GPUS, BF16, COMPILER = "a GPU", "several GPUs", "native bf16", "a C++ compiler"


def find_missing(needs: Iterable[str]) -> str:
    """Why a rung cannot be measured here; empty where it can."""
    return next(filter(None, map(_why_missing, needs)), "")


def _why_missing(need: str) -> str:
    has_gpu, count = torch.cuda.is_available(), torch.cuda.device_count()
    if need == GPU:
        return "" if has_gpu else "not measurable here: no GPU"
    if need == GPUS:
        return "" if count > 1 else f"not measurable here: {count or 'no'} GPU{'' if count == 1 else 's'}"
    if need == BF16:
        is_native = torch.cuda.is_bf16_supported() if has_gpu else bf16_is_native_on_cpu()
        return "" if is_native else "not measurable here: bf16 is not native"
    if need == COMPILER:
        return why_not(torch.device("cuda" if has_gpu else "cpu"))
    return "" if importlib.util.find_spec(need) else f"the package {need} is not installed"
