"""Each family of encoders as we run it, against the library's own forward over padded rows with a
mask.

Tiny encoders of random weights, fp32, no dropout, classes and tags: the largest difference of a
logit and of a gradient over batches of equal and unequal, short and long rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.claim import Claim, bounded
from flatout.data.batches.flat_batch import FlatBatch, flat_batch
from flatout.models.encoder.transformer import (
    FLAT_FAMILIES,
    Compute,
    Outputs,
    Transformer,
    TransformerConfig,
)

PADDED_FAMILIES = ("deberta",)
"""One of those that cannot run flat."""
_LENGTHS = ([1], [7, 7, 7], [2, 3, 9, 21, 21, 22, 40], [3, 161, 170, 170, 200])
_VOCABULARY = 90
_PADDING = 1
_MOST_APART = 1e-5


def family_claims(*, quick: bool = False) -> Iterator[Claim]:
    """Two rows a family; `quick` leaves out the longest batches."""
    lengths = _LENGTHS[:-1] if quick else _LENGTHS
    for family in (*sorted(FLAT_FAMILIES), *PADDED_FAMILIES):
        way = "flat" if family in FLAT_FAMILIES else "padded"
        for what, apart in zip(
            ("logit", "gradient"), largest_differences(family, lengths), strict=True
        ):
            yield bounded(
                f"{family}, {way}: largest difference of a {what}", apart, "", most=_MOST_APART
            )


def largest_differences(
    family: str, batches: Sequence[list[int]] = _LENGTHS
) -> tuple[float, float]:
    """Of a logit, and of a gradient."""
    of_logits = 0.0
    of_gradients = 0.0
    for kind in ("single", "tags"):
        for lengths in batches:
            batch = _batch(lengths)
            ours, theirs = _built(family, kind, Compute.auto), _built(family, kind, Compute.padded)
            found = ours(batch)
            expected = _by_the_library(theirs, batch)
            of_logits = max(of_logits, float((found - expected).detach().abs().max()))
            wanted, gradients = _gradients(theirs, expected), _gradients(ours, found)
            assert gradients.keys() == wanted.keys(), "both sides have the same weights"
            apart = (
                float((gradients[name] - gradient).abs().max()) for name, gradient in wanted.items()
            )
            of_gradients = max(of_gradients, *apart)
    return of_logits, of_gradients


def _built(family: str, kind: str, compute: Compute) -> Transformer:
    """A tiny encoder; the same weights for every way of computing."""
    torch.manual_seed(3)
    still: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
    config = TransformerConfig(
        family=family, hidden=32, layers=3, heads=4, compute=compute, **still
    )
    model = config.build(
        Outputs(["a", "b", "c"], kind),
        vocabulary_size=_VOCABULARY,
        padding_id=_PADDING,
        separator_id=None,
    )
    for weight in model.parameters():
        if weight.ndim > 1:  # heads start so small that a wrong row would hardly show
            torch.nn.init.normal_(weight, std=0.1)
    return model


def _batch(lengths: list[int]) -> FlatBatch:
    random = torch.Generator().manual_seed(0)
    return flat_batch(
        [torch.randint(5, _VOCABULARY, (length,), generator=random) for length in lengths]
    )


def _by_the_library(model: Transformer, batch: FlatBatch) -> Tensor:
    """Its own plain attention, over padded rows and their mask."""
    if model.family in FLAT_FAMILIES:  # the others have no other
        model.net.set_attn_implementation("eager")
    mask = torch.arange(int(batch.lengths.max())) < batch.lengths.unsqueeze(1)
    tokens = torch.full(mask.shape, model.padding_id)
    tokens[mask] = batch.tokens.long()
    logits: Tensor = model.net(input_ids=tokens, attention_mask=mask.long()).logits
    return logits[mask] if model.is_tagging else logits


def _gradients(model: Transformer, outputs: Tensor) -> dict[str, Tensor]:
    """Of a mean over rows, as losses are, in which every output counts for something else."""
    weights = torch.linspace(-1, 1, outputs.numel()).view(outputs.shape)
    (outputs * weights).sum(1).mean().backward()
    return {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
