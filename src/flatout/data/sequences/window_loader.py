"""`windows`: a DataLoader of windows of a table, for any module that takes lookback and horizon.

Memory is the table's numbers once, and 12 bytes a window. Open this file to change the arguments of
`windows`, or how windows are cut from a table. `window_batches.py` copies the rows of a batch,
`forecasting_windows.py` reads the datasets of pytorch-forecasting. Windows of recordings in a store
are cut in `views.py`, those of long texts in `data/tokens/long_texts.py`.

Shapes: B windows, L rows of lookback, H of horizon, C columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from flatout.data.checks.findings import counted, name_few
from flatout.data.sequences.columns import RecordingRules
from flatout.data.sequences.forecasting_windows import (
    ForecastingWindows,
    is_forecasting,
    open_datasets,
)
from flatout.data.sequences.missing import Missing
from flatout.data.sequences.recording import Recording, measured_columns
from flatout.data.sequences.recordings import ReadingNotes, read_recordings
from flatout.data.sequences.views import Cut, Places, Segments
from flatout.data.sequences.window_batches import (
    SeededOrder,
    WindowBatches,
    gather_runs,
    join_arrays,
    keep_batch,
)
from flatout.data.tables.formats.in_memory import table_of
from flatout.data.tables.table import require_columns
from flatout.errors import UserError, as_choice, require

Names = str | list[str] | tuple[str, ...] | None
Roles = dict[str, list[str]]  # columns by what they are for: target, features, known, static


def windows(
    source: object,
    *,
    lookback: int = 0,
    horizon: int = 1,
    target: Names = None,
    group: Names = None,
    time: str | None = None,
    features: Names = None,
    known: Names = None,
    static: Names = None,
    stride: int = 1,
    missing: str = "refuse",
    max_gap: float | None = None,
    batch_size: int = 64,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """A DataLoader of windows: `lookback` rows of a group, and the `horizon` rows behind them.

    `source` is a pandas, polars or pyarrow table, or a mapping of arrays; columns hold numbers.
    `features` are read in the lookback, `known` in the horizon too; `static` have one value a
    group. A batch is `(x, y)`. x is `[B, L, C]` of target, features and known; with `known` or
    `static` it is a mapping of `past` and these. y is `[B, H, targets]`.

    A `source` may also be a `TimeSeriesDataSet` of pytorch-forecasting, or several, which are read
    in turn. It defines its own windows, so only settings from `batch_size` on may be set beside it.
    """
    require(batch_size > 0, "batch_size", f"{batch_size}", allowed="1 or more")
    dataset: WindowBatches
    if is_forecasting(source):
        source = [source]
    if isinstance(source, Iterator | list | tuple):
        datasets = open_datasets(source)
        are_set = {
            "lookback": bool(lookback),
            "horizon": horizon != 1,
            "target": bool(target),
            "group": bool(group),
            "time": bool(time),
            "features": bool(features),
            "known": bool(known),
            "static": bool(static),
            "stride": stride != 1,
            "missing": missing != "refuse",
            "max_gap": max_gap is not None,
        }
        _require_own_windows([name for name, is_set in are_set.items() if is_set])
        dataset = ForecastingWindows(datasets)
    else:
        named = {"target": target, "features": features, "known": known, "static": static}
        roles = {role: _as_list(columns) for role, columns in named.items()}
        rules = _rules(roles, time, _as_list(group), missing, max_gap)
        _require_sizes({"lookback": lookback, "horizon": horizon, "stride": stride})
        cut = Cut(lookback, horizon, stride=stride)
        dataset = TableWindows(_read_groups(source, roles, rules), roles, cut)
    return DataLoader(
        dataset,
        batch_size,
        sampler=SeededOrder(dataset, seed) if shuffle else None,
        collate_fn=keep_batch,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )


def _rules(
    roles: Mapping[str, list[str]],
    time: str | None,
    group: list[str],
    missing: str,
    max_gap: float | None,
) -> RecordingRules:
    """How the rows of each group are read."""
    is_span = max_gap is None or (isinstance(max_gap, int | float) and max_gap > 0)
    require(is_span, "max_gap", f"{max_gap!r}", allowed="seconds above 0, or None")
    return RecordingRules(
        columns=[name for names in roles.values() for name in names],
        time=time,
        group=group,
        max_gap=max_gap,
        missing=as_choice(Missing, missing, "missing"),
        past_only=True,
    )


def _require_own_windows(settings: list[str]) -> None:
    """Refuse settings of windows for a dataset that has windows already."""
    require(
        not settings,
        "windows",
        "a TimeSeriesDataSet defines its own windows",
        hint=f"Leave out {', '.join(settings)}.",
    )


def _require_sizes(counts: Mapping[str, int]) -> None:
    for name, value in counts.items():
        require(isinstance(value, int) and value > 0, name, f"{value!r}", allowed="1 or more")


class TableWindows(WindowBatches):
    """Windows of a table's rows, group after group, as pairs of lookback and horizon."""

    def __init__(self, recordings: Iterator[Recording], roles: Roles, cut: Cut) -> None:
        # Columns lie in the order target, features, known, static: with 1, 3 and 2 of the first
        # three, `ends` are 1, 4, 6.
        ends = np.cumsum([len(roles[role]) for role in ("target", "features", "known")])
        blocks = []
        statics = []
        lengths = {}
        are_filled = []
        for recording in recordings:
            blocks.append(recording.values[:, : ends[-1]].astype(np.float32))
            statics.append(_only_row(recording, roles["static"], ends[-1]))
            lengths[recording.name] = len(recording.rows)
            measured = measured_columns(recording)[:, : ends[0]]
            are_filled.append((~measured).any(axis=1))
        _require_long_enough(lengths, cut)
        end = np.cumsum(list(lengths.values()))
        self.begin = np.append(0, end[:-1])
        segments = Segments(self.begin, self.begin, end, np.arange(len(end)))
        self.start = cut.rows(segments).start
        self.lookback = cut.lookback or 0
        self.horizon = cut.horizon
        self.static = np.stack(statics)
        self._leave_out(np.concatenate(are_filled))
        self.values = join_arrays(blocks)
        self.target = self.values[:, : ends[0]]
        self.known = self.values[:, ends[1] :]

    def _leave_out(self, is_filled: NDArray[np.bool_]) -> None:
        """Leave out the windows with a filled target in their horizon: it was never measured."""
        # is_filled 0 1 0 0 → count 0 0 1 1 1: rows 1 and 2 have count[3] - count[1] = 1 filled one
        count = np.append(0, np.cumsum(is_filled))
        first = self.start + self.lookback
        is_whole = count[first + self.horizon] == count[first]
        if is_whole.all():
            return
        left_out = int((~is_whole).sum())
        self.start = self.start[is_whole]
        require(
            len(self.start) > 0,
            "missing",
            f"each horizon of {self.horizon} holds a target that was filled",
            hint="Lower horizon, or set missing=drop.",
        )
        warnings.warn(f"{counted(left_out, 'window')} left out: a target was filled", stacklevel=4)

    def batch(self, numbers: Places) -> Any:
        start = self.start[numbers]
        behind = start + self.lookback
        past = gather_runs(self.values, start, self.lookback)
        y = gather_runs(self.target, behind, self.horizon)
        if not (self.known.size or self.static.size):
            return past, y
        future = gather_runs(self.known, behind, self.horizon) if self.known.size else None
        group = np.searchsorted(self.begin, start, "right") - 1
        static = torch.from_numpy(self.static[group]) if self.static.size else None
        return {"past": past, "known": future, "static": static}, y


def _as_list(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _read_groups(source: object, roles: Roles, rules: RecordingRules) -> Iterator[Recording]:
    """The groups of a table, one by one; messages name the settings of `windows`."""
    require(
        bool(roles["target"]),
        "target",
        "no column is named",
        hint="Name what is forecast: target=COLUMN.",
    )
    # An arrow table takes arrays without a copy; lists of their numbers take ten times the memory.
    if isinstance(source, Mapping):
        arrays = {name: np.asarray(values) for name, values in source.items()}
        are_flat = all(array.ndim == 1 for array in arrays.values())
        is_table = are_flat and len({*map(len, arrays.values())}) == 1
        source = pa.table(arrays) if is_table else arrays
    table = table_of(source, where="windows")
    require_columns(
        table, {f"{role}[{name}]": name for role, names in roles.items() for name in names}
    )
    notes = ReadingNotes()
    try:
        yield from read_recordings(table, rules, notes)
    except UserError as error:
        raise UserError(
            error.where.removeprefix("data."),
            error.what,
            allowed=error.allowed,
            hint=error.hint.replace("data.", ""),
        ) from None
    # The level leads to the caller of `windows`: TableWindows and `windows` lie between.
    if notes.short:
        warnings.warn(f"{counted(notes.short, 'group')} of a single row left out", stacklevel=4)
    if notes.holes:
        warnings.warn(notes.describe_holes("max_gap"), stacklevel=4)


def _only_row(recording: Recording, names: list[str], first: int) -> NDArray[np.float32]:
    """The values of the static columns, from `first` on, which must be the same in all rows."""
    values = recording.values[:, first:]
    for column in np.flatnonzero((values != values[:1]).any(axis=0)):
        raise UserError(
            "static",
            f"{recording.name} has several values of {names[column]}",
            hint="Name it in features or known.",
        )
    return values[0].astype(np.float32)


def _require_long_enough(lengths: dict[str, int], cut: Cut) -> None:
    """Refuse groups that are all too short for a window, and warn of those that are.

    `lengths` are the rows of each group, by its name.
    """
    needed = (cut.lookback or 0) + cut.horizon
    longest = max(lengths.values(), default=1)
    keys = f"lookback={cut.lookback} and horizon={cut.horizon}"
    require(
        longest >= needed,
        keys,
        f"{needed:,} rows are needed, the longest group has {longest:,}",
        hint="Lower one of them, or pass longer groups.",
    )
    if short := [name for name, length in lengths.items() if length < needed]:
        what = f"{counted(len(short), 'group')} shorter than the {needed:,} rows of {keys} left out"
        warnings.warn(f"{what}: {name_few(short)}", stacklevel=4)
