"""What a run has measured of itself: all that a verdict is made of, kept in `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from flatout.perf.measure.intervals import SpeedupInterval

LEAST_GAIN = 1.1  # what a fix must be worth to be named
# a gain whose lower bound is too small is named only where it may be as large as this
LEAST_UNCERTAIN = 1.25
ROUNDS = 5  # of a race, at least: their extreme ratios hold the median in nine of ten cases
ROUND_S = 0.05  # least seconds that each way trains in a round
LEAST_STEPS = 30  # optimizer steps from which on there is something to tell
LEAST_COMPILING = 0.1  # the share of the time from which on compiling is named
_MANY_GRAPHS = 3  # a few are made once; from so many on a run compiles again and again
OWN_LOADER = "own"  # the feed of a run with the user's own DataModule
MODEL = ("forward", "backward", "optimizer")  # parts that another model changes
COMPUTED = ("wait", "transfer", *MODEL)  # parts that another feed or model changes


@dataclass(kw_only=True, slots=True)
class Tried:
    """Steps of the finished run's model in another way, timed side by side with steps
    as they were.
    """

    cause: str
    override: str
    rows_per_s: float
    # rows a second without the override: of the same try, or of the run itself for feeds
    as_was: float
    rows_per_batch: float
    batches_per_step: int = 1
    low: float | None = None
    # how many times as fast, at least and at most; None in runs of earlier versions
    high: float | None = None

    @staticmethod
    def by(gain: SpeedupInterval, as_was: float, **about: Any) -> Tried:
        """From how many times as fast its steps were."""
        return Tried(
            rows_per_s=as_was * gain.value, as_was=as_was, low=gain.low, high=gain.high, **about
        )

    @property
    def speedup(self) -> SpeedupInterval:
        value = max(self.rows_per_s, 1e-9) / max(self.as_was, 1e-9)
        low, high = self.low or value, self.high or value
        return SpeedupInterval(value, min(low, value), max(high, value))


@dataclass(kw_only=True, slots=True)
class Evidence:
    """One run's measurements, its first few steps left out."""

    device: str
    steps: int
    batches: int
    rows_per_batch: float  # over all ranks
    accumulate: int = 1
    world: int = 1
    batch_size: int | None = None  # as it was set; None where tokens decide
    effective_batch: int | None = None  # rows of a step over all devices, where these were set
    pieces: int = 1  # of a batch, as memory did not suffice for it whole
    # what precision=auto would choose here, where another was asked for and none was measured
    native: str = ""
    ms: dict[str, float] = field(default_factory=dict)  # milliseconds of each part, for each batch
    padding_share: float = 0.0
    mfu: float | None = None
    feed: str = "resident"
    precision: str = "32-true"
    threads: int = 1
    cores: int = 1  # that this process may use
    machine_cores: int = 1
    flush_every: int = 50
    # how many validations, checkpoints and flushes
    counts: dict[str, int] = field(default_factory=dict)
    epochs: float = 1.0
    # milliseconds of each of your own, a batch
    callbacks: dict[str, float] = field(default_factory=dict)
    # how often each reads a number of the device a step
    reads: dict[str, float] = field(default_factory=dict)
    # graphs of torch.compile after the first steps; seconds
    compiled: dict[str, float] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, float]] = field(default_factory=list)
    """Of each rank, the parts of a batch, and under `alone` a step's phases with no other rank to
    wait for."""
    feed_alone: float | None = None  # rows a second of the feed with no model
    feed_cores: float | None = None  # cores that it kept busy meanwhile
    # milliseconds of a batch in steps with nothing between them, where that was tried
    alone_ms: float | None = None
    # of a batch's model in uncompiled steps, where a run compiles again and again
    eager_ms: float | None = None
    tuned_layers: int = 0  # layers of a pretrained encoder that is tuned whole; 0 for all others
    untested: str = ""  # the override of a feed that there was no time to try
    tried: list[Tried] = field(default_factory=list)
    not_tried: str = ""  # why nothing was tried, where nothing was
    compile_s: float = 0.0  # what torch.compile took where a compiled step was tried
    notes: list[str] = field(default_factory=list)  # what is to be known of single tries

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())

    @property
    def model_ms(self) -> float:
        return self.ms_of(*MODEL)

    @property
    def model_rows_per_s(self) -> float:
        """Rows a second with nothing but feed and model."""
        return 1000 * self.rows_per_batch / max(self.ms_of(*COMPUTED), 1e-9)

    def ms_of(self, *parts: str) -> float:
        return sum(self.ms.get(part, 0.0) for part in parts)

    def share(self, *parts: str) -> float:
        """Of all the time, what these parts took."""
        return self.ms_of(*parts) / max(self.total_ms, 1e-9)

    @property
    def compiling_share(self) -> float:
        """Of all the time, what torch.compile took for graph after graph; 0 where there
        were few.
        """
        if self.compiled.get("graphs", 0) < _MANY_GRAPHS:
            return 0.0
        return min(
            1.0, 1000 * self.compiled.get("seconds", 0.0) / max(self.total_ms * self.batches, 1e-9)
        )

    @staticmethod
    def from_dict(kept: Mapping[str, Any]) -> Evidence:
        """From `asdict` of this version or another: what it does not know is left out."""
        given = _known(Evidence, kept)
        given["tried"] = [Tried(**_known(Tried, each)) for each in given.get("tried", [])]
        return Evidence(**given)


def _known(kind: type, kept: Mapping[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in kept.items() if name in names}
