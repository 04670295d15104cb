"""The verdict in anybody's Trainer: what limited the run, and what races on copies say of each fix.

`Trainer(callbacks=[Verdict()])` is all there is to it. While training it reads clocks. At the end
of `fit` copies of module and loader train in each way, in turn, over the same batches. Weights,
random numbers and loader stay the same.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L

from flatout.callbacks.clock import FIRST_STEPS
from flatout.callbacks.curve_source import CurveSource
from flatout.callbacks.hardware_monitor import HardwareMonitor
from flatout.callbacks.run_curves import EARLY, RunCurves
from flatout.callbacks.step_timer import StepTimer
from flatout.callbacks.throughput import FetchTimes, Throughput
from flatout.engine.lightning_internals import callbacks_of, set_callbacks
from flatout.engine.precision import LIGHTNING_NAMES, Precision
from flatout.errors import require
from flatout.files import write_atomically
from flatout.perf.verdict.evidence import LEAST_STEPS, Evidence
from flatout.perf.verdict.gathering import evidence_of_own
from flatout.perf.verdict.own_tries import try_own
from flatout.perf.verdict.rules import findings, verdict
from flatout.run_log import RunLog

# a look takes some 2 ms of the processor: each second it would be the most that the verdict costs
_LOOK_S = 2.0
_IN_PYTHON: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"~callbacks\.(TQDM|Rich)ProgressBar\b": "Trainer(enable_progress_bar=False)",
    r"~callbacks\.(\w+(?: \d+)?)": r"leaving \1 out of Trainer(callbacks=…)",
    r"\++trainer\.(\w+)=(\S+) \++trainer\.(\w+)=(\S+)": r"Trainer(\1=\2, \3=\4)",
    r"\++trainer\.(\w+)=(\S+)": r"Trainer(\1=\2)",
    r"(?<!\S)threads=(\d+)": r"torch.set_num_threads(\1)",
    r"(?<!\S)precision=(\w+)": lambda found: (
        f'Trainer(precision="{LIGHTNING_NAMES[Precision(found[1])]}")'
    ),
    r"(?<!\S)compile=false": "leaving out torch.compile",
    r"checkpoint\.every_steps=null checkpoint\.\S+": (
        "ModelCheckpoint(every_n_epochs=1), or ExactCheckpoint()"
    ),
}  # words of the command line, and what a script says instead


class Verdict(RunCurves):
    """Says what limited the training of any module, and what each fix would be worth."""

    def __init__(self, *, seconds: float = 20.0, log: RunLog | None = None) -> None:
        """`seconds`: most that the races at the end of `fit` take; they never take more than a
        tenth of the run.
        """
        require(seconds >= 0, "seconds", f"{seconds:g}", allowed="0 or more")
        super().__init__([])
        self.seconds = seconds
        self._log = log or RunLog()
        self.verdict: dict[str, Any] | None = None
        """In the words of `summary.json`; None before the end of a training that was long
        enough."""
        self.evidence: Evidence | None = None
        self.why_none = "no training has ended yet"
        self.is_judging, self._is_early = False, True
        self._fetches = FetchTimes()
        self._began = 0.0

    def save(self, path: str | Path) -> None:
        """Write the verdict and what it rests on as JSON; without a verdict, why there is none."""
        kept = None if self.evidence is None else asdict(self.evidence)
        found = {
            "verdict": self.verdict,
            "evidence": kept,
            "why_none": None if self.verdict else self.why_none,
        }
        write_atomically(Path(path), json.dumps(found, indent=1, ensure_ascii=False))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        others = [each for each in callbacks_of(trainer) if each is not self]
        self.is_judging = False
        self.verdict = None
        self.evidence = None
        if trainer.barebones:
            self._leave("the Trainer is barebones, and runs without clocks")
        elif any(isinstance(each, Verdict) and each.is_judging for each in others):
            self._leave("another one judges this training")
        else:
            # A step timer or a monitor that is here already counts for both.
            timer = next((each for each in others if type(each) is StepTimer), StepTimer())
            monitor = next((each for each in others if type(each) is HardwareMonitor), None)
            super().__init__(
                [],
                timer=timer,
                monitor=monitor or HardwareMonitor(every_s=_LOOK_S, say=self._log.say),
            )
            self.parts = tuple(
                each for each in (self.throughput, self.timer, self.monitor) if each not in others
            )
            self.is_judging = True
            self._is_early = True
            self._fetches = FetchTimes()
            super().setup(trainer, pl_module, stage)

    def _leave(self, why: str) -> None:
        self.why_none = why
        self.parts = ()
        self._log.say(f"verdict: none, {why}")

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.perf_counter()
        self._counts = dict(self.clock.counts)
        if self.timer not in self.parts and trainer.global_step >= FIRST_STEPS:
            # it may have counted trainings before, or this one before a resume
            self.timer.times.mark_first()
        super().begin(trainer, pl_module)
        if self.is_judging:
            self._fetches.on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._fetches.on_train_epoch_start(trainer, pl_module)

    def flush(self, trainer: L.Trainer) -> None:
        self._steps_since = 0
        self._batches_since = 0
        self.settle()
        if self.is_judging and self._is_early and self.throughput.volume.total.steps >= EARLY:
            self._is_early = False
            if trainer.is_global_zero and (evidence := self._evidence(trainer)) is not None:
                self._log.say(f"verdict: after {evidence.steps} steps, {split_line(evidence)}")
                if plain := [each for each in findings(evidence) if each.is_plain]:
                    self._log.say(f"verdict: {plain[0].in_words(in_python).sentence()}")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # what the module logs there is its own
        CurveSource.on_validation_end(self, trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._fetches.on_train_end(trainer, pl_module)
        self._trained_s = time.perf_counter() - self._began

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._fetches.on_exception(trainer, pl_module, exception)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Judge now: the last checkpoint is written, and the loader's workers have ended."""
        if not (self.is_judging and trainer.is_global_zero):
            return
        if (evidence := self._evidence(trainer)) is None:
            needed = f"{LEAST_STEPS} steps after the first {FIRST_STEPS}"
            had = self.throughput.volume.total.steps
            self._leave(f"a verdict needs {needed}, this training had {had}")
            return
        try_own(
            trainer,
            self._fetches.loader,
            evidence,
            seconds=self.seconds,
            trained_s=self._trained_s,
        )
        self.evidence = evidence
        self.verdict = verdict(evidence, in_python)
        for line in (
            *evidence.notes,
            f"{evidence.steps:,} steps, {split_line(evidence)}",
            self.verdict["sentence"],
        ):
            self._log.say(f"verdict: {line}")

    @property
    def state_key(self) -> str:
        """Of this one: Lightning refuses two of the same, and this one says by itself that it steps
        aside.
        """
        return f"{type(self).__qualname__} {id(self)}"  # asked for with every hook

    def state_dict(self) -> dict[str, Any]:
        """Nothing of it is in a checkpoint."""
        return {}

    def _evidence(self, trainer: L.Trainer) -> Evidence | None:
        self.timer.close()
        if (found := evidence_of_own(self, trainer, self._fetches.ms)) is not None:
            found.counts = {
                name: number - self._counts[name] for name, number in found.counts.items()
            }
        return found


def split_line(evidence: Evidence) -> str:
    """The time of a batch, and the shares of its parts."""
    parts = ", ".join(
        f"{each} {evidence.share(each):.0%}"
        for each in evidence.ms
        if evidence.share(each) >= 0.005
    )
    return f"{evidence.total_ms:.1f} ms a batch: {parts}"


def in_python(words: str) -> str:
    for pattern, said in _IN_PYTHON.items():
        words = re.sub(pattern, said, words)
    return words


def attach(trainer: L.Trainer) -> Verdict:
    """Add a verdict and the callbacks that it reads to an existing Trainer; return the verdict.

    Callbacks of a class that the Trainer has already are not added.
    """
    require(
        isinstance(trainer, L.Trainer), "attach", f"takes a Trainer, not {type(trainer).__name__}"
    )
    callbacks = callbacks_of(trainer)
    classes = {type(callback) for callback in callbacks}
    ours = (StepTimer(), Throughput(), HardwareMonitor(), Verdict())
    callbacks = [callback for callback in ours if type(callback) not in classes] + callbacks
    set_callbacks(trainer, callbacks)
    return next(callback for callback in callbacks if isinstance(callback, Verdict))
