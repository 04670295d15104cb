"""Confirmed fixes of a verdict: how much faster a run was with an override.

`doctor --confirm` measures it in short runs and writes `confirmation.json` into the run folder.
`tune` reads the file, and does not measure the same again. Here stand the lengths of the short runs
(`count_steps`), and what is kept of them.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flatout.files import load_json, write_atomically
from flatout.perf.measure.intervals import SpeedupInterval
from flatout.perf.verdict.evidence import Evidence
from flatout.perf.verdict.findings import RECOMMENDED

FILE = "confirmation.json"
LEAST_STEPS = 60
"""Optimizer steps of the shortest run that is compared."""
_MOST_STEPS = 300
_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OverrideConfirmation:
    """The speedup of an override, measured in rounds of short runs with and without it."""

    override: str
    predicted: SpeedupInterval | None  # by the verdict; None if it had not tried the override
    measured: SpeedupInterval
    steps: int  # optimizer steps of each run with the original settings
    # Rows a second of each round: without and with the override.
    rates: tuple[tuple[float, ...], tuple[float, ...]]
    device: str
    version: str

    @property
    def holds(self) -> bool:
        return self.predicted is not None and self.measured.value in self.predicted

    @property
    def helps(self) -> bool:
        return self.measured.low > RECOMMENDED

    @property
    def slows(self) -> bool:
        return self.measured.high < 1

    def sentence(self) -> str:
        measured = f"measured {self.measured}"
        if self.predicted is None:
            return f"{self.override}: {measured}, untested before"
        ending = "as predicted" if self.holds else "outside the predicted bounds"
        return f"{self.override}: predicted {self.predicted}, {measured}, {ending}"

    def as_dict(self) -> dict[str, Any]:
        predicted = None if self.predicted is None else self.predicted.as_dict()
        return asdict(self) | {
            "predicted": predicted,
            "measured": self.measured.as_dict(),
            "holds": self.holds,
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> OverrideConfirmation:
        """The confirmation whose `as_dict` this is.

        KeyError, TypeError or ValueError for anything else.
        """
        predicted = values["predicted"]
        before, after = values["rates"]
        return OverrideConfirmation(
            override=str(values["override"]),
            predicted=None if predicted is None else _interval(predicted),
            measured=_interval(values["measured"]),
            steps=int(values["steps"]),
            rates=(tuple(before), tuple(after)),
            device=str(values["device"]),
            version=str(values["version"]),
        )


def _interval(values: Mapping[str, Any]) -> SpeedupInterval:
    """The interval whose `as_dict` this is; a file of others may hold anything in it."""
    return SpeedupInterval(float(values["value"]), float(values["low"]), float(values["high"]))


def promised_speedup(judged: Mapping[str, Any]) -> SpeedupInterval | None:
    """The speedup that a verdict predicts for its override, with bounds; None if it names none."""
    if judged["predicted_gain"] is None:
        return None
    return SpeedupInterval(judged["predicted_gain"], judged["gain_low"], judged["gain_high"])


def count_steps(evidence: Evidence) -> int:
    """Optimizer steps of each short run: about three seconds of training."""
    step_s = evidence.total_ms * evidence.accumulate / 1000
    steps = min(_MOST_STEPS, max(LEAST_STEPS, round(3.0 / max(step_s, 1e-6))))
    # The end of an epoch costs time too (validation, a checkpoint). So a run goes on to that end
    # where it is near: 100 steps become 150 of an epoch of 150, and stay 100 of one of 400.
    epoch = math.ceil(evidence.steps / max(evidence.epochs, 1e-9))
    return epoch if steps < epoch <= min(2 * steps, _MOST_STEPS) else steps


def count_override_steps(override: str, evidence: Evidence, steps: int) -> int:
    """Steps with the override that train as many rows as `steps` without it.

    200 steps of 8 rows, override `data.batch_size=16` → 100 steps.
    """
    return max(LEAST_STEPS, round(steps / _growth_of_step(override, evidence)))


def _growth_of_step(override: str, evidence: Evidence) -> float:
    """How many times as many rows an optimizer step has with the override."""
    values = dict(word.split("=", 1) for word in override.split() if "=" in word)
    if (effective := values.get("data.effective_batch", "null")) != "null":
        return int(effective) / max(1, evidence.effective_batch or 1)
    rows = int(values.get("data.batch_size", evidence.batch_size or 1)) / (evidence.batch_size or 1)
    return rows * int(values.get("data.accumulate", evidence.accumulate)) / evidence.accumulate


@dataclass(slots=True)
class Confirmed:
    """What confirmations of a run say about settings: `tune` does not measure these again."""

    values: dict[str, Any] = field(default_factory=dict)  # settings that made the run faster
    why: dict[str, str] = field(default_factory=dict)  # the reason for each of them
    slower: frozenset[str] = frozenset()  # overrides that slowed it


def read_confirmations(folder: Path) -> list[OverrideConfirmation]:
    """The confirmations in a run folder, the newest first; a warning and none if it is damaged."""
    path = folder / FILE
    try:
        values = load_json(path)
        if values["schema"] != _SCHEMA:
            return []
        return list(map(OverrideConfirmation.from_dict, values["confirmations"]))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        warnings.warn(
            f"{path} is damaged: doctor --confirm writes it again", UserWarning, stacklevel=2
        )
        return []


def keep_confirmation(folder: Path, confirmation: OverrideConfirmation) -> Path:
    """Write a confirmation to the run folder; it replaces an older one of the same override."""
    confirmations = [confirmation.as_dict()]
    for other in read_confirmations(folder):
        if other.override != confirmation.override:
            confirmations.append(other.as_dict())
    values = {"schema": _SCHEMA, "confirmations": confirmations}
    path = folder / FILE
    write_atomically(path, json.dumps(values, indent=1))
    return path
