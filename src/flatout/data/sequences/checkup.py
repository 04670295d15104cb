"""What a run would find in its recordings before training, without a store: what `flatout check` prints of them.

One pass over the tables, a file at a time. The first mistake that would end a run ends the check as well.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flatout.data.checks.findings import Level, Remark, counted
from flatout.data.sequences.choices import SequenceProblem
from flatout.data.sequences.recordings import ReadingNotes
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.sequences.survey import SequencePreparation, Survey
from flatout.data.sequences.views import require_rows
from flatout.data.store.progress import Progress
from flatout.errors import UserError

_TRAIN = "python -m train data=sequence model=rnn task=sequence precision=fp32"
_MAPPINGS = "data.noise.", "data.offset.", "data.low_pass."
"""Settings by feature, which `train` takes with a plus sign."""
_LABEL = "python -m train data=sequence model=rnn precision=fp32"


@dataclass(slots=True)
class SequenceCheckup:
    """What was found."""

    source: str
    remarks: list[Remark] = field(default_factory=list)
    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    """Recordings of each split, their samples, and the samples of the shortest, the median and the longest."""
    columns: dict[str, dict[str, float]] = field(default_factory=dict)
    """Mean, spread, least and most of each column over the training samples."""
    steps_s: list[float] = field(default_factory=list)
    """Least, median and most of the recordings' seconds between two samples; empty without data.time."""

    def count(self, level: Level) -> int:
        return sum(remark.level is level for remark in self.remarks)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        facts = {"source": self.source, "splits": self.splits, "columns": self.columns, "steps_s": self.steps_s}
        return {**facts, "remarks": [remark.as_dict() for remark in self.remarks]}

    def lines(self) -> list[str]:
        """Lengths, sampling and columns as tables."""
        lines = []
        for split, counts in self.splits.items():
            shortest, median, longest = (f"{counts[name]:,}" for name in ("shortest", "median", "longest"))
            lengths = shortest if shortest == longest else f"{shortest} to {longest}, median {median}"
            recordings = counted(counts["recordings"], "recording")
            lines.append(f"{split}: {recordings}, {counts['samples']:,} samples; length {lengths}")
        if self.steps_s:
            least_s, median_s, most_s = self.steps_s
            lines.append(f"a sample every {median_s:g} s (recordings: {least_s:g} to {most_s:g} s)")
        if self.columns:
            names = ("mean", "spread", "least", "most")
            width = max(map(len, [*self.columns, "training samples"]))
            lines += ["", "training samples".ljust(width) + "".join(f"{name:>12}" for name in names)]
            for column, values in self.columns.items():
                lines.append(column.ljust(width) + "".join(f"{values[name]:>12.5g}" for name in names))
        return ["", *lines, ""]

    def command(self, key: str, source: str, settings: Sequence[str]) -> str:
        """The command that trains on these recordings."""
        start = _LABEL if f"data.problem={SequenceProblem.label.value}" in settings else _TRAIN
        settings = [f"+{setting}" if setting.startswith(_MAPPINGS) else setting for setting in settings]
        return f"{start} data.{key}={shlex.quote(source)} {shlex.join(settings)}".rstrip()


def check_recordings(config: SequenceDataConfig) -> SequenceCheckup:
    """Read all recordings once; a mistake of the user is a remark."""
    source = str(config.source or config.train or "the built-in cells")
    found, notes = SequenceCheckup(source), ReadingNotes()
    try:
        _fill(found, config, notes)
    except UserError as error:
        found.remarks.append(Remark(Level.error, error.where, str(error).removeprefix(f"{error.where}: ")))
    found.remarks += map(_remark, notes.lines())
    if notes.steps and config.time is not None:
        found.steps_s = [float(value) for value in np.quantile(notes.steps, (0, 0.5, 1))]
    return found


def _fill(found: SequenceCheckup, config: SequenceDataConfig, notes: ReadingNotes) -> None:
    preparation = SequencePreparation(config)
    survey = Survey(config, preparation.columns, preparation.splitter())
    with Progress() as progress:
        for split, recording in preparation.read(notes, progress):
            survey.add(split, recording)
    survey.finish()
    found.remarks += map(_remark, survey.lines())
    found.columns = survey.describe_columns()
    for split, counts in survey.facts()["splits"].items():
        own = [each for each in survey.segments if each.split == split]
        lengths = np.array([each.stop - each.first for each in own])
        shortest, median, longest = (int(value) for value in np.quantile(lengths, (0, 0.5, 1)))
        found.splits[split] = {**counts, "shortest": shortest, "median": median, "longest": longest}
        require_rows(config, split, own, [survey.found[each.recording].name for each in own])


def _remark(line: str) -> Remark:
    """A line of the survey; its level stands before it."""
    level = Level.warning if line.startswith("warning ") else Level.note
    source, _, what = line.removeprefix("warning ").partition(": ")
    return Remark(level, source, what)
