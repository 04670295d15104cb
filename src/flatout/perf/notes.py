"""Notes of earlier runs on this machine, a small file each: what fits into memory, and what ladders
have measured.

Alike are runs of the same model and its settings, precision, longest row and layout, on as many
devices of the same kind. A run that ran out of memory notes the rows (or tokens) it computed at
once; the next one begins with them. Tuning finds the same notes by `row_key` and tries no more
rows. To try whole batches again, delete the file. A ladder notes its gains so that verdicts can
refer to them: a rung that does what an override does is noted under it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.data.store.cache import default_cache_folder, recipe_key
from flatout.files import sync_folder, write_atomically
from flatout.report.summary import hardware

FOLDER = "micro-batches"
ROWS = "training rows"  # the limit that tuning looks for
_LADDERS = "ladders"


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that was computed at once."""

    most: int
    # whether it ended the run, so that the run that resumes needs it at once
    has_ended: bool = False


class MicroBatches:
    """The note of runs like this one."""

    def __init__(self, cache: Path, about: Mapping[str, Any]) -> None:
        self.about = dict(about)
        self.path = cache / FOLDER / f"{recipe_key(self.about)}.json"

    def read(self) -> tuple[dict[str, Limit], str]:
        """The limits, by what they are for; and a sentence where the file is damaged."""
        return _read_limits(self.path)[1:]

    def note(self, name: str, limit: Limit, row_key: str = "") -> None:
        """Write a limit down; `OSError` where the disk refuses."""
        limits = {each: asdict(kept) for each, kept in {**self.read()[0], name: limit}.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        noted = {"about": self.about, "row_key": row_key, "limits": limits}
        write_atomically(self.path, json.dumps(noted, indent=1, ensure_ascii=False))
        sync_folder(self.path.parent)


def known_rows(cache: Path, row_key: str) -> int | None:
    """The most rows that are known to fit at once, by `micro_batch_key`; None where nothing is
    known.
    """
    found = []
    for path in sorted((cache / FOLDER).glob("*.json")):
        key, limits, word = _read_limits(path)
        if word:
            warnings.warn(word, UserWarning, stacklevel=2)
        elif key == row_key and ROWS in limits:
            found.append(limits[ROWS].most)
    return min(found, default=None)


def micro_batch_key(model: nn.Module, *, longest: int, device: torch.device, precision: str) -> str:
    """A name for what decides how many rows fit at once: shapes, longest row, device,
    arithmetic.
    """
    shapes = [
        (name, list(weight.shape), weight.requires_grad)
        for name, weight in model.named_parameters()
    ]
    return recipe_key(
        {"shapes": shapes, "longest": longest, "device": memory_key(device), "precision": precision}
    )


def memory_key(device: torch.device) -> str:
    """A device by its make and memory, so that two alike share their answers."""
    if device.type != "cuda":
        return device.type
    known = torch.cuda.get_device_properties(device)
    return f"{known.name}, {known.total_memory / 2**30:.0f} GiB"


def _read_limits(path: Path) -> tuple[str, dict[str, Limit], str]:
    """The key of a note for tuning, its limits, and a sentence where it is damaged."""
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        found = {
            str(name): Limit(_count(of["most"]), bool(of["has_ended"]))
            for name, of in noted["limits"].items()
        }
        return str(noted.get("row_key", "")), found, ""
    except FileNotFoundError:
        return "", {}, ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return "", {}, f"{path} is damaged ({type(error).__name__}) and passed over"


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is no number of rows")
    return value


def note_ladder(cache: Path, found: Mapping[str, Any], settings: Mapping[str, str]) -> None:
    """Note the measured rungs of a ladder, if any; `settings`: the override that does what a rung
    does, by its name.
    """
    noted = [rung for rung in found["rungs"] if rung["measured"] and settings.get(rung["name"])]
    if gains := {
        settings[rung["name"]]: {"rung": rung["name"], **rung["measured"]} for rung in noted
    }:
        path = cache / _LADDERS / f"{found['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {name: found[name] for name in ("name", "date", "device")}
        write_atomically(path, json.dumps({**about, "gains": gains}, indent=1, ensure_ascii=False))


def known_gain(cache: Path, override: str, device: str) -> str | None:
    """What an override, or its key alone, brought in the newest ladder on this device, in words;
    None without.
    """
    found: list[tuple[str, str, str]] = []
    for path in (cache / _LADDERS).glob("*.json"):
        # A verdict does without a damaged note.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            noted = json.loads(path.read_text(encoding="utf-8"))
            date = str(noted["date"])
            name = str(noted["name"])
            gains = noted["gains"]
            for gain in (
                gains[word] for word in (override, override.partition("=")[0]) if word in gains
            ):
                low, high = gain["low"], gain["high"]
                sure = "" if low is None or high is None else f" ({low:.1f}–{high:.1f})"
                said = (
                    f"{gain['rung']} brought {gain['value']:.1f}×{sure} in your ladder {name} of"
                    f" {date}"
                )
                found += [(date, name, said)] if noted["device"] == device else []
    return max(found)[2] if found else None


def measured_before(override: str | None) -> str | None:
    """What a ladder on this machine has measured for one of the words of an override, as a
    sentence.
    """
    folder = default_cache_folder()
    device = machine_name()
    return next(
        filter(None, (known_gain(folder, word, device) for word in (override or "").split())), None
    )


def machine_name() -> str:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = hardware(device, max(1, torch.cuda.device_count()), "")
    return f"{about['device']}, {about['cores']} cores"
