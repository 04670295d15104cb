"""Outputs of an encoder's frozen layers, computed once over the rows of a store, and read by each epoch from then on.

They are a store in the cache, beside that of the texts: a ragged column of `tokens * hidden` numbers a row, or a fixed
one where only first tokens are read above the cut. Rows are computed a block at a time, by length and without padding,
and written in their order; so memory holds one block. Nothing is dropped below the cut.

Products of other shapes may differ in the last digit: in fp32 losses equal those without a store to about 1e-6.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.batches.feed import Feed, choose_feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import TOKENS, column_on
from flatout.data.batches.plan import FeedKind, PlanSettings
from flatout.data.store.progress import Progress
from flatout.data.store.store import Array, Column, Ragged, Store, StoreSplit, StoreWriter
from flatout.engine.precision import Precision, arithmetic
from flatout.models.encoder.transformer import Transformer

STATES = "states"
_BLOCK_TOKENS, _PASS_TOKENS = 1 << 13, 1 << 12
_FORMATS = {torch.float32: "float32", torch.bfloat16: "uint16", torch.float16: "uint16"}
"""How numpy calls what holds the bits of each number format."""


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """The first layers of an encoder, and the arithmetic that they are computed with."""

    network: Transformer
    layers: int
    device: torch.device
    precision: Precision
    kind: torch.dtype | None
    """The number format that is kept; None: the layer's own."""

    @property
    def are_first(self) -> bool:
        """Whether only first tokens are read above the cut."""
        return self.network.is_narrow and self.layers == len(self.network.in_order())

    def blocks(self, split: StoreSplit) -> Iterator[tuple[NDArray[np.integer], Tensor]]:
        """Lengths and outputs of one run of rows after the other."""
        tokens = split.ragged(TOKENS)
        ends = tokens.offsets[1:]
        cuts = np.searchsorted(ends, np.arange(_BLOCK_TOKENS, ends[-1] if len(ends) else 0, _BLOCK_TOKENS))
        for start, stop in itertools.pairwise(np.unique([0, *cuts, split.num_rows]).tolist()):
            yield tokens.lengths[start:stop], self.outputs(rows_between(split, start, stop))

    def outputs(self, rows: StoreSplit) -> Tensor:
        """Outputs of some rows on the host, in their order: `[T, H]`, or `[B, H]` of first tokens."""
        lengths = rows.lengths(TOKENS).astype(np.int64)
        plan = PlanSettings(tokens_per_batch=max(_PASS_TOKENS, int(lengths.max())), shuffle=False)
        begins_B = torch.from_numpy(np.cumsum(lengths) - lengths)
        found: Tensor | None = None
        was_training = self.network.training
        self.network.eval()
        for batch in Feed(rows, plan, device=self.device):
            with torch.no_grad(), arithmetic(self.precision, self.device):
                states = self.network.run_layers(batch, stop=self.layers).cpu()
            states = states if self.kind is None else states.to(self.kind)
            if found is None:
                found = states.new_empty(len(lengths) if self.are_first else int(lengths.sum()), states.shape[1])
            found[batch.rows if self.are_first else _places(batch, begins_B)] = states
        self.network.train(was_training)
        assert found is not None
        return found

    def write(self, writer: StoreWriter, splits: Sequence[StoreSplit]) -> None:
        writer.expected_rows = sum(split.num_rows for split in splits)
        with Progress() as progress:
            for split in (split for split in splits if split.num_rows):
                done, part = progress.task(f"{split.name}: {self.layers} layers", split.num_rows), None
                for lengths, states in self.blocks(split):
                    width, is_known = states.shape[1], states.dtype is torch.float32
                    values = states.numpy() if is_known else states.view(torch.int16).numpy().view(np.uint16)
                    if part is None:
                        column = Column(_FORMATS[states.dtype], not self.are_first, width if self.are_first else 0)
                        part = writer.split(split.name, {STATES: column})
                        writer.facts |= {"width": width, "format": str(states.dtype).removeprefix("torch.")}
                    part.append(states=values if self.are_first else (values.reshape(-1), lengths * width))
                    done(len(lengths))


class StoredStates:
    """Adds to each batch of a split what frozen layers answer to its rows, while the network reads that."""

    def __init__(self, store: Store, split: str, network: Transformer, device: torch.device) -> None:
        self.network, self.device = network, device
        self.width, self.kind = int(store.facts["width"]), getattr(torch, store.facts["format"])
        stored = store.splits[split]
        kind = choose_feed(FeedKind.auto, stored.num_bytes, device, None).kind
        column = _shaped(stored.columns[STATES], self.width)
        self.column = column_on(column, device if kind is FeedKind.resident else torch.device("cpu"))

    def __call__(self, batch: FlatBatch) -> FlatBatch:
        if self.network.stored_layers:
            values, _ = self.column.gather(batch.rows.numpy(), batch.lengths.numpy())
            states = values.view(-1, self.width).view(self.kind)
            if states.device.type == "cpu" and self.device.type == "cuda":
                states = states.pin_memory()
            batch.states = states.to(self.device, non_blocking=True)
        return batch


def rows_between(split: StoreSplit, start: int, stop: int) -> StoreSplit:
    """The texts of some rows that follow each other, as a split of their own."""
    tokens = split.ragged(TOKENS)
    offsets = tokens.offsets[start : stop + 1]
    own = Ragged(tokens.values[offsets[0] : offsets[-1]], offsets - offsets[0], tokens.lengths[start:stop])
    return StoreSplit(split.name, stop - start, {TOKENS: own})


def _places(batch: FlatBatch, begins_B: Tensor) -> Tensor:
    """Where each token of a batch stands when rows come in their order."""
    shift_B = begins_B[batch.rows] - batch.lengths.cumsum(0) + batch.lengths
    return torch.repeat_interleave(shift_B, batch.lengths) + torch.arange(batch.num_tokens)


def _shaped(column: Array | Ragged, width: int) -> Array | Ragged:
    """A column of `[T, H]` numbers; torch knows few operations on uint16, so bits are held as int16."""
    values = column.values if isinstance(column, Ragged) else column
    values = values.view(np.int16) if values.dtype == np.uint16 else values
    if not isinstance(column, Ragged):
        return values
    return Ragged(values.reshape(-1, width), column.offsets // width, column.lengths // width)
