"""Outputs of an encoder's frozen layers, computed once over a store's rows and read in each epoch.

`FrozenPart` computes them and writes them to a store in the cache, beside that of the texts. A row
is a ragged column of `tokens * hidden` numbers, or a fixed one where only first tokens are read
above the frozen layers. Rows are computed without padding, a block of rows at a time, and written
in the order of the texts, so memory holds one block. Dropout is off in these layers. `StoredStates`
adds the outputs to each batch.

    a split of 4 rows, blocks of about 8,192 tokens    rows 0 to 2 are one block, row 3 the next

    the feed batches the rows of a block by length     row 1, then row 0, then row 2
    written in their order                             row 0, row 1, row 2

Shapes: T tokens, B rows, H numbers a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.feed import Feed, choose_feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import TOKENS, column_on
from flatout.data.batches.plan import FeedKind, PlanSettings
from flatout.data.ragged import row_begins
from flatout.data.store.progress import Progress
from flatout.data.store.store import Array, Column, Ragged, Store, StoreSplit, StoreWriter
from flatout.engine.precision import Precision, arithmetic
from flatout.models.encoder.network import Transformer

STATES = "states"  # name of the column
_BLOCK_TOKENS = 1 << 13  # tokens whose outputs are in memory at once
_PASS_TOKENS = 1 << 12  # tokens that go through the layers at once


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """The first layers of an encoder, and the arithmetic that computes them."""

    network: Transformer
    layers: int
    device: torch.device
    precision: Precision
    kind: torch.dtype | None  # number format of what is stored; None: that of the outputs

    @property
    def are_first(self) -> bool:
        """Whether only first tokens are read above these layers."""
        return self.network.is_narrow and self.layers == len(self.network.in_order())

    def blocks(self, split: StoreSplit) -> Iterator[tuple[NDArray[np.integer], Tensor]]:
        """The lengths and outputs of the rows, block by block, in the order of the rows."""
        tokens = split.ragged(TOKENS)
        ends = tokens.offsets[1:]
        num_tokens = ends[-1] if len(ends) else 0
        # A block ends with the row in which its last token would lie.
        cuts = np.searchsorted(ends, np.arange(_BLOCK_TOKENS, num_tokens, _BLOCK_TOKENS))
        edges = np.unique([0, *cuts, split.num_rows]).tolist()
        for start, stop in itertools.pairwise(edges):
            yield tokens.lengths[start:stop], self.outputs(rows_between(split, start, stop))

    def outputs(self, rows: StoreSplit) -> Tensor:
        """The outputs for these rows on the host, in their order: `[T, H]`, or `[B, H]`."""
        lengths = rows.lengths(TOKENS).astype(np.int64)
        plan = PlanSettings(tokens_per_batch=max(_PASS_TOKENS, int(lengths.max())), shuffle=False)
        begins_B = torch.from_numpy(row_begins(lengths))
        outputs: Tensor | None = None
        was_training = self.network.training
        self.network.eval()
        for batch in Feed(rows, plan, device=self.device):
            with torch.no_grad(), arithmetic(self.precision, self.device):
                states = self.network.run_layers(batch, stop=self.layers).cpu()
            states = states if self.kind is None else states.to(self.kind)
            if outputs is None:
                count = len(lengths) if self.are_first else int(lengths.sum())
                outputs = states.new_empty(count, states.shape[1])
            places = batch.rows if self.are_first else _places_in_order(batch, begins_B)
            outputs[places] = states
        self.network.train(was_training)
        assert outputs is not None
        return outputs

    def write(self, writer: StoreWriter, splits: Sequence[StoreSplit]) -> None:
        """Compute and write the outputs for all rows of these splits, with a progress bar."""
        writer.expected_rows = sum(split.num_rows for split in splits)
        with Progress() as progress:
            for split in splits:
                if split.num_rows:
                    done = progress.task(f"{split.name}: {self.layers} layers", split.num_rows)
                    self._write_split(writer, split, done)

    def _write_split(
        self, writer: StoreWriter, split: StoreSplit, done: Callable[[int], object]
    ) -> None:
        """Write one split; `done` counts its rows."""
        split_writer = None
        for lengths, states in self.blocks(split):
            width = states.shape[1]
            values = _to_numpy(states)
            if split_writer is None:
                fixed_width = width if self.are_first else 0
                column = Column(values.dtype.name, not self.are_first, fixed_width)
                split_writer = writer.split(split.name, {STATES: column})
                number_format = str(states.dtype).removeprefix("torch.")
                writer.facts |= {"width": width, "format": number_format}
            if self.are_first:
                split_writer.append(states=values)
            else:
                split_writer.append(states=(values.reshape(-1), lengths * width))
            done(len(lengths))


class StoredStates:
    """Adds the stored outputs of frozen layers to each batch of a split.

    Only while the network reads them: it stops when a frozen layer begins to train. It is a feed's
    `complete`: it reads memory of the device, which a worker process has no access to.
    """

    def __init__(
        self, store: Store, split: str, network: Transformer, device: torch.device
    ) -> None:
        self.network = network
        self.device = device
        self.width = int(store.facts["width"])
        self.dtype: torch.dtype = getattr(torch, store.facts["format"])
        stored = store.splits[split]
        feed_kind = choose_feed(FeedKind.auto, stored.num_bytes, device).value
        column_device = device if feed_kind is FeedKind.resident else torch.device("cpu")
        column = _split_by_token(stored.columns[STATES], self.width)
        self.column = column_on(column, column_device)

    def __call__(self, batch: FlatBatch) -> FlatBatch:
        if self.network.stored_layers:
            values, _ = self.column.gather(batch.rows.numpy(), batch.lengths.numpy())
            states = values.view(-1, self.width).view(self.dtype)
            if states.device.type == "cpu" and self.device.type == "cuda":
                states = states.pin_memory()
            batch.states = states.to(self.device, non_blocking=True)
        return batch


def rows_between(split: StoreSplit, start: int, stop: int) -> StoreSplit:
    """The texts of the rows from `start` to `stop` (not included), as a split."""
    tokens = split.ragged(TOKENS)
    offsets = tokens.offsets[start : stop + 1]
    values = tokens.values[offsets[0] : offsets[-1]]
    own_tokens = Ragged(values, offsets - offsets[0], tokens.lengths[start:stop])
    return StoreSplit(split.name, stop - start, {TOKENS: own_tokens})


def _places_in_order(batch: FlatBatch, begins_B: Tensor) -> Tensor:
    """`[T]` the place of each token of a batch when the rows stand in their order.

    Rows of lengths 3 and 2 begin at 0 and 3. A batch with row 1, then row 0: places 3 4 0 1 2.
    """
    shift_B = begins_B[batch.rows] - batch.lengths.cumsum(0) + batch.lengths
    return torch.repeat_interleave(shift_B, batch.lengths) + torch.arange(batch.num_tokens)


def _to_numpy(states: Tensor) -> NDArray[np.generic]:
    """The states for a store; numpy has no bf16, so its bits are stored as uint16."""
    if states.dtype is torch.float32:
        return states.numpy()
    return states.view(torch.int16).numpy().view(np.uint16)


def _split_by_token(column: Array | Ragged, width: int) -> Array | Ragged:
    """A column of `[T, H]` numbers.

    Torch knows few operations on uint16, so bits are held as int16.
    """
    values = column.values if isinstance(column, Ragged) else column
    values = values.view(np.int16) if values.dtype == np.uint16 else values
    if not isinstance(column, Ragged):
        return values
    return Ragged(values.reshape(-1, width), column.offsets // width, column.lengths // width)
