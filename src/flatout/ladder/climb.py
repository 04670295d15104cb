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
from flatout.ladder.measure import Measured, OurRun, UsualProgram, measure_apart
from flatout.ladder.rungs import LEARNING, OTHER, STARTUP, Ladder, Rung
from flatout.perf.measure.apart import Failed
from flatout.perf.measure.intervals import speedup

ROUNDS = 5
"""Most rounds; more would show nothing new."""
LEAST_ROUNDS = 3
"""Fewer rounds give no bounds that are worth printing."""
LONGEST_S, SHORTEST_S = 5.0, 1.0
"""Of one measurement."""
_OF_BUDGET = 0.4
"""Share of the budget that is training; the rest is preparing."""
_USUAL_ROUNDS = 5
TOO_SHORT = "left out: the budget was over"

Make = Callable[[Rung, float], UsualProgram | OurRun]
"""The program of a rung that trains for so many seconds."""


@dataclass(slots=True)
class Step:
    """A rung and what was measured of it, round by round."""

    rung: Rung
    found: dict[int, Measured] = field(default_factory=dict)
    """By the number of the round."""
    skipped: str = ""
    """Why it was not measured."""

    @property
    def is_measured(self) -> bool:
        return bool(self.found)

    def values(self, rounds: Sequence[int] | None = None) -> list[float]:
        """What the rung is compared by, larger is better: rows a second, or the inverse of the startup."""
        chosen = list(self.found) if rounds is None else rounds
        return [self.found[number].rows_per_s for number in chosen]

    def middle(self, name: str) -> float | None:
        """The median of a figure over rounds."""
        values = [getattr(each, name) for each in self.found.values()]
        known = [value for value in values if value is not None]
        return median(known) if known else None

    @property
    def spread(self) -> float | None:
        """Half the range of the rounds, as a fraction of their median."""
        values = self.values()
        return (max(values) - min(values)) / (2 * median(values)) if len(values) > 1 else None


def seconds_of_measurement(budget_s: float, rungs: int) -> float:
    """How long one measurement trains, so that the usual number of rounds fits."""
    return min(LONGEST_S, max(SHORTEST_S, _OF_BUDGET * budget_s / (rungs * _USUAL_ROUNDS)))


def top_of(rungs: Sequence[Rung]) -> int:
    """The place of the last rung that learns what those below it learn."""
    return max((place for place, rung in enumerate(rungs) if rung.measures != OTHER), default=0)


def rounds_of(count: int, top: int | None = None) -> Iterator[list[int]]:
    """The order of rungs in each round: the foot and the top first, then down and up again."""
    top = count - 1 if top is None else top
    yield [0, *([top] if top else []), *(place for place in range(1, count) if place != top)]
    for number in range(1, ROUNDS):
        upward = list(range(count))
        yield upward[::-1] if number % 2 else upward


def climb(ladder: Ladder, make: Make, folder: Path, *, budget_s: float, say: Callable[[str], None]) -> list[Step]:
    """Measure all rungs that can be measured here, as often as the budget allows."""
    until = time.monotonic() + budget_s
    steps = [Step(rung, skipped=_why_skipped(rung)) for rung in ladder.rungs]
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
        if not step.is_measured and not step.skipped:
            step.skipped = TOO_SHORT
    return steps


def _why_skipped(rung: Rung) -> str:
    is_timed = rung.measures != LEARNING
    return find_missing(rung.needs) if is_timed else "not timed: it changes what a step learns, not its time"


def ratio(below: Step, above: Step, measures: str = "training") -> Estimate:
    """How much faster a rung is than another: over the rounds that measured both, else by their medians.

    Too few rounds bound nothing.
    """
    both = sorted(set(below.found) & set(above.found))
    if measures == STARTUP:
        values = [[1 / max(step.found[number].startup_s, 1e-9) for number in both] for step in (below, above)]
    else:
        values = [step.values(both) for step in (below, above)]
    if not both:
        return Estimate(median(above.values()) / median(below.values()))
    gain = speedup(values[0], values[1])
    return Estimate(gain.value, gain.low, gain.high) if len(both) >= LEAST_ROUNDS else Estimate(gain.value)


GPU, GPUS, BF16, COMPILER = "a GPU", "several GPUs", "native bf16", "a C++ compiler"


def find_missing(needs: Iterable[str]) -> str:
    """Why a rung cannot be measured here; empty where it can."""
    return next(filter(None, map(_why_missing, needs)), "")


def _why_missing(need: str) -> str:
    if need in _CHECKS:
        return _CHECKS[need]()
    is_there = importlib.util.find_spec(need) is not None
    return "" if is_there else f"the package {need} is not installed"


def _missing_gpus() -> str:
    count = torch.cuda.device_count()
    return "" if count > 1 else f"not measurable here: {count or 'no'} GPU{'' if count == 1 else 's'}"


def _missing_bf16() -> str:
    is_there = torch.cuda.is_bf16_supported() if torch.cuda.is_available() else bf16_is_native_on_cpu()
    return "" if is_there else "not measurable here: bf16 is not native"


_CHECKS: dict[str, Callable[[], str]] = {
    GPU: lambda: "" if torch.cuda.is_available() else "not measurable here: no GPU",
    GPUS: _missing_gpus,
    BF16: _missing_bf16,
    COMPILER: lambda: why_not(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
}
