"""`windows`: a DataLoader of windows of a table, for any module that takes lookback and horizon.

A usual loader makes a window a row: Python cuts each out, then stacks 64 of them. A DataLoader asks
a dataset that has `__getitems__` for all numbers of a batch at once, so each group of columns is
copied by one index. Samplers, distributed ones too, and workers are torch's own. Memory is the
table's numbers once, and 12 bytes a window.

The batches of pytorch-forecasting's `TimeSeriesDataSet` are gathered from the tensors that it has
encoded. Encoders, scalers and normalizers stay its own: its `to_dataloader` and this give a model
the same numbers. Several datasets in turn, made with `TimeSeriesDataSet.from_dataset`, are read one
at a time, so a large table is never whole in pandas. Shapes: B windows, L rows of lookback, H of
horizon, C columns, T the longest encoder or decoder of a batch.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from flatout.data.batches.gather import HostColumn, runs_of
from flatout.data.batches.plan import stream
from flatout.data.checks.findings import counted
from flatout.data.sequences.columns import RecordingRules
from flatout.data.sequences.recordings import ReadingNotes, Recording, read_recordings
from flatout.data.sequences.settings import Missing
from flatout.data.sequences.views import Cut, Places, Segments
from flatout.data.store.store import Array, Ragged
from flatout.data.tables.formats.in_memory import table_of
from flatout.data.tables.table import require_columns
from flatout.errors import UserError, as_choice, require

# what is read of a `TimeSeriesDataSet`
_COLUMNS = ("reals", "categoricals", "time", "weight", "groups")
_NUMBERS_AT_ONCE = 65_536
Names = str | list[str] | tuple[str, ...] | None
Roles = dict[str, list[str]]  # columns by what they are for: target, features, known, static


def windows(
    source: Any,
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
    group. A batch is `(x, y)`: x is `[B, L, C]` of target, features and known, or with `known` or
    `static` a mapping of `past` and these; y is `[B, H, targets]`.

    A `source` may also be a `TimeSeriesDataSet` of pytorch-forecasting, or several, which are read
    in turn. It defines its own windows: of the other settings those from `batch_size` on count.
    """
    require(batch_size > 0, "batch_size", f"{batch_size}", allowed="1 or more")
    if is_forecasting(source) or isinstance(source, Iterator | list | tuple):
        has_said = not (lookback or target or group or time or features or known or static)
        require(
            has_said,
            "windows",
            "a TimeSeriesDataSet says itself what its windows are",
            hint="Leave out lookback and columns.",
        )
        found: WindowBatches = ForecastingWindows([source] if is_forecasting(source) else source)
    else:
        named = {"target": target, "features": features, "known": known, "static": static}
        roles = {role: _listed(columns) for role, columns in named.items()}
        columns = [name for names in roles.values() for name in names]
        how = as_choice(Missing, missing, "missing")
        ways: dict[str, Any] = {"max_gap": max_gap, "missing": how, "past_only": True}
        rules = RecordingRules(columns=columns, time=time, group=_listed(group), **ways)
        for name, value in (("lookback", lookback), ("horizon", horizon), ("stride", stride)):
            require(isinstance(value, int) and value > 0, name, f"{value!r}", allowed="1 or more")
        is_span = max_gap is None or (isinstance(max_gap, int | float) and max_gap > 0)
        require(is_span, "max_gap", f"{max_gap!r}", allowed="seconds above 0, or None")
        found = TableWindows(
            _recordings(source, roles, rules), roles, Cut(lookback, horizon, stride=stride)
        )
    order = SeededOrder(found, seed) if shuffle else None
    settings: dict[str, Any] = {
        "drop_last": drop_last,
        "num_workers": num_workers,
        "pin_memory": pin_memory,
    }
    return DataLoader(found, batch_size, sampler=order, collate_fn=take_whole, **settings)


def take_whole(batch: Any) -> Any:
    """The `collate_fn` of a batch that is whole already."""
    return batch


class SeededOrder(RandomSampler):
    """Each window once an epoch, in an order of seed and epoch alone; counts the epochs where they
    are not set.
    """

    def __init__(self, windows: WindowBatches, seed: int) -> None:
        super().__init__(windows)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        random = stream(self.seed, self.epoch)
        self.epoch += 1
        order = np.arange(
            self.num_samples, dtype=np.int32 if self.num_samples < 2**31 else np.int64
        )
        random.shuffle(order)
        # a list of all would take 40 bytes a window
        for first in range(0, len(order), _NUMBERS_AT_ONCE):
            yield from order[first : first + _NUMBERS_AT_ONCE].tolist()


class WindowBatches(Dataset[Any], ABC):
    """Windows by number: `[3]` is one, `__getitems__` a batch that needs no collating."""

    start: Places  # the first row of each window

    @abstractmethod
    def batch(self, numbers: Places) -> Any:
        """The windows of these numbers, put together."""

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, number: int) -> Any:
        return first_of(self.__getitems__([range(len(self))[number]]))

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        return self.batch(np.asarray(numbers, np.int64))


def gather_runs(values: Array, start_B: Places, length: int | NDArray[np.integer]) -> Tensor:
    """`[B, longest, C]`: the rows of `values` from each start; shorter runs end in zeros, others
    need no padding.
    """
    if not isinstance(length, int) and (length == length[0]).all():
        length = int(length[0])
    if isinstance(length, int):
        return torch.from_numpy(runs_of(values, length)[start_B])
    column = HostColumn(Ragged(values, start_B, length.astype(np.int32)))
    longest = int(length.max())
    flat, _ = column.gather(np.arange(len(start_B)), length.astype(np.int64))
    padded = flat.new_zeros((len(start_B), longest, *values.shape[1:]))
    padded[torch.from_numpy(np.arange(longest) < length[:, None])] = flat
    return padded


def first_of(batch: Any) -> Any:
    """The first row of a batch, of whatever it is made."""
    if isinstance(batch, dict):
        return {name: first_of(part) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(map(first_of, batch))
    return None if batch is None else batch[0]


def is_forecasting(source: Any) -> bool:
    """Whether this is a `TimeSeriesDataSet`."""
    return hasattr(source, "calculate_decoder_length") and hasattr(source, "index")


class TableWindows(WindowBatches):
    """Windows of a table's rows, group after group, as pairs of lookback and horizon."""

    def __init__(self, recordings: Iterator[Recording], roles: Roles, cut: Cut) -> None:
        ends = np.cumsum([len(roles[role]) for role in ("target", "features", "known")])
        blocks = []
        statics = []
        lengths = {}
        filled = []
        for each in recordings:
            blocks.append(each.values[:, : ends[-1]].astype(np.float32))
            statics.append(_only_row(each, roles["static"], ends[-1]))
            lengths[each.name] = len(each.rows)
            nothing = np.zeros(len(each.rows), np.bool_)
            filled.append(
                nothing if each.measured is None else (~each.measured[:, : ends[0]]).any(axis=1)
            )
        _require_long_enough(lengths, cut)
        end = np.cumsum(list(lengths.values()))
        self.begin = np.append(0, end[:-1])
        self.start = cut.rows(Segments(self.begin, self.begin, end, np.arange(len(end)))).start
        self.lookback = cut.lookback or 0
        self.horizon = cut.horizon
        self.static = np.stack(statics)
        self._leave_out(np.concatenate(filled))
        self.values = _joined(blocks)
        self.target, self.known = self.values[:, : ends[0]], self.values[:, ends[1] :]

    def _leave_out(self, is_filled: NDArray[np.bool_]) -> None:
        """Leave out the windows with a target in their horizon that was filled: it is no truth."""
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
        past, y = (
            gather_runs(self.values, start, self.lookback),
            gather_runs(self.target, behind, self.horizon),
        )
        if not (self.known.size or self.static.size):
            return past, y
        known = gather_runs(self.known, behind, self.horizon) if self.known.size else None
        group = np.searchsorted(self.begin, start, "right") - 1
        static = torch.from_numpy(self.static[group]) if self.static.size else None
        return {"past": past, "known": known, "static": static}, y


def _listed(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _recordings(source: Any, roles: Roles, rules: RecordingRules) -> Iterator[Recording]:
    """The groups of a table, one by one; messages name the settings of `windows`."""
    require(
        bool(roles["target"]),
        "target",
        "no column is named",
        hint="Name what is forecast: target=COLUMN.",
    )
    # arrays as they stand: lists of their numbers take ten times the memory
    if isinstance(source, Mapping):
        source = {name: np.asarray(values) for name, values in source.items()}
        is_table = (
            all(each.ndim == 1 for each in source.values())
            and len({*map(len, source.values())}) == 1
        )
        source = pa.table(source) if is_table else source
    table = table_of(source, where="windows")
    require_columns(
        table, {f"{role}[{name}]": name for role, names in roles.items() for name in names}
    )
    notes = ReadingNotes()
    try:
        yield from read_recordings(table, rules, notes)
    except UserError as error:
        where, hint = (text.replace("data.", "") for text in (error.where, error.hint))
        raise UserError(where, error.what, allowed=error.allowed, hint=hint) from None
    if notes.short:
        warnings.warn(f"{counted(notes.short, 'group')} of a single row left out", stacklevel=5)


def _only_row(recording: Recording, names: list[str], first: int) -> NDArray[np.float32]:
    """The values of the static columns, from `first` on, which must be the same in all rows."""
    values = recording.values[:, first:]
    for place in np.flatnonzero((values != values[:1]).any(axis=0)):
        raise UserError(
            "static",
            f"{recording.name} has several values of {names[place]}",
            hint="Name it in features or known.",
        )
    return values[0].astype(np.float32)


def _require_long_enough(lengths: dict[str, int], cut: Cut) -> None:
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
        what = (
            f"{counted(len(short), 'group')} shorter than the {needed:,} rows of {keys} left out: "
        )
        warnings.warn(what + ", ".join(short[:3]) + (", …" if len(short) > 3 else ""), stacklevel=4)


class ForecastingWindows(WindowBatches):
    """Windows of one or several `TimeSeriesDataSet`s, in the order of their index."""

    def __init__(self, sources: Iterable[Any]) -> None:
        parts: list[dict[str, Any]] = []
        for source in sources:
            require(
                is_forecasting(source),
                "windows",
                f"cannot read a {type(source).__name__}",
                allowed="a table, a mapping of arrays, or TimeSeriesDataSets",
            )
            if not parts:
                self.about = source
            parts.append(_read(source, sum(len(part["time"]) for part in parts)))
        require(
            bool(parts), "windows", "no TimeSeriesDataSet in the iterable", hint="Pass one or more."
        )
        self.columns = {name: _joined([part[name] for part in parts]) for name in parts[0]}
        self.start, self.past, self.future = (
            self.columns.pop(name) for name in ("start", "past", "future")
        )

    def batch(self, numbers: NDArray[np.int64]) -> Any:
        """What `TimeSeriesDataSet._collate_fn` makes of the same windows."""
        start = self.start[numbers]
        past = self.past[numbers]
        future = self.future[numbers]
        columns = self.columns
        about = self.about
        after = start + past

        def cut(values: NDArray[Any]) -> tuple[Tensor, Tensor]:
            return gather_runs(values, start, past), gather_runs(values, after, future)

        reals, categoricals = cut(columns["reals"]), cut(columns["categoricals"])
        places = [name for name in columns if name.startswith("target")]
        targets = [cut(columns[name]) for name in places]
        group = np.searchsorted(columns["begin"], start, "right") - 1
        scales = [torch.from_numpy(columns[f"scale of {name}"][group]) for name in places]
        self._write_lengths(reals, past, future)
        self._write_targets(reals, targets, scales, (past, future))
        sides = map(list, zip(*targets, strict=True))
        encoder_target, target = (side if about.multi_target else side[0] for side in sides)
        first = torch.from_numpy(columns["time"][start] + past)
        weight = columns["weight"]
        x = {
            "encoder_cat": categoricals[0],
            "encoder_cont": reals[0],
            "encoder_target": encoder_target,
            "encoder_lengths": torch.from_numpy(past.astype(np.int64)),
            "decoder_cat": categoricals[1],
            "decoder_cont": reals[1],
            "decoder_target": target,
            "decoder_lengths": torch.from_numpy(future.astype(np.int64)),
            "decoder_time_idx": first[:, None] + torch.arange(int(future.max())),
            "groups": torch.from_numpy(columns["groups"][group]),
            "target_scale": scales if about.multi_target else scales[0],
        }
        return x, (target, None if weight is None else gather_runs(weight, after, future))

    def _write_targets(self, reals: Any, targets: Any, scales: list[Tensor], lengths: Any) -> None:
        """The scales of targets that are scaled by their own window; and these targets, where they
        are inputs too.
        """
        names, places = self.about.target_names, self.about.reals
        for number, normalizer in enumerate(self.about.target_normalizers):
            if _is_per_window(normalizer):
                scales[number] = _scale(targets[number][0], lengths[0], normalizer)
                for values, side, length in zip(reals, targets[number], lengths, strict=True):
                    if names[number] in places:
                        scaled = normalizer.transform(side, target_scale=scales[number])
                        values[:, :, places.index(names[number])] = _blanked(scaled, length)

    def _write_lengths(
        self, reals: tuple[Tensor, Tensor], past: NDArray[Any], future: NDArray[Any]
    ) -> None:
        """The columns of the dataset that depend on where a window is cut."""
        about, most = self.about, self.about.max_encoder_length
        share = torch.from_numpy((past - 0.5 * most) / most * 2.0)[:, None]
        for values, first, length in zip(reals, (-past, 0 * past), (past, future), strict=True):
            if about.add_relative_time_idx:
                steps = torch.from_numpy(first[:, None] + np.arange(values.shape[1])).to(
                    values.dtype
                )
                values[:, :, about.reals.index("relative_time_idx")] = _blanked(
                    steps / most, length
                )
            if about.add_encoder_length:
                shares = share.expand(values.shape[:2]).to(values.dtype)
                values[:, :, about.reals.index("encoder_length")] = _blanked(shares, length)


def _is_per_window(normalizer: Any) -> bool:
    return "EncoderNormalizer" in {kind.__name__ for kind in type(normalizer).__mro__}


def _scale(target: Tensor, past: NDArray[Any], normalizer: Any) -> Tensor:
    """`[B, 2]` center and scale of each window's encoder, for all windows of one length at once."""
    scale = target.new_empty(len(target), 2)
    for length in np.unique(past).tolist():
        rows = torch.from_numpy(past == length)
        scale[rows] = normalizer.fit(target[rows, :length]).get_parameters().to(scale.dtype)
    return scale


def _blanked(values: Tensor, length: NDArray[Any]) -> Tensor:
    """`[B, T]` with zeros behind the end of each window."""
    return values.where(torch.from_numpy(np.arange(values.shape[1]) < length[:, None]), 0)


def _read(source: Any, before: int) -> dict[str, Any]:
    """The columns of a dataset, and its windows; `before` are the rows of the datasets
    before it.
    """
    _require_plain(source)
    found: dict[str, Any] = {
        name: None if (part := source.data[name]) is None else part.numpy() for name in _COLUMNS
    }
    index = {
        name: source.index[name].to_numpy()
        for name in ("index_start", "index_end", "sequence_length")
    }
    rows = index["index_end"] - index["index_start"] + 1
    what = "some windows lack time steps, which it fills while it loads"
    is_whole = rows == index["sequence_length"]
    _require(bool(is_whole.all()), "allow_missing_timesteps", what, "Write a row for each step")
    future = source.calculate_decoder_length(found["time"][index["index_end"]], rows)
    groups = found["groups"]
    begin = np.append(0, np.flatnonzero((groups[1:] != groups[:-1]).any(axis=1)) + 1)
    found |= {
        "begin": begin + before,
        "groups": groups[begin],
        "start": index["index_start"] + before,
    }
    found |= {"past": (rows - future).astype(np.int32), "future": future.astype(np.int32)}
    for number, (values, normalizer) in enumerate(
        zip(source.data["target"], source.target_normalizers, strict=True)
    ):
        names = [torch.from_numpy(group) for group in found["groups"]]
        scale = [
            np.asarray(normalizer.get_parameters(name, source.group_ids), np.float32)
            for name in names
        ]
        found |= {f"target {number}": values.numpy(), f"scale of target {number}": np.stack(scale)}
    return found


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 or parts[0] is None else np.concatenate(parts)


def _require_plain(source: Any) -> None:
    """What the dataset changes in a window while it loads must be what is done here too."""
    _require(
        source.randomize_length is None,
        "randomize_length",
        "windows of random length",
        "Set it to False",
    )
    others = [name for name in source.reals if name not in source.target_names]
    scaled = [name for name in others if _is_per_window(source.get_transformer(name))]
    _require(
        not scaled, "scalers", f"{', '.join(scaled)} scaled by each window", "Scale it by group"
    )
    is_scaled = source.add_target_scales and any(map(_is_per_window, source.target_normalizers))
    _require(
        not is_scaled, "add_target_scales", "scales of each window as inputs", "Set it to False"
    )


def _require(condition: bool, setting: str, what: str, fix: str) -> None:
    require(
        condition,
        f"TimeSeriesDataSet.{setting}",
        f"{what}: not served",
        hint=f"{fix}, or keep to_dataloader().",
    )
