"""Which lines of the package run when you train: `python -m tests.docs.lines_run`.

A small run is traced line by line. A line belongs to the first of these that it runs in: a step
amid the training, the store and the batches, or the rest of the run. Lines that run when a module
is imported count nowhere. It prints the rows of the tables of `docs/reading_order.md`.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L

import flatout
from flatout import BiLSTMConfig, HeadlinesConfig, TextDataConfig, fit

PACKAGE = Path(flatout.__file__).parent
FIRST_STEP = 10  # by then each part of a step has run once
Line = tuple[str, int]


class TracedLines:
    """The lines of the package that run, by the phase that is named."""

    def __init__(self) -> None:
        self.phase = "run"
        self.lines: dict[str, set[Line]] = {"step": set(), "run": set()}

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        is_ours = name.startswith(str(PACKAGE)) and name.endswith(".py")
        if frame.f_code.co_name == "<module>" or not is_ours:
            return None
        self.lines[self.phase].add((name, frame.f_lineno))
        return self.trace


class MarkSteps(L.Callback):
    """Names the phase: a step in the middle of the training, or all else."""

    def __init__(self, traced: TracedLines) -> None:
        self.traced = traced

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step >= FIRST_STEP:
            self.traced.phase = "step"

    def on_train_batch_end(self, *_: object) -> None:
        self.traced.phase = "run"


def count_lines() -> dict[str, Counter[str]]:
    """For `step`, `store` and `run`: how many lines of each file run in a small training."""
    traced = TracedLines()
    sample = HeadlinesConfig(rows=2000, eval_rows=200)
    with tempfile.TemporaryDirectory() as folder:
        # the store is new each time: it is made, and not only opened
        data = TextDataConfig(sample=sample, batch_size=32, cache=f"{folder}/cache")
        callbacks = {"mark": MarkSteps(traced)}
        sys.settrace(traced.trace)
        threading.settrace(traced.trace)
        try:
            fit(data, BiLSTMConfig(), epochs=1, output=folder, callbacks=callbacks, threads=1)
        finally:
            sys.settrace(None)
            threading.settrace(None)
    of_step = traced.lines["step"]
    found = {"step": Counter(), "store": Counter(), "run": Counter()}
    for name, number in of_step | traced.lines["run"]:
        path = Path(name).relative_to(PACKAGE).as_posix()
        phase = "store" if path.startswith("data/") else "run"
        found["step" if (name, number) in of_step else phase][path] += 1
    return found


def main() -> None:
    for phase, counts in count_lines().items():
        print(f"\n{phase}: {sum(counts.values()):,} lines of {len(counts)} files")
        for path, count in counts.most_common():
            print(f"| `{path}` | {count} |")


if __name__ == "__main__":
    main()
