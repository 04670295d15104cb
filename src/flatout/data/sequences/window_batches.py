"""Windows by number, a batch of them in one gather: the datasets of which a torch DataLoader asks for its batches.

A usual loader makes a window a row: Python cuts each out, then stacks 64 of them. A DataLoader asks a dataset that has
`__getitems__` for all numbers of a batch at once, so each group of columns is copied by one index. Samplers,
distributed ones too, and workers are torch's own.

The batches of pytorch-forecasting's `TimeSeriesDataSet` are gathered from the tensors that it has encoded. Encoders,
scalers and normalizers stay its own: its `to_dataloader` and this give a model the same numbers. Several datasets in
turn, made with `TimeSeriesDataSet.from_dataset`, are read one at a time, so a large table is never whole in pandas.
Shapes: B windows, C columns, T the longest encoder or decoder of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from flatout.data.batches.gather import HostColumn, runs_of
from flatout.data.sequences.views import Places
from flatout.data.store.store import Array, Ragged
from flatout.errors import require

_COLUMNS = ("reals", "categoricals", "time", "weight", "groups")
"""What is read of a `TimeSeriesDataSet`."""


class WindowBatches(Dataset[Any], ABC):
    """Windows by number: `[3]` is one, `__getitems__` a batch that needs no collating."""

    start: Places
    """The first row of each window."""

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
    """`[B, longest, C]`: the rows of `values` from each start; shorter runs end in zeros, others need no padding."""
    if not isinstance(length, int) and (length == length[0]).all():
        length = int(length[0])
    if isinstance(length, int):
        return torch.from_numpy(runs_of(values, length)[start_B])
    column, longest = HostColumn(Ragged(values, start_B, length.astype(np.int32))), int(length.max())
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


class ForecastingWindows(WindowBatches):
    """Windows of one or several `TimeSeriesDataSet`s, in the order of their index."""

    def __init__(self, sources: Iterable[Any]) -> None:
        parts: list[dict[str, Any]] = []
        for source in sources:
            allowed = "a table, a mapping of arrays, or TimeSeriesDataSets"
            require(is_forecasting(source), "windows", f"cannot read a {type(source).__name__}", allowed=allowed)
            if not parts:
                self.about = source
            parts.append(_read(source, sum(len(part["time"]) for part in parts)))
        require(bool(parts), "windows", "no TimeSeriesDataSet in the iterable", hint="Pass one or more.")
        self.columns = {name: _joined([part[name] for part in parts]) for name in parts[0]}
        self.start, self.past, self.future = (self.columns.pop(name) for name in ("start", "past", "future"))

    def batch(self, numbers: NDArray[np.int64]) -> Any:
        """What `TimeSeriesDataSet._collate_fn` makes of the same windows."""
        start, past, future = self.start[numbers], self.past[numbers], self.future[numbers]
        columns, about, after = self.columns, self.about, start + past

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
        first, weight = torch.from_numpy(columns["time"][start] + past), columns["weight"]
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
        """The scales of targets that are scaled by their own window; and these targets, where they are inputs too."""
        names, places = self.about.target_names, self.about.reals
        for number, normalizer in enumerate(self.about.target_normalizers):
            if _is_per_window(normalizer):
                scales[number] = _scale(targets[number][0], lengths[0], normalizer)
                for values, side, length in zip(reals, targets[number], lengths, strict=True):
                    if names[number] in places:
                        scaled = normalizer.transform(side, target_scale=scales[number])
                        values[:, :, places.index(names[number])] = _blanked(scaled, length)

    def _write_lengths(self, reals: tuple[Tensor, Tensor], past: NDArray[Any], future: NDArray[Any]) -> None:
        """The columns of the dataset that depend on where a window is cut."""
        about, most = self.about, self.about.max_encoder_length
        share = torch.from_numpy((past - 0.5 * most) / most * 2.0)[:, None]
        for values, first, length in zip(reals, (-past, 0 * past), (past, future), strict=True):
            if about.add_relative_time_idx:
                steps = torch.from_numpy(first[:, None] + np.arange(values.shape[1])).to(values.dtype)
                values[:, :, about.reals.index("relative_time_idx")] = _blanked(steps / most, length)
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
    if int(length.min()) == values.shape[1]:
        return values
    return values.where(torch.from_numpy(np.arange(values.shape[1]) < length[:, None]), 0)


def _read(source: Any, before: int) -> dict[str, Any]:
    """The columns of a dataset, and its windows; `before` are the rows of the datasets before it."""
    _require_plain(source)
    found: dict[str, Any] = {name: None if (part := source.data[name]) is None else part.numpy() for name in _COLUMNS}
    index = {name: source.index[name].to_numpy() for name in ("index_start", "index_end", "sequence_length")}
    rows = index["index_end"] - index["index_start"] + 1
    what, is_whole = "some windows lack time steps, which it fills while it loads", rows == index["sequence_length"]
    _require(bool(is_whole.all()), "allow_missing_timesteps", what, "Write a row for each step")
    future, groups = source.calculate_decoder_length(found["time"][index["index_end"]], rows), found["groups"]
    begin = np.append(0, np.flatnonzero((groups[1:] != groups[:-1]).any(axis=1)) + 1)
    found |= {"begin": begin + before, "groups": groups[begin], "start": index["index_start"] + before}
    found |= {"past": (rows - future).astype(np.int32), "future": future.astype(np.int32)}
    for number, (values, normalizer) in enumerate(zip(source.data["target"], source.target_normalizers, strict=True)):
        names = [torch.from_numpy(group) for group in found["groups"]]
        scale = [np.asarray(normalizer.get_parameters(name, source.group_ids), np.float32) for name in names]
        found |= {f"target {number}": values.numpy(), f"scale of target {number}": np.stack(scale)}
    return found


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 or parts[0] is None else np.concatenate(parts)


def _require_plain(source: Any) -> None:
    """What the dataset changes in a window while it loads must be what is done here too."""
    _require(source.randomize_length is None, "randomize_length", "windows of random length", "Set it to False")
    others = [name for name in source.reals if name not in source.target_names]
    scaled = [name for name in others if _is_per_window(source.get_transformer(name))]
    _require(not scaled, "scalers", f"{', '.join(scaled)} scaled by each window", "Scale it by group")
    is_scaled = source.add_target_scales and any(map(_is_per_window, source.target_normalizers))
    _require(not is_scaled, "add_target_scales", "scales of each window as inputs", "Set it to False")


def _require(condition: bool, setting: str, what: str, fix: str) -> None:
    require(condition, f"TimeSeriesDataSet.{setting}", f"{what}: not served", hint=f"{fix}, or keep to_dataloader().")
