"""Lean layers are torch's own mathematics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flatout.models.lean import (
    LeanDropout,
    LeanEmbedding,
    draw_words,
    drop_by_words,
    kept_places,
    make_lean,
)


def lean_pair(padding: int | None = None) -> tuple[nn.Embedding, LeanEmbedding]:
    torch.manual_seed(0)
    plain = nn.Embedding(1 << 16, 16, padding_idx=padding)
    holder = nn.Sequential(copy.deepcopy(plain))
    make_lean(holder)
    lean = holder[0]
    assert isinstance(lean, LeanEmbedding)
    lean.keeps_gradient = True
    return plain, lean


@pytest.mark.parametrize("padding", [None, 3])
def test_a_kept_gradient_equals_a_fresh_one_step_after_step(padding: int | None) -> None:
    plain, lean = lean_pair(padding)
    steppers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (plain, lean)]
    for step in range(4):
        ids = torch.randint(0, 20, (7,), generator=torch.Generator().manual_seed(step))
        for module, stepper in zip((plain, lean), steppers, strict=True):
            for weight in (0.5, 2.0):  # two micro-batches a step
                (module(ids).pow(2).sum() * weight).backward()
            stepper.step()
        assert plain.weight.grad is not None
        assert lean.weight.grad is not None
        torch.testing.assert_close(lean.weight.grad, plain.weight.grad, rtol=0, atol=1e-6)
        if step % 2:  # else the next backward pass clears it, where the gradient was dropped
            lean.clear()
            assert not lean.weight.grad.any()
        for stepper in steppers:
            stepper.zero_grad()
    torch.testing.assert_close(lean.weight, plain.weight, rtol=0, atol=1e-6)


def test_whoever_does_not_ask_for_it_gets_torchs_own_gradient() -> None:
    plain, lean = lean_pair()
    lean.keeps_gradient = False
    for module in (plain, lean):
        module(torch.tensor([1, 1, 5])).sum().backward()
    assert lean.weight.grad is not None
    assert plain.weight.grad is not None
    assert torch.equal(lean.weight.grad, plain.weight.grad)


def test_small_tables_are_left_alone_and_states_are_the_same() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Dropout(0.1))
    names = list(model.state_dict())
    make_lean(model)
    assert (type(model[0]), type(model[1])) == (nn.Embedding, LeanDropout)
    assert list(model.state_dict()) == names


@pytest.mark.soak(seconds=2)
def test_a_compiled_model_drops_by_the_compilers_own_means() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5))
    make_lean(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (200, 300):
        values = torch.ones(rows, 8, requires_grad=True)
        found = compiled(values)
        found.sum().backward()
        assert float((found == 0).float().mean()) == pytest.approx(0.5, abs=0.03)
        assert values.grad is not None


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_dropout_drops_its_share_keeps_the_mean_and_passes_what_stays(share: float) -> None:
    torch.manual_seed(0)
    holder = nn.Sequential(nn.Dropout(share))
    make_lean(holder)
    values = torch.ones(1000, 501, requires_grad=True)
    found = holder(values)
    assert float((found == 0).float().mean()) == pytest.approx(share, abs=0.005)
    assert float(found.detach().mean()) == pytest.approx(1, abs=0.02)
    found.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, found.detach())
    holder.eval()
    assert torch.equal(holder(values), values)


def test_places_that_stay_have_no_pattern_and_follow_the_seed() -> None:
    torch.manual_seed(5)
    first, scale = kept_places(torch.Size([4, 10_001]), 0.25)
    torch.manual_seed(5)
    again, _ = kept_places(torch.Size([4, 10_001]), 0.25)
    assert torch.equal(first, again)
    assert first.unique().tolist() == [-1, 0]  # all bits of a place, or none
    first = first.neg()
    assert scale == pytest.approx(4 / 3)
    for stride in range(4):  # one draw decides four places; each must be as likely
        assert float(first.flatten()[stride::4].float().mean()) == pytest.approx(0.75, abs=0.02)
    pairs = first.flatten()[:-1].float() * first.flatten()[1:].float()
    assert float(pairs.mean()) == pytest.approx(0.75**2, abs=0.02)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.1, 0.5, 1e-6])
def test_dropout_by_words_is_a_product_with_places_and_a_factor(
    kind: torch.dtype, share: float
) -> None:
    torch.manual_seed(0)
    values = torch.randn(7, 33).to(kind).requires_grad_()
    gradient = torch.randn(33, 7).to(kind).t()  # of other strides than the values
    words = draw_words(values.shape)
    before = words.clone()
    found = drop_by_words(values, words, share)
    edge = round(share * 65_536)
    stays = (words >= edge - 32_768).to(kind)
    scale = 65_536 / (65_536 - edge)
    assert torch.equal(words, before)
    assert torch.equal(found, values * stays * scale)
    assert torch.equal(torch.autograd.grad(found, values, gradient)[0], gradient * stays * scale)


def test_a_table_whose_weight_is_read_whole_leaves_its_gradient_to_autograd() -> None:
    """The kept gradient is of rows that were looked up; ranks would exchange nothing of
    this one.
    """
    model = nn.ModuleDict(
        {name: nn.Embedding(1 << 16, 4) for name in ("word_embeddings", "rel_embeddings")}
    )
    make_lean(model)
    assert {name: type(table) for name, table in model.items()} == {
        "word_embeddings": LeanEmbedding,
        "rel_embeddings": nn.Embedding,
    }
