"""What is known of recordings whose store is open: columns, scales, names, and the shape of a network's answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flatout.data.info import DataInfo, Labels
from flatout.data.problem import Problem
from flatout.data.sequences.columns import RecordingRules
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.sequences.shape import Scaler, SequenceShape
from flatout.data.store.store import Ragged

if TYPE_CHECKING:
    from flatout.data.sequences.views import Segments


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInfo(DataInfo):
    """Recordings of sensors."""

    config: SequenceDataConfig
    segments: dict[str, Segments] = field(default_factory=dict)
    """The samples of each split."""
    notes: list[str] = field(default_factory=list)
    """What was found when rows were made of them."""

    @property
    def lines(self) -> list[str]:
        return [self.report.line(), *self.facts["lines"], *self.notes]

    @property
    def key(self) -> str:
        """The store's key and the rows that are read of it: equal keys mean equal data."""
        config = self.config
        return f"{self.report.key} {config.lookback} {config.stride} {config.horizon} {config.chunk}"

    @property
    def problem(self) -> SequenceProblem:
        return self.config.problem

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
        classes, rows = facts["classes"] or self.targets, facts["splits"]["train"]["recordings"]
        return Labels(problem, classes, facts["class_counts"], rows, facts["label_mean"], facts["label_spread"])

    @property
    def shape(self) -> SequenceShape:
        """Sizes of a network for these recordings."""
        config, columns, targets = self.config, len(self.columns), len(self.targets)
        if config.problem is SequenceProblem.label:
            return SequenceShape(columns, 0, labels=len(self.labels.classes))
        if config.problem is SequenceProblem.forecast:
            return SequenceShape(columns, targets, config.lookback, config.horizon)
        return SequenceShape(columns - targets, targets, config.lookback, is_stateful=config.chunk is not None)

    @property
    def rules(self) -> RecordingRules:
        """How new tables become recordings like those of the training."""
        return RecordingRules.of(self.config)

    @property
    def floors(self) -> dict[str, float]:
        """The lowest root mean square error that can be reached on each target of a built-in sample."""
        is_known = self.config.is_sample and self.problem is SequenceProblem.estimate
        found = {name: self.config.sample.floor(name) for name in self.targets} if is_known else {}
        return {name: value for name, value in found.items() if value is not None}

    def rows_of(self, split: str) -> Ragged:
        return self.store.splits[split].ragged("tokens")

    def recording_of_rows(self, split: str) -> NDArray[np.integer]:
        """Number of each row's recording, among all names."""
        return self.store.splits[split].fixed("recording")

    def summary(self) -> dict[str, Any]:
        splits, lengths = self.facts["splits"], self.rows_of("train").lengths
        return {
            "rows": {name: view.num_rows for name, view in self.store.splits.items() if name in splits},
            "classes": len(self.targets),
            "tokens": int(lengths.sum(dtype=np.int64)),
            "mean_length": float(lengths.mean()),
            "truncated_rows": 0,
            "sequences": {
                **{kind: {name: counts[kind] for name, counts in splits.items()} for kind in ("recordings", "samples")},
                "step_s": self.facts["step"],
                "floor": self.floors,
            },
        }
