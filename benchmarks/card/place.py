"""Where rows of `bench gpu` are measured: a device, a folder, and commands that train there."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.claim import Options

ROOT = Path(__file__).parents[2]
_COMMAND_S = 600
RUNS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Trained:
    """What a command that trained has left."""

    folder: Path
    code: int
    said: str
    """All that it printed."""
    losses: list[float]
    """Of each step that was written down."""
    summary: dict[str, Any]

    @property
    def device(self) -> str:
        return str(self.summary["hardware"]["device"])

    def require_success(self) -> None:
        if self.code or self.summary.get("status") != "finished":
            lines = self.said.strip().splitlines()[-3:]
            raise RuntimeError(f"{self.folder.name} ended with {self.code}: {' | '.join(lines)}")


def begin(words: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    """`python -m` these words, at the head of a group of processes; what it says can be read as one
    text.
    """
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        cwd=ROOT,
        start_new_session=True,
    )


@dataclass(frozen=True, slots=True)
class Place:
    """A device, and where to write."""

    device: torch.device
    folder: Path
    options: Options
    begin: Callable[..., Any] = begin
    """Starts `python -m` some words."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def accelerator(self) -> str:
        """Lightning's name of the device."""
        return "gpu" if self.is_gpu else "cpu"

    def words(self, name: str, *words: str, accelerator: str | None = None) -> list[str]:
        """The command of a run whose folder has this name."""
        return [
            "train",
            *words,
            f"trainer.accelerator={accelerator or self.accelerator}",
            f"hydra.run.dir={self.folder / name}",
            f"output={self.folder}",
            "logger=none",
            "monitor.progress=false",
            "monitor.flush_every=1",
        ]

    def train(self, name: str, *words: str, accelerator: str | None = None) -> Trained:
        """Run it to its end."""
        return self.outcome(name, self.begin(self.words(name, *words, accelerator=accelerator)))

    def outcome(self, name: str, process: Any) -> Trained:
        """Wait for a command, and read what it left in the folder of this name."""
        try:
            said, _ = process.communicate(timeout=_COMMAND_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        folder = self.folder / name
        return Trained(folder, process.returncode, said, losses_of(folder), summary_of(folder))

    def train_all(self, runs: dict[str, tuple[list[str], str]]) -> dict[str, Trained]:
        """Some runs at the same time: the words of each, and its accelerator."""
        with ThreadPoolExecutor(1 if self.options.tiny else RUNS_AT_ONCE) as pool:
            began = {
                name: pool.submit(self.train, name, *words, accelerator=accelerator)
                for name, (words, accelerator) in runs.items()
            }
            return {name: run.result() for name, run in began.items()}


def summary_of(folder: Path) -> dict[str, Any]:
    """A run's summary; empty where it wrote none."""
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def losses_of(folder: Path) -> list[float]:
    """The training losses that a run wrote down."""
    path = folder / "metrics.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def side_by_side(**curves: Sequence[float]) -> str:
    """Five places of some curves, for a note."""
    shortest = min(map(len, curves.values()))
    places = sorted({round(part * (shortest - 1) / 4) for part in range(5)})
    parts = [
        f"{name} " + " ".join(f"{curve[place]:.4f}" for place in places)
        for name, curve in curves.items()
    ]
    steps = " ".join(str(place + 1) for place in places)
    return f"steps {steps}: {'; '.join(parts)}"
