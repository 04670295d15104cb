"""`check SOURCE data.features=… data.target=…`: recordings, their lengths and columns, and the command that trains."""

from __future__ import annotations

import shlex
from dataclasses import fields

from flatout.data.checks.findings import counted
from flatout.data.sequences.checkup import SequenceCheckup
from flatout.data.sequences.choices import SequenceProblem
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.text import TextDataConfig

_TRAIN = "python -m train data=sequence model=rnn task=sequence precision=fp32"
_MAPPINGS = "data.noise.", "data.offset.", "data.low_pass."
"""Settings by feature, which `train` takes with a plus sign."""
_LABEL = "python -m train data=sequence model=rnn precision=fp32"


def are_of_recordings(settings: list[str]) -> bool:
    """Whether a setting is one that only recordings have."""
    own = {field.name for field in fields(SequenceDataConfig)} - {field.name for field in fields(TextDataConfig)}
    names = {setting.partition("=")[0].removeprefix("data.").partition(".")[0] for setting in settings}
    problems = {f"data.problem={problem.value}" for problem in SequenceProblem}
    return bool(names & own or problems & set(settings))


def train_command(key: str, source: str, settings: list[str]) -> str:
    """The command that trains on these recordings."""
    start = _LABEL if f"data.problem={SequenceProblem.label.value}" in settings else _TRAIN
    settings = [f"+{setting}" if setting.startswith(_MAPPINGS) else setting for setting in settings]
    return f"{start} data.{key}={shlex.quote(source)} {shlex.join(settings)}".rstrip()


def lines_of_recordings(found: SequenceCheckup) -> list[str]:
    """Lengths, sampling and columns as tables."""
    lines = []
    for split, counts in found.splits.items():
        shortest, median, longest = (f"{counts[name]:,}" for name in ("shortest", "median", "longest"))
        lengths = shortest if shortest == longest else f"{shortest} to {longest}, median {median}"
        recordings = counted(counts["recordings"], "recording")
        lines.append(f"{split}: {recordings}, {counts['samples']:,} samples; length {lengths}")
    if found.steps_s:
        least_s, median_s, most_s = found.steps_s
        lines.append(f"a sample every {median_s:g} s (recordings: {least_s:g} to {most_s:g} s)")
    if found.columns:
        names = ("mean", "spread", "least", "most")
        width = max(map(len, [*found.columns, "training samples"]))
        lines += ["", "training samples".ljust(width) + "".join(f"{name:>12}" for name in names)]
        for column, values in found.columns.items():
            lines.append(column.ljust(width) + "".join(f"{values[name]:>12.5g}" for name in names))
    return lines
