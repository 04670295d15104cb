"""One measurement of one rung, in a process forked from the warm server, so that nothing is left of it.

This file is the ladder's whole timing: a program runs for some seconds, its first steps are left out, and rows, waiting
and memory are counted. Ratios and their intervals are made of several measurements (`climb.py`).
"""

from __future__ import annotations

import importlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatout.distributed.processes import OUTPUT
from flatout.ladder.usual.program import WARM_STEPS, Case, Stopwatch
from flatout.perf.measure.apart import run
from flatout.perf.measure.steps import peak_bytes

if TYPE_CHECKING:
    from flatout.run.launch import RunJob

_GPU_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Measured:
    rows_per_s: float
    tokens_per_s: float | None
    wait_share: float
    padding_share: float | None
    startup_s: float  # to the first batch; of a run of ours all that is no training step, which is more
    memory_gb: float | None  # peak of the process that trains; its workers are not counted
    device_share: float | None = None  # share of the time in which the GPU was busy; None without one
    metrics: dict[str, float] | None = None  # on the test rows; None where the training was cut short


Program = Callable[[float | None, Path], Measured]
"""Trains for some seconds in a folder; None: to the end, and the test rows are answered."""


def measure_usual(
    program: str, case: Case, keywords: Mapping[str, Any], seconds: float | None, folder: Path
) -> Measured:
    """A usual program with some keywords."""
    module = importlib.import_module(f"flatout.ladder.usual.{program}")
    how = module.How(**keywords)
    if fill := getattr(module, "fill_cache", None):
        fill(case, how)
    began, clock = time.perf_counter(), Stopwatch(seconds)
    with _logged(folder / "usual.log", f"usual.{program}"):
        trained = module.Program(case, how)
        for _ in itertools.count() if seconds is not None else range(case.epochs):
            trained.train_epoch(clock)
            if clock.is_over:
                break
        metrics = trained.test() if seconds is None else None
    spent, first = clock.spent, clock.first_batch_at or time.perf_counter()
    taken = max(spent.seconds, 1e-9)
    return Measured(
        rows_per_s=spent.rows / taken,
        tokens_per_s=spent.tokens / taken if spent.tokens else None,
        wait_share=spent.wait_s / taken,
        padding_share=1 - spent.tokens / spent.computed if spent.computed else None,
        startup_s=first - began,
        memory_gb=peak_memory_gb(),
        metrics=metrics,
    )


def measure_run(job: RunJob, words: Sequence[str], seconds: float | None, folder: Path) -> Measured:
    """A run of ours with some words, which also limit it.

    Validations and checkpoints are not counted: a usual program has none, and seconds would weigh them too much.
    """
    began = time.perf_counter()
    (folder / "run").mkdir(parents=True, exist_ok=True)
    result = job.train(folder / "run", words, resumes=False)
    speed, training = result.summary["speed"], result.summary["training"]
    parts = {name: value for name, value in speed["step_ms"].items() if value is not None and name != "validation"}
    whole_s = training["steps"] * training["rows_per_step"] / max(speed["rows_per_s"], 1e-9)
    saved_ms, steps_ms = parts.pop("checkpoint", 0.0), max(sum(parts.values()), 1e-9)
    trained_s = whole_s * steps_ms / (steps_ms + saved_ms)
    gain = whole_s / max(trained_s, 1e-9) * slow_start(trained_s, training["steps"], speed["first_steps_ms"] or [])
    tested = {name[5:]: value for name, value in result.metrics.items() if name.startswith("test/")}
    return Measured(
        rows_per_s=speed["rows_per_s"] * gain,
        tokens_per_s=speed["tokens_per_s"] * gain if speed["tokens_per_s"] else None,
        wait_share=parts.get("wait", 0.0) / steps_ms,
        padding_share=speed["padding_share"],
        startup_s=max(0.0, time.perf_counter() - began - trained_s),
        memory_gb=peak_memory_gb(),
        metrics=tested if seconds is None else None,
    )


def slow_start(trained_s: float, steps: int, first_ms: list[float]) -> float:
    """How much faster the steps are after the first ones, which a usual program leaves out and a summary counts."""
    warm_ms = first_ms[:WARM_STEPS]
    later, later_s = steps - len(warm_ms), trained_s - sum(warm_ms) / 1000
    return trained_s / steps * later / later_s if later > 0 and later_s > 0 else 1.0


def peak_memory_gb() -> float | None:
    """Most memory that this process has held, of a GPU where it computes on one; None where the system does not say."""
    is_on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    peak = peak_bytes(torch.device("cuda" if is_on_gpu else "cpu"))
    return None if peak is None else peak / 1e9


@contextmanager
def _logged(path: Path, name: str) -> Iterator[None]:
    """A usual program writes its log lines into a file, as it would."""
    handler, log = logging.FileHandler(path, encoding="utf-8"), logging.getLogger(name)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def measure_apart(program: Program, seconds: float | None, folder: Path, *, limit_s: float | None = None) -> Measured:
    """Measure in a process of its own, which prints to a file; `Failed` where it ended early, or beyond `limit_s`."""
    folder.mkdir(parents=True, exist_ok=True)
    return run(partial(_measure, program, seconds, folder), limit_s, {OUTPUT: str(folder / "output.txt")})


def _measure(program: Program, seconds: float | None, folder: Path) -> Measured:
    with _device_use() as samples:
        found = program(seconds, folder)
    return replace(found, device_share=sum(samples) / len(samples) if samples else None)


@contextmanager
def _device_use() -> Iterator[list[float]]:
    """Uses of the GPU while it trains, as a thread samples them; none without a GPU."""
    samples, done = list[float](), threading.Event()

    def watch() -> None:
        while not done.wait(_GPU_EVERY_S):
            samples.append(torch.cuda.utilization() / 100)

    if torch.cuda.device_count():
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield samples
    finally:
        done.set()
