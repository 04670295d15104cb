"""Climb a ladder within a budget: measure each rung in turn, round after round.

The first round measures the foot and the top, then what lies between. Later rounds go up and down,
so that neighbours are measured one right after the other. A slow minute of the machine then slows
both, and their ratio inside a round stays right:

    round 1     foot   top    rung 1   rung 2
    round 2     top    rung 2   rung 1   foot
    round 3     foot   rung 1   rung 2   top

Each measurement runs in a process that is forked from the warm server. It trains for some seconds,
and its first steps are not counted.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from flatout.distributed.processes import OUTPUT
from flatout.engine.compile import why_not
from flatout.engine.precision import bf16_is_native_on_cpu
from flatout.ladder.compare_runs import Estimate
from flatout.ladder.rungs import LEARNING, OTHER, STARTUP, Ladder, Rung
from flatout.ladder.usual.program import WARM_STEPS, Case, Stopwatch
from flatout.perf.measure.apart import Failed, run
from flatout.perf.measure.intervals import speedup
from flatout.perf.measure.steps import peak_bytes

if TYPE_CHECKING:
    from flatout.run.job import RunJob


@dataclass(frozen=True, slots=True)
class RungMeasurement:
    """Figures of one program in one round."""

    rows_per_s: float
    tokens_per_s: float | None
    wait_share: float
    padding_share: float | None
    # to the first batch; of a run of ours all that is no training step, which is more
    startup_s: float
    memory_gb: float | None  # peak of the process that trains; its workers are not counted
    # share of the time in which the GPU was busy; None without one
    device_share: float | None = None
    # on the test rows; None where the training was cut short
    metrics: dict[str, float] | None = None


# trains so many seconds in a folder; None: to the end, and tests
Program = Callable[[float | None, Path], RungMeasurement]


def measure_usual(
    name: str, case: Case, keywords: Mapping[str, Any], seconds: float | None, folder: Path
) -> RungMeasurement:
    """Train a usual program with some of its options, for so many seconds or to the end."""
    module = importlib.import_module(f"flatout.ladder.usual.{name}")
    how = module.OPTIONS(**keywords)
    if hasattr(module, "prepare") and how.caching:
        # Made before the clock starts: the rung shows what the file of an earlier run saves.
        module.prepare(case, how, "train")
    began = time.perf_counter()
    clock = Stopwatch(seconds)
    log = logging.getLogger(f"usual.{name}")  # a program writes its lines into a file, as it would
    log.addHandler(logging.FileHandler(folder / "usual.log", encoding="utf-8"))
    log.setLevel(logging.INFO)
    log.propagate = False
    program = module.PROGRAM(case, how)
    for _ in itertools.count() if seconds is not None else range(case.epochs):
        program.train_epoch(clock)
        if clock.is_over:
            break
    metrics = program.test() if seconds is None else None
    spent = clock.spent
    first = clock.first_batch_at or time.perf_counter()
    taken_s = max(spent.seconds, 1e-9)
    return RungMeasurement(
        rows_per_s=spent.rate,
        tokens_per_s=spent.tokens / taken_s if spent.tokens else None,
        wait_share=spent.wait_s / taken_s,
        padding_share=1 - spent.tokens / spent.computed if spent.computed else None,
        startup_s=first - began,
        memory_gb=peak_memory_gb(),
        metrics=metrics,
    )


def measure_run(
    job: RunJob, words: Sequence[str], seconds: float | None, folder: Path
) -> RungMeasurement:
    """Train a run of flatout with some more words.

    Validations and checkpoints are not counted, as a usual program has none.
    """
    began = time.perf_counter()
    (folder / "run").mkdir(parents=True, exist_ok=True)
    result = job.train(folder / "run", words, resumes=False)
    speed, training = result.summary["speed"], result.summary["training"]
    parts = {
        name: value
        for name, value in speed["step_ms"].items()
        if value is not None and name != "validation"
    }
    # The summary's speed counts checkpoints and slow first steps. A run of 10 s, of which 2 s wrote
    # checkpoints, trained for 8 s: its speed is 10 / 8 of the summary's.
    whole_s = training["steps"] * training["rows_per_step"] / max(speed["rows_per_s"], 1e-9)
    saved_ms = parts.pop("checkpoint", 0.0)
    steps_ms = max(sum(parts.values()), 1e-9)
    trained_s = whole_s * steps_ms / (steps_ms + saved_ms)
    without_first = slow_start(trained_s, training["steps"], speed["first_steps_ms"] or [])
    gain = whole_s / max(trained_s, 1e-9) * without_first
    tested = {}
    for name, value in result.metrics.items():
        if name.startswith("test/"):
            tested[name.removeprefix("test/")] = value
    return RungMeasurement(
        rows_per_s=speed["rows_per_s"] * gain,
        tokens_per_s=speed["tokens_per_s"] * gain if speed["tokens_per_s"] else None,
        wait_share=parts.get("wait", 0.0) / steps_ms,
        padding_share=speed["padding_share"],
        startup_s=max(0.0, time.perf_counter() - began - trained_s),
        memory_gb=peak_memory_gb(),
        metrics=tested if seconds is None else None,
    )


def slow_start(trained_s: float, steps: int, first_ms: list[float]) -> float:
    """How much faster steps are without the first ones.

    A usual program leaves them out, a summary counts them. Of 10 steps in 2 s the first 3 took 1 s:
    then 0.2 s a step become 1 / 7 s, a factor of 1.4.
    """
    warm_ms = first_ms[:WARM_STEPS]
    later_steps = steps - len(warm_ms)
    later_s = trained_s - sum(warm_ms) / 1000
    if later_steps <= 0 or later_s <= 0:
        return 1.0
    return trained_s / steps * later_steps / later_s


def peak_memory_gb() -> float | None:
    """Most memory that this process has held, on its GPU or the host; None if unknown."""
    uses_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    peak = peak_bytes(torch.device("cuda" if uses_gpu else "cpu"))
    return None if peak is None else peak / 1e9


def measure_apart(
    program: Program, seconds: float | None, folder: Path, *, limit_s: float | None = None
) -> RungMeasurement:
    """Measure in another process, which prints to a file.

    `Failed` is raised if it ends early, or takes longer than `limit_s`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return run(
        partial(_measure, program, seconds, folder), limit_s, {OUTPUT: str(folder / "output.txt")}
    )


def _measure(program: Program, seconds: float | None, folder: Path) -> RungMeasurement:
    # A thread reads five times a second how busy the GPU is, while the program trains.
    samples = list[float]()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            samples.append(torch.cuda.utilization() / 100)

    if torch.cuda.device_count():
        threading.Thread(target=watch, daemon=True).start()
    try:
        measurement = program(seconds, folder)
    finally:
        done.set()
    return replace(measurement, device_share=sum(samples) / len(samples) if samples else None)


ROUNDS = 5  # most rounds, and the usual ones; more would show nothing new
_LEAST_ROUNDS = 3  # fewer rounds give no bounds that are worth printing
# of one measurement
_LONGEST_S = 5.0
_SHORTEST_S = 1.0
_OF_BUDGET = 0.4  # share of the budget that is training; the rest is preparing
TOO_SHORT = "left out: the budget was over"
Make = Callable[[Rung, float], Program]  # the program of a rung that trains for so many seconds


@dataclass(slots=True)
class ClimbedRung:
    """A rung and its measurements, round by round."""

    rung: Rung
    rounds: dict[int, RungMeasurement] = field(default_factory=dict)  # by the number of the round
    skipped: str = ""  # why it was not measured

    def middle(self, name: str) -> float | None:
        """The median of a figure over rounds."""
        values = [getattr(measurement, name) for measurement in self.rounds.values()]
        measured = [value for value in values if value is not None]
        return median(measured) if measured else None

    @property
    def spread(self) -> float | None:
        """Half the range of the rounds, as a fraction of their median."""
        rates = [each.rows_per_s for each in self.rounds.values()]
        return (max(rates) - min(rates)) / (2 * median(rates)) if len(rates) > 1 else None


def seconds_of_measurement(budget_s: float, rungs: int) -> float:
    """How long one measurement trains, so that five rounds fit: 8 min and 9 rungs → 4.3 s."""
    return min(_LONGEST_S, max(_SHORTEST_S, _OF_BUDGET * budget_s / (rungs * ROUNDS)))


def top_of(rungs: Sequence[Rung]) -> int:
    """The place of the last rung that learns what those below it learn."""
    return max((place for place, rung in enumerate(rungs) if rung.measures != OTHER), default=0)


def rounds_of(count: int, top: int) -> Iterator[list[int]]:
    """The order of rungs in each round: the foot and the top first, then down and up again."""
    ends = [0, top] if top else [0]
    yield [*ends, *(place for place in range(count) if place not in ends)]
    for number in range(1, ROUNDS):
        yield list(range(count))[:: -1 if number % 2 else 1]


def climb(
    ladder: Ladder, make: Make, folder: Path, *, budget_s: float, say: Callable[[str], None]
) -> list[ClimbedRung]:
    """Measure all rungs that can be measured here, as often as `budget_s` seconds allow.

    `make` gives the program of a rung. Each measurement has a folder of its own below `folder`, and
    `say` gets a line about it. The foot and the top are measured once even beyond the budget.
    """
    until = time.monotonic() + budget_s
    steps = [ClimbedRung(rung, skipped=_why_not_timed(rung)) for rung in ladder.rungs]
    open_steps = [step for step in steps if not step.skipped]
    seconds = seconds_of_measurement(budget_s, len(open_steps))
    longest_s = dict[str, float]()  # of a rung's measurements so far, with their preparation
    top = top_of([step.rung for step in open_steps])
    for number, order in enumerate(rounds_of(len(open_steps), top)):
        for number_of_step in order:
            step = open_steps[number_of_step]
            name = step.rung.name
            # A measurement that would end beyond the budget is left out, by how long the last one
            # of this rung took. Without its ends a ladder has no result.
            is_end = number == 0 and number_of_step in (0, top)
            would_end = time.monotonic() + longest_s.get(name, seconds)
            if step.skipped or (would_end > until and not is_end):
                continue
            began = time.monotonic()
            measurement_folder = (
                folder / "measurements" / f"{ladder.rungs.index(step.rung):02d}-{number}"
            )
            limit_s = max(3 * seconds, until - began) + 60
            try:
                measurement = measure_apart(
                    make(step.rung, seconds), seconds, measurement_folder, limit_s=limit_s
                )
            except Failed as failed:
                step.skipped = f"failed: {failed}"
                say(f"{name}: {step.skipped}")
                continue
            step.rounds[number] = measurement
            longest_s[name] = time.monotonic() - began
            say(f"round {number + 1}, {name}: {measurement.rows_per_s:,.0f} rows/s")
    for step in steps:
        if not step.rounds and not step.skipped:
            step.skipped = TOO_SHORT
    return steps


def _why_not_timed(rung: Rung) -> str:
    """The reason why a rung cannot be timed here; empty if it can."""
    if rung.measures == LEARNING:
        return "not timed: it changes what a step learns, not its time"
    return find_missing(rung.needs)


def ratio(below: ClimbedRung, above: ClimbedRung, measures: str = "training") -> Estimate:
    """How many times as fast the rung above is as the rung below.

    Rounds that measured both give a ratio each; their median is the value, and its interval is left
    out where they are few. Without such a round the medians of all rounds are compared.
    `measures` says what is compared: `startup` compares startups, all else rows a second.
    """
    both = sorted(below.rounds.keys() & above.rounds.keys())
    if not both:
        before = median(measurement.rows_per_s for measurement in below.rounds.values())
        after = median(measurement.rows_per_s for measurement in above.rounds.values())
        return Estimate(after / before)
    rates_below = [_rate(below.rounds[number], measures) for number in both]
    rates_above = [_rate(above.rounds[number], measures) for number in both]
    gain = speedup(rates_below, rates_above)
    if len(both) < _LEAST_ROUNDS:
        return Estimate(gain.value)
    return Estimate(gain.value, gain.low, gain.high)


def _rate(measurement: RungMeasurement, measures: str) -> float:
    """The figure that is compared between rungs, larger is better: of a startup its inverse."""
    if measures == STARTUP:
        return 1 / max(measurement.startup_s, 1e-9)
    return measurement.rows_per_s


def find_missing(needs: Iterable[str]) -> str:
    """The first thing that a rung needs and this machine lacks; empty if it has all."""
    return next(filter(None, map(_why_missing, needs)), "")


def _why_missing(need: str) -> str:
    has_gpu = torch.cuda.is_available()
    count = torch.cuda.device_count()
    if need == "a GPU":
        return "" if has_gpu else "not measurable here: no GPU"
    if need == "several GPUs":
        devices = {0: "no GPUs", 1: "1 GPU"}
        return f"not measurable here: {devices[count]}" if count in devices else ""
    if need == "native bf16":
        is_native = torch.cuda.is_bf16_supported() if has_gpu else bf16_is_native_on_cpu()
        return "" if is_native else "not measurable here: bf16 is not native"
    if need == "a C++ compiler":
        return why_not(torch.device("cuda" if has_gpu else "cpu"))
    return "" if importlib.util.find_spec(need) else f"the package {need} is not installed"
