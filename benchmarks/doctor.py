"""Bottlenecks planted into runs: does the verdict name each, and does its fix bring what it
predicts?

Each planted run is a command line in a process of its own. The override of its verdict is then
confirmed as `doctor --confirm` does: short runs of both, in turn. Where no override removes the
cause, the plant itself is taken away. Ten healthy runs follow: nothing may be found in them, or the
gain must be confirmed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import doctor_plain
from benchmarks.claim import Claim, Options, bounded, not_here
from benchmarks.planted import HEALTHY, PLANTED, QUICK, Planted
from flatout.callbacks.step_timer import StepTimer
from flatout.cli.doctor import build_sides, measure_in_turn, train_apart, with_override
from flatout.distributed.processes import end_with_parent, wait_until_warm, warm_start
from flatout.errors import RunBroke, UserError, did_you_mean, require
from flatout.perf.measure.intervals import SpeedupInterval, speedup
from flatout.perf.verdict.confirmation import count_steps, promised_speedup
from flatout.perf.verdict.evidence import Evidence

_ALWAYS = [
    "monitor.progress=false",
    "monitor.rival=false",
    "trainer.accelerator=cpu",
    "checkpoint.patience=null",
]
_NAMED = 0.95
_WITHIN = 0.9
_LIMIT = 0.6
"""Cores that the planted control group allows."""


def claims(options: Options) -> Iterator[Claim]:
    if options.plain:
        yield from doctor_plain.claims(options)
        return
    warm_start()
    wait_until_warm()
    began = time.perf_counter()
    rounds = options.choose_rounds(2, 1, 1)
    planted, healthy = chosen(options)
    diagnosed, checked = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, each in enumerate(planted):
            if why := each.why_not():
                yield not_here(each.name, why)
                continue
            place = Path(folder) / f"planted-{number}"
            diagnosed.append(
                or_broken(each.name, each.causes, partial(diagnose, each, place, rounds))
            )
            yield diagnosed[-1].as_claim()
        for number, name in enumerate(healthy):
            place = Path(folder) / f"healthy-{number}"
            checked.append(
                or_broken(name, (), partial(check_healthy, name, HEALTHY[name], place, rounds))
            )
            yield checked[-1].as_claim()
    if diagnosed:
        yield from _cost(min(each.step_ms for each in diagnosed))
    yield from summary_of(diagnosed, checked)
    minutes = (time.perf_counter() - began) / 60
    most = options.choose(15, 3, 15)
    yield bounded(
        "the whole bench",
        minutes,
        "minutes",
        most=most,
        note=f"{rounds} rounds of each confirmation",
    )


def chosen(options: Options) -> tuple[list[Planted], list[str]]:
    """The plants, and the names of the healthy runs, that were asked for."""
    names = [*(each.name for each in PLANTED), *HEALTHY]
    if options.only is not None:
        wanted = {name for name in names if options.only.lower() in name.lower()}
        hint = did_you_mean(options.only, names)
        require(bool(wanted), "--only", f"no plant and no healthy run {options.only!r}", hint=hint)
    else:
        wanted = {*QUICK, *list(HEALTHY)[:2]} if options.quick else set(names)
    return [each for each in PLANTED if each.name in wanted], [
        name for name in HEALTHY if name in wanted
    ]


def summary_of(diagnosed: list[Diagnosed], checked: list[Diagnosed]) -> Iterator[Claim]:
    """The four figures that the bench is for."""
    promised = [
        each
        for each in (*diagnosed, *checked)
        if each.predicted is not None and each.measured is not None
    ]
    yield _share("planted bottlenecks named first", [each.is_named for each in diagnosed], _NAMED)
    yield _share(
        "predicted intervals that hold the measured gain",
        [each.is_within for each in promised],
        _WITHIN,
    )
    yield bounded(
        "recommended fixes that slow a run", sum(each.slows for each in promised), "", most=0
    )
    alarms = sum(not each.is_quiet for each in checked)
    yield bounded(f"false alarms in {len(checked)} healthy runs", alarms, "", most=0)


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """The verdict of a run, and what its fix was worth."""

    name: str
    causes: tuple[str, ...]
    """What the verdict may call it; none of a healthy run."""
    verdict: dict[str, Any]
    rates: list[list[float]] | None = None
    """Rows a second of each round, as it was and with the fix; None where nothing could be run."""
    step_ms: float = math.inf
    """What half of its steps took at most."""

    @property
    def predicted(self) -> SpeedupInterval | None:
        return promised_speedup(self.verdict)

    @property
    def measured(self) -> SpeedupInterval | None:
        """The gain that came."""
        return None if self.rates is None else speedup(*self.rates)

    @property
    def is_named(self) -> bool:
        return self.verdict["cause"] in self.causes

    @property
    def is_within(self) -> bool:
        """Whether the gain that came lies within the predicted bounds."""
        return (
            self.predicted is not None
            and self.measured is not None
            and self.measured.value in self.predicted
        )

    @property
    def slows(self) -> bool:
        """Whether a recommended fix made the run slower."""
        return self.predicted is not None and self.measured is not None and self.measured.value < 1

    @property
    def is_quiet(self) -> bool:
        """Whether a healthy run was left in peace: nothing found, or a gain that is real."""
        return self.verdict["cause"] == "nothing" or self.is_within

    def as_claim(self) -> Claim:
        holds = (
            self.is_named and (self.predicted is None or self.is_within)
            if self.causes
            else self.is_quiet
        )
        value = math.nan if self.measured is None else self.measured.value
        goal = "quiet" if not self.causes else "named" if self.predicted is None else "in bounds"
        note = "\n    ".join([self.verdict["sentence"], *self._rounds()])
        if self.measured is not None:
            promise = "no promise" if self.predicted is None else f"predicted {self.predicted}"
            note = f"{promise}, measured {self.measured}; {note}"
        name = self.name if self.is_named or not self.causes else f"{self.name}: NOT NAMED"
        expected = None if self.predicted is None else self.predicted.value
        return Claim(
            name,
            value,
            expected,
            "× as fast",
            None if expected is None else value / expected,
            goal,
            holds,
            note,
        )

    def _rounds(self) -> list[str]:
        return [
            f"round {number}: {before:,.0f} rows/s as it was, {after:,.0f} with the fix"
            f" ({after / before:.2f}×)"
            for number, (before, after) in enumerate(zip(*self.rates or [[], []], strict=True), 1)
        ]


def or_broken(name: str, causes: tuple[str, ...], diagnosing: Callable[[], Diagnosed]) -> Diagnosed:
    """A run that ends with an error is a row that does not hold; the others still count."""
    try:
        return diagnosing()
    except (UserError, RunBroke, KeyError, TypeError) as error:  # no verdict, or no evidence
        found = {"cause": "error", "sentence": f"{type(error).__name__}: {error}", "override": None}
        return Diagnosed(name, causes, {**found, "predicted_gain": None})


def diagnose(planted: Planted, place: Path, rounds: int) -> Diagnosed:
    """Run it, then confirm the fix of its verdict; or take the plant away where no override does
    it.
    """
    words = [
        *_ALWAYS,
        *planted.words,
        f"trainer.max_epochs={planted.epochs}",
        *_trusted(planted.words),
    ]
    with _around(planted.around):
        summary = train_apart(words, place / "first")
        found, step_ms = summary["verdict"], summary["speed"]["step_percentiles_ms"]["p50"]
        rates = None
        if found["override"] and found["cause"] != "compile":
            rates = _confirm(words, found["override"], summary, place, rounds)
        elif found["predicted_gain"] is not None:
            rates = _confirm(words, "~callbacks.plant", summary, place, rounds)
    return Diagnosed(planted.name, planted.causes, found, rates, step_ms)


def check_healthy(name: str, words: list[str], place: Path, rounds: int) -> Diagnosed:
    """A run that nothing holds back; a gain that its verdict promises is confirmed."""
    words = [*_ALWAYS, *words]
    summary = train_apart(words, place / "first")
    found = summary["verdict"]
    rates = None
    if found["predicted_gain"] is not None and found["override"]:
        rates = _confirm(words, found["override"], summary, place, rounds)
    return Diagnosed(name, (), found, rates)


def _confirm(
    words: list[str], override: str, summary: dict[str, Any], place: Path, rounds: int
) -> list[list[float]]:
    evidence = Evidence.from_dict(summary["evidence"])
    plain = with_override(words, "monitor.verdict=false")
    sides = build_sides(plain, override, evidence, count_steps(evidence))
    return measure_in_turn(sides, place, rounds)


def _trusted(words: list[str]) -> list[str]:
    names = [word.partition("=")[2] for word in words if "._target_=" in word]
    return [f"+allow_targets=[{','.join(names)}]"] if names else []


@contextmanager
def _around(what: str) -> Iterator[None]:
    """Another process that computes, or a control group that limits this one and all it starts."""
    with ExitStack() as stack:
        if what == "process":
            process = multiprocessing.get_context("forkserver").Process(
                target=_compute, daemon=True
            )
            process.start()
            stack.callback(process.kill)
        elif what == "group":
            stack.enter_context(_limited())
        yield


def _compute() -> None:
    """Keep all cores but half busy, as a neighbour does."""
    end_with_parent()
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    values = torch.rand(700, 700)
    while True:
        values = (values @ values).clamp_(0, 1)


@contextmanager
def _limited() -> Iterator[None]:
    """The server that runs are forked from, in a control group with a limit of cores."""
    group = Path("/sys/fs/cgroup/cpu") / f"flatout-bench-{os.getpid()}"
    group.mkdir()
    server = str(vars(vars(multiprocessing.forkserver)["_forkserver"])["_forkserver_pid"])
    before = _group_of(server)
    try:
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text(str(int(100_000 * _LIMIT)))
        (group / "cgroup.procs").write_text(server)
        yield
    finally:
        (before / "cgroup.procs").write_text(server)
        until = time.monotonic() + 5
        while (group / "cgroup.procs").read_text().strip() and time.monotonic() < until:
            time.sleep(0.1)
        group.rmdir()


def _group_of(process: str) -> Path:
    lines = Path(f"/proc/{process}/cgroup").read_text(encoding="utf-8").splitlines()
    path = next(line.split(":")[2] for line in lines if "cpu" in line.split(":")[1].split(","))
    found = Path("/sys/fs/cgroup/cpu") / path.strip("/")
    return found if found.is_dir() else Path("/sys/fs/cgroup/cpu")


def _share(claim: str, holds: list[bool], least: float) -> Claim:
    count = sum(holds)
    total = len(holds)
    share = count / total if total else 1.0
    return Claim(claim, count, total, "", share, f"≥ {least:.0%}", share >= least - 1e-9)


def _cost(quickest_ms: float, steps: int = 20_000) -> Iterator[Claim]:
    """What the clock does in a step: four looks at the edges of its phases, its end, and every so
    often their sums.
    """
    timer = StepTimer(callbacks={})
    spent = 0.0
    began = time.perf_counter()
    for step in range(steps):
        edges = [time.perf_counter() for _ in range(4)]
        spent += edges[3] - edges[0]
        timer.end_step(step)
        if step % timer.every_n_steps == 0:
            timer.close()
    cost_us = 1e6 * (time.perf_counter() - began) / steps
    yield bounded("the clock, of each step", cost_us, "µs", most=20)
    note = f"half of its steps take {quickest_ms:.1f} ms at most"
    yield bounded(
        "the clock, of the quickest run's steps", cost_us / quickest_ms / 10, "%", most=1, note=note
    )
