"""Windows of a table for models of darts, a package of its own.

`python examples/windows_for_darts.py [rows]`.
"""

import sys

import numpy as np
import torch
from darts.models import TiDEModel
from darts.utils.data import TorchTrainingBatch, TorchTrainingDataset, TorchTrainingSample

from flatout.data import windows

COLUMNS = {"target": "y", "features": "f", "known": "k", "group": "id", "time": "t"}


class ForDarts(TorchTrainingDataset):
    """The windows of a loader: features are past covariates, known columns future ones, static
    columns static ones.
    """

    def __init__(self, loader: torch.utils.data.DataLoader) -> None:
        super().__init__()
        self.windows = loader.dataset

    def fields(self, numbers: list[int]) -> dict[str, torch.Tensor | None]:
        x, y = self.windows.__getitems__(numbers)
        past, known, static = (x, None, None) if isinstance(x, torch.Tensor) else x.values()
        first_known = past.shape[2] - (0 if known is None else known.shape[2])
        parts = past.tensor_split([y.shape[2], first_known], 2)
        target, features, known_before = (part if part.shape[2] else None for part in parts)
        return {
            "past_target": target,
            "past_covariates": features,
            "historic_future_covariates": known_before,
            "future_covariates": known,
            "static_covariates": None if static is None else static[:, None],
            "future_target": y,
        }

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> TorchTrainingSample:
        fields = self.fields([number]).items()
        return TorchTrainingSample(
            **{name: None if part is None else part[0].numpy() for name, part in fields}
        )

    def __getitems__(self, numbers: list[int]) -> TorchTrainingBatch:
        return TorchTrainingBatch(**self.fields(numbers))


def main(rows: int = 4000) -> float:
    place = np.arange(rows)
    noise = np.random.default_rng(0).standard_normal(rows)
    table = {
        "id": place // 400,
        "t": place % 400,
        "f": noise,
        "k": np.cos(place / 5),
        "y": np.sin(place / 5),
    }
    model = TiDEModel(
        30, 6, batch_size=64, n_epochs=2, pl_trainer_kwargs={"accelerator": "cpu", "logger": False}
    )
    loader = windows(table, lookback=30, horizon=6, **COLUMNS)
    how = {"collate_fn": loader.collate_fn, "sampler": loader.sampler, "shuffle": False}
    model.fit_from_dataset(ForDarts(loader), dataloader_kwargs=how)
    return float(model.model.trainer.callback_metrics["train_loss"])


if __name__ == "__main__":
    print(main(*map(int, sys.argv[1:])))
