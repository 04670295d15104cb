"""What is known of recordings whose store is open: columns, scales, names, and the shape of a
network's answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.info import DataInfo, Labels
from flatout.data.problem import Problem
from flatout.data.sequences.columns import Floats
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.store.store import Ragged

if TYPE_CHECKING:
    from flatout.data.sequences.views import Segments

ROWS_A_BLOCK = 1 << 16
_OTHER_UNIT = 10.0
_MANY_SAMPLES = 1000
"""From this ratio of root mean squares on another unit is suspected; fewer samples may lie where a
column is small."""


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """Sizes of a network's inputs and answers."""

    inputs: int  # columns that are read: the first of a batch
    targets: int  # columns that are answered: the last of a batch. A forecast reads them as well
    lookback: int | None = None  # samples of a window; None where rows are recordings or chunks
    horizon: int = 0  # samples that a forecast answers, which stand behind its window; 0: none
    labels: int = 0  # outputs for a whole recording; 0: answers belong to times
    is_stateful: bool = False  # whether a row continues the row of the batch before

    @property
    def is_each_step(self) -> bool:
        """Whether each sample has an answer."""
        return self.lookback is None and not self.labels

    @property
    def outputs(self) -> int:
        """Numbers of one answer."""
        return self.labels or self.targets * max(1, self.horizon)


@dataclass(frozen=True, slots=True)
class Scaler:
    """`(value - shift) / factor` for each column, fitted on the training rows."""

    shift: list[float]
    factor: list[float] = field(default_factory=list)

    @classmethod
    def fit(cls, kind: str, moments: dict[str, Floats]) -> Scaler:
        """From count, sum, squares, least and most of each column."""
        count = moments["count"]
        if kind == "none":
            return cls([0.0] * len(count), [1.0] * len(count))
        shift = moments["mean"]
        factor = np.sqrt(moments["squares"] / count)
        if kind == "minmax":
            shift = moments["least"]
            factor = moments["most"] - moments["least"]
        return cls(shift.tolist(), np.where(factor > 0, factor, 1.0).tolist())

    def scale(self, values: NDArray[Any]) -> NDArray[np.float32]:
        """Columns in their units as the store keeps them; block by block, so that
        little is copied.
        """
        shift, factor = np.array(self.shift), np.array(self.factor)
        scaled = np.empty(values.shape, np.float32)
        for at in range(0, len(values), ROWS_A_BLOCK):
            block = slice(at, at + ROWS_A_BLOCK)
            scaled[block] = (values[block] - shift) / factor
        return scaled

    def of_targets(self, targets: int) -> tuple[list[float], list[float]]:
        return self.shift[-targets:], self.factor[-targets:]


def describe_units(names: list[str], ratios: NDArray[np.float64], samples: float) -> list[str]:
    """A line for each column many times as large, or small, as in training; few small samples prove
    no other unit.
    """
    least = 1 / _OTHER_UNIT if samples >= _MANY_SAMPLES else 0.0
    return [
        f"{name} is {ratio:.3g} times as large as in the training recordings; is it in another"
        " unit?"
        for name, ratio in zip(names, ratios.tolist(), strict=True)
        if ratio > _OTHER_UNIT or 0 < ratio < least
    ]


_MARGIN = 0.1
_NEARLY_ALL = 0.9
_FAR = 4.0
"""Part of a range by which a value may lie beside it; share of samples outside, and spreads between
two means, from which on a column is warned of."""


@dataclass(frozen=True, slots=True)
class ColumnRanges:
    """Where the values of each column lie, in its own unit."""

    least: list[float]
    most: list[float]
    mean: list[float]
    spread: list[float]

    @classmethod
    def of(cls, blocks: Iterable[NDArray[Any]]) -> ColumnRanges:
        """Of blocks `[samples, columns]`, one of them at a time in memory."""
        parts = []
        for block in blocks:
            values = block.astype(np.float64)
            with np.errstate(over="ignore"):  # a spread that is not finite is no reason to warn
                squares = (values**2).sum(axis=0)
            parts.append(
                (values.min(axis=0), values.max(axis=0), values.sum(axis=0), squares, len(values))
            )
        leasts, mosts, sums, squares_of_parts, counts = zip(*parts, strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.sum(sums, axis=0) / sum(counts)
            variance = np.sum(squares_of_parts, axis=0) / sum(counts) - mean**2
        spread = np.sqrt(np.maximum(variance, 0.0))
        least = np.min(leasts, axis=0)
        most = np.max(mosts, axis=0)
        return cls(least.tolist(), most.tolist(), mean.tolist(), spread.tolist())

    def count_outside(self, block: Floats) -> NDArray[np.int64]:
        """How many values of each column lie outside of the range, and not just beside it."""
        least, most = np.array(self.least), np.array(self.most)
        margin = _MARGIN * (most - least)
        return ((block < least - margin) | (block > most + margin)).sum(axis=0)

    def find_apart(
        self, other: ColumnRanges, outside: NDArray[np.int64], samples: int
    ) -> list[int]:
        """Columns of which nearly all values lie outside of the range, or whose mean is several
        spreads away.
        """
        distance = np.abs(np.array(other.mean) - np.array(self.mean))
        is_far = distance > _FAR * np.array(self.spread)
        return np.flatnonzero((outside >= _NEARLY_ALL * samples) | is_far).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInfo(DataInfo):
    """Recordings of sensors."""

    config: SequenceDataConfig
    segments: dict[str, Segments] = field(default_factory=dict)  # the samples of each split
    notes: list[str] = field(default_factory=list)  # what was found when rows were made of them

    @property
    def lines(self) -> list[str]:
        return [self.report.line(), *self.facts["lines"], *self.notes]

    @property
    def key(self) -> str:
        """The store's key and the rows that are read of it: equal keys mean equal data."""
        config = self.config
        return (
            f"{self.report.key} {config.lookback} {config.stride} {config.horizon} {config.chunk}"
        )

    @property
    def columns(self) -> list[str]:
        """Columns of the store: those that are read first, those that are answered last."""
        return list(self.facts["columns"])

    @property
    def targets(self) -> list[str]:
        return self.config.targets

    @property
    def scaler(self) -> Scaler:
        return Scaler(**self.facts["scaler"])

    @property
    def recording_names(self) -> list[str]:
        return list(self.facts["recordings"])

    @property
    def labels(self) -> Labels:
        """The classes or the number of a recording, for data.problem=label."""
        facts = self.facts
        problem = Problem.single if facts["classes"] else Problem.regression
        classes = facts["classes"] or self.targets
        rows = facts["splits"]["train"]["recordings"]
        return Labels(
            problem,
            classes,
            facts["class_counts"],
            rows,
            facts["label_mean"],
            facts["label_spread"],
        )

    @property
    def shape(self) -> SequenceShape:
        """Sizes of a network for these recordings."""
        config = self.config
        columns = len(self.columns)
        targets = len(self.targets)
        if config.problem is SequenceProblem.label:
            return SequenceShape(columns, 0, labels=len(self.labels.classes))
        if config.problem is SequenceProblem.forecast:
            return SequenceShape(columns, targets, config.lookback, config.horizon)
        return SequenceShape(
            columns - targets, targets, config.lookback, is_stateful=config.chunk is not None
        )

    @property
    def floors(self) -> dict[str, float]:
        """The lowest root mean square error that can be reached on each target of a built-in
        sample.
        """
        is_known = self.config.is_sample and self.config.problem is SequenceProblem.estimate
        found = {name: self.config.sample.floor(name) for name in self.targets} if is_known else {}
        return {name: value for name, value in found.items() if value is not None}

    def rows_of(self, split: str) -> Ragged:
        return self.store.splits[split].ragged("tokens")

    def measured(self, split: str) -> NDArray[np.uint8] | None:
        """`[samples, K]` of the store: 1 where a target was measured, 0 where it repeats a value;
        None: all were.
        """
        column = self.store.splits[split].columns.get("targets")
        return column.values if isinstance(column, Ragged) else None

    def measured_share(self, split: str) -> float:
        """Share of the truths of a split's rows that were measured."""
        measured = self.measured(split)
        rows = self.rows_of(split)
        shape = self.shape
        if measured is None:
            return 1.0
        stop = rows.offsets[: len(rows.lengths)] + rows.lengths
        first = (
            rows.offsets[: len(rows.lengths)]
            if shape.is_each_step
            else stop - max(1, shape.horizon)
        )
        count = np.append(0, measured.sum(axis=1, dtype=np.int64).cumsum())
        truths = int((stop - first).sum()) * shape.targets
        return float((count[stop] - count[first]).sum()) / max(1, truths)

    def read_ranges(self) -> ColumnRanges:
        """Where the training samples of each column that is read lie, in its unit; a block at a
        time is in memory.
        """
        width = self.shape.inputs
        segments = self.segments["train"]
        values = self.rows_of("train").values[:, :width]
        shift, factor = np.array(self.scaler.shift[:width]), np.array(self.scaler.factor[:width])

        def read_blocks() -> Iterator[Floats]:
            for first, stop in zip(segments.first.tolist(), segments.stop.tolist(), strict=True):
                for begin in range(first, stop, ROWS_A_BLOCK):
                    yield values[begin : min(begin + ROWS_A_BLOCK, stop)] * factor + shift

        return ColumnRanges.of(read_blocks())

    def recording_of_rows(self, split: str) -> NDArray[np.integer]:
        """Number of each row's recording, among all names."""
        return self.store.splits[split].fixed("recording")

    def summary(self) -> dict[str, Any]:
        splits = self.facts["splits"]
        lengths = self.rows_of("train").lengths
        return {
            "rows": {
                name: view.num_rows for name, view in self.store.splits.items() if name in splits
            },
            "classes": len(self.targets),
            "tokens": int(lengths.sum(dtype=np.int64)),
            "mean_length": float(lengths.mean()),
            "truncated_rows": 0,
            "sequences": {
                **{
                    kind: {name: counts[kind] for name, counts in splits.items()}
                    for kind in ("recordings", "samples")
                },
                "step_s": self.facts["step"],
                "floor": self.floors,
            },
        }
