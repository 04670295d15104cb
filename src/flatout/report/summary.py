"""`summary.json`: facts and results of a run in one schema.

`schema.json` beside this file lists every key. A run writes the summary at its start, with null
where nothing is known, and replaces the whole file in one step whenever it learns more. Open it to
add a key, or to read the summary of a finished run.
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
from flatout.errors import LARGEST_SEED, UserError, require
from flatout.files import load_json, write_atomically
from flatout.masking import mask_settings
from flatout.tasks.task_class import TaskClass

SCHEMA = 1
FILE = "summary.json"
# sections without fixed keys: a run adds its own
_OPEN = ("metrics", "intervals", "artifacts", "evidence", "baseline.metrics")
_MAPPINGS = ("versions", "tune", "verdict", "baseline", "calibration", "price")  # or null
_SECTIONS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("schema.json").read_text("utf-8")
)
"""`first`: every key of the schema, null where nothing is known yet; `later`: those of sections
that are null there."""


def empty_summary() -> dict[str, Any]:
    return {**deepcopy(_SECTIONS["first"]), "versions": versions()}


class Summary:
    """The summary of one run; without a path it stays in memory, and `write` does nothing."""

    def __init__(self, values: dict[str, Any], path: Path | None = None) -> None:
        self.values = values
        self.path = path

    def set(self, path: str, value: object) -> None:
        """Set one value by its dotted path; KeyError if the schema does not have it.

        A mapping for a section sets only the keys it has: `set("speed", {"mfu": 0.4})`.
        """
        *parents, last = path.split(".")
        section: Any = self.values
        for name in parents:
            section = _section(section, name)
        before = _section(section, last)
        if not (isinstance(value, dict) and isinstance(before, dict)):
            section[last] = value
        elif path in _OPEN:
            before.update(value)
        else:
            for name, inner in value.items():
                self.set(f"{path}.{name}", inner)

    def finish(self, status: str) -> None:
        assert status in ("finished", "interrupted", "failed")
        self.values["status"] = status
        self.write()

    def write(self) -> None:
        """Replace the file in one step: a reader sees the old text or the new one."""
        if self.path is not None:
            values = mask_settings(json_safe(self.values))
            write_atomically(self.path, json.dumps(values, indent=1, ensure_ascii=False))


def _section(values: object, name: str) -> Any:
    """The value under a name of the schema; a section that is null so far gets its keys."""
    if not isinstance(values, dict) or name not in values:
        raise KeyError(name)
    if values[name] is None and name in _SECTIONS["later"]:
        values[name] = deepcopy(_SECTIONS["later"][name])
    return values[name]


def read_summary(folder: Path) -> dict[str, Any]:
    """The summary in a run folder; UserError if there is none, or it is not one of ours."""
    name_a_run = "Name a run folder, below outputs/."
    values = read_json(folder, FILE, name_a_run, "Train again: the file was changed.")
    if "schema" not in values:
        raise UserError(str(folder / FILE), "not the summary of a run", hint=name_a_run)
    # The folder may come from others: what reads a section takes it for a mapping or a list.
    first = _SECTIONS["first"] | {name: {} for name in _MAPPINGS}
    for name, section in first.items():
        value = values.get(name)
        is_section = isinstance(section, dict | list) and value is not None
        require(
            not is_section or isinstance(value, type(section)),
            str(folder / FILE),
            f"{name} is {type(value).__name__}, and should be {type(section).__name__}",
            hint=name_a_run,
        )
    _complete(values, _SECTIONS["first"])
    rows = values["data"]["rows"]
    # a metric of a user's module may be anything, so what reads one checks it
    numbers = [(name, values["training"][name]) for name in ("seconds", "steps")]
    numbers += rows.items() if isinstance(rows, dict) else ()
    wrong = [name for name, value in numbers if not _is_number_or_null(value)]
    wrong += [] if isinstance(values["status"], str) else ["status"]
    wrong += [] if isinstance(rows, dict) else ["data.rows"]
    require(
        not wrong,
        str(folder / FILE),
        f"{', '.join(wrong[:3])}: not what a run writes there",
        hint=name_a_run,
    )
    return values


def _complete(values: dict[str, Any], shape: Mapping[str, Any]) -> None:
    """Add the keys of the schema that a summary lacks, and those of a section that is null."""
    for name, part in shape.items():
        if values.get(name) is None:
            values[name] = deepcopy(part)
        elif isinstance(part, dict) and isinstance(values[name], dict):
            _complete(values[name], part)


def _is_number_or_null(value: object) -> bool:
    """Whether a value is null, or a number that arrays hold."""
    if isinstance(value, int):
        return abs(value) <= LARGEST_SEED
    return value is None or isinstance(value, float)


def read_json(folder: Path, name: str, if_missing: str, if_broken: str) -> dict[str, Any]:
    """The mapping in a JSON file of a folder; empty if the file holds something else.

    The last two arguments are the hints of the errors for a file that is missing or broken.
    """
    path = folder / name
    try:
        values = load_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(str(folder), f"no {name} there", hint=if_missing) from None
    except OSError as error:
        raise UserError(
            str(path), f"cannot be read: {error.strerror}", hint="Check that you may read it."
        ) from None
    except UserError as error:
        raise UserError(str(path), f"cannot be read, it {error.what}", hint=if_broken) from None
    return values if isinstance(values, dict) else {}


def mark_broken(folder: Path, since: float, status: str = "failed") -> None:
    """Close the summary of a killed run; one that is closed already stays unchanged.

    A summary older than `since`, in seconds as of `time.time`, belongs to an earlier run.
    """
    path = folder / FILE
    # a second of tolerance: clocks of file systems are coarse
    if not path.is_file() or path.stat().st_mtime < since - 1:
        return
    if (values := read_summary(folder))["status"] == "running":
        Summary(values, path).finish(status)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a run uses, as far as they are installed."""
    installed = {"python": platform.python_version()}
    packages = "flatout torch lightning transformers tokenizers numpy pyarrow"
    for package in packages.split():
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def hardware(device: torch.device, count: int, precision: str) -> dict[str, Any]:
    """The devices a run computes on, and its precision; the peak is measured later."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        name = processor_name()
        memory = psutil.virtual_memory().total
    return {
        "device": name,
        "count": count,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "precision": precision,
        "peak_tflops": None,
        "peak_source": None,
    }


def json_safe(value: object) -> Any:
    """A value as JSON can hold it: tensors and arrays as lists, NaN and infinity as null."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if hasattr(value, "tolist"):
        return json_safe(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def plain(value: object) -> Any:
    """Settings as mappings, lists and plain values, with secrets masked.

    A class is its name, and any other object that of its class: `<torch.optim.adamw.AdamW>`.
    """
    return mask_settings(_plain(value))


def _plain(value: object) -> Any:
    if isinstance(value, TaskClass):
        # as it is typed
        return {"_target_": _plain(value.task), **_plain(value.config)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    kind = value if isinstance(value, type) else type(value)
    return f"<{kind.__module__}.{kind.__qualname__}>"


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their dotted keys: {"a": {"b": 1}} gives {"a.b": 1}; an empty group stays."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
