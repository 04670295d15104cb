"""The answers of a trained network for bit strings."""

from __future__ import annotations

from torch import Tensor, nn

from flatout.bits.info import GramLabels
from flatout.data.batches.flat_batch import FlatBatch


def finished_answers(model: nn.Module, labels: GramLabels, batch: FlatBatch) -> Tensor:
    """`[B, C]` logits of the answers, after the vote of ridge where the network has one."""
    logits = model(batch)[:, : labels.num_outputs].float()
    blended = getattr(model, "blended", None)
    return logits if blended is None else blended(logits, batch)
