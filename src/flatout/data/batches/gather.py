"""Rows of a store split as flat batches: one vectorised gather for many batches, then views of it.

Gathering costs a fixed price a call and some nanoseconds a token. So some ten thousand rows are
gathered at once, and each batch is a slice of the result. A batch of 512 short rows then costs
about ten microseconds on the host. Open this file to change how rows come from a store to a device.

Shapes: R rows of all batches that are gathered at once, T tokens. Two batches of two rows each go
through it like this:

    rows wanted       3 0 | 1 2        lengths   1 2 | 1 3
    gathered tokens   d a a | b c c c  offsets   0 1 3 4 7

    batch 1           d a a            offsets   0 1 3
    batch 2           b c c c          offsets   0 1 4
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.kept_tensors import on_device
from flatout.data.batches.plan import BatchRows
from flatout.data.ragged import row_bounds, row_indices
from flatout.data.store.store import Array, Ragged, StoreSplit

TOKENS = "tokens"
TARGETS = "targets"
_COPIED = ("tokens_T", "offsets_R", "targets", "target_offsets_R")


def runs_of(values: Array, length: int) -> Array:
    """`[T - length + 1, length, …]`: every `length` neighbouring samples, as a view."""
    shape = (len(values) - length + 1, length, *values.shape[1:])
    strides = (values.strides[0], *values.strides)
    # The constructor takes a sixth of the time of as_strided.
    if values.flags.c_contiguous:
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
        # numpy copies rows in a third of torch's time
        if self.host is not None:
            values = self.host.take(rows, axis=0, mode="clip")
            return torch.from_numpy(values.reshape(-1)), offsets_R
        return self.values[on_device(rows, self.device)].view(-1), offsets_R


class HostColumn:
    """A ragged column in the host's memory; its rows may overlap, as windows of recordings do.

    It is gathered by numpy, which takes a third of torch's time.
    """

    def __init__(self, column: Ragged) -> None:
        self.lengths = column.lengths
        self.offsets = column.offsets
        self.values = column.values

    def gather(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Values of those rows one after the other, and `[R+1]` where each row begins.

        Values of two bytes become int32, because torch knows few operations on uint16.
        """
        offsets = row_bounds(lengths)
        longest = int(lengths.max()) if len(lengths) else 0
        starts = self.offsets[rows]
        if self.values.ndim > 1 and longest * len(rows) == offsets[-1]:
            # Rows of one length are copied whole, which spares an index for each sample.
            values = runs_of(self.values, longest)[starts].reshape(-1, self.values.shape[1])
        elif offsets[-1]:
            # The index is right by construction; "clip" only spares numpy the check.
            values = self.values.take(row_indices(starts, lengths), axis=0, mode="clip")
        else:
            values = self.values[:0]  # `take` refuses an empty column
        if values.dtype == np.uint16:
            values = values.astype(np.int32)
        return torch.from_numpy(values), torch.from_numpy(offsets)


class DeviceColumn:
    """A ragged column in a device's memory; its lengths stay on the host as well."""

    def __init__(self, column: Ragged, device: torch.device) -> None:
        self.lengths = column.lengths
        self.device = device
        # torch knows few operations on uint16: the same bits are held as int16, and widened when
        # they are gathered.
        self.is_narrow = column.values.dtype == np.uint16
        values = column.values.view(np.int16) if self.is_narrow else column.values
        self.values = torch.from_numpy(values).to(device)
        self.offsets = torch.from_numpy(column.offsets).to(device)

    def gather(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The same as HostColumn's, without a wait for the device."""
        total = int(lengths.sum())
        rows_R = on_device(rows, self.device)
        lengths_R = on_device(lengths, self.device)
        # `row_indices` on the device; the total comes from the host, so that no shape is asked for.
        ends_R = lengths_R.cumsum(0)
        shift_R = self.offsets[rows_R] - ends_R + lengths_R
        index_T = torch.repeat_interleave(shift_R, lengths_R, output_size=total)
        index_T += torch.arange(total, device=self.device)
        values_T = self.values[index_T]
        if self.is_narrow:
            # int16 has the sign in the highest bit: -1 is 65535.
            values_T = values_T.to(torch.int32).bitwise_and_(0xFFFF)
        return values_T, torch.nn.functional.pad(ends_R, (1, 0))


def column_on(
    column: Ragged | Array, device: torch.device
) -> HostColumn | DeviceColumn | FixedColumn:
    """A column of a store where the device can gather its rows."""
    if not isinstance(column, Ragged):
        return FixedColumn(column, device)
    return HostColumn(column) if device.type == "cpu" else DeviceColumn(column, device)


@dataclass(slots=True)
class GatheredRun:
    """The gathered rows of consecutive batches, before they are cut apart."""

    batches: BatchRows
    lengths_R: Tensor
    tokens_T: Tensor
    offsets_R: Tensor
    targets: Tensor | None
    target_offsets_R: Tensor | None
    target_bounds: NDArray[np.int64] | None
    """Where each batch's labels begin, known to the host; only for several labels a row."""
    # the GPU records it when it has copied them; None where there is nothing to wait for
    copied: torch.cuda.Event | None = None


class Gatherer:
    """Columns of one split on one device: gathers the rows of batches by their numbers."""

    def __init__(self, split: StoreSplit, device: torch.device) -> None:
        self.device = device
        self.tokens = column_on(split.columns[TOKENS], device)
        targets = split.columns.get(TARGETS)
        self.ragged_targets = column_on(targets, device) if isinstance(targets, Ragged) else None
        self.targets = (
            torch.from_numpy(targets).to(device) if isinstance(targets, np.ndarray) else None
        )

    def run(self, batches: BatchRows) -> GatheredRun:
        rows = batches.rows
        lengths = self.tokens.lengths[rows].astype(np.int64)
        tokens_T, offsets_R = self.tokens.gather(rows, lengths)
        targets = None
        target_offsets_R = None
        target_bounds = None
        if self.ragged_targets is not None:
            counts = self.ragged_targets.lengths[rows].astype(np.int64)
            targets, target_offsets_R = self.ragged_targets.gather(rows, counts)
            target_bounds = row_bounds(counts)[batches.bounds]
        elif self.targets is not None:
            targets = self.targets[on_device(rows, self.device)]
            # Losses of torch take class ids as int64 alone.
            targets = targets if targets.is_floating_point() else targets.long()
        return GatheredRun(
            batches=batches,
            lengths_R=torch.from_numpy(lengths),
            tokens_T=tokens_T,
            offsets_R=offsets_R,
            targets=targets,
            target_offsets_R=target_offsets_R,
            target_bounds=target_bounds,
        )


def move_run(run: GatheredRun, device: torch.device) -> GatheredRun:
    """Copy a run to `device`, from page-locked memory. A GPU copies while it computes steps: the
    copy has a stream of its own.
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


def await_run(run: GatheredRun, device: torch.device) -> GatheredRun:
    """Let the stream of the steps wait until a run is copied; the host does not wait."""
    if run.copied is not None:
        here = torch.cuda.current_stream(device)
        here.wait_event(run.copied)
        for name in _COPIED:
            if (tensor := getattr(run, name)) is not None:
                # The allocator knows the copying stream alone: without this it might give the
                # memory away while a step still reads it.
                tensor.record_stream(here)
    return run


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def cut_run(run: GatheredRun) -> Iterator[FlatBatch]:
    """The batches of a gathered run, as views of it; each batch has at least one row."""
    # Views are made by one split of each tensor: slicing batch by batch would cost more than the
    # gather.
    batches = run.batches
    bounds = batches.bounds
    sizes = np.diff(bounds)
    token_bounds = row_bounds(run.lengths_R.numpy())[bounds]
    rows = torch.from_numpy(batches.rows).split(sizes.tolist())
    lengths = run.lengths_R.split(sizes.tolist())
    tokens = run.tokens_T.split(np.diff(token_bounds).tolist())
    offsets = _cut_offsets(run.offsets_R, bounds, token_bounds)
    targets, target_offsets = _cut_targets(run, sizes)
    # Rows of a batch stand shortest first.
    longest = run.lengths_R.numpy()[bounds[1:] - 1].tolist()
    counted = zip(
        batches.num_real.tolist(),
        batches.step_rows.tolist(),
        batches.ends_step.tolist(),
        strict=True,
    )
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


def _cut_offsets(
    offsets_R: Tensor, bounds: NDArray[np.int64], value_bounds: NDArray[np.int64]
) -> tuple[Tensor, ...]:
    """Offsets of each batch: where its rows begin, counted from its first value, and its end.

    `bounds`: the first row of each batch; `value_bounds`: its first value, such as a token.
    """
    # Offsets 0 1 3 4 7 of two batches of two rows: the 3 ends the first and begins the second.
    # Places 0 1 2, 2 3 4 → 0 1 3, 3 4 7, less the first values 0 and 3 → 0 1 3, 0 1 4.
    sizes = np.diff(bounds) + 1
    places = on_device(row_indices(bounds[:-1], sizes), offsets_R.device)
    first_values = on_device(np.repeat(value_bounds[:-1], sizes), offsets_R.device)
    return (offsets_R.index_select(0, places) - first_values).split(sizes.tolist())


def _cut_targets(
    run: GatheredRun, sizes: NDArray[np.int64]
) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
    """The targets of each batch, and where the labels of its rows begin where rows have several."""
    nothing = [None] * len(sizes)
    if run.targets is None:
        return nothing, nothing
    if run.target_bounds is None or run.target_offsets_R is None:
        return run.targets.split(sizes.tolist()), nothing
    offsets = _cut_offsets(run.target_offsets_R, run.batches.bounds, run.target_bounds)
    return run.targets.split(np.diff(run.target_bounds).tolist()), offsets
