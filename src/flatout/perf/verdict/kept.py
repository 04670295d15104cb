"""`verdict.json`: a verdict, its evidence, the pace of the steps, and the machine they ran on.

The pace is what a later training is compared with: optimizer steps a second, with an interval. The
steps are cut into blocks of equal number, one after the other. The pace is the median of the
blocks' paces, so that a few slow seconds do not count. With blocks of 10, 9, 10, 4 and 10 steps a
second it is 10.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from flatout.distributed.limits import processor_name
from flatout.errors import UserError, require
from flatout.files import write_atomically
from flatout.perf.measure.intervals import SpeedupInterval, median_of
from flatout.perf.verdict.evidence import LEAST_STEPS, Evidence, split_line

_BLOCKS = 12  # the middle eight of them are an interval of nine in ten


class Pace:
    """The times at which optimizer steps ended, without what lay between the steps."""

    def __init__(self) -> None:
        self._ended_s = array("d")

    def note_step(self, now_s: float, outside_s: float) -> None:
        """A step has ended; `outside_s`: seconds so far of logging, checkpoints and validations."""
        self._ended_s.append(now_s - outside_s)

    def steps_per_s(self) -> SpeedupInterval | None:
        """Steps a second, with an interval; None for fewer steps than a verdict needs."""
        steps = len(self._ended_s) - 1
        if steps < LEAST_STEPS:
            return None
        edges = [round(block * steps / _BLOCKS) for block in range(_BLOCKS + 1)]
        paces = list[float]()
        for first, last in pairwise(edges):
            seconds = max(self._ended_s[last] - self._ended_s[first], 1e-9)
            paces.append((last - first) / seconds)
        return median_of(paces)


@dataclass(kw_only=True)
class KeptVerdict:
    """What one training leaves behind for `verdict.json`."""

    verdict: dict[str, Any] | None = None
    evidence: Evidence | None = None
    why_none: str = ""  # why there is no verdict
    pace: SpeedupInterval | None = None
    machine: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "evidence": None if self.evidence is None else asdict(self.evidence),
            "why_none": None if self.verdict else self.why_none,
            "steps_per_s": None if self.pace is None else self.pace.as_dict(),
            "machine": self.machine,
        }

    def lines(self) -> list[str]:
        """What is printed: the split of the time, that of each rank, and the sentence."""
        evidence = self.evidence
        if evidence is None or self.verdict is None:
            return [f"none, {self.why_none}"]
        lines = [*evidence.notes, f"{evidence.steps:,} steps, {split_line(evidence.ms)}"]
        own_ms = evidence.own_ms_of_ranks
        for rank, ms in enumerate(evidence.ranks):
            is_slowest = own_ms[rank] == max(own_ms)
            line = f"rank {rank}: {split_line(ms)}"
            lines.append(
                f"{line}; the slowest: {own_ms[rank]:.1f} ms of its own" if is_slowest else line
            )
        return [*lines, self.verdict["sentence"]]

    def save(self, path: str | Path) -> None:
        write_atomically(Path(path), json.dumps(self.as_dict(), indent=1, ensure_ascii=False))


def describe_machine(device: torch.device, world: int) -> dict[str, Any]:
    """What is equal for two machines only if times measured on one are valid for the other."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "devices": world,
    }


def read_baseline(path: Path) -> dict[str, Any]:
    """A `verdict.json` to compare with; `UserError` where it is none."""
    hint = "Name a verdict.json that python -m flatout doctor run has written."
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("--against", f"there is no {path}", hint=hint) from None
    except (OSError, ValueError) as error:
        raise UserError("--against", f"{path} cannot be read: {error}", hint=hint) from None
    is_ours = isinstance(values, dict) and isinstance(values.get("machine"), dict)
    require(is_ours, "--against", f"{path} is no verdict of a training", hint=hint)
    require(_is_pace(values.get("steps_per_s")), "--against", f"{path} has no pace", hint=hint)
    return dict(values)


def _is_pace(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    numbers = [value.get(name) for name in ("value", "low", "high")]
    return all(isinstance(number, float | int) and number > 0 for number in numbers)


def compare_with(
    pace: SpeedupInterval, machine: Mapping[str, Any], baseline: Mapping[str, Any]
) -> SpeedupInterval | str:
    """The ratio of a pace to the baseline's; a sentence where the machines differ.

    Bounds: 20 (19–21) steps a second after 25 (24–26) is a ratio of 0.8, from 19 / 26 to 21 / 24.
    """
    before = baseline["steps_per_s"]
    differing = [name for name, value in machine.items() if baseline["machine"].get(name) != value]
    if differing:
        parts = list[str]()
        for name in differing:
            parts.append(f"{name} {machine[name]} now, {baseline['machine'].get(name)} then")
        return f"not compared: another machine ({'; '.join(parts)})"
    return SpeedupInterval(
        pace.value / before["value"], pace.low / before["high"], pace.high / before["low"]
    )
