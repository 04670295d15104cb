"""Runs on recordings of cells, and such recordings in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from flatout import (
    CellsConfig,
    CheckpointConfig,
    OptimConfig,
    RNNConfig,
    SequenceDataConfig,
)
from flatout.data.samples.cells import CellsTable
from flatout.models.window_mlp import WindowMLPConfig
from tests.data.whole_tables import whole_table
from tests.fitting import quiet_fit

CELLS = CellsConfig(cells=4, cycles=2, samples=50)
SETTINGS = {
    "chunk": ({"chunk": 20}, RNNConfig(hidden=8, layers=2, smoothing="ema")),
    "gru": ({"cumulate": ["current"]}, RNNConfig(hidden=8, cell="gru")),
    "window": ({"lookback": 12, "stride": 5}, RNNConfig(hidden=8, residual="ridge")),
    "mlp": ({"lookback": 12, "stride": 5}, WindowMLPConfig(widths=[8])),
    "forecast": (
        {
            "problem": "forecast",
            "target": ["voltage", "soc"],
            "lookback": 12,
            "horizon": 3,
        },
        WindowMLPConfig(widths=[8], shared=True),
    ),
}


def train(folder: Path, kind: str) -> Any:
    way, model = SETTINGS[kind]
    return quiet_fit(
        SequenceDataConfig(sample=CELLS, batch_size=8, **way),
        model,
        output=str(folder),
        max_epochs=2,
        optim=OptimConfig(lr=0.01),
        checkpoint=CheckpointConfig(patience=None),
    )


def cells_of(split: str) -> pa.Table:
    table = CellsTable(CELLS, split)
    return whole_table(table)


def write_cells(folder: Path) -> Path:
    folder.mkdir()
    rows = cells_of("test")
    for number, cell in enumerate(sorted(set(rows["cell"].to_pylist()))):
        pq.write_table(
            rows.filter(pa.compute.equal(rows["cell"], cell)), folder / f"{number}.parquet"
        )
    return folder
