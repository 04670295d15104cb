"""Batches of pytorch-forecasting's `TimeSeriesDataSet`, gathered from the tensors it has encoded.

Encoders, scalers and normalizers stay its own: its `to_dataloader` and `windows` give a model the
same numbers. Several datasets in turn, made with `TimeSeriesDataSet.from_dataset`, are read one at
a time, so a large table is never whole in pandas. Nothing of pytorch-forecasting is imported. Open
this file when its batches have got another column, or when a dataset is refused that should be
served.

Shapes: B windows, C columns, T the longest encoder or decoder of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.sequences.window_batches import WindowBatches, gather_runs, join_arrays
from flatout.data.store.store import Array
from flatout.errors import UserError, require

# the columns that are read of a `TimeSeriesDataSet`
_COLUMNS = ("reals", "categoricals", "time", "weight", "groups")
Lengths = NDArray[np.int32]  # [B] rows of each window
Pair = tuple[Tensor, Tensor]  # values of encoder and decoder: [B, T] or [B, T, C]
Columns = dict[str, Any]  # arrays by name; None for a column that the dataset lacks


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


def is_forecasting(source: object) -> TypeGuard[ForecastingDataset]:
    """Whether this is a `TimeSeriesDataSet`."""
    return hasattr(source, "calculate_decoder_length") and hasattr(source, "index")


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
    """The same datasets; each is checked when it is its turn."""
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
            self.columns[name] = join_arrays([part[name] for part in parts])
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
                values[:, :, about.reals.index(name)] = _zero_behind(scaled, length)

    def _write_lengths(self, reals: Pair, past: Lengths, future: Lengths) -> None:
        """Write the inputs that depend on where a window is cut: relative time, encoder length."""
        about = self.about
        most = about.max_encoder_length
        share = torch.from_numpy((past - 0.5 * most) / most * 2.0)[:, None]
        # An encoder of 3 rows has the times -3, -2, -1, its decoder 0, 1, …, all divided by `most`.
        for values, first, length in zip(reals, (-past, 0 * past), (past, future), strict=True):
            if about.add_relative_time_idx:
                steps = torch.from_numpy(first[:, None] + np.arange(values.shape[1]))
                times = _zero_behind(steps.to(values.dtype) / most, length)
                values[:, :, about.reals.index("relative_time_idx")] = times
            if about.add_encoder_length:
                shares = share.expand(values.shape[:2]).to(values.dtype)
                values[:, :, about.reals.index("encoder_length")] = _zero_behind(shares, length)


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


def _zero_behind(values: Tensor, length: Lengths) -> Tensor:
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
    _require_served(
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


def _require_plain(source: ForecastingDataset) -> None:
    """Refuse a dataset that changes windows while it loads in ways that are not done here."""
    _require_served(
        source.randomize_length is None,
        "randomize_length",
        "windows of random length",
        "Set it to False",
    )
    others = [name for name in source.reals if name not in source.target_names]
    scaled = [name for name in others if _is_per_window(source.get_transformer(name))]
    _require_served(
        not scaled, "scalers", f"{', '.join(scaled)} scaled by each window", "Scale it by group"
    )
    is_scaled = source.add_target_scales and any(map(_is_per_window, source.target_normalizers))
    _require_served(
        not is_scaled, "add_target_scales", "scales of each window as inputs", "Set it to False"
    )


def _require_served(condition: bool, setting: str, problem: str, fix: str) -> None:
    require(
        condition,
        f"TimeSeriesDataSet.{setting}",
        f"{problem}: not served",
        hint=f"{fix}, or keep to_dataloader().",
    )
