"""When a run will end: known from the notes of an earlier run, or from its own first steps.

`ExpectedEnd` listens to the curves of a run. About once a second it notes how many steps are done,
which costs some microseconds. The first estimate is printed and kept, to be judged at the end; the
progress line shows the time that is left, by all steps so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.callbacks.clock import Clock
from flatout.price.costs import Costs, Done, Expected, PlannedLengths, expect
from flatout.price.energy import EnergyMeter
from flatout.price.pace import Moment, fit_pace
from flatout.run_log import Say

_FIRST_S = 2.0  # of steps, after which the first estimate is made
_LEAST_MOMENTS = 3
_MOST_MOMENTS = 400  # every second one is dropped beyond them
BUSY = 0.1  # fraction of the machine that other processes take, from which on it is said


@dataclass(slots=True, kw_only=True)
class ExpectedEnd:
    """The expected end of one run, and what its parts have taken."""

    measure_lengths: Callable[[], PlannedLengths | None]  # None if it has no end
    clock: Clock
    meter: EnergyMeter
    began: float  # of `time.perf_counter`
    noted: Costs | None = None  # of the last run of these steps
    ratios: Sequence[float] = ()
    say: Say = print
    busy: Callable[[], float] = float  # fraction of the machine that other processes take
    seconds_before: Callable[[], float] = float  # of the run before it was resumed
    leaves_cores: bool = False  # whether other processes have cores of their own
    resumed_at: Done = field(default_factory=Done)
    first: Expected | None = None
    lengths: PlannedLengths | None = None
    moments: list[Moment] = field(default_factory=list)
    watts: float | None = None  # while it trains
    _first_step_at: float = 0.0
    _fit_ended_at: float = 0.0
    _tries_s: float = 0.0
    _first_joules: float | None = None
    _first_busy: float = 0.0

    def note(self, step: int) -> None:
        """Note that `step` steps are done; make the first estimate when there are enough."""
        now = time.perf_counter()
        joules = self.meter.joules(now - self.began)
        if not self.moments:
            self._begin(step, now)
        elif step <= self.moments[-1].step:
            return
        elif joules is not None and self._first_joules is not None:
            self.watts = (joules - self._first_joules) / (now - self._first_step_at)
        self.moments.append(Moment(step, now - self.clock.outside_s))
        if len(self.moments) > _MOST_MOMENTS:
            del self.moments[1:-1:2]
        is_enough = len(self.moments) >= _LEAST_MOMENTS and now - self._first_step_at >= _FIRST_S
        if self.first is None and is_enough and (costs := self.costs()) is not None:
            self._tell(costs, "by its first steps")

    def on_flush(self, step: int, epoch: float, values: dict[str, float]) -> None:
        self.note(step)

    def on_validation(self, step: int, epoch: float, values: dict[str, float]) -> None:
        """The clock counts validations."""

    def close(self) -> None:
        """Training has ended."""
        self._fit_ended_at = time.perf_counter()

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Context manager: its seconds are those of the verdict's tries, not of the training."""
        began = time.perf_counter()
        yield
        self._tries_s = time.perf_counter() - began

    def _begin(self, step: int, now: float) -> None:
        self._first_step_at = now
        self._first_joules = self.meter.joules(now - self.began)
        self.lengths = self.measure_lengths()
        self.began -= self.seconds_before()
        self.resumed_at = Done(max(0, step - 1), self.clock.counts["validation"])
        if self.noted is not None and self.lengths is not None:
            costs = replace(self.noted, start_s=self._first_step_at - self.began)
            self._tell(costs, "by the last run of these steps")

    def _tell(self, costs: Costs, source: str) -> None:
        assert self.lengths is not None
        busy = self.busy()
        # asked once: its medians of all samples are too much work for each second
        self._first_busy = busy
        self.first = expect(costs, self.lengths, self.ratios, done=self.resumed_at, busy=busy)
        end = time.localtime(time.time() + self.first.value_s + self.began - time.perf_counter())
        others = ""
        if busy >= BUSY:
            others = f"; other processes take {busy:.0%} of this machine, which may change"
        moment = time.strftime("%H:%M", end)
        why = f"{source}{self.first.correction}{others}"
        self.say(f"expected: {self.first} in all, until {moment} ({why})")

    def time_left(self) -> str:
        """`3.7 min (3.4–4.1) left`; empty while nothing is known."""
        costs = self.costs() or self.noted
        if costs is None or self.lengths is None or not self.moments:
            return ""
        validations = self.clock.counts["validation"]
        done = Done(self.moments[-1].step, validations, is_started=True)
        left = expect(costs, self.lengths, done=done, busy=self._first_busy)
        return f"{left} left"

    def costs(self) -> Costs | None:
        """What the parts have taken so far; None before there is a pace."""
        if self.lengths is None:
            return None
        pace = fit_pace(self.lengths.work, self.moments)
        if pace is None:
            return None
        spent = self.clock.spent
        counts = self.clock.counts
        validations = counts["validation"]
        # A forward pass alone takes about a third of a step.
        steps_an_epoch = len(self.lengths.work.ends) - 1
        passes_s = pace.seconds(steps_an_epoch, self.lengths.work.ends[-1]) / 3
        validation_s = passes_s * self.lengths.validation_share
        if validations:
            validation_s = spent["validation"] / validations
        evaluation_s = passes_s * self.lengths.evaluation_share
        if self._fit_ended_at:
            evaluation_s = time.perf_counter() - self._fit_ended_at - self._tries_s
        return Costs(
            start_s=self._first_step_at - self.began,
            pace=pace,
            validation_s=float(validation_s),
            save_s=spent["checkpoint"] / max(1, counts["checkpoint"]),
            saves_a_validation=counts["checkpoint"] / validations if validations else 1.0,
            evaluation_s=float(evaluation_s),
            watts=self.watts,
            is_guessed=not self._fit_ended_at,
            leaves_cores=self.leaves_cores,
        )

    def ratio(self, took_s: float) -> float | None:
        """The time taken over the time expected; None where no earlier run was known.

        An estimate by the first steps guesses the evaluation, so its error is not that of the pace.
        """
        if self.first is None or self.noted is None:
            return None
        return took_s / self.first.raw_s

    def facts(self) -> dict[str, Any]:
        """What the summary keeps under `price`, at the end of the run."""
        now = time.perf_counter()
        whole_s = now - self.began
        parts = {
            "start": self._first_step_at - self.began,
            "validation": self.clock.spent["validation"],
            "checkpoints": self.clock.spent["checkpoint"],
            "evaluation": now - self._fit_ended_at,
        }
        parts["training"] = max(0.0, whole_s - sum(parts.values()))
        facts: dict[str, Any] = {"took_s": whole_s, "took_parts_s": parts}
        if self.first is not None:
            facts |= {
                "expected_s": self.first.value_s,
                "interval_s": [self.first.low_s, self.first.high_s],
                "raw_s": self.first.raw_s,
                "parts_s": self.first.parts_s,
            }
        return facts
