"""`summary.json`: facts and results of a run in one schema, written at its start and replaced in
one step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from flatout.distributed.limits import processor_name
from flatout.errors import UserError
from flatout.files import write_atomically
from flatout.masking import mask_settings

SCHEMA = 1
FILE = "summary.json"
_OPEN = ("metrics", "intervals", "artifacts", "evidence", "baseline.metrics")
_SECTIONS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("schema.json").read_text("utf-8")
)
"""`first`: every key of the schema, null where nothing is known yet; `later`: those of sections
that are null there."""


def empty_summary() -> dict[str, Any]:
    return {**deepcopy(_SECTIONS["first"]), "versions": versions()}


class Summary:
    """The summary of one run; `write` puts it into the run folder, and without a path it stays in
    memory.
    """

    def __init__(self, values: dict[str, Any], path: Path | None = None) -> None:
        self.values, self.path = values, path

    def set(self, path: str, value: Any) -> None:
        """Set one value by its dotted path, which must be in the schema; of a section, the values
        that are given.
        """
        *parents, last = path.split(".")
        section: Any = self.values
        for name in parents:
            section = _section(section, name)
        before = _section(section, last)
        if path in _OPEN:
            before |= value
        elif isinstance(value, dict) and isinstance(before, dict):
            for name, each in value.items():
                self.set(f"{path}.{name}", each)
        else:
            section[last] = value

    def finish(self, status: str) -> None:
        assert status in ("finished", "interrupted", "failed")
        self.values["status"] = status
        self.write()

    def write(self) -> None:
        """Replace the file in one step: a reader sees the old text or the new one."""
        if self.path is not None:
            values = mask_settings(json_safe(self.values))
            write_atomically(self.path, json.dumps(values, indent=1, ensure_ascii=False))


def _section(values: Any, name: str) -> Any:
    """What stands under a name of the schema; a section that is null so far gets its keys."""
    if not isinstance(values, dict) or name not in values:
        raise KeyError(name)
    if values[name] is None and name in _SECTIONS["later"]:
        values[name] = deepcopy(_SECTIONS["later"][name])
    return values[name]


def read_summary(folder: Path) -> dict[str, Any]:
    hints = ("Name a run folder, below outputs/.", "Train again: the file was changed.")
    if "schema" not in (values := read_json(folder, FILE, *hints)):
        raise UserError(str(folder / FILE), "not the summary of a run", hint=hints[0])
    return values


def read_json(folder: Path, name: str, if_missing: str, if_broken: str) -> dict[str, Any]:
    """The mapping in a file of a folder; empty where the file holds something else.

    The last two are hints.
    """
    path = folder / name
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(str(folder), f"no {name} there", hint=if_missing) from None
    except OSError as error:
        raise UserError(
            str(path), f"cannot be read: {error.strerror}", hint="Check that you may read it."
        ) from None
    except ValueError as error:
        raise UserError(
            str(path), f"cannot be read, it is not valid JSON: {error}", hint=if_broken
        ) from None
    return values if isinstance(values, dict) else {}


def mark_broken(folder: Path, since: float, status: str = "failed") -> None:
    """Close the summary of a killed run; a summary that is closed already stays as it was."""
    path = folder / FILE
    if not path.is_file() or path.stat().st_mtime < since - 1:
        return
    if (values := read_summary(folder))["status"] == "running":
        Summary(values, path).finish(status)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a run uses, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in (
        "flatout",
        "torch",
        "lightning",
        "transformers",
        "tokenizers",
        "numpy",
        "pyarrow",
    ):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def hardware(device: torch.device, count: int, precision: str) -> dict[str, Any]:
    """The devices a run computes on, and its precision."""
    is_cuda = device.type == "cuda"
    memory = (
        torch.cuda.get_device_properties(device).total_memory
        if is_cuda
        else psutil.virtual_memory().total
    )
    name = torch.cuda.get_device_name(device) if is_cuda else processor_name()
    found = {
        "device": name,
        "count": count,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
    }
    return {**found, "precision": precision, "peak_tflops": None, "peak_source": None}


def json_safe(value: Any) -> Any:
    """Plain JSON: tensors and numpy values become numbers, and numbers that are not finite become
    null.
    """
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if hasattr(value, "tolist"):
        return json_safe(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def plain(value: Any) -> Any:
    """Settings as mappings, lists and plain values, secrets masked; any other object is named by
    its type.
    """
    return mask_settings(_plain(value))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return (
        str(value)
        if isinstance(value, Path)
        else f"<{type(value).__module__}.{type(value).__qualname__}>"
    )


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted keys; of a group without any, the group."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        is_group = isinstance(value, dict) and value
        flat |= flattened(value, f"{prefix}{name}.") if is_group else {f"{prefix}{name}": value}
    return flat
