"""Tiny encoders of each family, their batches, and what the library answers on padded rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.data.batches.flat_batch import FlatBatch, flat_batch
from flatout.models.encoder.transformer import (
    FLAT_FAMILIES,
    Compute,
    Outputs,
    Transformer,
    TransformerConfig,
)

VOCABULARY = 90
PADDING = 1
FLAT = sorted(FLAT_FAMILIES)
PADDED = ["deberta", "ernie"]


def built(
    family: str, *, kind: str = "single", compute: str = "auto", **settings: Any
) -> Transformer:
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
        **settings,
    )
    model = config.build(
        Outputs(["a", "b", "c"], kind),
        vocabulary_size=VOCABULARY,
        padding_id=PADDING,
        separator_id=None,
    )
    # classifiers start so small that a wrong row would hardly show
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1) if weight.ndim > 1 else None
    return model.train()


DEBERTA = {
    "with keys of its own for distances": {"share_att_key": False},
    "content to position alone": {"pos_att_type": ["c2p"], "norm_rel_ebd": "none"},
    "position to content alone": {"pos_att_type": ["p2c"], "share_att_key": False},
    "few buckets, which long rows share": {"position_buckets": 4, "max_position_embeddings": 32},
    "no buckets": {"position_buckets": -1, "max_relative_positions": 12},
    "absolute positions too": {"position_biased_input": True, "type_vocab_size": 2},
    "no distances": {"relative_attention": False},
}
"""Forms of DeBERTa-v2 besides v3's, which is what random weights have."""
# Ettin's and mmBERT's folders say modernbert, and differ from ModernBERT's in this.
MODERN = {
    "classifier_pooling": "mean",
    "local_attention": 8,
    "classifier_activation": "gelu",
    "classifier_bias": False,
}
MODERN |= {
    "global_rope_theta": 160000.0,
    "local_rope_theta": 160000.0,
    "position_embedding_type": "sans_pos",
}
EURO = {"heads that share keys": {"num_key_value_heads": 2}, "first": {"classifier_pooling": "bos"}}
EURO |= {"mean": {"classifier_pooling": "mean"}}
FORMS = [pytest.param("deberta-v2", form, id=name) for name, form in DEBERTA.items()]
FORMS += [pytest.param("eurobert", form, id=f"eurobert, {name}") for name, form in EURO.items()]


def batch_of(lengths: list[int], seed: int = 0) -> FlatBatch:
    random = torch.Generator().manual_seed(seed)
    return flat_batch(
        [torch.randint(5, VOCABULARY, (length,), generator=random) for length in lengths]
    )


def reference(model: Transformer, batch: FlatBatch) -> Tensor:
    """The library's own forward over padded rows with an attention mask."""
    model.net.set_attn_implementation("eager")
    longest = int(batch.lengths.max())
    tokens = torch.full((batch.num_rows, longest), model.padding_id)
    mask = torch.zeros(batch.num_rows, longest, dtype=torch.long)
    for row, (start, length) in enumerate(
        zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False)
    ):
        tokens[row, :length] = batch.tokens[start : start + length]
        mask[row, :length] = 1
    logits = model.net(input_ids=tokens, attention_mask=mask).logits
    return logits[mask.bool()] if model.is_tagging else logits


def gradients(model: Transformer, outputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, outputs.numel()).view(outputs.shape)
    (outputs * weights).sum(1).mean().backward()  # a mean over rows, as losses are
    return {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


LENGTHS = [[1], [7, 7, 7], [2, 3, 9, 21, 21, 22, 40], [3, 161, 170, 170, 200]]


def assert_equal(flat: Transformer, padded: Transformer, batch: FlatBatch) -> None:
    outputs = flat(batch)
    expected = reference(padded, batch)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    found = gradients(flat, outputs)
    wanted = gradients(padded, expected)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda told, at=name: f"{at}: {told}"
        )
