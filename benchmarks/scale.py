"""Many devices and many trials: rows a second of two processes against one, and what a trial costs
beside its run.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning as L
import numpy as np

from benchmarks.claim import Claim, Options, bounded, in_turn, reaching
from flatout.data.batches.plan import Plan, PlanSettings
from flatout.distributed.ranks import cores_here

_TINY = ["+experiment=bert_tiny", "trainer.accelerator=cpu", "monitor.progress=false"]


def claims(options: Options) -> Iterator[Claim]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        yield from _two_processes(place, options)
        yield from _balance(options)
        yield from _trials(place, options)
        yield _accounted(place, options)
        yield _reference(place, options)


def _two_processes(place: Path, options: Options) -> Iterator[Claim]:
    """Rows a second while training, start and evaluation left out."""
    words = [
        *_TINY,
        f"data.sample.rows={2_000 if options.quick else 12_000}",
        "trainer.max_epochs=1",
    ]
    cores = cores_here()
    if len(cores) < 2:
        yield reaching("two processes against one: needs two cores", float("nan"), "", least=None)
        return
    count = iter(range(1_000))

    def folder() -> Path:
        return place / f"run-{next(count)}"

    def alone() -> float:
        return _rows_per_s([_started(words, folder(), cores[:1])])

    def together() -> float:
        return _rows_per_s([_started([*words, "trainer.devices=2"], folder(), cores[:2])])

    def apart() -> float:
        return _rows_per_s([_started(words, folder(), [core]) for core in cores[:2]])

    alone()  # builds the store
    one, two, strangers = in_turn([alone, together, apart], 1 if options.quick else options.rounds)
    note = (
        f"{strangers:,.0f} rows/s of two runs at once that exchange nothing:"
        f" {strangers / one:.2f}x, the roof here"
    )
    # Ranks on CPU cores are for tests and small jobs: a figure to know, without a goal.
    yield Claim(
        "bert_tiny: two processes, one thread each", two, one, "rows/s", two / one, "", True, note
    )


def _balance(options: Options) -> Iterator[Claim]:
    """Tokens of the fullest rank over the mean: in the middle step, which is what others wait for,
    and at the worst.
    """
    random = np.random.default_rng(0)
    lengths = np.clip(
        random.lognormal(3.0, 0.6, 20_000 if options.quick else 200_000), 3, 256
    ).astype(np.int32)
    for world in (2, 8):
        tokens = np.stack([_tokens_of_steps(lengths, rank, world) for rank in range(world)])
        whole = tokens[:, :-1]  # the last step may have fewer rows than ranks
        in_steps = 100 * (whole.max(0) / whole.mean(0) - 1)
        most = np.quantile(in_steps, 0.9)
        middle = float(np.median(in_steps))
        over_epoch = 100 * (whole.sum(1).max() / whole.sum(1).mean() - 1)
        note = (
            f"{most:.2f} % in one step of ten, where a row is very long; {over_epoch:.2f} % over an"
            " epoch"
        )
        yield bounded(
            f"tokens of the fullest of {world} ranks above the mean", middle, "%", most=1, note=note
        )


def _tokens_of_steps(lengths: np.ndarray, rank: int, world: int) -> np.ndarray:
    plan = Plan(lengths, PlanSettings(rows_per_batch=32, rank=rank, world=world))
    batches = plan.batches(0, plan.num_batches)
    return np.add.reduceat(lengths[batches.rows], batches.bounds[:-1])


def _trials(place: Path, options: Options) -> Iterator[Claim]:
    """The trials of a sweep against the run alone, each from its start to its end."""
    count, times = (2, 1) if options.quick else (6, 2)
    words = [
        "data.sample.rows=2000",
        "trainer.max_epochs=2",
        "data.batch_size=64",
        "precision=fp32",
    ]
    folder = place / "trials"
    seeds = ",".join(str(seed) for seed in range(count))
    done = _run(
        [sys.executable, "-m", "train", "-m", *words, f"seed={seeds}", f"hydra.sweep.dir={folder}"]
    )
    each = [
        float(seconds) for seconds in re.findall(r"trial \d+: complete, [^,]+, ([\d.]+) s", done)
    ]
    alone = [
        _run_s([*words, f"seed={seed}", f"hydra.run.dir={place}/alone-{seed}"])
        for seed in range(times)
    ]
    summaries = [_summary(folder / str(number)) for number in range(count)]
    trained = [summary["training"]["seconds"] for summary in summaries]
    over = float(np.median([trial - run for trial, run in zip(each[1:], trained[1:], strict=True)]))
    note = (
        f"a run alone: {min(alone):.1f} s, of which {trained[-1]:.1f} s after its imports; a trial:"
        f" {each[-1]:.1f} s"
    )
    yield bounded("a trial above its own run, from the second on", over, "s", most=8, note=note)
    data = max(summary["data"]["cache"]["seconds"] for summary in summaries[1:])
    yield bounded("a trial's time on data, the longest from the second on", data, "s", most=1)


def _accounted(place: Path, options: Options) -> Claim:
    """A sweep that meets a crash, a hang and a kill -9, and is taken up again."""
    count, crash, hang = (6, 1, 4) if options.quick else (30, 3, 5)
    folder = place / "sweep"
    planted = [
        "+callbacks.planted._target_=benchmarks.scale.Planted",
        "+allow_targets=[benchmarks.scale]",
        f"+callbacks.planted.crash={crash}",
        f"+callbacks.planted.hang={hang}",
    ]
    space = ["model.hidden=choice(8,16,32)", "optim.lr=tag(log,interval(1e-4,1e-1))"]
    words = [
        *space,
        *planted,
        "data.sample.rows=500",
        "trainer.max_epochs=3",
        f"trials={count}",
        "trial_for=12s",
    ]
    command = [sys.executable, "-m", "flatout", "sweep"]
    begun = subprocess.Popen(
        [*command, *words, f"hydra.sweep.dir={folder}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not (folder / str(count // 2) / "metrics.csv").exists() and begun.poll() is None:
        time.sleep(0.05)
    begun.kill()
    begun.wait()
    _run([*command, "resume", str(folder), "+allow_targets=[benchmarks.scale]"])
    rows = _table(folder)
    claim = f"accounted trials of {count}: one crash, one hang, one kill -9 of the sweep"
    return reaching(claim, len(rows), "", least=count, note=_counted(rows))


def _reference(place: Path, options: Options) -> Claim:
    """The reference sweep as it stands; a short look takes a few of its trials and promises nothing
    of the rest.
    """
    folder = place / "bloom"
    trials = 1 if options.quick else 30
    words = [
        "+experiment=bloom_sweep",
        f"hydra.sweep.dir={folder}",
        f"hydra.sweeper.trials={trials}",
    ]
    began = time.perf_counter()
    _run([sys.executable, "-m", "train", *words])
    minutes = (time.perf_counter() - began) / 60
    rows = _table(folder)
    best = max(float(row["value"]) for row in rows if row["status"] == "complete")
    note = f"{_counted(rows)}; best validation Dice {best:.4f}"
    if options.quick:
        return reaching(
            f"bloom_sweep, {trials} of its 30 trials", minutes, "min", least=None, note=note
        )
    return bounded("bloom_sweep, 30 trials", minutes, "min", most=10, note=note)


def _table(folder: Path) -> list[dict[str, str]]:
    """The rows of a sweep's table."""
    with (folder / "sweep.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _counted(rows: list[dict[str, str]]) -> str:
    """How many trials ended how."""
    states = Counter(row["status"] for row in rows)
    return ", ".join(f"{number} {state}" for state, number in sorted(states.items()))


class Planted(L.Callback):
    """Ends its process in one trial of a sweep and waits for ever in another, before they are
    validated.
    """

    def __init__(self, crash: int, hang: int) -> None:
        self.crash, self.hang = crash, hang

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        number = Path(trainer.default_root_dir).name
        if number == str(self.crash):
            os.kill(os.getpid(), signal.SIGKILL)
        if number == str(self.hang):
            time.sleep(3600)


def _started(
    words: Sequence[str], folder: Path, cores: Sequence[int]
) -> tuple[subprocess.Popen[bytes], Path]:
    """A run on some cores, one thread a process."""

    def pin() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)

    process = subprocess.Popen(
        [sys.executable, "-m", "train", *words, f"hydra.run.dir={folder}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        preexec_fn=pin,
    )
    return process, folder


def _rows_per_s(started: Sequence[tuple[subprocess.Popen[bytes], Path]]) -> float:
    """Of all runs together, when they have ended."""
    for process, folder in started:
        if process.wait():
            raise RuntimeError(f"the run in {folder} failed")
    return sum(_summary(folder)["speed"]["rows_per_s"] for _, folder in started)


def _summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{done.stdout}\n{done.stderr}")
    return done.stdout


def _run_s(words: Sequence[str]) -> float:
    began = time.perf_counter()
    _run([sys.executable, "-m", "train", *words])
    return time.perf_counter() - began
