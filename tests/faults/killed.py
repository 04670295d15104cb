"""Runs that are killed, asked to end, or broken by a callback, and taken up again: the same bytes
must come out.
"""

from __future__ import annotations

import itertools
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.distributed.signals import ASKING
from tests.faults.plants import STEPS, DrawsNumbers, KillAt, RaiseAt, SignalAt
from tests.faults.runs import (
    FAMILIES,
    Spec,
    attempt,
    differences,
    finished,
    run_folder,
    said,
    saved_step,
    seconds_of,
    side_by_side,
)

_MOST_KILLS = 3


class References:
    """Runs that nothing happened to, one a spec; how long each took."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._runs: dict[str, tuple[Path, float]] = {}

    def make(self, specs: list[Spec]) -> None:
        """Train those that are missing, side by side."""
        missing = {_key(spec): spec for spec in specs if _key(spec) not in self._runs}
        # The first builds each family's store.
        first = {spec.family: key for key, spec in reversed(missing.items())}
        for keys in (list(first.values()), [key for key in missing if key not in first.values()]):
            self._runs |= dict(side_by_side(lambda key: (key, self._timed(missing[key])), keys))

    def _timed(self, spec: Spec) -> tuple[Path, float]:
        folder = self.place / f"reference-{abs(hash(_key(spec)))}"
        seconds = seconds_of(lambda: finished(spec, folder))
        return run_folder(folder), seconds

    def of(self, spec: Spec) -> tuple[Path, float]:
        return self._runs[_key(spec)]


def _key(spec: Spec) -> str:
    return repr(
        replace(spec, plants=tuple(plant for plant in spec.plants if plant[0] is DrawsNumbers))
    )


def grid() -> list[Spec]:
    """Every family, with and without worker processes and accumulation, in both precisions."""
    parts = itertools.product(FAMILIES, (0, 2), (1, 3), ("fp32", "bf16"))
    return [
        Spec(family, workers, accumulate, precision, batch_size=12 // accumulate)
        for family, workers, accumulate, precision in parts
    ]


def random_kills(place: Path, count: int, seed: int = 0) -> list[list[str]]:
    """kill -9 at random moments, up to three a run, the same command again each time."""
    specs = list(itertools.islice(itertools.cycle(grid()), count))
    references = References(place)
    references.make(specs)

    def case(item: tuple[int, Spec]) -> list[str]:
        number, spec = item
        numbers = random.Random(seed * 100_003 + number)
        folder = place / f"killed-{number}"
        reference, seconds = references.of(spec)
        for _ in range(numbers.randint(1, _MOST_KILLS)):
            attempt(spec, folder, kill_after_s=numbers.uniform(0.1, 1.0) * seconds)
        return ended(spec, folder, reference)

    return side_by_side(case, enumerate(specs))


def signals_at_any_phase(place: Path, count: int) -> list[list[str]]:
    """A signal in each hook of training, at different steps: at most a step is lost, and the exit
    code tells which.
    """
    places = [
        "on_train_batch_start",
        "on_train_batch_end",
        "on_validation_start",
        "on_validation_batch_end",
        "on_validation_end",
        "on_train_epoch_end",
        "on_train_epoch_start",
    ]
    specs = [
        Spec(family, accumulate=accumulate, batch_size=12 // accumulate)
        for family, accumulate in _KINDS
    ]
    parts = itertools.product(places, ASKING, (2, 5, 1, 8), specs)
    cases = list(itertools.islice(_spread(parts), count))
    references = References(place)
    references.make(specs)

    def case(item: tuple[int, tuple[str, signal.Signals, int, Spec]]) -> list[str]:
        index, (where, number, step, spec) = item
        folder = place / f"asked-{index}"
        code = attempt(spec.planted(SignalAt, place=where, step=step, number=number), folder)
        run = run_folder(folder)
        name = f"{number.name} {where} {step} {spec.family}"
        if not (run / STEPS).exists():
            return [f"{name}: never came there, ended with {code}"]
        at = int((run / STEPS).read_text())
        saved = saved_step(run)
        if code != 128 + number:
            return [f"{name}: ended with {code}: {said(folder)}"]
        if not at <= saved <= at + 1:
            return [f"{name}: after step {at}, the newest checkpoint is of step {saved}"]
        return ended(spec, folder, references.of(spec)[0])

    return side_by_side(case, enumerate(cases))


def exceptions_of_callbacks(place: Path, count: int) -> list[list[str]]:
    """Somebody's callback raises: no row is lost or trained twice."""
    places = [
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_optimizer_step",
        "on_validation_start",
        "on_validation_batch_start",
        "on_validation_epoch_end",
        "on_validation_end",
        "on_train_epoch_end",
        "on_train_epoch_start",
        "on_train_end",
    ]
    specs = [
        Spec(family, accumulate=accumulate, batch_size=12 // accumulate).planted(DrawsNumbers)
        for family, accumulate in _KINDS
    ]
    cases = list(
        itertools.islice(_spread(itertools.product(places, (4, 7, 2, 8, 1), specs)), count)
    )
    references = References(place)
    references.make(specs)

    def case(item: tuple[int, tuple[str, int, Spec]]) -> list[str]:
        index, (where, step, spec) = item
        folder = place / f"raised-{index}"
        code = attempt(spec.planted(RaiseAt, place=where, step=step), folder)
        if code != 1:
            return [f"{where} {step}: ended with {code}: {said(folder)}"]
        return ended(spec, folder, references.of(spec)[0])

    return side_by_side(case, enumerate(cases))


def epoch_edges(place: Path, count: int) -> list[list[str]]:
    """kill -9 and SIGTERM just around the ends of epochs and validations, for every way to place
    validations.
    """
    schedules: dict[str, dict[str, Any]] = {
        "each epoch": {},
        "twice an epoch": {"val_check_interval": 0.5},
        "every other epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
        "every 4 batches": {"check_val_every_n_epoch": None, "val_check_interval": 4},
        "to a step": {"max_steps": 13},
        "part of each epoch": {"limit_train_batches": 5},
    }
    edges = [
        ("on_train_batch_end", 7),
        ("on_train_batch_end", 8),
        ("on_validation_start", 1),
        ("on_validation_end", 1),
        ("on_train_epoch_end", 1),
        ("on_train_epoch_start", 1),
    ]
    specs = {name: Spec(trainer=schedule) for name, schedule in schedules.items()}
    cases = _spread(itertools.product(schedules, edges, ("kill", "term")))[:count]
    references = References(place)
    references.make(list(specs.values()))

    def case(item: tuple[int, tuple[str, tuple[str, int], str]]) -> list[str]:
        index, (name, (where, step), how) = item
        spec = specs[name]
        folder = place / f"edge-{index}"
        plant = (KillAt, {}) if how == "kill" else (SignalAt, {"number": signal.SIGTERM})
        attempt(spec.planted(plant[0], place=where, step=step, **plant[1]), folder)
        return [
            f"{name}, {where} {step}: {each}"
            for each in ended(spec, folder, references.of(spec)[0])
        ]

    return side_by_side(case, enumerate(cases))


_KINDS = (
    ("bilstm", 1),
    ("encoder", 1),
    ("bits", 1),
    ("bilstm", 3),
    ("encoder", 3),
)


def _spread(parts: itertools.product) -> list:
    """The same cases in a fixed random order, so that the first few are of every kind."""
    cases = list(parts)
    random.Random(1).shuffle(cases)
    return cases


def ended(spec: Spec, folder: Path, reference: Path) -> list[str]:
    """What is wrong when the same command is given once more and left alone."""
    code = attempt(spec, folder)
    if code:
        return [f"{folder.name}: taken up again it ended with {code}: {said(folder)}"]
    return [f"{folder.name}: {each}" for each in differences(run_folder(folder), reference)]
