"""The batches of the coming steps in one block on the device, where captured steps read them.

A captured step has fixed addresses. So that many steps need no copy between them, their batches
are copied into a block at once, a row each. Each captured step reads the row of `place`:

    rows of the block    0 tokens of batch 0, padding
                         1 tokens of batch 1, padding
    place = 1   ->       the step reads row 1, as far as its shape reaches

Batches of all shapes share the block, as each shape reads the beginning of a row. Open this file to
change what the host asks of the device to fill it: four operators for any number of batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch
    from flatout.data.batches.shapes import Shape, Shapes


class BatchRing:
    """Tokens, offsets and targets of so many batches as there are places."""

    def __init__(self, shapes: Shapes, places: int, buffer: FlatBatch) -> None:
        """`buffer`: of one of the shapes; it has the types and the rows of all."""
        self._shapes = shapes
        tokens = buffer.tokens
        features = tokens.shape[1:]
        most = shapes.most_tokens
        # the first place of a captured step is written by each of them, so it lies on the device
        self.place = torch.zeros(1, dtype=torch.int64, device=tokens.device)
        self._tokens = tokens.new_zeros(places, most, *features)
        self._offsets = buffer.offsets.new_zeros(places, len(buffer.offsets))
        self._padding = tokens.new_zeros(most, *features)
        self._targets: Tensor | None = None
        if buffer.targets is not None:
            columns = buffer.targets.shape[1:]
            labels = most if shapes.tags else len(buffer.targets)
            self._targets = buffer.targets.new_zeros(places, labels, *columns)
            self._no_labels = buffer.targets.new_full((labels, *columns), shapes.unlabelled)

    def tensors(self) -> list[Tensor]:
        """All that captured steps read."""
        own = [self.place, self._tokens, self._offsets]
        return own if self._targets is None else [*own, self._targets]

    def put(self, buffer: FlatBatch) -> None:
        """Copy a filled buffer to the first place."""
        self._tokens[0, : buffer.num_tokens].copy_(buffer.tokens)
        self._offsets[0].copy_(buffer.offsets)
        if self._targets is not None and buffer.targets is not None:
            self._targets[0, : len(buffer.targets)].copy_(buffer.targets)

    def put_all(self, batches: Sequence[FlatBatch], shapes: Sequence[Shape]) -> None:
        """Copy the batches of the coming steps to places from the first on; nothing waits."""
        count = len(batches)
        _join(self._tokens, self._padding, [batch.tokens for batch in batches])
        lengths = torch.stack([batch.lengths for batch in batches]).numpy()
        sizes = np.array([shape.tokens for shape in shapes])
        offsets = torch.from_numpy(self._shapes.offsets_of(lengths, sizes))
        on_host = offsets if self.place.is_cpu else offsets.pin_memory()
        self._offsets[:count].copy_(on_host, non_blocking=True)
        if self._targets is not None:
            targets = [batch.targets for batch in batches if batch.targets is not None]
            _join(self._targets, self._no_labels, targets)

    def read(self, buffer: FlatBatch, step_rows: Tensor) -> FlatBatch:
        """The batch at `place`, in the shape of a buffer; called within a capture."""
        batch = replace(
            buffer,
            tokens=self._tokens[:, : buffer.num_tokens].index_select(0, self.place)[0],
            offsets=self._offsets.index_select(0, self.place)[0],
            step_rows=step_rows,
        )
        if self._targets is not None and buffer.targets is not None:
            labels = self._targets[:, : len(buffer.targets)]
            batch.targets = labels.index_select(0, self.place)[0]
        batch.longest_row = buffer.longest_row
        batch.copied_from = None
        return batch


def _join(block: Tensor, padding: Tensor, rows: Sequence[Tensor]) -> None:
    """Copy rows of any length into those of a block, with padding behind each; one operator."""
    most = block.shape[1]
    parts = list[Tensor]()
    for row in rows:
        parts += [row, padding[: most - row.shape[0]]]
    torch.cat(parts, out=block[: len(rows)].flatten(0, 1))
