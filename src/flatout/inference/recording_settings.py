"""What a model folder says of the recordings that its network was trained on.

The folder may come from others, so numbers are compared with their ranges and lists with their
lengths. Open this file to add something that a predictor of recordings has to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flatout.data.sequences.columns import RecordingRules
from flatout.data.sequences.info import ColumnRanges, Scaler, SequenceShape

if TYPE_CHECKING:
    from flatout.inference.model_folder import ModelFolder

_MOST_COLUMNS = 1 << 20
_MOST_SAMPLES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """What `config.json` of a model folder says of the recordings."""

    shape: SequenceShape
    rules: RecordingRules
    scaler: Scaler
    step_s: float | None
    label_scale: tuple[float, float]
    has_classes: bool
    label: str | None = None
    # runs of older versions did not note where their columns lie
    sizes: list[float] = field(default_factory=list)
    ranges: ColumnRanges | None = None

    def require_fitting(self, folder: ModelFolder, names: list[str]) -> None:
        """Refuse numbers out of their range and lists of other lengths, which others may write."""
        shape = self.shape
        counts = (shape.targets, shape.horizon, shape.labels)
        folder.require(1 <= shape.inputs <= _MOST_COLUMNS, "data.shape.inputs")
        folder.require(all(0 <= count <= _MOST_COLUMNS for count in counts), "data.shape")
        folder.require(len(names) == (shape.labels or shape.targets) > 0, "data.shape")
        folder.require(shape.lookback is None or 1 <= shape.lookback <= _MOST_SAMPLES, "data.shape")
        folder.require(len(self.rules.names) == shape.inputs, "data.rules")
        folder.require(self.scaler.fits(max(shape.inputs, shape.targets)), "data.scaler")
        folder.require(len(self.sizes) in (0, shape.inputs), "data.sizes")
        folder.require(self.ranges is None or self.ranges.fit(shape.inputs), "data.ranges")
        for name, seconds in (("step_s", self.step_s), ("rules.step", self.rules.step)):
            folder.require(seconds is None or seconds > 0, f"data.{name}")
        folder.require(self.rules.max_gap is None or self.rules.max_gap > 0, "data.rules.max_gap")
        needs_time = self.rules.step or self.rules.max_gap or self.rules.cumulate
        folder.require(not needs_time or bool(self.rules.time), "data.rules.time")
