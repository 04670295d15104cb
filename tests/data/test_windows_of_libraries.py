"""The batches of pytorch-forecasting and darts, and what their models learn from them: the same
from our loader.

Both are no dependencies of this project: what needs one is skipped without it. `pip install
pytorch-forecasting darts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from tests.trainers import QUIET
from torch.utils.data import DataLoader

from flatout.data import windows
from flatout.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, of each release


def table() -> pd.DataFrame:
    random = np.random.default_rng(0)
    parts = []
    for number, length in enumerate((40, 25, 60)):
        t = np.arange(length)
        columns = {
            "y": 10 + np.sin(t / 5 + number),
            "z": 5 + random.standard_normal(length),
            "k": np.cos(t / 7),
        }
        columns |= {"f": random.standard_normal(length), "w": 1 + random.random(length)}
        columns |= {
            "c": [["u", "v"][place % 2] for place in t],
            "s": np.full(length, float(number)),
        }
        parts.append(pd.DataFrame({"id": f"g{number}", "t": t, **columns}))
    whole = pd.concat(parts, ignore_index=True)
    return whole.astype(dict.fromkeys("yzkfws", "float32"))


@dataclass
class Prepared:
    """What `windows` reads of a `TimeSeriesDataSet`: two series, encoders of unequal length."""

    randomize_length: Any = None
    reals: list[str] = field(default_factory=lambda: ["y", "relative_time_idx", "encoder_length"])
    gaps: int = 0

    def __post_init__(self) -> None:
        self.target_names = ["y"]
        self.group_ids = ["id"]
        self.multi_target = False
        self.add_target_scales = False
        self.add_relative_time_idx = True
        self.add_encoder_length = True
        self.max_encoder_length = 4
        self.target_normalizers = [SimpleNamespace(get_parameters=lambda *group: [1.0, 2.0])]
        y = torch.arange(20.0)
        reals = torch.stack([y, 0 * y, 0 * y], 1)
        time = torch.arange(20) % 10
        groups = torch.arange(20)[:, None] // 10
        nothing = torch.zeros(20, 0, dtype=torch.int64)
        self.data = {
            "reals": reals,
            "categoricals": nothing,
            "time": time,
            "groups": groups,
            "target": [y],
            "weight": y,
        }
        start = np.array([0, 2, 11, 14])
        rows = np.array([6, 5, 4, 6])
        self.index = pd.DataFrame(
            {
                "index_start": start,
                "index_end": start + rows - 1,
                "sequence_length": rows + self.gaps,
            }
        )

    def get_transformer(self, name: str) -> None:
        return None

    def calculate_decoder_length(self, time_last: Any, sequence_length: Any) -> Any:
        return np.minimum(sequence_length - 2, 2)


def test_encoders_of_unequal_length_end_in_zeros_as_theirs_do():
    ((x, (target, weight)),) = list(windows(Prepared(), shuffle=False))
    assert x["encoder_lengths"].tolist() == [4, 3, 2, 4]
    assert x["decoder_lengths"].tolist() == [
        2,
        2,
        2,
        2,
    ]
    assert x["encoder_cont"][..., 0].tolist() == [
        [0, 1, 2, 3],
        [2, 3, 4, 0],
        [11, 12, 0, 0],
        [14, 15, 16, 17],
    ]
    assert x["encoder_cont"][1, :, 1].tolist() == [-0.75, -0.5, -0.25, 0]
    assert x["decoder_cont"][1, :, 1].tolist() == [
        0,
        0.25,
    ]
    assert x["encoder_cont"][2, :, 2].tolist() == [0, 0, 0, 0]
    assert x["decoder_cont"][0, :, 2].tolist() == [1, 1]
    assert target.tolist() == weight.tolist() == [[4, 5], [5, 6], [13, 14], [18, 19]]
    assert x["decoder_time_idx"].tolist() == [[4, 5], [5, 6], [3, 4], [8, 9]]
    assert x["groups"].tolist() == [[0], [0], [1], [1]]
    assert x["target_scale"].tolist() == [[1, 2]] * 4
    assert x["encoder_cat"].shape == (4, 4, 0)


def test_several_datasets_in_turn_are_one():
    batches = list(windows(iter([Prepared(), Prepared()]), shuffle=False, batch_size=4))
    assert_same(batches[0], batches[1])


def test_settings_of_windows_are_refused_for_a_dataset_that_has_them():
    with pytest.raises(UserError) as caught:
        windows(Prepared(), horizon=2, stride=3, missing="drop", max_gap=60)
    assert str(caught.value) == (
        "windows: a TimeSeriesDataSet defines its own windows."
        " Leave out horizon, stride, missing, max_gap."
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"randomize_length": (0.2, 0.05)},
            "randomize_length: windows of random length: not served. Set it to False",
        ),
        (
            {"gaps": 1},
            (
                "allow_missing_timesteps: some windows lack time steps, which it fills while it"
                " loads: not served."
            ),
        ),
    ],
)
def test_what_it_changes_while_it_loads_is_refused(change, message):
    with pytest.raises(UserError) as caught:
        windows(Prepared(**change))
    assert str(caught.value).startswith(f"TimeSeriesDataSet.{message}")


def assert_same(theirs: Any, ours: Any) -> None:
    """Mappings, tuples and tensors alike, to 1e-6."""
    if isinstance(theirs, dict):
        assert theirs.keys() == ours.keys()
        theirs, ours = list(theirs.values()), list(ours.values())
    if isinstance(theirs, tuple | list):
        assert len(theirs) == len(ours)
        for each, other in zip(theirs, ours, strict=True):
            assert_same(each, other)
    elif theirs is None:
        assert ours is None
    else:
        assert theirs.dtype == ours.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


CASES: dict[str, dict[str, Any]] = {
    "scaled by group": {
        "target": "y",
        "weight": "w",
        "add_relative_time_idx": True,
        "add_target_scales": True,
    },
    "scaled by window, unequal lengths": {
        "target": "y",
        "min_encoder_length": 6,
        "min_prediction_length": 2,
        "add_relative_time_idx": True,
    },
    "two targets": {"target": ["y", "z"]},
    "lags": {"target": "y", "lags": {"y": [1, 3]}},
}


def their_dataset(case: str) -> Any:
    theirs = pytest.importorskip("pytorch_forecasting")
    by_group = theirs.GroupNormalizer(groups=["id"])
    by_window = theirs.EncoderNormalizer(transformation="softplus")
    normalizer = {
        "two targets": theirs.MultiNormalizer([by_window, by_group]),
        "scaled by window, unequal lengths": by_window,
    }
    return theirs.TimeSeriesDataSet(
        table(),
        time_idx="t",
        group_ids=["id"],
        max_encoder_length=12,
        max_prediction_length=4,
        static_reals=["s"],
        time_varying_known_reals=["t", "k"],
        time_varying_known_categoricals=["c"],
        time_varying_unknown_reals=["y", "z", "f"],
        target_normalizer=normalizer.get(case, by_group),
        **CASES[case],
    )


@pytest.mark.parametrize("case", CASES)
def test_batches_of_pytorch_forecasting_are_the_same(case):
    dataset = their_dataset(case)
    theirs, ours = both_loaders(dataset)
    assert len(theirs) == len(ours)
    for each, other in zip(theirs, ours, strict=True):
        assert_same(each, other)


def both_loaders(dataset: Any) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Their loader and ours, of the same windows in the same order."""
    order = np.random.default_rng(1).permutation(len(dataset)).tolist()
    ours = windows(dataset)
    sides = ((dataset, dataset._collate_fn), (ours.dataset, ours.collate_fn))
    theirs, mine = (
        DataLoader(each, 16, sampler=order, collate_fn=collate) for each, collate in sides
    )
    return theirs, mine


OFF = QUIET | {"enable_checkpointing": False}


def losses_of(callback: type, fit: Callable[[object], object]) -> list[float]:
    """The loss of each step; `fit` takes a callback."""
    losses: list[float] = []
    ends = {
        "on_train_batch_end": lambda self, trainer, module, outputs, *rest: losses.append(
            float(outputs["loss"])
        )
    }
    torch.manual_seed(3)
    fit(type("Losses", (callback,), ends)())
    return losses


def test_a_model_of_pytorch_forecasting_has_the_same_losses():
    dataset = their_dataset("scaled by window, unequal lengths")
    from pytorch_forecasting import TemporalFusionTransformer

    def fit(loader: DataLoader[Any]) -> list[float]:
        def start(callback: object) -> None:
            model = TemporalFusionTransformer.from_dataset(
                dataset, hidden_size=8, dropout=0.1, log_interval=-1
            )
            L.Trainer(max_epochs=2, accelerator="cpu", callbacks=[callback], **OFF).fit(
                model, loader
            )

        return losses_of(L.Callback, start)

    theirs, ours = map(fit, both_loaders(dataset))
    assert len(theirs) > 5
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_a_model_of_darts_has_the_same_losses_with_the_class_of_the_example():
    pytest.importorskip("darts")
    import pytorch_lightning
    from darts import TimeSeries
    from darts.models import TiDEModel
    from darts.utils.data import SequentialTorchTrainingDataset
    from examples.windows_for_darts import ForDarts

    frame = table()

    def series(column: str, static: list[str] | None = None) -> list[Any]:
        names = {
            "group_cols": "id",
            "time_col": "t",
            "static_cols": static,
            "drop_group_cols": ["id"],
        }
        return [
            each.astype(np.float32)
            for each in TimeSeries.from_group_dataframe(frame, value_cols=column, **names)
        ]

    chunks = {"input_chunk_length": 12, "output_chunk_length": 4, "max_samples_per_ts": 10}
    theirs = SequentialTorchTrainingDataset(series("y", ["s"]), series("f"), series("k"), **chunks)
    roles = {
        "target": "y",
        "features": "f",
        "known": "k",
        "static": "s",
        "group": "id",
        "time": "t",
    }
    ours = ForDarts(windows(frame, lookback=12, horizon=4, **roles))
    # darts counts from the end of each series
    last = np.cumsum([length - 15 for length in (40, 25, 60)]) - 1
    order = np.random.default_rng(1).permutation(len(theirs))
    same = [int(last[number // 10] - number % 10) for number in order]

    def fit(dataset: Any, order: list[int], **more: Any) -> list[float]:
        def start(callback: object) -> None:
            off = {"accelerator": "cpu", "callbacks": [callback], **OFF}
            model = TiDEModel(
                12,
                4,
                batch_size=8,
                n_epochs=4,
                hidden_size=16,
                random_state=3,
                pl_trainer_kwargs=off,
            )
            model.fit_from_dataset(
                dataset, dataloader_kwargs={"sampler": order, "shuffle": False, **more}
            )

        return losses_of(pytorch_lightning.Callback, start)

    before = fit(theirs, order.tolist())
    after = fit(ours, same, collate_fn=lambda batch: batch)
    assert len(before) == 16
    assert before[-1] < before[0]
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)
