"""Loaders of windows for an LSTM and for pytorch-forecasting.

`python examples/windows.py [rows]`.
"""

import sys
from importlib.util import find_spec

import lightning as L
import numpy as np
import pandas as pd
import torch

from flatout.data import windows

COLUMNS = {"lookback": 30, "horizon": 6, "target": "y", "features": "f", "group": "id", "time": "t"}
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Forecaster(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(2, 32, batch_first=True)
        self.head = torch.nn.Linear(32, 6)

    def training_step(
        self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        x, y = batch  # 30 rows of y and f, then 6 rows of y
        loss = (self.head(self.lstm(x)[0][:, -1]) - y[..., 0]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


def forecasting(table: pd.DataFrame) -> None:
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    data = TimeSeriesDataSet(
        table, "t", "y", ["id"], max_prediction_length=6, time_varying_unknown_reals=["y", "f"]
    )
    L.Trainer(max_epochs=1, **QUIET).fit(
        TemporalFusionTransformer.from_dataset(data, hidden_size=8), windows(data)
    )


def main(rows: int = 4000) -> float:
    place = np.arange(rows)
    noise = np.random.default_rng(0).standard_normal(rows)
    table = {
        "id": place // 400,
        "t": place % 400,
        "f": noise,
        "y": np.sin(place / 5) + 0.2 * np.roll(noise, 1),
    }
    trainer = L.Trainer(max_epochs=3, **QUIET)
    trainer.fit(Forecaster(), windows(table, **COLUMNS))
    if find_spec("pytorch_forecasting"):
        forecasting(pd.DataFrame(table).astype({"id": str}))
    return float(1 - trainer.callback_metrics["loss"] / table["y"].var())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
