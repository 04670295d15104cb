"""Nothing is lost, whatever happens: runs killed, asked to end, broken and damaged in every way, and taken up again.

Each row is a number of cases, and how many of them ended as they must: mostly with the same bytes as a run that nothing
happened to. `--rounds full` tries many more than the tests do; it takes hours.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.claim import Claim, Options, reaching
from benchmarks.faults import disks, killed, ranks, switches
from benchmarks.faults.costs import costs
from benchmarks.faults.runs import tally
from benchmarks.hostile import kept_inside, refused_targets
from benchmarks.store_faults import flips_detected, write_faults_survived
from flatout.distributed.processes import wait_until_warm, warm_start

Problems = Sequence[list[str]]
"""What is wrong with each case; nothing with those that ended as they must."""


def claims(options: Options) -> Iterator[Claim]:
    warm_start()
    wait_until_warm()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, sizes, rows in _ROWS:
            count = sizes[options.size]
            yield _claim(name, list(rows(place / name.partition(" ")[0], count)))
            for each in place.iterdir():
                shutil.rmtree(each)
        if disks.has_strace():
            yield from _at_each_call(place)
        else:
            yield reaching("R2, R13 need strace, a package of every Linux", float("nan"), "", least=None)
        yield from costs(place, options)


def _at_each_call(place: Path) -> Iterator[Claim]:
    for name, where in (("this disk", place), ("another disk", disks.on_another_disk())):
        if where is None:
            continue
        with tempfile.TemporaryDirectory(dir=where) as folder:
            yield _claim(f"R2 kill -9 at each call of a save, {name}", disks.killed_in_a_save(Path(folder)))
    yield _claim("R13 a disk that refuses, at each call of a save", disks.errors_in_a_save(place))


def _claim(name: str, problems: Problems) -> Claim:
    good, count, first = tally(problems)
    return reaching(name, good, f"of {count}", least=count, note=first[:300])


def _store_flips(place: Path, count: int) -> Problems:
    place.mkdir()
    detected, tried = flips_detected(count, 7, folder=place)
    return [[]] * detected + [["a wrong bit passed"]] * (tried - detected)


def _store_writes(place: Path, count: int) -> Problems:
    place.mkdir()
    survived, tried = write_faults_survived(each_refusal=count > 1, folder=place)
    return [[]] * survived + [["a store or its neighbours were lost"]] * (tried - survived)


def _hostile_targets(place: Path, count: int) -> Problems:
    return _refusals(*refused_targets(count > 1))


def _escapes(place: Path, count: int) -> Problems:
    return _refusals(*kept_inside(count > 1))


def _refusals(good: int, tried: int) -> Problems:
    return [[]] * good + [["executed, or outside"]] * (tried - good)


Rows = Callable[[Path, int], Iterator[list[str]] | Problems]
_ROWS: list[tuple[str, dict[str, int], Rows]] = [
    ("R1 kill -9 at random moments", {"quick": 8, "ci": 40, "full": 1000}, killed.random_kills),
    ("R4 a damaged newest checkpoint", {"quick": 60, "ci": 60, "full": 200}, disks.damaged_newest),
    ("R5 wrong bits in checkpoints", {"quick": 500, "ci": 500, "full": 10_000}, disks.flipped_bits),
    ("R5 wrong bits in stores", {"quick": 200, "ci": 500, "full": 10_000}, _store_flips),
    ("R6 signals at any phase", {"quick": 8, "ci": 40, "full": 400}, killed.signals_at_any_phase),
    ("R7 edges of epochs and validations", {"quick": 8, "ci": 72, "full": 72}, killed.epoch_edges),
    ("R8 exceptions of callbacks", {"quick": 8, "ci": 40, "full": 200}, killed.exceptions_of_callbacks),
    ("R9 one of two ranks harmed", {"quick": 1, "ci": 8, "full": 100}, ranks.one_of_two_harmed),
    ("R10 plans of other worlds", {"quick": 500, "ci": 5_000, "full": 100_000}, ranks.plans),
    ("R10 runs on other numbers of ranks", {"quick": 1, "ci": 6, "full": 100}, ranks.other_numbers_of_ranks),
    ("R12 switches without effect", {"quick": 6, "ci": 20, "full": 20}, switches.without_effect),
    ("R16 outputs that are no number", {"quick": 8, "ci": 38, "full": 296}, ranks.not_a_number),
    ("R13 a store's build killed or refused at each step", {"quick": 1, "ci": 2, "full": 2}, _store_writes),
    ("R16 on either of two ranks", {"quick": 1, "ci": 2, "full": 4}, ranks.not_a_number_on_either),
    ("S1 hostile targets", {"quick": 1, "ci": 1, "full": 2}, _hostile_targets),
    ("S3 paths that lead outside", {"quick": 1, "ci": 1, "full": 2}, _escapes),
]
"""Each row's name, how many cases there are of each size, and what makes them."""
