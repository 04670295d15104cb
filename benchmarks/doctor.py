"""Bottlenecks that are planted into runs: does the verdict name them, and is its fix worth what it says?

Each planted run is a command line in a process of its own. Its verdict's override is then applied, and both are run
again, in turn; the gain is the ratio of the median times that a row took, and what was told the median of what the
verdicts of all runs as planted told.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.claim import Claim, Options, bounded
from flatout.callbacks.step_timer import StepTimer
from flatout.distributed.processes import OUTPUT, end_with_parent, redirect_output, wait_until_warm, warm_start
from flatout.perf.verdict.evidence import Evidence

_ALWAYS = ["monitor.progress=false", "trainer.accelerator=cpu", "checkpoint.patience=null"]
_SMALL = ["data.sample.rows=8000", "data.sample.eval_rows=400", "model.embedding=64"]
_SMALL += ["model.hidden=64"]
_ENCODER = ["model=transformer", "data.sample.rows=2400", "data.sample.eval_rows=200", "data.batch_size=32"]
_ENCODER += ["model.hidden=192", "model.layers=3"]
_TINY = ["data.sample.rows=8000", "data.sample.eval_rows=400", "model.embedding=8", "model.hidden=8"]
_PLANT = "+callbacks.plant._target_=benchmarks.plants"

_MANY = ["data.sample.rows=27000", *_SMALL[1:]]
_WIDE = ["model=transformer", "data.sample.rows=3000", "data.sample.eval_rows=200", "data.batch_size=64"]
_WIDE += ["model.hidden=384", "model.layers=2", "model.heads=6"]
_PADDED = [*_ENCODER, "model.compute=padded", f"{_PLANT}.PadsToMax"]
_READS = [f"{_PLANT}.ReadsNorms", "+callbacks.plant.times=60"]


@dataclass(frozen=True, slots=True)
class Planted:
    """A run with something in it that holds it back."""

    name: str
    causes: tuple[str, ...]
    """What the verdict may call it."""
    words: list[str]
    epochs: int = 2


PLANTED = [
    Planted("a slow source", ("data",), [*_MANY, f"{_PLANT}.SlowSource", "+callbacks.plant.us_a_row=150"], 3),
    Planted(
        "work in Python for each row",
        ("data",),
        [*_MANY, "data.feed=resident", f"{_PLANT}.RowByRow", "+callbacks.plant.us_a_row=100"],
        3,
    ),
    Planted(
        "sleep in the collate",
        ("data",),
        [*_MANY, "data.feed=workers", "data.workers=1", f"{_PLANT}.SleepyCollate", "+callbacks.plant.ms=25"],
        2,
    ),
    Planted("padding to the maximum", ("padding",), [*_PADDED, "+callbacks.plant.longest=64"], 3),
    Planted("tiny batches", ("batch",), [*_SMALL, "data.batch_size=4"], 1),
    Planted("8 batches of 4 a step", ("accumulation",), [*_SMALL, "data.batch_size=4", "data.accumulate=8"], 1),
    Planted("numbers read each step", ("callbacks",), [*_SMALL, *_READS], 6),
    Planted("a callback that waits", ("callbacks",), [*_SMALL, f"{_PLANT}.Sleeps", "+callbacks.plant.ms=12"], 6),
    Planted("curves written each step", ("logging",), [*_TINY, "monitor.flush_every=1"], 20),
    Planted("a validation every 5 steps", ("validation",), [*_SMALL, "+trainer.val_check_interval=5"], 6),
    Planted("a checkpoint every 2 steps", ("checkpoint",), [*_SMALL, "checkpoint.every_steps=2"], 6),
    Planted("fp32 where bf16 is native", ("precision",), [*_WIDE, "precision=fp32"], 2),
    Planted("one thread", ("threads",), [*_WIDE, "threads=1"], 5),
]
_NAMED, _WITHIN, _TOLERANCE = 11 / 12, 9 / 12, 0.25
_ROUNDS = 3


def claims(options: Options) -> Iterator[Claim]:
    warm_start()
    wait_until_warm()
    planted = PLANTED[4:7] if options.quick else PLANTED
    named = within = 0
    quickest_ms = math.inf
    with tempfile.TemporaryDirectory() as place:
        for number, each in enumerate(planted):
            found = diagnosed(each, Path(place) / str(number), 1 if options.quick else _ROUNDS)
            named, within = named + found.is_named, within + found.is_within
            quickest_ms = min(quickest_ms, found.step_ms)
            yield found.as_claim()
    yield _share("planted bottlenecks that the verdict names", named, len(planted), _NAMED)
    yield _share("fixes within 25 % of the gain that was told", within, len(planted), _WITHIN)
    yield from _cost(quickest_ms)


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """What the verdict said of a planted run, and what its fix was worth."""

    planted: Planted
    verdict: dict[str, Any]
    """Of its first run."""
    told: float | None
    """The gain that verdicts promised."""
    gain: float | None
    """The gain that came."""
    step_ms: float
    """What half of its steps took at most."""

    @property
    def is_named(self) -> bool:
        return self.verdict["cause"] in self.planted.causes

    @property
    def is_within(self) -> bool:
        return self.is_named and self.ratio is not None and abs(self.ratio - 1) <= _TOLERANCE

    @property
    def ratio(self) -> float | None:
        """The gain that came over the one that was told."""
        return None if self.told is None or self.gain is None else self.gain / self.told

    def as_claim(self) -> Claim:
        gain = float("nan") if self.gain is None else self.gain
        goal, note = f"told ±{_TOLERANCE:.0%}", self.verdict["sentence"]
        name = self.planted.name if self.is_named else f"{self.planted.name}: NOT NAMED"
        return Claim(name, gain, self.told, "× as fast", self.ratio, goal, self.is_within, note)


def diagnosed(planted: Planted, place: Path, rounds: int) -> Diagnosed:
    """Run it, apply what its verdict says, and run both again in turn."""
    words = [*_ALWAYS, *planted.words, f"trainer.max_epochs={planted.epochs}"]
    first = trained(words, place / "first")
    found, step_ms = first["verdict"], first["speed"]["step_percentiles_ms"]["p50"]
    if not found["fix"] or found["predicted_gain"] is None:
        return Diagnosed(planted, found, None, None, step_ms)
    fixed = with_override(words, found["fix"])
    was, now = [first], []
    for number in range(rounds):
        now.append(trained(fixed, place / f"fixed-{number}"))
        if number + 1 < rounds:
            was.append(trained(words, place / f"again-{number}"))
    alike = [each["verdict"] for each in was if each["verdict"]["fix"] == found["fix"]]
    told = statistics.median(each["predicted_gain"] for each in alike)
    gain = statistics.median(map(_ms_a_row, was)) / statistics.median(map(_ms_a_row, now))
    return Diagnosed(planted, found, told, gain, step_ms)


def with_override(words: list[str], override: str) -> list[str]:
    """A command line with what a verdict says to type; what it takes away was added by words that go."""
    if override.startswith("~"):
        return [word for word in words if not word.startswith(f"+{override[1:]}.")]
    changed = {_key(part) for part in override.split()}
    return [*(word for word in words if _key(word) not in changed), *override.split()]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+")


def _ms_a_row(summary: dict[str, Any]) -> float:
    evidence = Evidence.from_dict(summary["evidence"])
    return evidence.total_ms / evidence.rows_per_batch


def trained(words: list[str], folder: Path) -> dict[str, Any]:
    """The summary of `python -m train`, in a process of its own."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    output = folder.with_suffix(".txt")
    trusted = ",".join(word.partition("=")[2] for word in words if "._target_=" in word)
    given = [*words, f"hydra.run.dir={folder}", f"+allow_targets=[{trusted}]"]
    process = context.Process(target=_train, args=(given, str(output), dict(os.environ)))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.exitcode}:\n{output.read_text(encoding='utf-8')}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary


def _train(words: list[str], output: str, environment: dict[str, str]) -> None:
    os.environ |= {**environment, OUTPUT: output}
    end_with_parent()
    redirect_output()
    import train

    train.main(words)


def _share(claim: str, count: int, total: int, least: float) -> Claim:
    goal = f"≥ {least * total:.0f} of {total}"
    return Claim(claim, count, total, "", count / total, goal, count / total >= least - 1e-9)


def _cost(quickest_ms: float, steps: int = 20_000) -> Iterator[Claim]:
    """What the clock does in a step: four looks at the edges of its phases, its end, and every so often their sums."""
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
    yield bounded("the clock, of the quickest run's steps", cost_us / quickest_ms / 10, "%", most=1, note=note)
