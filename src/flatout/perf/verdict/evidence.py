"""`Evidence`: all measurements of a run that its verdict is computed from.

`summary.json` contains it, so that `doctor` can judge a run again later, or one of another version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from flatout.perf.measure.intervals import SpeedupInterval

LEAST_GAIN = 1.1  # a fix is named if it gains at least so much
# A gain whose lower bound is too small must be at least so large.
LEAST_UNCERTAIN = 1.25
ROUNDS = 5  # of a race, at least: their extreme ratios contain the median in nine of ten cases
ROUND_S = 0.05  # least seconds that each way trains in a round
LEAST_STEPS = 30  # optimizer steps that a verdict needs
LEAST_COMPILING = 0.1  # fraction of the time from which on compiling is named
_MANY_GRAPHS = 3  # fewer are usual; a run with so many compiles again and again
OWN_LOADER = "own"  # the feed of a run with the user's own DataModule
MODEL = ("forward", "backward", "optimizer")  # parts that another model changes
COMPUTED = ("wait", "transfer", *MODEL)  # parts that another feed or model changes


@dataclass(kw_only=True, slots=True)
class Tried:
    """Steps of the run's model in another way, timed in turn with steps as they were."""

    cause: str
    override: str
    rows_per_s: float
    # Rows a second without the override: in the same race, or of the run itself for feeds.
    as_was: float
    rows_per_batch: float
    batches_per_step: int = 1
    # Bounds of the speedup; None in runs of earlier versions.
    low: float | None = None
    high: float | None = None

    @staticmethod
    def by(gain: SpeedupInterval, as_was: float, **about: Any) -> Tried:
        """A try whose steps had this speedup; `about`: the other fields."""
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
    """Measurements of one run, without its first few steps."""

    device: str
    steps: int
    batches: int
    rows_per_batch: float  # over all ranks
    accumulate: int = 1
    world: int = 1
    batch_size: int | None = None  # as it was set; None if tokens limit a batch
    effective_batch: int | None = None  # rows of a step over all devices, if they were set
    pieces: int = 1  # of a batch that did not fit into memory as a whole
    # The precision that precision=auto would choose here, if another was set and nothing was
    # measured.
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
    # Number of validations, checkpoints and flushes.
    counts: dict[str, int] = field(default_factory=dict)
    epochs: float = 1.0
    # By callback of the user: milliseconds a batch, and reads of the device's numbers a step.
    callbacks: dict[str, float] = field(default_factory=dict)
    reads: dict[str, float] = field(default_factory=dict)
    # Reads of the device's numbers in a step, by file and line, where the lines are known.
    reads_by_line: dict[str, float] = field(default_factory=dict)
    workers: int | None = None  # that read batches, of a DataLoader that is not flatout's
    # `graphs` of torch.compile after the first steps, and its `seconds`.
    compiled: dict[str, float] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    gpu: dict[str, Any] = field(default_factory=dict)
    # Of each rank the milliseconds of each part of a batch; `alone` is the model's part in steps
    # without other ranks.
    ranks: list[dict[str, float]] = field(default_factory=list)
    feed_alone: float | None = None  # rows a second of the feed without a model
    feed_cores: float | None = None  # cores that it kept busy
    # Milliseconds of a batch in steps without interruptions, if they were tried.
    alone_ms: float | None = None
    # Milliseconds of a batch's model in eager steps, if a run compiles again and again.
    eager_ms: float | None = None
    tuned_layers: int = 0  # layers of a pretrained encoder if all are trained; else 0
    untested: str = ""  # the override of a feed for which there was no time
    tried: list[Tried] = field(default_factory=list)
    not_tried: str = ""  # why nothing was tried; empty if something was
    compile_s: float = 0.0  # that torch.compile took, if a compiled step was tried
    notes: list[str] = field(default_factory=list)  # remarks on single tries

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())

    @property
    def model_ms(self) -> float:
        return self.ms_of(*MODEL)

    @property
    def model_rows_per_s(self) -> float:
        """Rows a second if there were nothing but feed and model."""
        return 1000 * self.rows_per_batch / max(self.ms_of(*COMPUTED), 1e-9)

    def ms_of(self, *parts: str) -> float:
        return sum(self.ms.get(part, 0.0) for part in parts)

    def share(self, *parts: str) -> float:
        """The fraction of the time that these parts took."""
        return self.ms_of(*parts) / max(self.total_ms, 1e-9)

    @property
    def own_ms_of_ranks(self) -> list[float]:
        """Of each rank the milliseconds of a batch in which it does not wait for the others."""
        own_ms = []
        for ms in self.ranks:
            own_parts = (ms.get(part, 0.0) for part in ("wait", "forward", "callbacks", "other"))
            own_ms.append(sum(own_parts))
        return own_ms

    @property
    def readers_to_keep_up(self) -> int:
        """How many times as many workers would have a batch ready whenever the model needs one.

        Example: the model computes 2 ms for a batch, then waits 6 ms for the next. So one worker
        reads a batch in 8 ms, and 4 would be enough. One more is for uneven batches: 5.
        """
        model_ms = max(self.model_ms, 1e-3)
        return 1 + round((self.ms_of("wait") + model_ms) / model_ms)

    @property
    def compiling_share(self) -> float:
        """The fraction of the time that torch.compile took; 0 if it made a few graphs only."""
        if self.compiled.get("graphs", 0) < _MANY_GRAPHS:
            return 0.0
        compiling_ms = 1000 * self.compiled.get("seconds", 0.0)
        return min(1.0, compiling_ms / max(self.total_ms * self.batches, 1e-9))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Evidence:
        """The evidence whose `asdict` this is; unknown keys, of another version, are ignored."""
        arguments = _select_fields(Evidence, values)
        tries = arguments.get("tried", [])
        arguments["tried"] = [Tried(**_select_fields(Tried, tried)) for tried in tries]
        return Evidence(**arguments)


def split_line(ms: Mapping[str, float]) -> str:
    """The time of a batch and the shares of its parts: "5.1 ms a batch: wait 60%, forward 40%"."""
    total_ms = max(sum(ms.values()), 1e-9)
    shares = {part: spent / total_ms for part, spent in ms.items()}
    parts = [f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.005]
    return f"{total_ms:.1f} ms a batch: {', '.join(parts)}"


def without_none(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that are known; those of hardware may be None."""
    return {name: value for name, value in figures.items() if value is not None}


def _select_fields(record: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(record)}
    return {name: value for name, value in values.items() if name in names}
