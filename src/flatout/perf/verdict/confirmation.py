"""What a fix was worth when it was run: kept beside the run, in `confirmation.json`, and read by
`tune`.
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
    """An override beside the original settings, in rounds of short runs."""

    override: str
    predicted: SpeedupInterval | None  # by the verdict; None where it had not tried the override
    measured: SpeedupInterval
    steps: int  # optimizer steps of each run with the original settings
    # rows a second of each round: as it was, and with the override
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
    def from_dict(kept: Mapping[str, Any]) -> OverrideConfirmation:
        """From what `as_dict` gave; anything else is a KeyError, TypeError or ValueError."""
        predicted = kept["predicted"]
        before, after = kept["rates"]
        return OverrideConfirmation(
            override=str(kept["override"]),
            predicted=None if predicted is None else SpeedupInterval(**predicted),
            measured=SpeedupInterval(**kept["measured"]),
            steps=int(kept["steps"]),
            rates=(tuple(before), tuple(after)),
            device=str(kept["device"]),
            version=str(kept["version"]),
        )


@dataclass(slots=True)
class Confirmed:
    """What confirmations have found for some settings: `tune` does not measure it again."""

    values: dict[str, Any] = field(default_factory=dict)  # settings that made the run faster
    why: dict[str, str] = field(default_factory=dict)  # of each of them, by its key
    slower: frozenset[str] = frozenset()  # overrides that slowed it


def read_confirmations(folder: Path) -> list[OverrideConfirmation]:
    """The confirmations beside a run, the newest first; a damaged file is named and
    counts as none.
    """
    path = folder / FILE
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return (
            [OverrideConfirmation.from_dict(each) for each in kept["confirmations"]]
            if kept["schema"] == _SCHEMA
            else []
        )
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        warnings.warn(
            f"{path} is damaged: doctor --confirm writes it again", UserWarning, stacklevel=2
        )
        return []


def keep_confirmation(folder: Path, confirmation: OverrideConfirmation) -> Path:
    """Write a confirmation beside the run; it replaces an older one of the same override."""
    others = [each for each in read_confirmations(folder) if each.override != confirmation.override]
    values = {
        "schema": _SCHEMA,
        "confirmations": [each.as_dict() for each in (confirmation, *others)],
    }
    path = folder / FILE
    write_atomically(path, json.dumps(values, indent=1))
    return path
