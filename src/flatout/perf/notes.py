"""Notes of earlier runs on this machine, in small files: what fits into memory, and gains of
ladders.

A run that ran out of memory notes how many rows (or tokens) it then computed at once, and a later
run like it starts with them. Two runs are alike if they have the same model and settings,
precision, longest row and layout, and as many devices of the same kind. Tuning finds the same notes
by `row_key` and tries no more rows. To try whole batches again, delete the file.

A ladder notes the gain of each rung under the override that does the same, so that verdicts can
refer to it.
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
from flatout.files import load_json, sync_folder, write_atomically
from flatout.report.summary import hardware

FOLDER = "micro-batches"
ROWS = "training rows"  # the limit that tuning reads
_LADDERS = "ladders"


@dataclass(frozen=True, slots=True)
class Limit:
    """The most rows (or tokens) that were computed at once."""

    most: int
    # Whether running out of memory ended the run: the run that resumes it needs the limit at once.
    has_ended: bool = False


class MicroBatches:
    """The note of runs like this one: `about` is what they have in common."""

    def __init__(self, cache: Path, about: Mapping[str, Any]) -> None:
        self.about = dict(about)
        self.path = cache / FOLDER / f"{recipe_key(self.about)}.json"

    def read(self) -> tuple[dict[str, Limit], str]:
        """The limits by name, such as `ROWS`, and a sentence if the file is damaged, else ""."""
        return _read_limits(self.path)[1:]

    def note(self, name: str, limit: Limit, row_key: str = "") -> None:
        """Add a limit to the file; `OSError` if it cannot be written."""
        limits = self.read()[0] | {name: limit}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        values = {
            "about": self.about,
            "row_key": row_key,
            "limits": {name: asdict(limit) for name, limit in limits.items()},
        }
        write_atomically(self.path, json.dumps(values, indent=1, ensure_ascii=False))
        sync_folder(self.path.parent)


def known_rows(cache: Path, row_key: str) -> int | None:
    """The most rows at once that fitted in all earlier runs with this `micro_batch_key`.

    None if there was no such run.
    """
    fitting_rows = []
    for path in sorted((cache / FOLDER).glob("*.json")):
        key, limits, damage = _read_limits(path)
        if damage:
            warnings.warn(damage, UserWarning, stacklevel=2)
        elif key == row_key and ROWS in limits:
            fitting_rows.append(limits[ROWS].most)
    return min(fitting_rows, default=None)


def micro_batch_key(model: nn.Module, *, longest: int, device: torch.device, precision: str) -> str:
    """A key of all that decides how many rows fit at once.

    That is the shapes of the weights and which are trained, the longest row, device and precision.
    """
    shapes = [
        (name, list(weight.shape), weight.requires_grad)
        for name, weight in model.named_parameters()
    ]
    return recipe_key(
        {"shapes": shapes, "longest": longest, "device": memory_key(device), "precision": precision}
    )


def memory_key(device: torch.device) -> str:
    """A device's name and memory: two devices of the same kind share their notes."""
    if device.type != "cuda":
        return device.type
    card = torch.cuda.get_device_properties(device)
    return f"{card.name}, {card.total_memory / 2**30:.0f} GiB"


def _read_limits(path: Path) -> tuple[str, dict[str, Limit], str]:
    """The `row_key` of a note, its limits by name, and a sentence if the file is damaged."""
    try:
        values = load_json(path)
        limits = {}
        for name, limit in values["limits"].items():
            limits[str(name)] = Limit(_as_rows(limit["most"]), bool(limit["has_ended"]))
        return str(values.get("row_key", "")), limits, ""
    except FileNotFoundError:
        return "", {}, ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return "", {}, f"{path} is damaged ({type(error).__name__}) and ignored"


def _as_rows(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is no number of rows")
    return value


def note_ladder(cache: Path, results: Mapping[str, Any], settings: Mapping[str, str]) -> None:
    """Note the measured rungs of a ladder, if any.

    `results`: the ladder's results. `settings`: by a rung's name, the override that does the same.
    """
    gains = {}
    for rung in results["rungs"]:
        override = settings.get(rung["name"])
        if override and rung["measured"]:
            gains[override] = {"rung": rung["name"], **rung["measured"]}
    if gains:
        path = cache / _LADDERS / f"{results['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {name: results[name] for name in ("name", "date", "device")}
        write_atomically(path, json.dumps({**about, "gains": gains}, indent=1, ensure_ascii=False))


def known_gain(cache: Path, override: str, device: str) -> str | None:
    """A sentence on what an override, or its key alone, brought in the newest ladder on `device`.

    None if no ladder has measured it there.
    """
    sentences: list[tuple[str, str, str]] = []  # date, ladder, sentence
    for path in (cache / _LADDERS).glob("*.json"):
        # A damaged note is ignored.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            values = load_json(path)
            date = str(values["date"])
            ladder = str(values["name"])
            for key in (override, override.partition("=")[0]):
                gain = values["gains"].get(key)
                if gain is None or values["device"] != device:
                    continue
                low, high = gain["low"], gain["high"]
                bounds = "" if low is None or high is None else f" ({low:.1f}–{high:.1f})"
                speedup = f"{gain['rung']} brought {gain['value']:.1f}×{bounds}"
                sentences.append((date, ladder, f"{speedup} in your ladder {ladder} of {date}"))
    return max(sentences)[2] if sentences else None


def measured_before(override: str | None) -> str | None:
    """`known_gain` of the first word of an override that has one; None without."""
    folder = default_cache_folder()
    device = machine_name()
    for word in (override or "").split():
        gain = known_gain(folder, word, device)
        if gain is not None:
            return gain
    return None


def machine_name() -> str:
    """The device and the number of cores here: gains of one machine do not hold for another."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = hardware(device, max(1, torch.cuda.device_count()), "")
    return f"{about['device']}, {about['cores']} cores"
