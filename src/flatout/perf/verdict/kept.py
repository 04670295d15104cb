"""`verdict.json`: a verdict, its evidence, the pace of the steps, and the machine they ran on.

The pace is what a later training is compared with: optimizer steps a second, with an interval. The
steps are cut into blocks of equal number, one after the other. The pace is the median of the
blocks' paces, so that a few slow seconds do not count. With blocks of 10, 9, 10, 4 and 10 steps a
second it is 10. The training's own pace leaves out the time in which it waited for a core, as other
processes had it: that is compared where both trainings have it.
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

from flatout.data.checks.findings import counted
from flatout.distributed.limits import processor_name
from flatout.errors import UserError, require
from flatout.files import load_json, write_atomically
from flatout.perf.measure.intervals import SpeedupInterval, median_of
from flatout.perf.verdict.evidence import LEAST_STEPS, Evidence, split_line

# Of 12 blocks the middle eight are an interval of nine in ten; of 40 the middle twelve.
_LEAST_BLOCKS = 12
_MOST_BLOCKS = 40
_STEPS_A_BLOCK = 5
_FASTEST = 1e12  # steps a second that a baseline may have


class Pace:
    """The times at which optimizer steps ended, without what lay between the steps."""

    def __init__(self) -> None:
        self._ended_s = array("d")
        self._own_ended_s = array("d")
        self._outside_s = 0.0
        self._waited_s = 0.0

    def note_step(self, now_s: float, outside_s: float, waited_s: float = 0.0) -> None:
        """A step has ended; `outside_s`: seconds so far of logging, checkpoints and validations.

        `waited_s`: seconds so far in which the training waited for a core, outside of steps, too.
        """
        ended_s = now_s - outside_s
        own_ended_s = ended_s
        if self._ended_s:
            step_s = ended_s - self._ended_s[-1]
            outside_step_s = outside_s - self._outside_s
            waited_step_s = waited_s - self._waited_s
            # The waits are divided between the step and what came between it and the one before.
            waited_step_s *= step_s / max(step_s + outside_step_s, 1e-9)
            own_ended_s = self._own_ended_s[-1] + max(0.0, step_s - waited_step_s)
        self._ended_s.append(ended_s)
        self._own_ended_s.append(own_ended_s)
        self._outside_s = outside_s
        self._waited_s = waited_s

    def steps_per_s(self) -> SpeedupInterval | None:
        """Steps a second, with an interval; None for fewer steps than a verdict needs."""
        return _pace_of(self._ended_s)

    def own_steps_per_s(self) -> SpeedupInterval | None:
        """The same without the time in which the training waited for a core."""
        return _pace_of(self._own_ended_s)


def _pace_of(ended_s: array[float]) -> SpeedupInterval | None:
    steps = len(ended_s) - 1
    if steps < LEAST_STEPS:
        return None
    blocks = min(max(_LEAST_BLOCKS, steps // _STEPS_A_BLOCK), _MOST_BLOCKS)
    edges = [round(block * steps / blocks) for block in range(blocks + 1)]
    paces = list[float]()
    for first, last in pairwise(edges):
        seconds = max(ended_s[last] - ended_s[first], 1e-9)
        paces.append((last - first) / seconds)
    return median_of(paces)


def describe_missed(steps: int) -> str:
    """Why there is no verdict where one was attached after so many steps of a Trainer."""
    return f"it was attached after {counted(steps, 'step')}; it judges what is trained from now on"


@dataclass(kw_only=True)
class KeptVerdict:
    """What one training leaves behind for `verdict.json`."""

    verdict: dict[str, Any] | None = None
    evidence: Evidence | None = None
    why_none: str = ""  # why there is no verdict
    pace: SpeedupInterval | None = None
    own_pace: SpeedupInterval | None = None  # without the time that other processes took
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def waiting_share(self) -> float:
        """The fraction of the time of steps in which the training waited for a core."""
        if self.pace is None or self.own_pace is None:
            return 0.0
        return max(0.0, 1 - self.pace.value / self.own_pace.value)

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "evidence": None if self.evidence is None else asdict(self.evidence),
            "why_none": None if self.verdict else self.why_none,
            "steps_per_s": None if self.pace is None else self.pace.as_dict(),
            "own_steps_per_s": None if self.own_pace is None else self.own_pace.as_dict(),
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


class JudgingCallback:
    """What a callback that judges trainings has when one has ended, on the first rank."""

    verdict: dict[str, Any] | None = None  # as in `summary.json`; None after a short training
    evidence: Evidence | None = None
    kept: KeptVerdict | None = None  # what `verdict.json` has
    why_none = "no training has ended yet"

    def save(self, path: str | Path) -> None:
        """Write the verdict and its evidence as JSON; without a verdict, why there is none."""
        (self.kept or KeptVerdict(why_none=self.why_none)).save(path)


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
        values = load_json(path)
    except FileNotFoundError:
        raise UserError("--against", f"there is no {path}", hint=hint) from None
    except OSError as error:
        raise UserError(
            "--against", f"{path} cannot be read: {error.strerror}", hint=hint
        ) from None
    except UserError as error:
        raise UserError("--against", f"{path} {error.what}", hint=hint) from None
    is_ours = isinstance(values, dict) and isinstance(values.get("machine"), dict)
    require(is_ours, "--against", f"{path} is no verdict of a training", hint=hint)
    require(_is_pace(values.get("steps_per_s")), "--against", f"{path} has no pace", hint=hint)
    return dict(values)


def _is_pace(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    numbers = [value.get(name) for name in ("value", "low", "high")]
    # a whole number may have more digits than arithmetic of floats takes
    return all(isinstance(number, float | int) and 0 < number < _FASTEST for number in numbers)


def paces_to_compare(
    judged: KeptVerdict, baseline: Mapping[str, Any]
) -> tuple[SpeedupInterval, dict[str, float]] | None:
    """The pace of a training and that of the baseline, of one kind; None without a pace.

    They are the own paces, where the baseline has one.
    """
    before = baseline.get("own_steps_per_s")
    if judged.own_pace is not None and before is not None and _is_pace(before):
        return judged.own_pace, before
    return None if judged.pace is None else (judged.pace, baseline["steps_per_s"])


def compare_with(
    pace: SpeedupInterval,
    before: Mapping[str, float],
    machine: Mapping[str, Any],
    machine_then: Mapping[str, Any],
) -> SpeedupInterval | str:
    """The ratio of a pace to an earlier one; a sentence where the machines differ.

    Bounds: 20 (19–21) steps a second after 25 (24–26) is a ratio of 0.8, from 19 / 26 to 21 / 24.
    """
    differing = list[str]()
    for name, value in machine.items():
        value_then = machine_then.get(name)
        if value != value_then:
            differing.append(f"{name} {value} now, {value_then} then")
    if differing:
        return f"not compared: another machine ({'; '.join(differing)})"
    return SpeedupInterval(
        pace.value / before["value"], pace.low / before["high"], pace.high / before["low"]
    )
