"""What a run has written, read back: its tables, losses, weights and choices."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a table with a header."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write a row as JSON on each line; the path."""
    path.write_text(jsonl_of(rows), encoding="utf-8")
    return path


def jsonl_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a file with a row as JSON on each line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def read_log(folder: Path) -> str:
    """All that the run in a folder has printed."""
    return (folder / "log.txt").read_text(encoding="utf-8")


def losses(folder: Path) -> list[float]:
    """The training losses of the run in a folder, step by step."""
    rows = read_csv(folder / "metrics.csv")
    return [float(row["train/loss"]) for row in rows if row["train/loss"]]


def model_weights(folder: Path) -> dict[str, Tensor]:
    """The weights that the run in a folder gives away."""
    return load_file(folder / "model" / "model.safetensors")


def choices_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each choice in a summary, by its name."""
    return {choice["name"]: choice["value"] for choice in summary["choices"]}


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    """The points of a curve of the run in a folder: step and value."""
    rows = read_csv(folder / "metrics.csv")
    return [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
