"""What a run has measured of itself: all that a verdict is made of, kept in `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import psutil
import torch

from flatout.callbacks.clock import compiled_so_far
from flatout.callbacks.run_curves import RunCurves
from flatout.data.batches.feed import Feed
from flatout.data.batches.feed_kind import FeedKind
from flatout.data.batches.plan import PlanSettings
from flatout.distributed.ranks import cores_here
from flatout.perf.measure.intervals import Interval

LEAST_GAIN = 1.1
"""What a fix must be worth to be named."""
LEAST_STEPS = 30
"""Optimizer steps from which on there is something to tell."""
OWN_LOADER = "own"
"""The feed of a run with the user's own DataModule."""


MODEL = ("forward", "backward", "optimizer")
"""Parts that another model changes."""
COMPUTED = ("wait", "transfer", *MODEL)
"""Parts that another feed or model changes."""


@dataclass(kw_only=True, slots=True)
class Tried:
    """Steps of the finished run's model in another way, timed side by side with steps as they were."""

    cause: str
    override: str
    rows_per_s: float
    as_was: float
    """Rows a second without the override: of the same try, or where feeds were tried of the run itself."""
    rows_per_batch: float
    batches_per_step: int = 1
    low: float | None = None
    high: float | None = None
    """How many times as fast, at least and at most; None in runs of earlier versions."""

    @property
    def speedup(self) -> Interval:
        """How many times as fast the steps were."""
        value = max(self.rows_per_s, 1e-9) / max(self.as_was, 1e-9)
        low, high = self.low or value, self.high or value
        return Interval(value, min(low, value), max(high, value))

    @staticmethod
    def from_dict(kept: Mapping[str, Any]) -> Tried:
        return Tried(**_known(Tried, kept))


@dataclass(kw_only=True, slots=True)
class Evidence:
    """One run's measurements, its first few steps left out."""

    device: str
    steps: int
    batches: int
    rows_per_batch: float
    """Over all ranks."""
    accumulate: int = 1
    world: int = 1
    batch_size: int | None = None
    """As it was set; None where tokens decide."""
    effective_batch: int | None = None
    """Rows of a step over all devices, where these were set."""
    pieces: int = 1
    """Of a batch, as memory did not suffice for it whole."""
    native: str = ""
    """Arithmetic that the device has in hardware, where another was asked for and none was measured."""
    ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds of each part, for each batch."""
    padding_share: float = 0.0
    mfu: float | None = None
    feed: str = "resident"
    precision: str = "32-true"
    threads: int = 1
    cores: int = 1
    """That this process may use."""
    machine_cores: int = 1
    flush_every: int = 50
    counts: dict[str, int] = field(default_factory=dict)
    """How many validations, checkpoints and flushes there were in those batches."""
    epochs: float = 1.0
    callbacks: dict[str, float] = field(default_factory=dict)
    """Milliseconds of each of your own callbacks, for each batch."""
    reads: dict[str, float] = field(default_factory=dict)
    """How often each of them reads a number of the device in a step."""
    compiled: dict[str, float] = field(default_factory=dict)
    """Graphs that torch.compile has made after the first few steps, and the seconds it took."""
    host: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, float]] = field(default_factory=list)
    """Of each rank, the parts of a batch, and under `alone` a step's phases with no other rank to wait for."""
    feed_alone: float | None = None
    """Rows a second of the feed with no model."""
    feed_cores: float | None = None
    """Cores that it kept busy meanwhile."""
    alone_ms: float | None = None
    """Milliseconds of a batch in steps with nothing between them, where that was tried."""
    untested: str = ""
    """The override of a feed that there was no time to try."""
    tried: list[Tried] = field(default_factory=list)
    not_tried: str = ""
    """Why nothing was tried, where nothing was."""

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())

    @property
    def computed_ms(self) -> float:
        """Milliseconds of a batch with its feed and model alone."""
        return sum(self.ms.get(part, 0.0) for part in COMPUTED)

    @property
    def model_ms(self) -> float:
        """Milliseconds of a batch with its model alone."""
        return sum(self.ms.get(part, 0.0) for part in MODEL)

    @property
    def model_rows_per_s(self) -> float:
        """Rows a second with nothing but feed and model."""
        return 1000 * self.rows_per_batch / max(self.computed_ms, 1e-9)

    def share(self, *parts: str) -> float:
        """Of all the time, what these parts took."""
        return sum(self.ms.get(part, 0.0) for part in parts) / max(self.total_ms, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(kept: Mapping[str, Any]) -> Evidence:
        """What `as_dict` has written, by this version or another: what it does not know is left out."""
        given = _known(Evidence, kept)
        given["tried"] = [Tried.from_dict(each) for each in given.get("tried", [])]
        return Evidence(**given)


def _known(kind: type, kept: Mapping[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in kept.items() if name in names}


def evidence_of_own(curves: RunCurves, device: torch.device, precision: str, epochs: float) -> Evidence | None:
    """What was measured with the user's own DataModule, whose batch size and tokens are not known."""
    accumulate = max(1, round(curves.throughput.total.batches / max(1, curves.steps)))
    plan = PlanSettings(rows_per_batch=1, accumulate=accumulate)
    found = evidence_of(curves, _Loader(plan, device, FeedKind.threaded), precision, epochs)
    if found is None:
        return None
    return replace(
        found,
        feed=OWN_LOADER,
        batch_size=None,
        padding_share=0.0,
        not_tried="with your own parts nothing else is tried",
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    plan: PlanSettings
    device: torch.device
    kind: FeedKind


def evidence_of(curves: RunCurves, feed: Feed | _Loader, precision: str, epochs: float) -> Evidence | None:
    """What was measured so far; None where it is too little for a verdict."""
    throughput, plan = curves.throughput, feed.plan
    counted = throughput.counted()
    steps = counted.batches // plan.accumulate
    if steps < LEAST_STEPS or not counted.rows:
        return None
    batches, clock = counted.batches, curves.clock
    seen, split = curves.monitor.summary(), curves.timer.counted().split()
    # Of what callbacks took, a device's own work behind them costs nothing.
    scale = split["callbacks"] / max(sum(clock.callbacks.values()), 1e-9)
    return Evidence(
        device=feed.device.type,
        steps=steps,
        batches=batches,
        rows_per_batch=counted.rows / batches,
        accumulate=plan.accumulate,
        world=plan.world,
        batch_size=None if plan.tokens_per_batch else plan.rows_per_batch,
        ms={part: 1000 * seconds / batches for part, seconds in split.items() if seconds},
        padding_share=1 - counted.tokens / max(1, counted.computed),
        mfu=throughput.mfu(counted),
        feed=feed.kind.value,
        precision=precision,
        threads=torch.get_num_threads(),
        cores=len(cores_here()),
        machine_cores=psutil.cpu_count() or 1,
        flush_every=curves.every_n_steps,
        counts=dict(clock.counts),
        epochs=epochs,
        callbacks={name: 1000 * scale * seconds / batches for name, seconds in clock.callbacks.items() if seconds},
        reads=clock.reads_a_step,
        compiled={name: now - clock.compiled.get(name, 0.0) for name, now in compiled_so_far().items()},
        host={name: value for name, value in seen.get("host", {}).items() if value is not None},
        gpu={name: value for name, value in seen.get("gpu", {}).items() if value is not None},
    )
