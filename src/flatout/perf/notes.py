"""Notes of how much of a batch fits into memory, for runs and for tuning: one small file for each kind of run.

Alike are runs of the same model and its settings, precision, longest row and layout, on as many devices of the same
kind. A run that ran out of memory notes the rows (or tokens) it computed at once; the next one begins with them. Tuning
finds the same notes by `row_key` and tries no more rows. To try whole batches again, delete the file.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.data.store.cache import recipe_key
from flatout.files import sync_folder, write_synced

FOLDER = "micro-batches"
ROWS = "training rows"
"""The limit that tuning looks for."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that was computed at once."""

    most: int
    has_ended: bool = False
    """Whether it ended the run, so that the run that resumes needs it at once."""


class MicroBatches:
    """The note of runs like this one."""

    def __init__(self, cache: Path, about: Mapping[str, Any]) -> None:
        self.about = dict(about)
        self.path = cache / FOLDER / f"{recipe_key(self.about)}.json"

    def read(self) -> tuple[dict[str, Limit], str]:
        """The limits, by what they are for; and a sentence where the file is damaged."""
        return _read(self.path)[1:]

    def note(self, name: str, limit: Limit, row_key: str = "") -> None:
        """Write a limit down; `OSError` where the disk refuses."""
        limits = {**self.read()[0], name: limit}
        values = {each: {"most": kept.most, "has_ended": kept.has_ended} for each, kept in limits.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}-{os.getpid()}")
        try:
            noted = {"about": self.about, "row_key": row_key, "limits": values}
            text = json.dumps(noted, indent=1, ensure_ascii=False)
            write_synced(beside, text.encode("utf-8", "surrogatepass"))
            beside.replace(self.path)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise
        sync_folder(self.path.parent)


def known_rows(cache: Path, row_key: str) -> int | None:
    """The most rows that are known to fit at once; None where nothing is known."""
    found = []
    for path in sorted((cache / FOLDER).glob("*.json")):
        key, limits, word = _read(path)
        if word:
            warnings.warn(word, UserWarning, stacklevel=2)
        elif key == row_key and ROWS in limits:
            found.append(limits[ROWS].most)
    return min(found, default=None)


def micro_batch_key(model: nn.Module, *, longest: int, device: torch.device, precision: str) -> str:
    """A name for what decides how many rows fit at once: shapes, longest row, device, arithmetic."""
    shapes = [(name, list(weight.shape), weight.requires_grad) for name, weight in model.named_parameters()]
    return recipe_key({"shapes": shapes, "longest": longest, "device": device_name(device), "precision": precision})


def device_name(device: torch.device) -> str:
    """A device by its make and memory, so that two alike share their answers."""
    if device.type != "cuda":
        return device.type
    known = torch.cuda.get_device_properties(device)
    return f"{known.name}, {known.total_memory / 2**30:.0f} GiB"


def _read(path: Path) -> tuple[str, dict[str, Limit], str]:
    """The key of a note for tuning, its limits, and a sentence where it is damaged."""
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        found = {
            str(name): Limit(_count(each["most"]), bool(each["has_ended"])) for name, each in noted["limits"].items()
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
