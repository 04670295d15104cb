"""Rows of a store split as flat batches: one vectorised gather for many batches, then views of it.

Gathering costs a fixed price a call and some nanoseconds a token, so some ten thousand rows are
gathered at once and each batch is a slice of the result: a batch of 512 short rows then costs about
ten microseconds on the host. Shapes: R rows of the whole run, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch, on_device
from flatout.data.batches.plan import BatchRows
from flatout.data.store.store import Array, Ragged, StoreSplit

TOKENS = "tokens"
TARGETS = "targets"
_COPIED = ("tokens_T", "offsets_R", "targets", "target_offsets_R")


def runs_of(values: Array, length: int) -> Array:
    """`[T - length + 1, length, …]`: each run of so many samples, as a view."""
    shape, strides = (
        (len(values) - length + 1, length, *values.shape[1:]),
        (values.strides[0], *values.strides),
    )
    if values.flags.c_contiguous:  # in a sixth of the time that as_strided takes
        return np.ndarray(shape, values.dtype, values, 0, strides)
    return np.lib.stride_tricks.as_strided(values, shape, strides, writeable=False)


class FixedColumn:
    """A column of equally many values a row, such as packed bits, in any device's memory."""

    def __init__(self, values: Array, device: torch.device) -> None:
        self.device = device
        self.width = values.shape[1]
        self.lengths = np.broadcast_to(self.width, len(values))
        self.host = values if device.type == "cpu" else None
        self.values = torch.from_numpy(values).to(device)

    def gather(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Values of those rows one after the other, and `[R+1]` where each row begins."""
        offsets_R = torch.arange(len(rows) + 1, device=self.device) * self.width
        if self.host is not None:  # numpy copies rows in a third of torch's time
            return torch.from_numpy(
                self.host.take(rows, axis=0, mode="clip").reshape(-1)
            ), offsets_R
        return self.values[on_device(rows, self.device)].view(-1), offsets_R


class HostColumn:
    """A ragged column in the host's memory, whose rows may overlap; numpy gathers in a third of
    torch's time.
    """

    def __init__(self, column: Ragged) -> None:
        self.lengths = column.lengths
        self.offsets = column.offsets
        self.values = column.values

    def gather(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Values of those rows one after the other, whole ones at least int32, and `[R+1]` where
        each row begins.
        """
        offsets = np.append(0, np.cumsum(lengths))
        longest = int(lengths.max()) if len(lengths) else 0
        # samples of rows of one length, copied whole
        if self.values.ndim > 1 and longest * len(rows) == offsets[-1]:
            values = runs_of(self.values, longest)[self.offsets[rows]].reshape(
                -1, self.values.shape[1]
            )
        else:
            index = np.repeat(self.offsets[rows] - offsets[:-1], lengths)
            index += np.arange(len(index))
            # The index is right by construction; "clip" only spares numpy the check.
            values = self.values.take(index, axis=0, mode="clip") if len(index) else self.values[:0]
        values = values.astype(np.int32) if values.dtype == np.uint16 else values
        return torch.from_numpy(values), torch.from_numpy(offsets)


class DeviceColumn:
    """A ragged column in a device's memory; its lengths stay on the host as well."""

    def __init__(self, column: Ragged, device: torch.device) -> None:
        self.lengths = column.lengths
        self.device = device
        # torch knows few operations on uint16: the same bits are held as int16 and widened when
        # gathered.
        self.is_narrow = column.values.dtype == np.uint16
        self.values = torch.from_numpy(
            column.values.view(np.int16) if self.is_narrow else column.values
        ).to(device)
        self.offsets = torch.from_numpy(column.offsets).to(device)

    def gather(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The same as HostColumn's, without a wait for the device."""
        total = int(lengths.sum())
        rows_R, lengths_R = on_device(rows, self.device), on_device(lengths, self.device)
        ends_R = lengths_R.cumsum(0)
        shift_R = self.offsets[rows_R] - ends_R + lengths_R
        index_T = torch.repeat_interleave(shift_R, lengths_R, output_size=total)
        index_T += torch.arange(total, device=self.device)
        values_T = self.values[index_T]
        if self.is_narrow:
            values_T = values_T.to(torch.int32).bitwise_and_(0xFFFF)
        return values_T, torch.nn.functional.pad(ends_R, (1, 0))


def column_on(
    column: Ragged | Array, device: torch.device
) -> HostColumn | DeviceColumn | FixedColumn:
    """A column of values a row, where the device can gather it."""
    if not isinstance(column, Ragged):
        return FixedColumn(column, device)
    return HostColumn(column) if device.type == "cpu" else DeviceColumn(column, device)


@dataclass(slots=True)
class Run:
    """The gathered rows of consecutive batches, before they are cut apart."""

    batches: BatchRows
    lengths_R: Tensor
    tokens_T: Tensor
    offsets_R: Tensor
    targets: Tensor | None
    target_offsets_R: Tensor | None
    target_bounds: NDArray[np.int64] | None
    """Where each batch's labels begin, known to the host; only for several labels a row."""
    # what a GPU marks when it has copied them; None where nothing is to be waited for
    copied: Any = None


class Gatherer:
    """Columns of one split on one device, and the way from row numbers to batches."""

    def __init__(self, split: StoreSplit, device: torch.device) -> None:
        self.device = device
        self.tokens = column_on(split.columns[TOKENS], device)
        targets = split.columns.get(TARGETS)
        self.ragged_targets = column_on(targets, device) if isinstance(targets, Ragged) else None
        self.targets = (
            torch.from_numpy(targets).to(device) if isinstance(targets, np.ndarray) else None
        )

    def run(self, batches: BatchRows) -> Run:
        rows = batches.rows
        lengths = self.tokens.lengths[batches.rows].astype(np.int64)
        tokens_T, offsets_R = self.tokens.gather(rows, lengths)
        targets = None
        target_offsets_R = None
        target_bounds = None
        if self.ragged_targets is not None:
            counts = self.ragged_targets.lengths[rows].astype(np.int64)
            targets, target_offsets_R = self.ragged_targets.gather(rows, counts)
            target_bounds = np.append(0, np.cumsum(counts))[batches.bounds]
        elif self.targets is not None:
            targets = self.targets[on_device(rows, self.device)]
            targets = targets if targets.is_floating_point() else targets.long()
        return Run(
            batches,
            torch.from_numpy(lengths),
            tokens_T,
            offsets_R,
            targets,
            target_offsets_R,
            target_bounds,
        )


def move_run(run: Run, device: torch.device) -> Run:
    """The run on `device`, from page-locked memory; a GPU copies on a stream of its own, beside the
    steps.
    """
    if device.type == "cpu":
        return run
    is_gpu = device.type == "cuda"
    with torch.cuda.stream(_copying(device)) if is_gpu else nullcontext():
        for name in _COPIED:
            if (tensor := getattr(run, name)) is not None:
                setattr(run, name, tensor.pin_memory().to(device, non_blocking=True))
    run.copied = _copying(device).record_event() if is_gpu else None
    return run


def await_run(run: Run, device: torch.device) -> Run:
    """Let the steps' stream, not the host, wait until a run is copied."""
    if run.copied is not None:
        here = torch.cuda.current_stream(device)
        here.wait_event(run.copied)
        for name in _COPIED:
            if (tensor := getattr(run, name)) is not None:
                # else its memory might be used again while a step reads it
                tensor.record_stream(here)
    return run


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def cut_run(run: Run) -> Iterator[FlatBatch]:
    """The batches of a gathered run, each of a row at least, as views of it that are made for all
    batches at once.
    """
    batches = run.batches
    bounds = batches.bounds
    sizes = np.diff(batches.bounds)
    ends_R = np.append(0, np.cumsum(run.lengths_R.numpy()))
    rows = torch.from_numpy(batches.rows).split(sizes.tolist())
    lengths = run.lengths_R.split(sizes.tolist())
    tokens = run.tokens_T.split(np.diff(ends_R[bounds]).tolist())
    offsets = _offsets(run.offsets_R, bounds, ends_R[bounds])
    targets, target_offsets = _cut_targets(run, sizes)
    counted = zip(
        batches.num_real.tolist(),
        batches.step_rows.tolist(),
        batches.ends_step.tolist(),
        strict=True,
    )
    longest = run.lengths_R.numpy()[bounds[1:] - 1].tolist()
    for i, (num_real, step_rows, ends_step) in enumerate(counted):
        batch = FlatBatch(
            tokens=tokens[i],
            offsets=offsets[i],
            lengths=lengths[i],
            rows=rows[i],
            targets=targets[i],
            target_offsets=target_offsets[i],
            num_real=num_real,
            step_rows=step_rows,
            ends_step=ends_step,
        )
        batch.longest_row = longest[i]
        yield batch


def _offsets(
    begins_R: Tensor, bounds: NDArray[np.int64], first: NDArray[np.int64]
) -> tuple[Tensor, ...]:
    """For each batch where its rows begin, counted from where the batch does, and where its last
    one ends.
    """
    sizes = np.diff(bounds) + 1
    place = np.arange(sizes.sum()) - np.repeat(np.arange(len(sizes)), sizes)
    place_on, first_on = (
        on_device(each, begins_R.device) for each in (place, np.repeat(first[:-1], sizes))
    )
    return (begins_R.index_select(0, place_on) - first_on).split(sizes.tolist())


def _cut_targets(
    run: Run, sizes: NDArray[np.int64]
) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    """The targets of each batch, and where the labels of its rows begin where rows have several."""
    nothing = [None] * len(sizes)
    if run.targets is None:
        return nothing, nothing
    if run.target_bounds is None or run.target_offsets_R is None:
        return run.targets.split(sizes.tolist()), nothing
    offsets = _offsets(run.target_offsets_R, run.batches.bounds, run.target_bounds)
    return run.targets.split(np.diff(run.target_bounds).tolist()), offsets
