"""One claim of ours and what it measured: both sides in one run, in turn, as medians."""

from __future__ import annotations

import io
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flatout.perf.measure.intervals import take_turns


@dataclass(frozen=True, slots=True)
class Options:
    """How long a bench may take, and where it finds data."""

    quick: bool = False
    """Fewer rounds and rows, under two minutes."""
    tiny: bool = False
    """A few rows in one round, for the tests of a bench's rows; its figures mean nothing."""
    data: Path | None = None
    """Folder of published data sets."""
    pretrained: str | None = None
    """Folder of a pretrained encoder."""
    asked_rounds: int | None = None
    """Rounds of each measurement, where they were asked for."""
    only: str | None = None
    """Part of the names of the rows to measure, in benches that can leave rows out."""
    plain: bool = False
    """doctor: in plain Trainers, with foreign modules and loaders."""

    @property
    def rounds(self) -> int:
        return self.choose_rounds(5, 3, 1)

    def choose_rounds(self, full: int, quick: int, tiny: int) -> int:
        """Rounds of a measurement: those asked for come first."""
        return self.asked_rounds or self.choose(full, quick, tiny)

    def choose(self, full: int, quick: int, tiny: int) -> int:
        """The size of this measurement."""
        if self.tiny:
            return tiny
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Claim:
    """What was claimed and measured; `theirs` is None where the claim is a plain bound
    on `ours`.
    """

    claim: str
    ours: float
    theirs: float | None
    unit: str
    ratio: float | None
    goal: str
    holds: bool
    note: str = ""
    applies: bool = True
    """False: it cannot be measured on this machine, and the note says why."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def at_least(
    claim: str, ours: float, theirs: float, unit: str, goal: float, note: str = ""
) -> Claim:
    """Ours is to be at least `goal` times theirs."""
    ratio = ours / theirs
    return Claim(claim, ours, theirs, unit, ratio, f"≥ {goal:g}×", ratio >= goal, note)


def at_most(
    claim: str, ours: float, theirs: float, unit: str, goal: float, note: str = ""
) -> Claim:
    """Ours is to be at most `goal` times theirs."""
    ratio = ours / theirs
    return Claim(claim, ours, theirs, unit, ratio, f"≤ {goal:g}×", ratio <= goal, note)


def bounded(claim: str, ours: float, unit: str, *, most: float, note: str = "") -> Claim:
    """Ours is to be at most `most`."""
    return Claim(claim, ours, None, unit, None, f"≤ {most:g} {unit}".rstrip(), ours <= most, note)


def not_here(claim: str, why: str) -> Claim:
    """A claim that does not apply on this machine."""
    return Claim(
        claim, math.nan, None, "", None, "", True, f"does not apply here: {why}", applies=False
    )


def reaching(claim: str, ours: float, unit: str, *, least: float | None, note: str = "") -> Claim:
    """Ours is to be at least `least`; None: a figure to know, with no goal."""
    goal = "" if least is None else f"≥ {least:,.0f}"
    return Claim(claim, ours, None, unit, None, goal, least is None or ours >= least, note)


def peak_memory_gb() -> float:
    """Most memory this process has held; not by `ru_maxrss` alone, which Linux carries over from
    the parent.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / 1e9
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measured_apart(function: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What `module:function` finds in a process of its own: settings on standard input, figures on
    its last line.
    """
    module, _, name = function.partition(":")
    command = [sys.executable, "-c", f"from {module} import {name}; {name}()"]
    paths = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        command, input=json.dumps(settings), capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def quiet() -> Iterator[None]:
    """What runs print is kept out of the table."""
    with redirect_stdout(io.StringIO()):
        yield


def in_turn(sides: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """Each side's median over rounds, the sides measured one after the other in every round."""
    return [statistics.median(rates) for rates in take_turns(sides, least=rounds)]
