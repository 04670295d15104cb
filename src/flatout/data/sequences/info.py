"""Facts about recordings whose store is open: columns, scales, names, and the sizes of a network.

`SequenceInfo` reads them from the store; tasks and predictors ask it. `Scaler` and `ColumnRanges`
also serve new recordings at inference: one puts them in the store's units, the other says which
columns lie where no training sample lay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.info import DataInfo, Labels
from flatout.data.problem import Problem
from flatout.data.ragged import row_bounds
from flatout.data.sequences.columns import Floats
from flatout.data.sequences.moments import Moments
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.store.store import Ragged

if TYPE_CHECKING:
    from flatout.data.sequences.views import Segments

ROWS_A_BLOCK = 1 << 16  # samples that are read or scaled at once
_OTHER_UNIT = 10.0  # ratio of root mean squares from which another unit is suspected
_MANY_SAMPLES = 1000  # fewer may well lie where a column is small
_MARGIN = 0.1  # part of a range by which a value may lie beside it
_NEARLY_ALL = 0.9  # fraction of samples outside of a range from which a column is warned of
_FAR = 4.0  # spreads between two means from which a column is warned of


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """Sizes of a network's inputs and answers.

    Three columns that are read and one that is estimated from windows of 50 samples: inputs 3,
    targets 1, lookback 50. A forecast of all four over 10 samples: inputs 4, targets 4, horizon 10.
    """

    inputs: int  # columns that are read: the first of a batch
    targets: int  # columns that are answered: the last of a batch. A forecast reads them as well
    lookback: int | None = None  # samples of a window; None where rows are recordings or chunks
    horizon: int = 0  # samples behind its window that a forecast answers; 0: none
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
    def fit(cls, kind: str, moments: Moments) -> Scaler:
        """The scale that `data.scale` names: standard, minmax or none.

        A column without spread, which a split other than training may have, keeps its unit.
        """
        count = len(moments.count)
        if kind == "none":
            return cls([0.0] * count, [1.0] * count)
        shift = moments.mean
        factor = moments.spread
        if kind == "minmax":
            shift = moments.least
            factor = moments.most - moments.least
        return cls(shift.tolist(), np.where(factor > 0, factor, 1.0).tolist())

    def fits(self, count: int) -> bool:
        """Whether it has a scale for each of so many columns or more."""
        return len(self.shift) == len(self.factor) >= count and all(self.factor)

    def scale(self, values: NDArray[np.generic]) -> NDArray[np.float32]:
        """Samples `[samples, columns]` as the store keeps them."""
        shift = np.array(self.shift)
        factor = np.array(self.factor)
        scaled = np.empty(values.shape, np.float32)
        # By the block: the differences are float64, and would take twice the room of the result.
        for at in range(0, len(values), ROWS_A_BLOCK):
            block = slice(at, at + ROWS_A_BLOCK)
            scaled[block] = (values[block] - shift) / factor
        return scaled

    def of_targets(self, targets: int) -> tuple[list[float], list[float]]:
        """Shift and factor of the last columns, which are the targets."""
        return self.shift[-targets:], self.factor[-targets:]


def describe_units(names: list[str], ratios: NDArray[np.float64], samples: float) -> list[str]:
    """A line for each column that is many times as large, or as small, as in training.

    `ratios` are its root mean square over that of training. A small one counts only with many
    samples: few may well lie where the column is small.
    """
    least = 1 / _OTHER_UNIT if samples >= _MANY_SAMPLES else 0.0
    return [
        f"{name} is {ratio:.3g} times as large as in the training recordings; is it in another"
        " unit, here or there?"
        for name, ratio in zip(names, ratios.tolist(), strict=True)
        if ratio > _OTHER_UNIT or 0 < ratio < least
    ]


@dataclass(frozen=True, slots=True)
class ColumnRanges:
    """Where the values of each column lie, in its own unit."""

    least: list[float]
    most: list[float]
    mean: list[float]
    spread: list[float]

    @classmethod
    def of(cls, blocks: Iterable[Floats]) -> ColumnRanges:
        """The ranges of blocks `[samples, columns]`, one of them at a time in memory."""
        moments = Moments.of(blocks)
        numbers = (moments.least, moments.most, moments.mean, moments.spread)
        return cls(*(of_columns.tolist() for of_columns in numbers))

    def fit(self, count: int) -> bool:
        """Whether these are ranges of so many columns."""
        numbers = (self.least, self.most, self.mean, self.spread)
        return all(len(of_columns) == count for of_columns in numbers)

    def count_outside(self, block: Floats) -> NDArray[np.int64]:
        """How many values of each column lie outside of the range, and not just beside it."""
        least = np.array(self.least)
        most = np.array(self.most)
        # A range from 0 to 50 lets values from -5 to 55 pass.
        margin = _MARGIN * (most - least)
        return ((block < least - margin) | (block > most + margin)).sum(axis=0)

    def find_apart(
        self, other: ColumnRanges, outside: NDArray[np.int64], samples: int
    ) -> list[int]:
        """Numbers of the columns in which other samples look as if they had another unit.

        Nearly all their values are outside of the range, as `outside` counts them, or their mean is
        several spreads away.
        """
        distance = np.abs(np.array(other.mean) - np.array(self.mean))
        is_far = distance > _FAR * np.array(self.spread)
        return np.flatnonzero((outside >= _NEARLY_ALL * samples) | is_far).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInfo(DataInfo):
    """Facts of an open store of recordings; `facts` and `report` are those of its preparation."""

    config: SequenceDataConfig
    segments: dict[str, Segments] = field(default_factory=dict)  # the samples of each split
    notes: list[str] = field(default_factory=list)  # warnings of recordings too short for a window

    @property
    def lines(self) -> list[str]:
        """The lines that are printed about the data when a run begins."""
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
        return Labels(
            Problem.single if facts["classes"] else Problem.regression,
            facts["classes"] or self.targets,
            facts["class_counts"],
            facts["splits"]["train"]["recordings"],
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
        """The lowest root mean square error that can be reached on targets of a built-in sample."""
        floors = {}
        if self.config.is_sample and self.config.problem is SequenceProblem.estimate:
            for name in self.targets:
                floor = self.config.sample.floor(name)
                if floor is not None:
                    floors[name] = floor
        return floors

    def rows_of(self, split: str) -> Ragged:
        return self.store.splits[split].ragged("tokens")

    def measured(self, split: str) -> NDArray[np.uint8] | None:
        """`[samples, K]`: 1 where a target was measured, 0 where it repeats a value before it.

        None if all were measured.
        """
        column = self.store.splits[split].columns.get("targets")
        return column.values if isinstance(column, Ragged) else None

    def measured_share(self, split: str) -> float:
        """Fraction of the targets of a split's rows that were measured.

        A window or a forecast is scored on its last samples only, so these alone count.
        """
        measured = self.measured(split)
        rows = self.rows_of(split)
        shape = self.shape
        if measured is None:
            return 1.0
        first = rows.offsets[: len(rows.lengths)]
        stop = first + rows.lengths
        if not shape.is_each_step:
            first = stop - max(1, shape.horizon)
        # measured 1 0 1 1 → count 0 1 1 2 3: samples 1 to before 3 have count[3] - count[1] = 1
        count = row_bounds(measured.sum(axis=1))
        targets = int((stop - first).sum()) * shape.targets
        return float((count[stop] - count[first]).sum()) / max(1, targets)

    def read_ranges(self) -> ColumnRanges:
        """Where the training samples of each column that is read lie, in its own unit."""
        width = self.shape.inputs
        segments = self.segments["train"]
        values = self.rows_of("train").values[:, :width]
        shift = np.array(self.scaler.shift[:width])
        factor = np.array(self.scaler.factor[:width])

        def read_blocks() -> Iterator[Floats]:
            for first, stop in zip(segments.first.tolist(), segments.stop.tolist(), strict=True):
                for begin in range(first, stop, ROWS_A_BLOCK):
                    yield values[begin : min(begin + ROWS_A_BLOCK, stop)] * factor + shift

        return ColumnRanges.of(read_blocks())

    def recording_of_rows(self, split: str) -> NDArray[np.integer]:
        """Number of each row's recording, among all names."""
        return self.store.splits[split].fixed("recording")

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says of the data."""
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
                "recordings": {name: counts["recordings"] for name, counts in splits.items()},
                "samples": {name: counts["samples"] for name, counts in splits.items()},
                "step_s": self.facts["step"],
                "floor": self.floors,
            },
        }
