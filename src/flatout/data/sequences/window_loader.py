"""`windows`: a DataLoader of windows of a table, for any module that takes lookback and horizon.

A usual loader cuts out each window in Python, then stacks 64 of them. A DataLoader asks a dataset
that has `__getitems__` for all numbers of a batch at once, so each group of columns is copied by
one index. Samplers, distributed ones too, and workers are torch's own. Memory is the table's
numbers once, and 12 bytes a window.

The batches of pytorch-forecasting's `TimeSeriesDataSet` are gathered from the tensors that it has
encoded. Encoders, scalers and normalizers stay its own: its `to_dataloader` and this give a model
the same numbers. Several datasets in turn, made with `TimeSeriesDataSet.from_dataset`, are read one
at a time, so a large table is never whole in pandas. Shapes: B windows, L rows of lookback, H of
horizon, C columns, T the longest encoder or decoder of a batch.
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from flatout.data.batches.gather import HostColumn, runs_of
from flatout.data.batches.plan import generator_of
from flatout.data.checks.findings import counted, name_few
from flatout.data.sequences.columns import RecordingRules
from flatout.data.sequences.missing import Missing
from flatout.data.sequences.recording import Recording, measured_columns
from flatout.data.sequences.recordings import ReadingNotes, read_recordings
from flatout.data.sequences.views import Cut, Places, Segments
from flatout.data.store.store import Array, Ragged
from flatout.data.tables.formats.in_memory import table_of
from flatout.data.tables.table import require_columns
from flatout.errors import UserError, as_choice, require

# what is read of a `TimeSeriesDataSet`
_COLUMNS = ("reals", "categoricals", "time", "weight", "groups")
_NUMBERS_AT_ONCE = 65_536  # window numbers that are a list of Python numbers at one time
Names = str | list[str] | tuple[str, ...] | None
Roles = dict[str, list[str]]  # columns by what they are for: target, features, known, static
Lengths = NDArray[np.int32]  # [B] rows of each window
Pair = tuple[Tensor, Tensor]  # values of encoder and decoder: [B, T] or [B, T, C]
Columns = dict[str, Any]  # arrays of a table or of its windows, by name; None where there is none
Batch = TypeVar("Batch")
Nested = Tensor | None | dict[str, "Nested"] | tuple["Nested", ...] | list["Nested"]


class Normalizer(Protocol):
    """The methods of a normalizer of pytorch-forecasting that are called here."""

    def fit(self, y: Tensor) -> Normalizer: ...

    def transform(self, y: Tensor, target_scale: Tensor) -> Tensor: ...

    def get_parameters(
        self, groups: Tensor | None = None, group_names: list[str] | None = None
    ) -> Tensor: ...


class ForecastingDataset(Protocol):
    """The attributes of a `TimeSeriesDataSet` of pytorch-forecasting that are read here."""

    data: dict[str, Any]
    index: Any  # a pandas table with a row for each window
    reals: list[str]
    target_names: list[str]
    target_normalizers: list[Normalizer]
    group_ids: list[str]
    max_encoder_length: int
    multi_target: bool
    add_relative_time_idx: bool
    add_encoder_length: bool
    add_target_scales: bool
    randomize_length: object

    def calculate_decoder_length(
        self, time_last: NDArray[np.integer], sequence_length: NDArray[np.integer]
    ) -> NDArray[np.integer]: ...

    def get_transformer(self, name: str) -> object: ...


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
    in turn. It defines its own windows: of the other settings those from `batch_size` on count.
    """
    require(batch_size > 0, "batch_size", f"{batch_size}", allowed="1 or more")
    dataset: WindowBatches
    if is_forecasting(source):
        source = [source]
    if isinstance(source, Iterator | list | tuple):
        datasets = open_datasets(source)
        ignored = {
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
        _require_own_windows([name for name, is_set in ignored.items() if is_set])
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
        collate_fn=take_whole,
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


def take_whole(batch: Batch) -> Batch:
    """The `collate_fn` of a dataset whose `__getitems__` returns whole batches."""
    return batch


class SeededOrder(RandomSampler):
    """Each window once an epoch, in an order that depends on the seed and the epoch only.

    Lightning calls `set_epoch`; without it each iteration is the next epoch.
    """

    def __init__(self, windows: WindowBatches, seed: int) -> None:
        super().__init__(windows)
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        random = generator_of(self.seed, self.epoch)
        self.epoch += 1
        kind = np.int32 if self.num_samples < 2**31 else np.int64
        order = np.arange(self.num_samples, dtype=kind)
        random.shuffle(order)
        # A list of all numbers would take 40 bytes a window.
        for first in range(0, len(order), _NUMBERS_AT_ONCE):
            yield from order[first : first + _NUMBERS_AT_ONCE].tolist()


class WindowBatches(Dataset[Any], ABC):
    """Windows by number: `[3]` is one window, `__getitems__([3, 7])` a whole batch."""

    start: Places  # the first row of each window

    @abstractmethod
    def batch(self, numbers: Places) -> Any:
        """A batch of the windows with these numbers."""

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, number: int) -> Any:
        return first_of(self.__getitems__([range(len(self))[number]]))

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        return self.batch(np.asarray(numbers, np.int64))


def gather_runs(values: Array, start_B: Places, length: int | NDArray[np.integer]) -> Tensor:
    """`[B, longest, C]`: the rows of `values` from each start; shorter runs end in zeros.

    Values 10 to 19, starts [2, 5] and lengths [3, 1] give [[12, 13, 14], [15, 0, 0]].
    """
    # Runs of one length are rows of a view: one index copies them, without padding.
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


def first_of(batch: Nested) -> Nested:
    """The first row of a batch, whatever containers its tensors are in."""
    if isinstance(batch, dict):
        return {name: first_of(part) for name, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(map(first_of, batch))
    if isinstance(batch, list):
        return list(map(first_of, batch))
    return None if batch is None else batch[0]


def is_forecasting(source: object) -> TypeGuard[ForecastingDataset]:
    """Whether this is a `TimeSeriesDataSet`."""
    return hasattr(source, "calculate_decoder_length") and hasattr(source, "index")


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
        self.values = _join(blocks)
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


def open_datasets(sources: Iterable[object]) -> Iterator[ForecastingDataset]:
    """The same datasets, one at a time; the first is made and checked at once.

    Anything else than a `TimeSeriesDataSet` is refused.
    """
    checked = _check_datasets(sources)
    first = next(checked, None)
    if first is None:
        raise UserError("windows", "no TimeSeriesDataSet in the iterable", hint="Pass one or more.")
    return itertools.chain([first], checked)


def _check_datasets(sources: Iterable[object]) -> Iterator[ForecastingDataset]:
    for source in sources:
        if not is_forecasting(source):
            raise UserError(
                "windows",
                f"cannot read a {type(source).__name__}",
                allowed="a table, a mapping of arrays, or TimeSeriesDataSets",
            )
        yield source


class ForecastingWindows(WindowBatches):
    """Windows of one or several `TimeSeriesDataSet`s, in the order of their index."""

    def __init__(self, sources: Iterable[ForecastingDataset]) -> None:
        parts: list[Columns] = []
        for source in sources:
            if not parts:
                self.about = source
            parts.append(_read(source, sum(len(part["time"]) for part in parts)))
        self.columns: Columns = {}
        for name in parts[0]:
            self.columns[name] = _join([part[name] for part in parts])
        self.start = self.columns["start"]

    def batch(self, numbers: NDArray[np.int64]) -> Any:
        """The batch that `TimeSeriesDataSet._collate_fn` makes of windows with these numbers."""
        columns = self.columns
        about = self.about
        start = self.start[numbers]
        past = columns["past"][numbers]
        future = columns["future"][numbers]
        after = start + past

        def cut(values: Array) -> Pair:
            return gather_runs(values, start, past), gather_runs(values, after, future)

        reals = cut(columns["reals"])
        categoricals = cut(columns["categoricals"])
        names = [name for name in columns if name.startswith("target")]
        targets = [cut(columns[name]) for name in names]
        group = np.searchsorted(columns["begin"], start, "right") - 1
        scales = [torch.from_numpy(columns[f"scale of {name}"][group]) for name in names]
        self._write_lengths(reals, past, future)
        self._write_targets(reals, targets, scales, (past, future))
        # Without several targets the dataset hands out the one target, not a list of one.
        encoder_target: Tensor | list[Tensor] = targets[0][0]
        target: Tensor | list[Tensor] = targets[0][1]
        if about.multi_target:
            encoder_target = [encoder for encoder, _ in targets]
            target = [decoder for _, decoder in targets]
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

    def _write_targets(
        self,
        reals: Pair,
        targets: list[Pair],
        scales: list[Tensor],
        lengths: tuple[Lengths, Lengths],
    ) -> None:
        """Scale targets by their own window, where the dataset does: in `scales` and `reals`."""
        about = self.about
        for number, normalizer in enumerate(about.target_normalizers):
            if not _is_per_window(normalizer):
                continue
            scales[number] = _scale(targets[number][0], lengths[0], normalizer)
            # A target may be an input too: then the scaled one is read.
            name = about.target_names[number]
            if name not in about.reals:
                continue
            for values, side, length in zip(reals, targets[number], lengths, strict=True):
                scaled = normalizer.transform(side, target_scale=scales[number])
                values[:, :, about.reals.index(name)] = _blank(scaled, length)

    def _write_lengths(self, reals: Pair, past: Lengths, future: Lengths) -> None:
        """Write the inputs that depend on where a window is cut: relative time, encoder length."""
        about = self.about
        most = about.max_encoder_length
        share = torch.from_numpy((past - 0.5 * most) / most * 2.0)[:, None]
        # An encoder of 3 rows has the times -3, -2, -1, its decoder 0, 1, …, all divided by `most`.
        for values, first, length in zip(reals, (-past, 0 * past), (past, future), strict=True):
            if about.add_relative_time_idx:
                steps = torch.from_numpy(first[:, None] + np.arange(values.shape[1]))
                times = _blank(steps.to(values.dtype) / most, length)
                values[:, :, about.reals.index("relative_time_idx")] = times
            if about.add_encoder_length:
                shares = share.expand(values.shape[:2]).to(values.dtype)
                values[:, :, about.reals.index("encoder_length")] = _blank(shares, length)


def _is_per_window(normalizer: object) -> bool:
    """Whether a normalizer is fitted on each window; by name, so that nothing is imported."""
    return "EncoderNormalizer" in {kind.__name__ for kind in type(normalizer).__mro__}


def _scale(target: Tensor, past: Lengths, normalizer: Normalizer) -> Tensor:
    """`[B, 2]` center and scale of each window's encoder, for all windows of one length at once."""
    scale = target.new_empty(len(target), 2)
    for length in np.unique(past).tolist():
        rows = torch.from_numpy(past == length)
        scale[rows] = normalizer.fit(target[rows, :length]).get_parameters().to(scale.dtype)
    return scale


def _blank(values: Tensor, length: Lengths) -> Tensor:
    """`[B, T]` with zeros behind the end of each window."""
    is_inside = np.arange(values.shape[1]) < length[:, None]
    return values.where(torch.from_numpy(is_inside), 0)


def _read(source: ForecastingDataset, before: int) -> Columns:
    """The columns of a dataset, and its windows; `before` counts the rows of earlier datasets.

    Windows have a start row, and rows of encoder and decoder (`past`, `future`). Groups have a
    first row (`begin`), their codes, and for each target a scale.
    """
    _require_plain(source)
    columns: Columns = {}
    for name in _COLUMNS:
        values = source.data[name]
        columns[name] = None if values is None else values.numpy()
    first = source.index["index_start"].to_numpy()
    last = source.index["index_end"].to_numpy()
    rows = last - first + 1
    is_whole = bool((rows == source.index["sequence_length"].to_numpy()).all())
    _require(
        is_whole,
        "allow_missing_timesteps",
        "some windows lack time steps, which it fills while it loads",
        "Write a row for each step",
    )
    future = source.calculate_decoder_length(columns["time"][last], rows)
    groups = columns["groups"]
    is_new = (groups[1:] != groups[:-1]).any(axis=1)
    begin = np.append(0, np.flatnonzero(is_new) + 1)
    columns["begin"] = begin + before
    columns["groups"] = groups[begin]
    columns["start"] = first + before
    columns["past"] = (rows - future).astype(np.int32)
    columns["future"] = future.astype(np.int32)
    for number, normalizer in enumerate(source.target_normalizers):
        columns[f"target {number}"] = source.data["target"][number].numpy()
        scales = [
            np.asarray(normalizer.get_parameters(group, source.group_ids), np.float32)
            for group in map(torch.from_numpy, columns["groups"])
        ]
        columns[f"scale of target {number}"] = np.stack(scales)
    return columns


def _join(parts: list[Any]) -> Any:
    """Arrays behind each other; without a copy where there is one, None where there are none."""
    return parts[0] if len(parts) == 1 or parts[0] is None else np.concatenate(parts)


def _require_plain(source: ForecastingDataset) -> None:
    """Refuse a dataset that changes windows while it loads in ways that are not done here."""
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


def _require(condition: bool, setting: str, problem: str, fix: str) -> None:
    require(
        condition,
        f"TimeSeriesDataSet.{setting}",
        f"{problem}: not served",
        hint=f"{fix}, or keep to_dataloader().",
    )
