"""Other people's loaders of windows, as their pages write them: a Dataset a row,
pytorch-forecasting's, darts' own.

Each side is a function of a table that gives a DataLoader; `OURS` has the loader of
`flatout.data.windows` that takes its place. A library that is not installed is imported by its own
side alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flatout.data import windows

LOOKBACK = 30
HORIZON = 6
BATCH = 64
NEEDS = {"a Dataset of rows": "", "pytorch-forecasting": "pytorch_forecasting", "darts": "darts"}
"""The sides, and the package that each needs."""
_SERIES_AT_ONCE = 50


def is_installed(side: str) -> bool:
    return not NEEDS[side] or importlib.util.find_spec(NEEDS[side]) is not None


def make_table(rows: int, each: int) -> pd.DataFrame:
    """Series of `each` rows: a target, a feature, a known column and a static one."""
    random = np.random.default_rng(0)
    count = rows // each
    columns = {
        name: random.standard_normal(count * each).astype(np.float32) for name in ("y", "f", "k")
    }
    numbers = {"id": np.repeat(np.arange(count), each), "t": np.tile(np.arange(each), count)}
    return pd.DataFrame({**numbers, **columns, "s": numbers["id"].astype(np.float32)}, copy=False)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A window is a row, cut out when it is asked for."""

    def __init__(self, table: pd.DataFrame) -> None:
        self.values = torch.from_numpy(table[["y", "f", "k"]].to_numpy())
        length = table.groupby("id").size().to_numpy()
        needed = LOOKBACK + HORIZON
        begin = np.cumsum(length) - length
        counts = zip(begin.tolist(), length.tolist(), strict=True)
        self.starts = [
            start + each for start, count in counts for each in range(count - needed + 1)
        ]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        start = self.starts[number]
        end = start + LOOKBACK
        return self.values[start:end], self.values[end : end + HORIZON, :1]


def rows_loader(table: pd.DataFrame) -> DataLoader[Any]:
    return DataLoader(Rows(table), BATCH, shuffle=True)


def forecasting_set(table: pd.DataFrame) -> Any:
    from pytorch_forecasting import GroupNormalizer, TimeSeriesDataSet

    return TimeSeriesDataSet(
        table,
        time_idx="t",
        target="y",
        group_ids=["id"],
        max_encoder_length=LOOKBACK,
        max_prediction_length=HORIZON,
        static_reals=["s"],
        time_varying_known_reals=["k"],
        time_varying_unknown_reals=["y", "f"],
        target_normalizer=GroupNormalizer(),
    )


def forecasting_loader(table: pd.DataFrame) -> DataLoader[Any]:
    return forecasting_set(table).to_dataloader(batch_size=BATCH)


def darts_loader(table: pd.DataFrame) -> DataLoader[Any]:
    from darts import TimeSeries
    from darts.utils.data import SequentialTorchTrainingDataset
    from darts.utils.data.torch_datasets.utils import _batch_collate_fn_train

    def series(column: str, static: list[str] | None = None) -> list[Any]:
        names = {
            "group_cols": "id",
            "time_col": "t",
            "static_cols": static,
            "drop_group_cols": ["id"],
        }
        made = TimeSeries.from_group_dataframe(table, value_cols=column, **names)
        return [each.astype(np.float32) for each in made]

    chunks = {"input_chunk_length": LOOKBACK, "output_chunk_length": HORIZON}
    found = SequentialTorchTrainingDataset(series("y", ["s"]), series("f"), series("k"), **chunks)
    return DataLoader(found, BATCH, shuffle=True, collate_fn=_batch_collate_fn_train)


def our_rows(table: pd.DataFrame, **more: Any) -> DataLoader[Any]:
    names: dict[str, Any] = {
        "target": "y",
        "features": ["f", "k"],
        "group": "id",
        "time": "t",
    } | more
    return windows(table, lookback=LOOKBACK, horizon=HORIZON, batch_size=BATCH, **names)


def our_darts(table: pd.DataFrame) -> DataLoader[Any]:
    from examples.windows_for_darts import ForDarts

    loader = our_rows(table, features="f", known="k", static="s")
    return DataLoader(ForDarts(loader), BATCH, sampler=loader.sampler, collate_fn=loader.collate_fn)


def our_forecasting(table: pd.DataFrame) -> DataLoader[Any]:
    """A dataset of the first rows of each series says how columns are encoded; whole series are
    read through it.
    """
    return windows(_parts(table), batch_size=BATCH, drop_last=True)


def _parts(table: pd.DataFrame) -> Iterator[Any]:
    from pytorch_forecasting import TimeSeriesDataSet

    about = forecasting_set(table.groupby("id").head(LOOKBACK + HORIZON))
    numbers = table["id"].to_numpy()
    for first in range(0, int(numbers[-1]) + 1, _SERIES_AT_ONCE):
        begin, end = np.searchsorted(numbers, [first, first + _SERIES_AT_ONCE])
        yield TimeSeriesDataSet.from_dataset(about, table.iloc[begin:end])


Side = Callable[[pd.DataFrame], DataLoader[Any]]
THEIRS: dict[str, Side] = {
    "a Dataset of rows": rows_loader,
    "pytorch-forecasting": forecasting_loader,
    "darts": darts_loader,
}
OURS: dict[str, Side] = {
    "a Dataset of rows": our_rows,
    "pytorch-forecasting": our_forecasting,
    "darts": our_darts,
}
