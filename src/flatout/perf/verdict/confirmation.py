"""Confirmed fixes of a verdict: how much faster a run was with an override.

`doctor --confirm` measures it in short runs and writes `confirmation.json` into the run folder.
`tune` reads the file, and does not measure the same again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flatout.files import write_atomically
from flatout.perf.measure.intervals import SpeedupInterval
from flatout.perf.verdict.findings import RECOMMENDED

FILE = "confirmation.json"
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
            predicted=None if predicted is None else SpeedupInterval(**predicted),
            measured=SpeedupInterval(**values["measured"]),
            steps=int(values["steps"]),
            rates=(tuple(before), tuple(after)),
            device=str(values["device"]),
            version=str(values["version"]),
        )


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
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["schema"] != _SCHEMA:
            return []
        return list(map(OverrideConfirmation.from_dict, values["confirmations"]))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
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
