"""Small runs in processes of their own, cut short and taken up again, and what tells that nothing
was lost.

A run here is a few dozen steps on some hundred made-up rows and takes half a second; a process is
forked from a warm server. Each computes on one thread, so that as many run at once as there are
cores, and the same numbers come out.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO, TypeVar

import lightning as L
import psutil
import torch
from safetensors.torch import load_file

from flatout.bits.settings import BitsDataConfig
from flatout.bits.task import GramsConfig
from flatout.checkpoints.folder import TENSORS
from flatout.checkpoints.kept import CHECKPOINTS, newest_first
from flatout.checkpoints.settings import CheckpointConfig
from flatout.config import MonitorConfig
from flatout.data.feeding import FeedKind
from flatout.data.texts.settings import TextDataConfig
from flatout.distributed.processes import end_with_parent, redirect_output, warm_start
from flatout.distributed.ranks import cores_here
from flatout.engine.optimizer import OptimConfig
from flatout.errors import EXIT_CODE, RunBroke, UserError
from flatout.models.bilstm import BiLSTMConfig
from flatout.models.bit_mlp import BitMLPConfig
from flatout.models.encoder.transformer import TransformerConfig
from flatout.run.launch import fit
from tests.run_files import read_csv

FAMILIES = ("bilstm", "encoder", "bits")
_WORDS = "ash birch cedar elm fir hazel larch maple oak pine rowan willow yew".split()
_CASE = "case"
Case = TypeVar("Case")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Spec:
    """One small run."""

    family: str = "bilstm"
    workers: int = 0
    accumulate: int = 1
    precision: str = "fp32"
    batch_size: int = 12
    dropout: float = 0.2
    trainer: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=lambda: {"every_steps": 3})
    monitor: dict[str, Any] = field(default_factory=lambda: {"flush_every": 4, "progress": False})
    data: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    logger: str = "none"
    """TensorBoard's pictures take a quarter of so small a run."""
    plants: tuple[tuple[type[L.Callback], dict[str, Any]], ...] = ()

    def planted(self, kind: type[L.Callback], **settings: Any) -> Spec:
        return replace(self, plants=(*self.plants, (kind, settings)))


def write_rows(path: Path, rows: int = 130) -> None:
    """A table of made-up texts of unequal length and their labels, the same for everybody."""
    numbers = random.Random(7)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for row in range(rows):
            label = numbers.randrange(3)
            words = [numbers.choice(_WORDS[label * 2 :]) for _ in range(numbers.randrange(1, 9))]
            writer.writerow([f"{' '.join(words)} {row}", "abc"[label]])


def train(spec: Spec, folder: Path, *, resume: str | None = "auto") -> Any:
    """The run of a spec below a folder, in this process."""
    is_bits = spec.family == "bits"
    feeding: dict[str, Any] = {
        "batch_size": spec.batch_size,
        "accumulate": spec.accumulate,
        **spec.data,
    }
    task = None
    if spec.workers:
        feeding |= {"feed": FeedKind.workers, "workers": spec.workers}
    if is_bits:
        data: Any = BitsDataConfig(**feeding)
        data.sample.rows = 160
        model: Any = BitMLPConfig(widths=[24], dropout=spec.dropout)
        # Ranks put together other people: without chance there are none.
        task = GramsConfig(recombine=1.0 if spec.dropout else 0.0)
    else:
        rows = folder.parent / "rows.csv"
        if not rows.exists():
            write_rows(rows)
        data = TextDataConfig(train=str(rows), text="text", label="label", max_length=16, **feeding)
        model = _MODELS[spec.family](spec.dropout)
    return fit(
        data,
        model,
        task=task,
        output=str(folder),
        name=_CASE,
        logger=spec.logger,
        resume=resume,
        precision=spec.precision,
        trainer={"max_epochs": 3, "accelerator": "cpu", **spec.trainer},
        optim=OptimConfig(**spec.optim),
        checkpoint=CheckpointConfig(**{"patience": None, **spec.checkpoint}),
        monitor=MonitorConfig(**spec.monitor),
        callbacks={
            f"plant_{number}": kind(**settings)
            for number, (kind, settings) in enumerate(spec.plants)
        },
        **spec.settings,
    )


_MODELS: dict[str, Callable[[float], Any]] = {
    "bilstm": lambda dropout: BiLSTMConfig(embedding=8, hidden=8, dropout=dropout),
    "encoder": lambda dropout: TransformerConfig(
        hidden=16, layers=2, heads=2, intermediate=32, dropout=dropout, attention_dropout=dropout
    ),
}
_CODES = threading.Lock()
"""Held by the one thread that may read exit codes: each can be read once, and every start reads all
there are."""
_GONE_S = 30.0
"""By when nothing may be left of a run that has ended."""


def attempt(
    spec: Spec, folder: Path, *, kill_after_s: float | None = None, number: int = signal.SIGKILL
) -> int:
    """The exit code of one process that trains; killed after some seconds where it has not ended by
    then.

    Several ranks are started from this process: the warm server is here.
    """
    warm_start()
    context = multiprocessing.get_context("forkserver")
    folder.parent.mkdir(parents=True, exist_ok=True)
    output = folder.parent / f"{folder.name}.txt"
    if spec.trainer.get("devices", 1) > 1:
        assert kill_after_s is None
        return _attempt_ranks(spec, folder, output)
    process = context.Process(target=_child, args=(spec, folder, str(output), dict(os.environ)))
    start(process)
    pid = process.pid
    assert pid is not None
    code = exit_code(process, kill_after_s or 120)
    if code is None and kill_after_s is not None:
        os.kill(pid, number)
        code = exit_code(process, 120)
    if code is None:
        os.kill(pid, signal.SIGKILL)
        raise RuntimeError(f"{folder}: the process did not end")
    _require_gone(folder, lambda: [each for each in psutil.pids() if _session_of(each) == pid])
    return code


def start(process: BaseProcess) -> None:
    with _CODES:
        process.start()


def exit_code(process: BaseProcess, within_s: float) -> int | None:
    """How a process ended; None where it has not by then."""
    multiprocessing.connection.wait([process.sentinel], within_s)
    with _CODES:
        return process.exitcode


def _attempt_ranks(spec: Spec, folder: Path, output: Path) -> int:
    os.environ["FLATOUT_OUTPUT"] = str(output)
    try:
        with output.open("a", encoding="utf-8") as file, redirect_stdout(file):
            code = code_of(lambda: train(spec, folder), file)
    finally:
        del os.environ["FLATOUT_OUTPUT"]
    _require_gone(folder, lambda: [each for each in psutil.pids() if _prints_to(each, output)])
    return code


def code_of(work: Callable[[], object], errors: TextIO) -> int:
    """The exit code that a command would have, its last words told; what it does not expect ends
    the process.
    """
    try:
        work()
    except UserError as mistake:
        print(mistake, file=errors)
        return EXIT_CODE
    except RunBroke as broken:
        print(broken, file=errors)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as end:
        return int(str(end.code))
    return 0


def _require_gone(folder: Path, left_over: Callable[[], list[int]]) -> None:
    """Wait until no process of a run is left; one that stays is an error."""
    until = time.monotonic() + _GONE_S
    while left := left_over():
        if time.monotonic() > until:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise RuntimeError(f"{folder}: {len(left)} processes are left after {_GONE_S:.0f} s")
        time.sleep(0.02)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _prints_to(pid: int, output: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/fd/1").resolve() == output.resolve()
    except OSError:
        return False


def _child(spec: Spec, folder: Path, output: str, environment: dict[str, str]) -> None:
    os.setsid()  # whatever it starts is known by its session
    # also where a shell in the background ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    os.environ |= {**environment, "FLATOUT_OUTPUT": output}
    end_with_parent()
    redirect_output()
    torch.set_num_threads(1)
    sys.exit(code_of(lambda: train(spec, folder), sys.stderr))


def finished(spec: Spec, folder: Path) -> Path:
    """The folder of a run that goes to its end."""
    if code := attempt(spec, folder):
        raise RuntimeError(f"{folder} ended with {code}:\n{said(folder)}")
    return run_folder(folder)


def run_folder(folder: Path) -> Path:
    """The newest run below a folder."""
    return max((folder / _CASE).iterdir(), key=lambda path: path.name)


def said(folder: Path) -> str:
    path = folder.parent / f"{folder.name}.txt"
    return path.read_text(encoding="utf-8", errors="replace")[-3000:] if path.exists() else ""


def saved_step(run: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    names = [path.name for path in newest_first(run / CHECKPOINTS)]
    return int(names[0].removeprefix("step-")) if names else 0


def differences(run: Path, reference: Path) -> list[str]:
    """What tells two finished runs apart, bit by bit: weights, optimizer, random numbers, metrics,
    the model left.
    """
    found = []
    for name in ("checkpoints/last", "checkpoints/best", "model"):
        file = "model.safetensors" if name == "model" else TENSORS
        ours, theirs = (load_file(place / name / file) for place in (run, reference))
        if ours.keys() != theirs.keys():
            found.append(f"{name}: other tensors")
        found += [
            f"{name}: {key}"
            for key in ours.keys() & theirs.keys()
            if not same_bits(ours[key], theirs[key])
        ]
    if (ours_rows := _metrics(run)) != (theirs_rows := _metrics(reference)):
        found.append(f"metrics.csv: {len(ours_rows)} rows against {len(theirs_rows)}")
    summaries = [
        json.loads((place / "summary.json").read_text(encoding="utf-8"))
        for place in (run, reference)
    ]
    if summaries[0]["metrics"] != summaries[1]["metrics"]:
        found.append("summary.json: other metrics")
    return found


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors are alike to the last bit, what is not a number too."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return bool(
        torch.equal(
            ours.contiguous().view(-1).view(torch.uint8),
            theirs.contiguous().view(-1).view(torch.uint8),
        )
    )


def _metrics(run: Path) -> list[dict[str, str]]:
    """Rows of metrics.csv without what the clock says."""
    rows = read_csv(run / "metrics.csv")
    timed = ("time/", "speed/rows_per_s", "speed/tokens_per_s", "speed/mfu", "host/", "gpu/")
    for row in rows:
        for name in list(row):
            if name.startswith(timed):
                del row[name]
    return rows


def seconds_of(make: Callable[[], object]) -> float:
    began = time.perf_counter()
    make()
    return time.perf_counter() - began


def side_by_side(work: Callable[[Case], Answer], cases: Iterable[Case]) -> list[Answer]:
    """The answers of all cases, as many at once as there are cores."""
    every = list(cases)
    if len(every) == 1:  # in this thread: the start of ranks handles signals
        return [work(every[0])]
    with ThreadPoolExecutor(max(1, len(cores_here()))) as pool:
        return list(pool.map(work, every))


def other_weights(run: Path, reference: Path) -> list[str]:
    """What tells the weights and the optimizer of two runs apart, bit by bit, at their
    last step.
    """
    ours, theirs = (_trained(place) for place in (run, reference))
    if ours.keys() != theirs.keys():
        return ["other tensors"]
    return [key for key in ours if not same_bits(ours[key], theirs[key])]


def largest_difference(run: Path, reference: Path) -> float:
    """Of any weight of two runs at their last step."""
    ours, theirs = (_trained(place) for place in (run, reference))
    weights = [key for key in theirs if key.startswith("/state_dict/")]
    return max(float((ours[key].double() - theirs[key].double()).abs().max()) for key in weights)


def losses_of(run: Path) -> dict[int, float]:
    """The training loss of each flush."""
    return {
        int(row["step"]): float(row["train/loss"]) for row in _metrics(run) if row["train/loss"]
    }


def _trained(run: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(run / CHECKPOINTS / "last" / TENSORS)
    return {
        name: value
        for name, value in tensors.items()
        if name.startswith(("/state_dict/", "/optimizer_states/"))
    }


def tally(problems: Sequence[list[str]]) -> tuple[int, int, str]:
    """How many cases had no problem, of how many, and the first problem there was."""
    good = sum(not each for each in problems)
    first = next((each[0] for each in problems if each), "")
    return good, len(problems), first
