"""Encoders over flat batches give what padded ones give, family by family."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flatout.data.batch import FlatBatch, flat_batch
from flatout.models.transformer import FLAT_FAMILIES, Compute, Outputs, Transformer, TransformerConfig

_VOCABULARY, _PADDING = 90, 1
FLAT = sorted(FLAT_FAMILIES)
PADDED = ["deberta-v2", "mpnet"]


def built(family: str, *, kind: str = "single", compute: str = "auto", **settings: object) -> Transformer:
    """A tiny encoder of random weights; the same ones for every way of computing."""
    torch.manual_seed(3)
    config = TransformerConfig(
        family=family,
        hidden=32,
        layers=3,
        heads=4,
        dropout=0.0,
        attention_dropout=0.0,
        head_dropout=0.0,
        compute=Compute(compute),
        **settings,  # type: ignore[arg-type]  # settings of several types by name
    )
    model = config.build(
        Outputs(["a", "b", "c"], kind), vocabulary_size=_VOCABULARY, padding_id=_PADDING, separator_id=None
    )
    for weight in model.parameters():  # classifiers start so small that a wrong row would hardly show
        torch.nn.init.normal_(weight, std=0.1) if weight.ndim > 1 else None
    return model.train()


def batch_of(lengths: list[int], seed: int = 0) -> FlatBatch:
    random = torch.Generator().manual_seed(seed)
    return flat_batch([torch.randint(5, _VOCABULARY, (length,), generator=random) for length in lengths])


def reference(model: Transformer, batch: FlatBatch) -> Tensor:
    """The library's own forward over padded rows with an attention mask."""
    model.net.set_attn_implementation("eager")
    longest = int(batch.lengths.max())
    tokens = torch.full((batch.num_rows, longest), model.padding_id)
    mask = torch.zeros(batch.num_rows, longest, dtype=torch.long)
    for row, (start, length) in enumerate(zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False)):
        tokens[row, :length] = batch.tokens[start : start + length]
        mask[row, :length] = 1
    logits = model.net(input_ids=tokens, attention_mask=mask).logits
    return logits[mask.bool()] if model.is_tagging else logits


def gradients(model: Transformer, outputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, outputs.numel()).view(outputs.shape)
    (outputs * weights).sum(1).mean().backward()  # a mean over rows, as losses are
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


LENGTHS = [[1], [7, 7, 7], [2, 3, 9, 21, 21, 22, 40], [3, 161, 170, 170, 200]]


@pytest.mark.parametrize("kind", ["single", "tags"])
@pytest.mark.parametrize("family", FLAT)
def test_flat_logits_and_gradients_equal_the_padded_reference(family: str, kind: str) -> None:
    for lengths in LENGTHS:
        batch = batch_of(lengths)
        flat = built(family, kind=kind, compute="flat")
        outputs = flat(batch)
        found = gradients(flat, outputs)
        padded = built(family, kind=kind, compute="padded")
        expected = reference(padded, batch)
        wanted = gradients(padded, expected)
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(
                found[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda told, at=name: f"{at}: {told}"
            )
