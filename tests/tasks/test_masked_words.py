"""Masked words: which tokens are masked, and the same loss and gradients as transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout import (
    MaskedLanguageConfig,
    TransformerConfig,
)
from flatout.data.batches.flat_batch import FlatBatch, cut_batch, flat_batch
from flatout.models.encoder.transformer import FLAT_FAMILIES, Outputs, Transformer
from flatout.tasks import MaskedLanguageModel
from flatout.tasks.masked_language import NO_TARGET, Masking, start_of

_WORDS = 90
_MASK = 4
_PADDING = 1
_SPECIAL = torch.zeros(_WORDS, dtype=torch.bool)
_SPECIAL[:5] = True
SHARES = MaskedLanguageConfig(mask_share=0.15, mask_token_share=0.8, random_token_share=0.1)
HOW = Masking(SHARES, mask_id=_MASK, vocabulary_size=_WORDS, frame=2)


def framed(lengths: list[int], seed: int = 0) -> FlatBatch:
    """Rows of random words between a first and a last special token."""
    random = torch.Generator().manual_seed(seed)
    words = [torch.randint(5, _WORDS, (length,), generator=random).tolist() for length in lengths]
    return flat_batch([[2, *row, 3] for row in words])


def masked_rows(batch: FlatBatch) -> dict[int, list[tuple[int, int, int]]]:
    """Of each row by its number: place, new token and target of what is masked."""
    assert batch.places is not None
    assert batch.targets is not None
    found: dict[int, list[tuple[int, int, int]]] = {}
    starts = batch.offsets.tolist()
    for place, target in zip(batch.places.tolist(), batch.targets.tolist(), strict=True):
        row = int(np.searchsorted(starts, place, side="right")) - 1
        seen = (place - starts[row], int(batch.tokens[place]), target)
        found.setdefault(int(batch.rows[row]), []).append(seen)
    return {row: sorted(each) for row, each in found.items()}


# Which tokens are masked


@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=12), epoch=st.integers(0, 2**20))
def test_each_row_gives_its_share_and_special_tokens_stay(lengths: list[int], epoch: int) -> None:
    batch = framed(lengths)
    masked = HOW.mask(batch, _SPECIAL, start_of(7, epoch))
    assert masked.places is not None
    assert masked.targets is not None
    counted = masked.targets != NO_TARGET
    assert not _SPECIAL[masked.targets[counted]].any()
    assert torch.equal(batch.tokens[masked.places][counted].long(), masked.targets[counted])
    untouched = torch.ones(batch.num_tokens, dtype=torch.bool)
    untouched[masked.places] = False
    assert torch.equal(masked.tokens[untouched], batch.tokens[untouched])
    wanted = sum(max(1, round(0.15 * length)) for length in lengths if length)
    assert int(counted.sum()) == wanted


@given(seed=st.integers(0, 2**62), epoch=st.integers(0, 1000))
def test_a_row_is_masked_alike_in_any_batch_and_in_pieces_of_it(seed: int, epoch: int) -> None:
    lengths = [3, 9, 9, 20, 31, 40]
    batch = framed(lengths)
    whole = masked_rows(HOW.mask(batch, _SPECIAL, start_of(seed, epoch)))
    pieces: dict[int, Any] = {}
    for piece in cut_batch(batch, 4):
        pieces |= masked_rows(HOW.mask(piece, _SPECIAL, start_of(seed, epoch)))
    assert pieces == whole


def test_epochs_seeds_and_rows_are_masked_otherwise() -> None:
    batch = framed([40] * 4)
    found = [
        HOW.mask(batch, _SPECIAL, start_of(seed, epoch)) for seed, epoch in ((0, 1), (0, 2), (1, 1))
    ]
    first, *others = [masked_rows(each) for each in found]
    assert all(first[row] != other[row] for other in others for row in first)
    places = set()
    for masked in first.values():
        places.add(tuple(place for place, *_ in masked))
    assert len(places) == 4


def test_most_masked_tokens_become_the_mask_some_a_random_word_and_all_places_are_as_likely() -> (
    None
):
    batch = framed([50] * 400)
    masked = HOW.mask(batch, _SPECIAL, start_of(3, 1))
    assert masked.places is not None
    assert masked.targets is not None
    new = masked.tokens[masked.places].long()
    old = masked.targets
    shares = [float(each.double().mean()) for each in (new == _MASK, new == old)]
    assert shares[0] == pytest.approx(0.8, abs=0.02)
    assert shares[1] == pytest.approx(0.1, abs=0.02)  # 1/90 of the random words too
    places = torch.tensor([place for row in masked_rows(masked).values() for place, *_ in row])
    counts = torch.bincount(places, minlength=52)[1:51]
    assert counts.min() > 25 and counts.max() < 115  # 64 on average


def test_rows_that_only_keep_a_rank_in_step_are_not_masked() -> None:
    batch = framed([10, 20])
    batch.num_real = 1
    masked = HOW.mask(batch, _SPECIAL, start_of(0, 1))
    assert set(masked_rows(masked)) == {int(batch.rows[0])}
    batch.num_real = 0
    nothing = HOW.mask(batch, _SPECIAL, start_of(0, 1))
    assert nothing.targets is not None
    assert nothing.targets.tolist() == [NO_TARGET]


# The same as transformers


def built(family: str, compute: str = "auto") -> Transformer:
    torch.manual_seed(3)
    shares = {"dropout": 0.0, "attention_dropout": 0.0}
    config = TransformerConfig(
        family=family, hidden=32, layers=3, heads=4, compute=compute, **shares
    )
    model = config.build(
        Outputs([], "words"), vocabulary_size=_WORDS, padding_id=_PADDING, separator_id=None
    )
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1) if weight.ndim > 1 else None
    return model.train()


def library_loss(model: Transformer, masked: FlatBatch) -> Tensor:
    """The loss of the library's ForMaskedLM over padded rows with a mask."""
    assert masked.places is not None
    assert masked.targets is not None
    model.net.set_attn_implementation("eager")
    labels = torch.full((masked.num_tokens,), NO_TARGET)
    labels[masked.places] = masked.targets
    shape = (masked.num_rows, masked.longest())
    is_token = torch.arange(shape[1]) < masked.lengths.unsqueeze(1)
    tokens = torch.full(shape, model.padding_id)
    wanted = torch.full(shape, NO_TARGET)
    tokens[is_token] = masked.tokens.long()
    wanted[is_token] = labels
    loss: Tensor = model.net(input_ids=tokens, attention_mask=is_token.long(), labels=wanted).loss
    return loss


@pytest.mark.parametrize("family", [*sorted(FLAT_FAMILIES), "deberta"])
def test_loss_and_gradients_equal_those_of_transformers_over_padded_rows(family: str) -> None:
    masked = HOW.mask(framed([0, 3, 9, 21, 22, 40]), _SPECIAL, start_of(1, 1))
    ours = built(family)
    theirs = built(family, "padded")
    task = MaskedLanguageModel(ours)
    count = int((masked.targets != NO_TARGET).sum())
    task.masked_per_row = count / masked.step_rows
    loss = task.loss(ours(masked), masked)
    wanted = library_loss(theirs, masked)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    loss.backward()
    wanted.backward()
    found = {
        name: weight.grad for name, weight in ours.named_parameters() if weight.grad is not None
    }
    expected = {
        name: weight.grad for name, weight in theirs.named_parameters() if weight.grad is not None
    }
    assert found.keys() == expected.keys()
    assert found
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at} {text}"
        )


# one declares its head after the encoder, one before
@pytest.mark.parametrize("family", ["bert", "camembert"])
def test_a_weight_of_two_names_is_saved_once_and_loaded_into_both(family: str) -> None:
    one = built(family)
    other = built(family)
    state = {
        name: weight + 1 for name, weight in one.state_dict().items() if weight.is_floating_point()
    }
    assert sum(len(weight) == _WORDS and weight.ndim == 2 for weight in state.values()) == 1
    other.load_state_dict(state, strict=False)
    table = other.net.get_input_embeddings().weight
    assert other.net.get_output_embeddings().weight is table
    torch.testing.assert_close(table, one.net.get_input_embeddings().weight + 1)
