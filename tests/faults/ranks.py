"""Runs on several ranks: one of them harmed, and the number of ranks changed from sitting to
sitting.
"""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np

from flatout.data.batches.plan import BatchLayout, Plan, PlanSettings
from flatout.errors import EXIT_CODE
from tests.faults.killed import References
from tests.faults.plants import KillAt, NotANumberAt, RaiseAt, SignalAt
from tests.faults.runs import (
    Spec,
    attempt,
    differences,
    largest_difference,
    losses_of,
    run_folder,
    said,
    side_by_side,
)

_CLOSE = 1e-5
_TWO = Spec(batch_size=6, trainer={"devices": 2})


def one_of_two_harmed(place: Path, count: int) -> list[list[str]]:
    """Either of two ranks is killed, asked to end, or raises: all are gone in time, and the run
    goes on as if not.
    """
    harms: dict[str, tuple[type[L.Callback], dict[str, Any], int]] = {
        "kill": (KillAt, {}, 1),
        "SIGTERM": (SignalAt, {"number": signal.SIGTERM}, 128 + signal.SIGTERM),
        "exception": (RaiseAt, {}, 1),
        "SIGUSR1": (SignalAt, {"number": signal.SIGUSR1}, 128 + signal.SIGUSR1),
    }
    references = References(place)
    references.make([_TWO])
    found = []
    cases = itertools.product(range(7, 27), harms.items(), (0, 1))
    for number, (step, (name, (kind, settings, code)), rank) in enumerate(
        itertools.islice(cases, count)
    ):
        folder = place / f"harmed-{number}"
        spec = _TWO.planted(kind, place="on_train_batch_end", step=step, rank=rank, **settings)
        got = attempt(spec, folder)
        problems = [] if got == code else [f"ended with {got}, not {code}: {said(folder)}"]
        problems += _goes_on(_TWO, folder, references.of(_TWO)[0])
        found.append([f"{name} of rank {rank}: {each}" for each in problems])
    return found


def not_a_number_on_either(place: Path, count: int) -> list[list[str]]:
    """An output of one of two ranks is no number: no update is made, and the run goes on when it is
    masked.
    """
    references = References(place)
    references.make([_TWO])
    found = []
    for number, (step, rank) in enumerate(
        itertools.islice(itertools.product((6, 9, 3), (0, 1)), count)
    ):
        folder = place / f"spoilt-by-{number}"
        got = attempt(_TWO.planted(NotANumberAt, step=step, value=float("nan"), rank=rank), folder)
        problems = _as_told(got, said(folder), step)
        problems += _goes_on(_TWO, folder, references.of(_TWO)[0])
        found.append([f"rank {rank}: {each}" for each in problems])
    return found


def not_a_number(place: Path, count: int) -> list[list[str]]:
    """An output is no number, or infinite, in some step: no update is made, and the run goes on
    when it is masked.
    """
    kinds = [
        ("bilstm", 1),
        ("encoder", 1),
        ("bits", 1),
        ("bilstm", 3),
    ]
    specs = [Spec(family, accumulate=parts, batch_size=12 // parts) for family, parts in kinds]
    values = (float("nan"), float("inf"))
    every = list(itertools.product(range(1, 30), values, specs))
    cases = every[:: max(1, len(every) // count)][:count]
    references = References(place)
    references.make(specs)

    def case(item: tuple[int, tuple[int, float, Spec]]) -> list[str]:
        number, (step, value, spec) = item
        folder = place / f"spoilt-{number}"
        got = attempt(spec.planted(NotANumberAt, step=step, value=value), folder)
        problems = _as_told(got, said(folder), step) or _goes_on(
            spec, folder, references.of(spec)[0]
        )
        return [f"{spec.family}, step {step}, {value}: {each}" for each in problems]

    return side_by_side(case, enumerate(cases))


def _as_told(code: int, words: str, step: int) -> list[str]:
    is_told = f"not finite at step {step + 1} (rows " in words
    return [] if code == EXIT_CODE and is_told else [f"ended with {code}: {words}"]


def _goes_on(spec: Spec, folder: Path, reference: Path) -> list[str]:
    code = attempt(spec, folder)
    return (
        differences(run_folder(folder), reference)
        if code == 0
        else [f"then {code}: {said(folder)}"]
    )


def other_numbers_of_ranks(place: Path, count: int) -> list[list[str]]:
    """1, 2 and 1 ranks in turn, their product with the micro-batch the same: the losses of one rank
    alone.
    """
    chains: list[tuple[tuple[int, int, int], ...]] = [
        ((1, 12, 1), (2, 6, 1), (1, 6, 2)),
        ((2, 6, 1), (1, 12, 1), (2, 3, 2)),
        ((1, 4, 3), (2, 6, 1), (1, 12, 1)),
    ]
    families = ("bilstm", "encoder", "bits")
    plain = [Spec(family, dropout=0.0, batch_size=12) for family in families]
    references = References(place)
    references.make(plain)
    found = []
    for number, (chain, spec) in enumerate(
        itertools.islice(itertools.product(chains, plain), count)
    ):
        folder = place / f"ranks-{number}"
        problems = []
        for part, (world, rows, accumulate) in enumerate(chain):
            here = replace(spec, batch_size=rows, accumulate=accumulate)
            here = replace(here, trainer={"devices": world}) if world > 1 else here
            is_last = part == len(chain) - 1
            plant = {
                "place": "on_train_batch_end",
                "step": 6 * (part + 1),
                "number": signal.SIGTERM,
            }
            code = attempt(here if is_last else here.planted(SignalAt, **plant), folder)
            if code != (0 if is_last else 128 + signal.SIGTERM):
                problems.append(f"{world} ranks ended with {code}: {said(folder)}")
        reference = references.of(spec)[0]
        problems = problems or alike(run_folder(folder), reference)
        found.append([f"{spec.family}, {chain}: {each}" for each in problems])
    return found


def alike(run: Path, reference: Path) -> list[str]:
    """What tells two runs apart, but for rounding: losses and weights."""
    ours = losses_of(run)
    theirs = losses_of(reference)
    if ours.keys() != theirs.keys():
        return [f"losses at other steps: {sorted(ours)} against {sorted(theirs)}"]
    apart = max(abs(ours[step] - theirs[step]) for step in theirs)
    problems = [f"losses {apart:.1e} apart"] if apart > _CLOSE else []
    weights = largest_difference(run, reference)
    return [*problems, *([f"weights {weights:.1e} apart"] if weights > 10 * _CLOSE else [])]


def plans(place: Path, count: int, seed: int = 0) -> list[list[str]]:
    """However a step is divided among ranks and micro-batches: the same rows in it, each exactly
    once an epoch.
    """
    return [_plan_case(np.random.default_rng((seed, number))) for number in range(count)]


def _plan_case(random: np.random.Generator) -> list[str]:
    lengths = random.integers(1, 40, size=int(random.integers(1, 200))).astype(np.int32)
    rows = int(random.integers(1, 9))
    parts = int(random.choice([1, 2, 3, 4, 6, 8]))
    layout = BatchLayout.flat if random.integers(2) else BatchLayout.padded
    cap = int(lengths.max()) * int(random.integers(1, 6)) if random.integers(2) else None
    epoch = int(random.integers(5))
    seed = int(random.integers(100))
    steps: dict[int, list[int]] | None = None
    for world in (world for world in range(1, parts + 1) if parts % world == 0):
        found: dict[int, list[int]] = {}
        for rank in range(world):
            settings = PlanSettings(
                rows_per_batch=rows,
                tokens_per_batch=cap,
                accumulate=parts // world,
                layout=layout,
                seed=seed,
                rank=rank,
                world=world,
            )
            plan = Plan(lengths, settings, epoch)
            batches = plan.batches(0, plan.num_batches)
            for batch, (begin, real) in enumerate(
                zip(batches.bounds, batches.num_real, strict=False)
            ):
                found.setdefault(batch // settings.accumulate, []).extend(
                    batches.rows[begin : begin + real].tolist()
                )
        found = {step: sorted(rows_of) for step, rows_of in found.items()}
        if sorted(itertools.chain(*found.values())) != list(range(len(lengths))):
            return [f"{world} ranks of {parts} parts: not each row once"]
        if steps is not None and found != steps:
            return [f"{world} ranks of {parts} parts: other rows in a step"]
        steps = found
    return []
