"""`Verdict`: a callback for any `L.Trainer` that says what limited the training.

`Trainer(callbacks=[Verdict()])` is enough. During training it reads clocks. At the end of `fit` it
measures what each fix is worth. For that, copies of the module and the loader are trained in other
ways, in turn and over the same batches. The module, random numbers and the loader do not change.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import lightning as L
from torch.utils.data import DataLoader

from flatout.callbacks.clock import FIRST_STEPS
from flatout.callbacks.curve_source import CurveSource
from flatout.callbacks.hardware_monitor import HardwareMonitor
from flatout.callbacks.run_curves import EARLY, RunCurves
from flatout.callbacks.step_timer import StepTimer
from flatout.callbacks.throughput import FetchTimes, Throughput
from flatout.distributed.both_lightnings import either
from flatout.distributed.collectives import are_several, of_all_ranks
from flatout.engine.lightning_internals import callbacks_of, set_callbacks
from flatout.engine.precision import LIGHTNING_NAMES, Precision
from flatout.errors import require
from flatout.perf.measure.own_clock import OwnClock
from flatout.perf.verdict.evidence import LEAST_STEPS, Evidence, split_line
from flatout.perf.verdict.gathering import evidence_of_own
from flatout.perf.verdict.kept import (
    JudgingCallback,
    KeptVerdict,
    Pace,
    describe_machine,
    describe_missed,
)
from flatout.perf.verdict.own_tries import try_own
from flatout.perf.verdict.rules import plain_finding, verdict
from flatout.run_log import RunLog

if TYPE_CHECKING:
    from transformers import Trainer as HFTrainer

    from flatout.perf.verdict.transformers_trainer import HFVerdict

# Seconds between samples of the hardware. A sample takes 2 ms of a core, more than all the rest.
_SAMPLE_S = 2.0
# Patterns of overrides, and what a script writes instead.
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
}


class Verdict(JudgingCallback, RunCurves):
    """Says what limited the training of any module, and what each fix would be worth."""

    def __init__(self, *, seconds: float = 20.0, log: RunLog | None = None) -> None:
        """`seconds`: the longest that the races at the end of `fit` may take.

        They take a tenth of the run; of one shorter than half a minute 3 s, and 30 % at most.
        """
        require(seconds >= 0, "seconds", f"{seconds:g}", allowed="0 or more")
        super().__init__([])
        self.seconds = seconds
        self._log = log or RunLog()
        self.gathers_ranks = True
        """Whether each rank has a verdict like this one, and hands its times to the first."""
        self._pace = Pace()
        self.is_judging = False
        self._is_early = True
        self._fetches = FetchTimes()
        self._began = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        others = [callback for callback in callbacks_of(trainer) if callback is not self]
        self.is_judging = False
        self.verdict = None
        self.evidence = None
        self.kept = None
        self._pace = Pace()
        if trainer.barebones:
            self._leave("the Trainer is barebones, and runs without clocks")
        elif any(isinstance(other, Verdict) and other.is_judging for other in others):
            self._leave("another one judges this training")
        else:
            # A step timer or a monitor of the Trainer is read, instead of a second one.
            timer = next((other for other in others if type(other) is StepTimer), StepTimer())
            monitor = HardwareMonitor(every_s=_SAMPLE_S, say=self._log.say)
            monitor = next((other for other in others if type(other) is HardwareMonitor), monitor)
            super().__init__([], timer=timer, monitor=monitor)
            own_parts = (self.throughput, self.timer, self.monitor)
            self.parts = tuple(part for part in own_parts if part not in others)
            self.is_judging = True
            self._is_early = True
            self._fetches = FetchTimes()
            super().setup(trainer, pl_module, stage)

    def _leave(self, why: str) -> None:
        """Do without a verdict, and say why."""
        self.why_none = why
        self.kept = KeptVerdict(why_none=why)
        self.parts = ()
        self._log.say(f"verdict: none, {why}")

    def note_missed(self, steps: int) -> None:
        """Say that a Trainer has taken so many steps before this verdict was attached."""
        self._leave(describe_missed(steps))

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.perf_counter()
        self._own_clock = OwnClock()  # of the thread that trains
        self._counts = dict(self.clock.counts)
        if self.timer not in self.parts and trainer.global_step >= FIRST_STEPS:
            # The timer may have counted earlier trainings, or this one before a resume.
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
            evidence = self._evidence(trainer) if trainer.is_global_zero else None
            if evidence is not None:
                self._log.say(f"verdict: after {evidence.steps} steps, {split_line(evidence.ms)}")
                finding = plain_finding(evidence)
                if finding is not None:
                    self._log.say(f"verdict: {finding.in_words(in_python).sentence()}")

    def end_step(self, step: int) -> None:
        super().end_step(step)
        if step >= FIRST_STEPS and self.is_judging:
            waited_s = self._own_clock.waited_s()
            self._pace.note_step(time.perf_counter(), self.clock.outside_s, waited_s)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Without `RunCurves`: metrics of a validation are logged by the module itself.
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
        if not self.is_judging:
            return
        evidence = self._evidence(trainer)
        if evidence is not None and self.gathers_ranks and are_several():
            evidence.ranks = of_all_ranks(evidence.ms)
        if not trainer.is_global_zero:
            return
        if evidence is None:
            needed = f"{LEAST_STEPS} steps after the first {FIRST_STEPS}"
            had = self.throughput.volume.total.steps
            self._leave(f"a verdict needs {needed}, this training had {had}")
            return
        loader = self._fetches.loader
        evidence.workers = loader.num_workers if isinstance(loader, DataLoader) else None
        try_own(trainer, loader, evidence, seconds=self.seconds, trained_s=self._trained_s)
        self.evidence = evidence
        self.verdict = verdict(evidence, in_python)
        device = trainer.strategy.root_device
        # While this thread waits for a core, a GPU computes.
        is_on_cpu = device.type == "cpu"
        self.kept = KeptVerdict(
            verdict=self.verdict,
            evidence=evidence,
            pace=self._pace.steps_per_s(),
            own_pace=self._pace.own_steps_per_s() if is_on_cpu else None,
            machine=describe_machine(device, trainer.world_size),
        )
        for line in self.kept.lines():
            self._log.say(f"verdict: {line}")

    @property
    def state_key(self) -> str:
        """A key of this object: Lightning refuses two callbacks with the same key.

        A second verdict prints that it does nothing instead. Lightning reads this with every hook.
        """
        return f"{type(self).__qualname__} {id(self)}"

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a verdict leaves no trace in checkpoints."""
        return {}

    def _evidence(self, trainer: L.Trainer) -> Evidence | None:
        """The evidence so far, with counts of this training only; None if it is too little."""
        self.timer.close()
        evidence = evidence_of_own(self, trainer, self._fetches.ms)
        if evidence is not None:
            for name, before in self._counts.items():
                evidence.counts[name] -= before
        return evidence


def in_python(words: str) -> str:
    """Rewrite overrides for a script: "+trainer.max_epochs=2" is "Trainer(max_epochs=2)"."""
    for pattern, replacement in _IN_PYTHON.items():
        words = re.sub(pattern, replacement, words)
    return words


def attach(trainer: L.Trainer | HFTrainer) -> Verdict | HFVerdict:
    """Add a verdict and the callbacks that it reads to an existing Trainer; return the verdict.

    Callbacks of a class that the Trainer has already are not added. A Trainer of transformers gets
    an `HFVerdict`.
    """
    theirs = sys.modules.get("transformers.trainer")
    if theirs is not None and isinstance(trainer, theirs.Trainer):
        from flatout.perf.verdict.transformers_trainer import attach_to  # imports transformers

        return attach_to(trainer)
    require(
        isinstance(trainer, either(L.Trainer)),
        "attach",
        f"takes a Trainer, not {type(trainer).__name__}",
    )
    lightning_trainer = cast("L.Trainer", trainer)  # of either package
    callbacks = callbacks_of(lightning_trainer)
    classes = {type(callback) for callback in callbacks}
    ours = (StepTimer(), Throughput(), HardwareMonitor(), Verdict())
    callbacks = [callback for callback in ours if type(callback) not in classes] + callbacks
    set_callbacks(lightning_trainer, callbacks)
    attached = next(callback for callback in callbacks if isinstance(callback, Verdict))
    steps_before = lightning_trainer.global_step
    if attached in ours and steps_before:
        attached.note_missed(steps_before)
    return attached
