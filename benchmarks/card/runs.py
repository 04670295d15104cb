"""Whole runs on a card, as `python -m train` makes them: curves, resuming, memory, tuning,
compiling, profiling.
"""

from __future__ import annotations

import gzip
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.card.place import Place, Trained, losses_of, side_by_side, summary_of
from benchmarks.claim import Claim, bounded, not_here, quiet, reaching
from flatout.config import MonitorConfig
from flatout.data.samples.headlines import HeadlinesConfig
from flatout.data.texts.settings import TextDataConfig
from flatout.distributed.processes import warm_start
from flatout.engine.optimizer import OptimConfig
from flatout.models.encoder.transformer import TransformerConfig
from flatout.run.launch import fit

_NO_DROPOUT = ["model.dropout=0", "model.attention_dropout=0", "model.head_dropout=0"]
_TINY = {
    "headlines": [
        "data.sample.rows=128",
        "data.sample.eval_rows=32",
        "data.sample.classes=4",
        "data.batch_size=16",
    ],
    "battery": [
        "data.sample.cells=3",
        "data.sample.cycles=2",
        "data.sample.samples=60",
        "data.chunk=20",
    ],
    "people": [
        "data.sample.rows=100",
        "data.batch_size=16",
        "data.encoding.size=64",
        "model.widths=[8]",
    ],
}
_FULL = {
    "headlines": ["data.sample.rows=6400", "data.sample.eval_rows=500", "data.batch_size=128"],
    "battery": [],
    "people": ["data.sample.rows=4000"],
}
EXPERIMENTS: dict[str, tuple[str, list[str]]] = {
    "headlines_bilstm": ("headlines", ["model.dropout=0", "trainer.max_epochs=2"]),
    "headlines_cnn": ("headlines", ["model.dropout=0", "trainer.max_epochs=2"]),
    "bert_tiny": ("headlines", [*_NO_DROPOUT, "trainer.max_epochs=2"]),
    "battery_soc": ("battery", ["trainer.max_epochs=10"]),
    "bloom_bigrams": (
        "people",
        ["model.dropout=0", "task.exposure=false", "task.recombine=0", "trainer.max_epochs=4"],
    ),
}
"""The data of each, and what it is asked for; without dropout, whose numbers a GPU draws otherwise
than a CPU."""
_FIRST_STEPS = 20
_PRECISIONS = ("bf16", "fp16")


def experiment(place: Place, name: str, *words: str) -> list[str]:
    """The words of an experiment at the size of this bench."""
    data, settings = EXPERIMENTS[name]
    sizes = _TINY[data] if place.options.tiny else _FULL[data]
    return [f"+experiment={name}", *sizes, *settings, *words]


START_ROWS = ("fork server: its processes find no CUDA context", "python -m train: test accuracy")


def start_claims(place: Place) -> Iterator[Claim]:
    """What every run on a card rests on, and the first command of README."""
    torch.ones(1, device=place.device)  # this process has a context, and must not hand it on
    note = look_from_fork_server(place.device)
    yield bounded(START_ROWS[0], float(bool(note)), "", most=0, note=note)
    words = (
        ["data.sample.rows=301", "data.sample.eval_rows=51", "trainer.max_epochs=1"]
        if place.options.tiny
        else []
    )
    started = time.perf_counter()
    run = place.train("default", *words)
    run.require_success()
    note = f"{time.perf_counter() - started:.1f} s with its start, on {run.device}"
    accuracy = 100 * run.summary["metrics"]["test/accuracy"]
    yield reaching(
        START_ROWS[1], accuracy, "%", least=None if place.options.tiny else 75, note=note
    )


def look_from_fork_server(device: torch.device) -> str:
    """What is wrong with a process of the warm server; empty where nothing is."""
    warm_start()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_look, args=(theirs, str(device)))
    process.start()
    theirs.close()
    try:
        return str(ours.recv()) if ours.poll(60) else "no answer in 60 s"
    except EOFError:
        return "it ended without an answer"
    finally:
        process.kill()
        process.join()


def _look(answer: Connection, device: str) -> None:
    try:
        found = "a CUDA context is there" if torch.cuda.is_initialized() else ""
        total = float(torch.ones(3, device=device).sum())
        answer.send(found or ("" if total == 3 else f"1 + 1 + 1 = {total}"))
    except (AssertionError, RuntimeError) as error:  # torch without CUDA raises the former
        answer.send(f"{type(error).__name__}: {error}")


def curve_rows(*names: str) -> tuple[str, ...]:
    """The rows of these experiments."""
    kinds = ("fp32 against the CPU", *(f"{precision} against fp32" for precision in _PRECISIONS))
    return tuple(f"{name}: losses, {kind}" for name in names for kind in kinds)


def curves_of(*names: str) -> Callable[[Place], Iterator[Claim]]:
    """Measures these experiments."""
    return lambda place: curve_claims(place, names)


def curve_claims(place: Place, names: tuple[str, ...]) -> Iterator[Claim]:
    """Losses in three precisions, and those of the CPU: an experiment's runs at once, then its
    curves side by side.
    """
    wanted = [each for each in _PRECISIONS if place.is_gpu or each != "fp16"]
    rows = iter(curve_rows(*names))
    for name in names:
        runs = {f"{name}_cpu": (experiment(place, name, "precision=fp32"), "cpu")}
        for precision in ("fp32", *wanted):
            runs[f"{name}_{precision}"] = (
                experiment(place, name, f"precision={precision}"),
                place.accelerator,
            )
        found = place.train_all(runs)
        whole, host = found[f"{name}_fp32"], found[f"{name}_cpu"]
        yield first_steps(next(rows), whole, host)
        for precision in _PRECISIONS:
            row = next(rows)
            yield (
                last_steps(row, found[f"{name}_{precision}"], whole)
                if precision in wanted
                else not_here(row, "no fp16 on a CPU")
            )


def first_steps(row: str, ours: Trained, theirs: Trained) -> Claim:
    """The largest difference of the first steps, in parts of the loss; later ones part by rounding
    alone.
    """
    ours.require_success()
    theirs.require_success()
    pairs = list(zip(ours.losses, theirs.losses, strict=True))[:_FIRST_STEPS]
    most = max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)
    note = side_by_side(
        **{f"{run.folder.name}, {run.device}": run.losses for run in (ours, theirs)}
    )
    return bounded(row, most, "", most=0.02, note=note)


def last_steps(row: str, ours: Trained, theirs: Trained) -> Claim:
    """The mean of the last quarter of the steps: a tenth of what was learnt, or 1 % of the loss,
    from that of fp32.
    """
    ours.require_success()
    theirs.require_success()
    ends = [
        sum(run.losses[-(count := max(1, len(run.losses) // 4)) :]) / count
        for run in (ours, theirs)
    ]
    allowed = max(0.1 * abs(theirs.losses[0] - ends[1]), 0.01 * abs(ends[1]))
    note = side_by_side(ours=ours.losses, fp32=theirs.losses)
    return Claim(
        row,
        ends[0],
        ends[1],
        "",
        ends[0] / ends[1],
        "near",
        abs(ends[0] - ends[1]) <= allowed,
        note,
    )


RESUMED = ("headlines_bilstm", "bert_tiny", "battery_soc")
RESUME_ROWS = tuple(f"{name}: killed and resumed, bytes that differ" for name in RESUMED)


def resume_claims(place: Place, names: tuple[str, ...] = RESUMED) -> Iterator[Claim]:
    """The weights of a deterministic run that is killed and resumed are those of one that is left
    alone.
    """
    with ThreadPoolExecutor(len(names)) as pool:
        yield from pool.map(lambda name: resumed(place, name), names)


def resumed(place: Place, name: str) -> Claim:
    more = ["+trainer.deterministic=true", "checkpoint.every_steps=3", "trainer.max_epochs=6"]
    words = experiment(place, name, *more)
    whole = place.train(f"{name}_whole", *words)
    whole.require_success()
    killed = kill_after_save(place, f"{name}_killed", words)
    again = place.train(f"{name}_killed", *words, f"resume={place.folder / f'{name}_killed'}")
    again.require_success()
    differing = sum(
        a != b for a, b in zip(_weights(whole.folder), _weights(again.folder), strict=True)
    )
    training = again.summary["training"]
    note = f"killed after step {training['resumed_from'] or 0} of {training['steps']}"
    is_fine = differing == 0 and killed and training["resumed_from"] is not None
    row = f"{name}: killed and resumed, bytes that differ"
    return Claim(
        row,
        differing,
        None,
        "",
        None,
        "≤ 0",
        is_fine,
        note if killed else "it ended before it was killed",
    )


def kill_after_save(place: Place, name: str, words: list[str]) -> bool:
    """Start a run and kill it as soon as a checkpoint is there; False: it ended before."""
    process = place.begin(place.words(name, *words))
    until = time.monotonic() + 120
    last = place.folder / name / "checkpoints" / "last"
    while not last.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    is_running = process.poll() is None
    if is_running:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    return is_running


def _weights(folder: Path) -> bytes:
    return next((folder / "model").glob("*.safetensors")).read_bytes()


MEMORY_ROWS = (
    "out of memory: times that a batch did not fit",
    "out of memory: largest difference of a loss",
)
_LITTLE_BYTES = 768 * 2**20


@contextmanager
def little_memory(device: torch.device) -> Iterator[dict[str, Any]]:
    """So much of a GPU's memory that a batch does not fit; what a run there needs besides."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, _LITTLE_BYTES / total), device)
    try:
        yield {}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def memory_claims(
    place: Place,
    little: Callable[[torch.device], AbstractContextManager[dict[str, Any]]] = little_memory,
) -> Iterator[Claim]:
    """A batch that does not fit is trained in pieces, and the losses are those of whole batches."""
    rows = place.options.choose(16_384, 16_384, 64)
    width = place.options.choose(256, 256, 16)
    exact: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}

    def train(name: str, callbacks: dict[str, Any]) -> Any:
        sample = HeadlinesConfig(rows=rows, eval_rows=64, classes=4)
        with quiet():
            return fit(
                TextDataConfig(sample=sample, batch_size=rows // 4, max_length=32),
                TransformerConfig(hidden=width, layers=4, heads=4, **exact),
                optim=OptimConfig(lr=1e-3),
                precision="fp32",
                epochs=2,
                folder=place.folder / name,
                callbacks=callbacks,
                logger="none",
                monitor=MonitorConfig(flush_every=1, progress=False, verdict=False, rival=False),
                trainer={"accelerator": place.accelerator},
            )

    whole = train("roomy", {})
    with little(place.device) as callbacks:
        found = train("little", callbacks)
    times = found.summary["training"]["out_of_memory"] or 0
    choice = next(
        (each for each in found.summary["choices"] if each["name"] == "micro-batch"), None
    )
    yield reaching(
        MEMORY_ROWS[0], times, "", least=1, note=f"trained in pieces: {choice and choice['value']}"
    )
    ours, theirs = (losses_of(each.folder) for each in (found, whole))
    most = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(ours, theirs, strict=True))
    yield bounded(MEMORY_ROWS[1], most, "", most=0.01, note=side_by_side(pieces=ours, whole=theirs))


COMMAND_ROWS = (
    "tune=auto: seconds",
    "a multirun of two: runs that finished",
    "compile=true: largest difference of a loss",
    "monitor=profile: kernels in the trace",
)


def command_claims(place: Place) -> Iterator[Claim]:
    """Commands that choose, repeat, compile and look."""
    yield tuned(place)
    yield repeated(place)
    yield compiled(place)
    yield profiled(place)


def tuned(place: Place) -> Claim:
    started = time.perf_counter()
    run = place.train("tuned", *experiment(place, "bert_tiny", "tune=auto"))
    run.require_success()
    values = (run.summary["tune"] or {}).get("values")
    note = f"with the run itself; chosen: {values}"
    return bounded(COMMAND_ROWS[0], time.perf_counter() - started, "s", most=120, note=note)


def repeated(place: Place) -> Claim:
    words = place.words("unused", *experiment(place, "headlines_cnn", "seed=1,2"))
    words = [word for word in words if not word.startswith("hydra.run.dir=")]
    process = place.begin(
        [words[0], "-m", *words[1:], f"hydra.sweep.dir={place.folder / 'repeated'}"]
    )
    said, _ = process.communicate(timeout=600)
    folders = [place.folder / "repeated" / str(number) for number in range(2)]
    found = [summary_of(folder) for folder in folders]
    count = sum(summary.get("status") == "finished" for summary in found)
    note = "; ".join(
        f"{summary['hardware']['device']}" for summary in found if summary.get("hardware")
    )
    is_fine = count == 2 and process.returncode == 0
    note = note if is_fine else " | ".join(said.strip().splitlines()[-3:])
    return Claim(COMMAND_ROWS[1], count, None, "", None, "≥ 2", is_fine, note)


def compiled(place: Place) -> Claim:
    words = experiment(place, "bert_tiny", "precision=fp32")
    found = place.train_all(
        {
            "compiled": ([*words, "compile=true"], place.accelerator),
            "not_compiled": ([*words, "compile=false"], place.accelerator),
        }
    )
    return first_steps(COMMAND_ROWS[2], found["compiled"], found["not_compiled"])


def profiled(place: Place) -> Claim:
    run = place.train(
        "profiled", *experiment(place, "headlines_cnn", "monitor=profile", "monitor.profile.wait=2")
    )
    run.require_success()
    with gzip.open(run.folder / "trace.json.gz", "rt", encoding="utf-8") as file:
        kind = '"cat": "kernel"' if place.is_gpu else '"cat": "cpu_op"'
        count = sum(line.count(kind) for line in file)
    slowest = (run.folder / "operators.csv").read_text(encoding="utf-8").splitlines()[1:3]
    return reaching(COMMAND_ROWS[3], count, "", least=1, note=f"slowest: {'; '.join(slowest)}")
