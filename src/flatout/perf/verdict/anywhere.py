"""The verdict in anybody's Trainer: what limited the run, and what races on copies say of each fix.

`Trainer(callbacks=[Verdict()])` is all there is to it. While training it reads clocks. At the end of `fit` copies of
module and loader train in each way, in turn, over the same batches. Weights, random numbers and loader stay the same.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from flatout.callbacks.clock import FIRST_STEPS
from flatout.callbacks.curve_source import CurveSource
from flatout.callbacks.fetch_times import FetchTimes
from flatout.callbacks.hardware_monitor import HardwareMonitor
from flatout.callbacks.run_curves import RunCurves
from flatout.callbacks.step_timer import StepTimer
from flatout.callbacks.throughput import Throughput
from flatout.engine.lightning_internals import callbacks_of
from flatout.engine.limits import free_bytes
from flatout.engine.precision import LIGHTNING_NAMES, Precision, bf16_is_native_on_cpu
from flatout.errors import require
from flatout.files import write_atomically
from flatout.perf.measure.steps import Way
from flatout.perf.verdict.copies import OwnFeed, OwnTask, Refused, copy_of_loader, nothing_stays
from flatout.perf.verdict.evidence import LEAST_GAIN, LEAST_STEPS, Evidence
from flatout.perf.verdict.experiments import LEAST_S, ROUNDS, SHARE, WAITS, try_feeds, try_models
from flatout.perf.verdict.judge import evidence_of_own, try_safely
from flatout.perf.verdict.rules import findings, starved, verdict
from flatout.perf.verdict.ways import (
    BUSY,
    FREE_BYTES,
    LEAST_STEPS_AN_EPOCH,
    MOST_WORKERS,
    SMALL_ROWS,
    most_fed,
    other_arithmetic,
)
from flatout.run_log import PrintLog, RunLog

_EARLY = 40
"""Optimizer steps after which the first verdict comes."""
_IN_PYTHON: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"~callbacks\.(\w+)": r"leaving \1 out of Trainer(callbacks=…)",
    r"\++trainer\.(\w+)=(\S+)": r"Trainer(\1=\2)",
    r"(?<!\S)threads=(\d+)": r"torch.set_num_threads(\1)",
    r"(?<!\S)precision=(\w+)": lambda found: f'Trainer(precision="{LIGHTNING_NAMES[Precision(found[1])]}")',
    r"(?<!\S)compile=false": "leaving out torch.compile",
    r"checkpoint\.every_steps=null checkpoint\.every_minutes=10": "ModelCheckpoint(every_n_epochs=1)",
}
"""Words of the command line, and what a script says instead."""


class Verdict(RunCurves):
    """Says what limited the training of any module, and what each fix would be worth."""

    def __init__(self, *, seconds: float = 20.0, log: RunLog | None = None) -> None:
        """`seconds`: most that the races at the end of `fit` take; they never take more than a tenth of the run."""
        require(seconds >= 0, "seconds", f"{seconds:g}", allowed="0 or more")
        super().__init__([])
        self.seconds, self._log = seconds, log or PrintLog()
        self.verdict: dict[str, Any] | None = None
        """In the words of `summary.json`; None before the end of a training that was long enough."""
        self.evidence: Evidence | None = None
        self.why_none = "no training has ended yet"
        self.is_judging, self._is_early = False, True
        self._fetches, self._began = FetchTimes(), 0.0

    def save(self, path: str | Path) -> None:
        """Write the verdict and what it rests on as JSON; without a verdict, why there is none."""
        kept = None if self.evidence is None else self.evidence.as_dict()
        found = {"verdict": self.verdict, "evidence": kept, "why_none": None if self.verdict else self.why_none}
        write_atomically(Path(path), json.dumps(found, indent=1, ensure_ascii=False))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        others = [each for each in callbacks_of(trainer) if each is not self]
        self.is_judging, self.verdict, self.evidence = False, None, None
        if trainer.barebones:
            self._leave("the Trainer is barebones, and runs without clocks")
        elif any(isinstance(each, Verdict) and each.is_judging for each in others):
            self._leave("another one judges this training")
        else:
            # A step timer or a monitor that is here already counts for both.
            timer = next((each for each in others if type(each) is StepTimer), StepTimer())
            monitor = next((each for each in others if type(each) is HardwareMonitor), None)
            super().__init__([], timer=timer, monitor=monitor or HardwareMonitor(say=self._log.say))
            self.parts = tuple(each for each in (self.throughput, self.timer, self.monitor) if each not in others)
            self.is_judging, self._fetches = True, FetchTimes()
            super().setup(trainer, pl_module, stage)

    def _leave(self, why: str) -> None:
        self.why_none, self.parts = why, ()
        self._log.say(f"verdict: none, {why}")

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._began = time.perf_counter()
        for part in self.parts:
            part.begin(trainer, pl_module)
        if self.timer in self.parts:
            vars(self).update(self.timer.hooks)
        if self.is_judging:
            self._fetches.on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._fetches.on_train_epoch_start(trainer, pl_module)

    def flush(self, trainer: L.Trainer) -> None:
        self._steps_since = self._batches_since = 0
        for part in self.parts:
            part.settle()
        steps = self.throughput.total.batches // trainer.accumulate_grad_batches
        if self.is_judging and self._is_early and steps >= _EARLY:
            self._is_early = False
            self._report_early(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        CurveSource.on_validation_end(self, trainer, pl_module)  # what the module logs there is its own

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._fetches.on_train_end(trainer, pl_module)
        self._trained_s = time.perf_counter() - self._began

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._fetches.on_exception(trainer, pl_module, exception)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Judge now: the last checkpoint is written, and the loader's workers have ended."""
        if not (self.is_judging and trainer.is_global_zero):
            return
        evidence = self._evidence(trainer)
        if evidence is None:
            steps = self.throughput.total.batches // trainer.accumulate_grad_batches
            self._leave(f"a verdict needs {LEAST_STEPS} steps after the first {FIRST_STEPS}, this training had {steps}")
            return
        try_own(trainer, pl_module, evidence, self.seconds, self._trained_s)
        self.evidence, self.verdict = evidence, verdict(evidence, in_python)
        self._log.say(f"verdict: {evidence.steps:,} steps, {split_line(evidence)}")
        self._log.say(f"verdict: {self.verdict['sentence']}")

    @property
    def state_key(self) -> str:
        """Of this one: Lightning refuses two of the same, and this one says by itself that it steps aside."""
        return f"{super().state_key} {id(self)}"

    def state_dict(self) -> dict[str, Any]:
        """Nothing of it is in a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return

    def _report_early(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero and (evidence := self._evidence(trainer)) is not None:
            self._log.say(f"verdict: after {evidence.steps} steps, {split_line(evidence)}")
            plain = [each for each in findings(evidence) if each.is_plain]
            if plain:
                self._log.say(f"verdict: {plain[0].in_words(in_python).sentence()}")

    def _evidence(self, trainer: L.Trainer) -> Evidence | None:
        self.timer.close()
        return evidence_of_own(self, trainer, self._fetches.ms)


def split_line(evidence: Evidence) -> str:
    """The time of a batch, and the shares of its parts."""
    shares = {part: evidence.share(part) for part in evidence.ms}
    parts = ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.005)
    return f"{evidence.total_ms:.1f} ms a batch: {parts}"


def in_python(words: str) -> str:
    """What a script says where a command line has these words."""
    for pattern, said in _IN_PYTHON.items():
        words = re.sub(pattern, said, words)
    return words


def attach(trainer: L.Trainer) -> Verdict:
    """Add step timer, throughput, hardware monitor and verdict to a Trainer that somebody else has built."""
    here = callbacks_of(trainer)
    ours = [StepTimer(), Throughput(), HardwareMonitor(), Verdict()]
    missing = [each for each in ours if not any(type(each) is type(other) for other in here)]
    vars(trainer)["callbacks"] = [*missing, *here]
    return next(each for each in callbacks_of(trainer) if isinstance(each, Verdict))


# What is raced.


def try_own(
    trainer: L.Trainer, module: L.LightningModule, evidence: Evidence, seconds: float, trained_s: float
) -> None:
    """Fill what other ways were worth into the evidence, or why nothing was tried."""
    device, seconds = trainer.strategy.root_device, min(seconds, SHARE * trained_s)
    step_s = evidence.total_ms * evidence.accumulate / 1000
    if trainer.world_size > 1:
        evidence.not_tried = "on several ranks nothing else is tried"
    elif seconds < LEAST_S:
        evidence.not_tried = "nothing was tried: the run was short"
    elif 4 * ROUNDS * step_s > seconds:
        evidence.not_tried = "nothing was tried: a step takes too long for it"
    elif (found := starved(evidence)) is not None:  # what is timed between turns of others means nothing
        evidence.not_tried = f"nothing was tried: {found.limit} would disturb it"
    else:
        until = time.perf_counter() + seconds
        with nothing_stays(module, device):
            try_safely(evidence, partial(_race, trainer, module, device, evidence, until))


def _race(
    trainer: L.Trainer, module: L.LightningModule, device: torch.device, evidence: Evidence, until: float
) -> None:
    precision = next((ours for ours, theirs in LIGHTNING_NAMES.items() if theirs == str(trainer.precision)), None)
    if precision is None:
        raise Refused(f"steps of precision {trainer.precision} are not timed")
    task: Any = OwnTask(trainer, module, device)
    about = {"rows": evidence.rows_per_batch, "accumulate": evidence.accumulate, "epochs": evidence.epochs}
    loader = copy_of_loader(trainer.train_dataloader, trainer)
    feed: Any = OwnFeed.of(loader, task, batches=evidence.batches / max(evidence.epochs, 1e-9), **about)
    was = Way(feed=feed, precision=precision, threads=torch.get_num_threads(), model=task.model)
    evidence.native = _other_precision(precision, device)
    if evidence.share("wait") >= WAITS and try_feeds(task, was, _other_loaders, evidence, until):
        return
    here = replace(was, feed=feed.opened(num_workers=0))  # what workers make is waited for, whatever computes
    try_models(
        task, [here, *other_arithmetic(here, evidence), *_larger_batches(here, evidence, until)], evidence, until
    )


def _other_precision(precision: Precision, device: torch.device) -> str:
    """The number format that may be faster."""
    if device.type == "cuda":
        is_newer = torch.cuda.get_device_capability(device) >= (8, 0)
        return (Precision.bf16 if is_newer else Precision.fp16).value if precision is Precision.fp32 else ""
    if precision is not Precision.fp32:
        return Precision.fp32.value
    return Precision.bf16.value if device.type == "cpu" and bf16_is_native_on_cpu() else ""


def _other_loaders(was: Way, evidence: Evidence) -> Iterator[Way]:
    """At most three other DataLoaders, what is likeliest first."""
    feed: Any = was.feed
    if not feed.is_torchs:
        raise Refused(f"other ways of reading {type(feed.loader).__name__} are not known")
    for changed, threads in _changes(feed, was, evidence):
        if feed.num_rows and changed.get("num_workers", feed.num_workers) and evidence.epochs > 1:
            changed = changed | {"persistent_workers": True}
        words = ", ".join(f"{name}={value}" for name, value in changed.items())
        override = f"DataLoader({words})" + (f" threads={threads}" if threads else "")
        made = feed.opened(**changed)
        if (
            most_fed(made, feed, evidence.feed_alone) >= LEAST_GAIN * evidence.model_rows_per_s
            or made.starts < feed.starts
        ):
            yield replace(was, cause="data", override=override, feed=made, threads=threads or was.threads)


def _changes(feed: OwnFeed, was: Way, evidence: Evidence) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Arguments of a DataLoader, and threads where workers need their cores."""
    model_ms, now = max(evidence.model_ms, 1e-3), feed.num_workers
    if now and evidence.epochs > 1 and feed.starts == 1.0:
        yield {"persistent_workers": True}, None
    is_busy = (evidence.feed_cores or 0.0) >= BUSY
    needed = 1 + round((evidence.ms.get("wait", 0.0) + model_ms) / model_ms)
    most = evidence.cores if is_busy else MOST_WORKERS
    workers = 1 if feed.is_stream else min(most, needed * max(1, now))  # each worker would give a whole stream
    if device_is_cpu(feed) and is_busy and not now:
        workers = max(1, evidence.cores // 2)
        threads = max(1, evidence.cores - workers)
        yield {"num_workers": workers}, threads if threads < was.threads else None
    elif workers > now:
        yield {"num_workers": workers}, None
    if now:
        yield {"num_workers": 0}, None
    if not device_is_cpu(feed) and not feed.loader.pin_memory:
        yield {"num_workers": max(1, workers), "pin_memory": True}, None


def device_is_cpu(feed: OwnFeed) -> bool:
    return bool(feed.device.type == "cpu")


def _larger_batches(was: Way, evidence: Evidence, until: float) -> Iterator[Way]:
    """The batches of a step in one, where there are several; else larger ones, where these are small."""
    feed: Any = was.feed
    rows, parts = feed.plan.rows_per_batch, evidence.accumulate
    if not feed.may_grow or (feed.device.type == "cpu" and free_bytes() < FREE_BYTES):
        return
    if parts > 1 and rows * parts <= SMALL_ROWS:
        override = f"DataLoader(batch_size={rows * parts}) ++trainer.accumulate_grad_batches=1"
        yield replace(was, cause="accumulation", override=override, feed=feed.grown(parts, 1))
    if parts > 1 or rows >= SMALL_ROWS:
        return
    left_s = until - time.perf_counter()
    for times in (16, 4):
        is_quick = times * evidence.model_ms / 1000 < left_s / (4 * ROUNDS)
        if is_quick and times * rows <= min(feed.num_rows // LEAST_STEPS_AN_EPOCH, 4 * SMALL_ROWS):
            override = f"DataLoader(batch_size={times * rows})"
            yield replace(was, cause="batch", override=override, feed=feed.grown(times, 1))
