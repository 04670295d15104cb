"""`windows`: each window equals that of a naive loop, to the bit; order, ranks, and what is
refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from tests.refusals import refused
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from flatout.data import windows
from flatout.errors import UserError

LENGTHS = {
    "a": 9,
    "b": 6,
    "c": 14,
    "d": 5,
}
"""Rows of each group."""


def table(lengths: dict[str, int] | None = None) -> pd.DataFrame:
    """Groups of unequal length, one after the other, with a static column."""
    random = np.random.default_rng(3)
    parts = []
    for number, (name, length) in enumerate((lengths or LENGTHS).items()):
        columns = {
            each: random.standard_normal(length).astype(np.float32) for each in ("y", "z", "f", "k")
        }
        parts.append(
            pd.DataFrame(
                {
                    "id": name,
                    "t": np.arange(length),
                    **columns,
                    "s": number + 0.5,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def naive(
    frame: pd.DataFrame, lookback: int, horizon: int, stride: int = 1
) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """The rows of each window and of its horizon, cut out one by one."""
    found = []
    for _, rows in frame.groupby("id", sort=False):
        for first in range(0, len(rows) - lookback - horizon + 1, stride):
            found.append(
                (
                    rows[first : first + lookback],
                    rows[first + lookback : first + lookback + horizon],
                )
            )
    return found


def stacked(rows: list[pd.DataFrame], columns: list[str]) -> Tensor:
    return torch.from_numpy(np.stack([each[columns].to_numpy(np.float32) for each in rows]))


def all_batches(loader: DataLoader[Any]) -> list[Any]:
    return list(loader)


GIVEN: dict[str, Any] = {
    "lookback": 3,
    "horizon": 2,
    "target": "y",
    "group": "id",
    "time": "t",
}


@pytest.mark.parametrize("stride", [1, 2, 5])
def test_windows_equal_those_of_a_naive_loop(stride):
    frame = table()
    loader = windows(
        frame,
        **{**GIVEN, "target": ["y", "z"]},
        features="f",
        stride=stride,
        shuffle=False,
        batch_size=4,
    )
    expected = naive(frame, 3, 2, stride)
    x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert torch.equal(x, stacked([past for past, _ in expected], ["y", "z", "f"]))
    assert torch.equal(y, stacked([future for _, future in expected], ["y", "z"]))
    assert len(loader.dataset) == len(expected)
    assert torch.equal(loader.dataset[-1][0], x[-1])


def test_known_and_static_columns_come_with_the_lookback():
    frame = table()
    loader = windows(
        frame, **GIVEN, features=["f"], known=["k"], static=["s"], shuffle=False, batch_size=100
    )
    expected = naive(frame, 3, 2)
    ((x, y),) = all_batches(loader)
    assert torch.equal(x["past"], stacked([past for past, _ in expected], ["y", "f", "k"]))
    assert torch.equal(x["known"], stacked([future for _, future in expected], ["k"]))
    assert torch.equal(x["static"], stacked([past[:1] for past, _ in expected], ["s"])[:, 0])
    assert torch.equal(y, stacked([future for _, future in expected], ["y"]))


def test_rows_of_groups_may_stand_mixed_and_tables_may_be_of_any_kind():
    frame = table()
    mixed = frame.sort_values("t", kind="stable")
    expected = [x for x, _ in windows(frame, **GIVEN, shuffle=False)]
    plain = {name: frame[name].to_numpy() for name in frame.columns}
    for source in (
        mixed,
        pa.Table.from_pandas(frame),
        plain,
        {name: list(values) for name, values in plain.items()},
    ):
        found = [x for x, _ in windows(source, **GIVEN, shuffle=False)]
        assert all(map(torch.equal, found, expected))


def test_short_groups_are_left_out_with_a_warning():
    with pytest.warns(
        UserWarning, match=r"2 groups shorter than the 8 rows of lookback=6 and horizon=2 left out"
    ) as warned:
        loader = windows(table(), **{**GIVEN, "lookback": 6}, shuffle=False)
    assert warned[0].filename == __file__
    expected = [past for past, _ in naive(table(), 6, 2)]
    assert torch.equal(torch.cat([x for x, _ in loader]), stacked(expected, ["y"]))


def test_groups_of_a_single_row_are_left_out_with_a_warning_too():
    frame = table()
    short = pd.concat([frame, frame.iloc[:1].assign(id="alone")])
    with pytest.warns(UserWarning, match="1 group of a single row left out") as warned:
        loader = windows(short, **GIVEN, shuffle=False)
    assert warned[0].filename == __file__  # the line that called `windows`
    assert len(loader.dataset) == len(windows(frame, **GIVEN, shuffle=False).dataset)


@pytest.mark.parametrize("gap", ["60s", 0, -1.0])
def test_a_gap_is_a_number_of_seconds(gap):
    with refused("max_gap", repr(gap), allowed="seconds above 0, or None"):
        windows(table(), **GIVEN, max_gap=gap)


def test_a_series_with_a_hole_is_warned_of_unless_max_gap_parts_it():
    # Settings are named without their `data.`; a group's own name stays whole.
    frame = table({"data.a": 12})
    frame.loc[6:, "t"] += 1_000
    said = r"=data\.a: longest gap 1,001 s, .* windows reach across it unless max_gap parts recor"
    with pytest.warns(UserWarning, match=said) as warned:
        windows(frame, **GIVEN)
    assert warned[0].filename == __file__
    assert len(windows(frame, **GIVEN, max_gap=60).dataset) == 2 * 2


@pytest.mark.parametrize("source", ["rows.csv", Path("rows.csv")])
def test_a_file_is_no_table_and_the_message_does_not_offer_one(source):
    with pytest.raises(
        UserError,
        match=r"windows: cannot read rows from a \w+ \(a mapping of columns, a pandas, polars,",
    ):
        windows(source, **GIVEN)


@pytest.mark.parametrize("value", ["4", 1.5])
def test_numbers_of_rows_are_whole(value):
    with pytest.raises(UserError, match=rf"lookback: {value!r} \(1 or more\)"):
        windows(table(), **{**GIVEN, "lookback": value})


def test_missing_values_are_filled_and_no_window_spans_a_gap_where_that_is_asked_for():
    frame = table({"a": 12})
    frame.loc[4, "y"] = np.nan
    with pytest.warns(UserWarning, match="2 windows left out: a target was filled") as warned:
        loader = windows(frame, **GIVEN, shuffle=False, missing="fill")
    assert warned[0].filename == __file__
    ((x, y),) = all_batches(loader)
    first = x[:, 0, 0].tolist()
    assert first == pytest.approx([frame.y[row] for row in (2, 3, 3, 5, 6, 7)])
    assert not torch.isin(y, torch.tensor(frame.y[3], dtype=y.dtype)).any()
    frame.loc[6:, "t"] += 10
    with pytest.warns(UserWarning, match="2 windows left out"):
        found = windows(frame, **GIVEN, missing="fill", max_gap=1).dataset
    assert len(found) == 2 * 2 - 2  # six rows on each side


def rows_of(loader: DataLoader[Any]) -> list[float]:
    """Something that tells windows apart."""
    return [float(value) for x, _ in loader for value in x[:, 0, 0]]


def test_an_order_is_of_seed_and_epoch_and_has_every_window_once():
    first, again, other = (windows(table(), **GIVEN, batch_size=4, seed=seed) for seed in (1, 1, 2))
    epochs = [rows_of(first) for _ in range(3)]
    assert [rows_of(again) for _ in range(3)] == epochs
    every = sorted(rows_of(windows(table(), **GIVEN, shuffle=False)))
    assert all(sorted(each) == every for each in epochs)
    assert len({tuple(each) for each in [*epochs, rows_of(other)]}) == 4
    first.sampler.set_epoch(1)
    assert rows_of(first) == epochs[1]


def test_ranks_of_a_distributed_sampler_see_other_windows():
    whole = windows(table(), **GIVEN)
    ranks = []
    for rank in range(2):
        sampler = DistributedSampler(
            whole.dataset, num_replicas=2, rank=rank, seed=5, drop_last=True
        )
        loader = DataLoader(whole.dataset, 4, sampler=sampler, collate_fn=whole.collate_fn)
        ranks.append(set(rows_of(loader)))
    assert not ranks[0] & ranks[1]
    assert len(ranks[0] | ranks[1]) == len(whole.dataset) // 2 * 2


def test_a_loader_is_sent_to_workers_whole():
    loader = windows(table(), **GIVEN, features="f", known="k", static="s", shuffle=False)
    copy = pickle.loads(pickle.dumps(loader.dataset))
    (x, y), (x_of_copy, y_of_copy) = (each.__getitems__([3, 0]) for each in (loader.dataset, copy))
    assert torch.equal(x["past"], x_of_copy["past"])
    assert torch.equal(y, y_of_copy)


def refusal(frame: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        windows(frame, **{**GIVEN, **settings})
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lookback": 0}, "lookback: 0 (1 or more)"),
        ({"batch_size": 0}, "batch_size: 0 (1 or more)"),
        ({"target": ()}, "target: no column is named. Name what is forecast: target=COLUMN."),
        ({"missing": "no"}, "missing: 'no' (refuse, fill, drop)"),
        (
            {"lookback": 50},
            (
                "lookback=50 and horizon=2: 52 rows are needed, the longest group has 14. "
                "Lower one of them, or pass longer groups."
            ),
        ),
        (
            {"features": "ff"},
            (
                "features[ff]: no column 'ff' in table in memory (columns: id, t, y, z, f, k, s)."
                " Did you mean 'f'?"
            ),
        ),
        (
            {"features": "y"},
            "features[y]: 'y' is the column of target[y] already (columns: id, t, y, z, f, k, s)",
        ),
        (
            {"static": "f"},
            "static: table in memory: id=a has several values of f. Name it in features or known.",
        ),
        (
            {"group": "who"},
            "group: no column 'who' in table in memory (columns: id, t, y, z, f, k, s)",
        ),
    ],
)
def test_a_wrong_setting_is_one_sentence(settings, message):
    assert refusal(table(), **settings) == message


def test_columns_that_do_not_fit_are_named_by_row():
    text = refusal(table().assign(f="high"), features="f")
    assert text.startswith("table in memory: f is 'high' in row 1 (numbers).")
    lacking = table()
    lacking.loc[11, "y"] = np.nan
    said = (
        "missing: table in memory: id=b: 1 row without y (row 12). Set missing=fill or"
        " missing=drop."
    )
    assert refusal(lacking) == said
    back = table()
    back.loc[11, "t"] = -1
    assert refusal(back).startswith(
        "time: table in memory: id=b: t goes back from 1 to -1 in row 12. Sort the rows by"
    )
    assert refusal({}).startswith("windows: the table in memory has no rows")
    assert refusal(3).startswith("windows: cannot read rows from a int")
    assert refusal([{"y": 1.0}]).startswith(
        "windows: cannot read a dict (a table, a mapping of arrays, or TimeSeriesDataSets)"
    )
    assert refusal([]).startswith("windows: no TimeSeriesDataSet in the iterable. Pass one or more")
    assert refusal({"y": [1.0, 2.0], "t": [1.0]}).startswith(
        "windows: cannot make a table of these columns"
    )
