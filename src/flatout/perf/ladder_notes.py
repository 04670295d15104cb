"""What ladders measured on this machine, so that a verdict can refer to it: one small file for each ladder.

A rung that does what an override of a run does is noted under that override. The newest note of an override counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatout.data.store.cache import default_cache_folder
from flatout.report.summary import hardware, write_atomically

FOLDER = "ladders"


@dataclass(frozen=True, slots=True)
class Gain:
    """What a rung brought."""

    ladder: str
    rung: str
    ratio: float
    low: float | None
    high: float | None
    date: str
    device: str

    def sentence(self) -> str:
        """Such as: bf16 brought 1.9× (1.8–2.0) in your ladder tweets of 2026-11-22."""
        sure = "" if self.low is None or self.high is None else f" ({self.low:.1f}–{self.high:.1f})"
        return f"{self.rung} brought {self.ratio:.1f}×{sure} in your ladder {self.ladder} of {self.date}"


def note_ladder(cache: Path, found: Mapping[str, Any], settings: Mapping[str, str]) -> Path | None:
    """Note the measured rungs of a ladder; `settings`: the override that does what a rung does, by its name.

    None where no such rung was measured. `OSError` where the disk refuses.
    """
    gains = {
        settings[rung["name"]]: {"rung": rung["name"], **rung["measured"]}
        for rung in found["rungs"]
        if rung["measured"] and settings.get(rung["name"])
    }
    if not gains:
        return None
    path = cache / FOLDER / f"{found['name']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {name: found[name] for name in ("name", "date", "device")}
    write_atomically(path, json.dumps({**about, "gains": gains}, indent=1, ensure_ascii=False))
    return path


def known_gain(cache: Path, override: str, device: str) -> Gain | None:
    """What an override brought in the newest ladder on this device; None where no ladder measured it.

    `override` is a whole word (`precision=bf16`), or a word whose key alone was noted (`data.batch_size=64`).
    """
    found = [
        gain
        for path in (cache / FOLDER).glob("*.json")
        for noted, gain in _read(path).items()
        if gain.device == device and noted in (override, override.partition("=")[0])
    ]
    return max(found, key=lambda gain: (gain.date, gain.ladder), default=None)


def measured_before(override: str | None) -> str | None:
    """What a ladder on this machine has measured for one of the words of an override, as a sentence."""
    folder, device = default_cache_folder(), device_name()
    gains = (known_gain(folder, word, device) for word in (override or "").split())
    return next((gain.sentence() for gain in gains if gain is not None), None)


def device_name() -> str:
    """The machine that measures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = hardware(device, max(1, torch.cuda.device_count()), "")
    return f"{about['device']}, {about['cores']} cores"


def _read(path: Path) -> dict[str, Gain]:
    """The gains of a note; of a damaged one none, as a verdict does without."""
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        about = (str(noted["date"]), str(noted["device"]))
        return {
            str(override): Gain(
                str(noted["name"]), str(gain["rung"]), float(gain["value"]), gain["low"], gain["high"], *about
            )
            for override, gain in noted["gains"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
