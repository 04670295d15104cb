"""Small recordings, in files and tables, and their data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from flatout.data import SequenceData
from flatout.errors import UserError


def recording(samples: int = 40, phase: float = 0.0, step: float = 1.0) -> dict[str, np.ndarray]:
    """A made-up recording of two features and a target that depends on both."""
    place = np.arange(samples)
    a = np.sin(place / 5 + phase)
    b = np.cos(place / 3 + phase)
    return {
        "t": place * step,
        "a": a,
        "b": b,
        "y": 10 + 3 * a - b,
    }


def uneven_recordings(count: int, shortest: int, longest: int) -> dict[str, Any]:
    """Columns of noise: `count` recordings, each of `shortest` samples or more, below `longest`."""
    random = np.random.default_rng(3)
    lengths = random.integers(shortest, longest, count)
    columns: dict[str, Any] = {"run": np.repeat(np.arange(count), lengths)}
    for name in ("a", "y"):
        columns[name] = random.normal(size=lengths.sum())
    return columns


def write_files(folder: Path, count: int = 6, **changes: Any) -> Path:
    """A folder of csv files, one recording each; `changes` replace columns of the second one."""
    folder.mkdir(exist_ok=True)
    for number in range(count):
        columns = recording(40 + number, phase=number)
        if number == 1:
            columns |= {name: change(columns) for name, change in changes.items()}
        lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        (folder / f"r{number}.csv").write_text(
            "\n".join([",".join(columns), *lines]), encoding="utf-8"
        )
    return folder


SETTINGS: dict[str, Any] = {
    "features": ["a", "b"],
    "target": "y",
    "time": "t",
    "batch_size": 4,
}


def open_data(source: Path | str | pa.Table | dict[str, object], **settings: Any) -> SequenceData:
    data = SequenceData(
        source=str(source) if isinstance(source, Path) else source, **{**SETTINGS, **settings}
    )
    data.setup()
    return data


def refusal(source: Path | str | pa.Table | dict[str, object], **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        open_data(source, **settings)
    return str(caught.value)


def table_of_recordings(parts: list[dict[str, Any]]) -> pa.Table:
    """The recordings below each other; what is one value of a recording stands in each row."""
    samples = len(parts[0]["a"])
    blocks = []
    for part in parts:
        columns = {name: np.broadcast_to(column, samples) for name, column in part.items()}
        blocks.append(pa.table(columns))
    return pa.concat_tables(blocks)


def labelled_recordings(*labels: object, phase: int = 0) -> pa.Table:
    """A recording for each label, in column `load`, of a cell of its number."""
    numbered = enumerate(labels)
    return pa.concat_tables(
        pa.table(
            {
                "cell": [str(cell)] * 20,
                "load": [label] * 20,
                **recording(20, phase + cell),
            }
        )
        for cell, label in numbered
    )
