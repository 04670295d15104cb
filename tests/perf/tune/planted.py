"""Parts of a run that die, hang, err, or just work: built in a throw-away process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch

from flatout import BiLSTMConfig, HeadlinesConfig, RunConfig, TextDataConfig, UserError
from flatout.distributed.ranks import Ranks
from flatout.perf.tune.probe import Parts
from flatout.run.parts import build_parts

SMALL = HeadlinesConfig(rows=400, eval_rows=40, classes=3)


def config(**settings) -> RunConfig:
    data = TextDataConfig(sample=SMALL, **({"batch_size": 32} | settings.pop("data", {})))
    return RunConfig(data=data, model=BiLSTMConfig(embedding=8, hidden=8), **settings)


def small_parts() -> Parts:
    """A BiLSTM on four hundred headlines."""
    return build_parts(config(), Ranks(), torch.device("cpu"))


def mistaken() -> Parts:
    raise UserError("data", "is not there")


def broken() -> Parts:
    raise RuntimeError("a defect\nof many lines")


def too_large() -> Parts:
    raise MemoryError


def killed() -> Parts:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hanging(note: str) -> Parts:
    """Says who it is, and never comes to an end."""
    Path(note).write_text(str(os.getpid()), encoding="utf-8")
    while True:
        time.sleep(1)


def hanging_with_semaphore(note: str) -> Parts:
    """Writes the name of a semaphore, as a compiler's pool of processes makes them, and never comes
    to an end.
    """
    kept = multiprocessing.get_context("spawn").Semaphore()
    Path(note).write_text(kept._semlock.name, encoding="utf-8")
    while True:
        time.sleep(1)


def alive(number: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return (
            Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            != "Z"
        )
    except OSError:
        return False


def within(seconds: float, condition) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
