"""The network over bit strings: packed bits are what unpacked ones are, and every part does what it
says.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from flatout import BitMLPConfig, UserError
from flatout.data.batches.flat_batch import FlatBatch, flat_batch, multi_hot
from flatout.models.bit_mlp import BitMLP

SOURCES = [0, 2, -1, 1, -1]
HASHED = 3
BITS = 16


def bit_batch(rows: int = 6, seed: int = 0) -> tuple[FlatBatch, torch.Tensor]:
    """Packed rows as a feed yields them, and the same bits as numbers."""
    packed = np.random.default_rng(seed).integers(0, 256, (rows, BITS // 8), dtype=np.uint8)
    batch = flat_batch([row.tolist() for row in packed])
    batch.tokens = torch.from_numpy(packed.reshape(-1))
    return batch, torch.from_numpy(np.unpackbits(packed, axis=1)).float()


def set_batch(rows: list[list[int]]) -> tuple[FlatBatch, torch.Tensor]:
    """Sets of numbers, and the same as zeros and ones."""
    batch = flat_batch(sorted(rows, key=len))
    return batch, multi_hot(batch.tokens, batch.offsets, BITS)


def build(is_set: bool = False, **settings) -> BitMLP:
    config = BitMLPConfig(**{"widths": [8], "start": "random", **settings})
    return config.build(num_inputs=BITS, is_set=is_set, hashed_of_label=SOURCES, num_hashed=HASHED)


def test_packed_bits_are_unpacked_highest_first():
    batch, bits = bit_batch()
    assert torch.equal(batch.bits(torch.float32), bits)
    assert batch.bits(torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("detectors", [True, False])
def test_a_set_of_numbers_is_what_its_zeros_and_ones_are(detectors):
    torch.manual_seed(0)
    on_sets = build(True, detectors=detectors)
    on_bits = build(False, detectors=detectors)
    weights = dict(on_sets.state_dict())
    for name in transposed(on_sets):
        weights[name] = weights[name].T
    on_bits.load_state_dict(weights)
    batch, hot = set_batch([[0, 5], [], [1, 2, 15], [7]])
    packed = np.packbits(hot.numpy().astype(np.uint8), axis=1)
    bits = flat_batch([row.tolist() for row in packed])
    bits.tokens = torch.from_numpy(packed.reshape(-1))
    found = on_sets(batch)
    expected = on_bits(bits)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for (name, one), other in zip(on_sets.named_parameters(), on_bits.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(
                one.grad.T if name in transposed(on_sets) else one.grad, other.grad
            )


def transposed(model: BitMLP) -> set[str]:
    """Names of the weights that hold a row for each number instead of a column."""
    return {
        name
        for name, value in model.named_parameters()
        if value.ndim == 2 and value.shape[0] == BITS
    }


def test_answers_are_those_of_a_plain_calculation():
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        model.composer[-1].weight.normal_()
        model.sureness.normal_()
        model.lean.normal_()
    batch, bits = bit_batch()
    detected = F.linear(bits, model.detectors.weight, model.detectors.bias)
    seen = detected.sigmoid()
    hidden = F.linear(seen, model.composer[0][0].weight, model.composer[0][0].bias).relu()
    answers = F.linear(hidden, model.composer[1].weight, model.composer[1].bias) + model.lean
    for label, source in enumerate(SOURCES):
        answers[:, label] += (
            -8.0 if source < 0 else (2 * seen[:, source] - 1) * model.sureness[label]
        )
    torch.testing.assert_close(model(batch), torch.cat([answers, detected], dim=1))


def test_known_grams_are_composed_as_detected_ones_are():
    model = build()
    known = torch.tensor([[1.0, 0.0, 1.0]])
    torch.testing.assert_close(model.compose(known), model.compose(known.clone().requires_grad_()))
    assert (model.compose(known) > 0).tolist() == [[True, True, False, False, False]]


def test_detectors_start_at_a_linear_function_and_stay_there():
    model = build(start="ridge")
    weight = torch.randn(BITS, HASHED)
    bias = torch.randn(HASHED)
    model.start_at(model.detectors, weight, bias)
    batch, bits = bit_batch()
    torch.testing.assert_close(model.detect(batch), bits @ weight + bias)
    assert model(batch).shape == (6, len(SOURCES))
    assert not model.trains_detectors
    assert build(start="ridge", train_detectors=True).trains_detectors
    assert build().trains_detectors


def test_detectors_that_are_not_trained_are_cast_once_and_anew_when_they_change():
    model = build(start="ridge")
    model.start_at(model.detectors, torch.randn(BITS, HASHED), torch.randn(HASHED))
    batch, bits = bit_batch()
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.linear(bits, model.detectors.weight, model.detectors.bias)
        first = model.detect(batch)
        cast = model._narrow
        assert torch.equal(first, plain)
        assert torch.equal(model.detect(batch), plain)
        assert model._narrow is cast
        model.start_at(model.detectors, torch.zeros(BITS, HASHED), torch.ones(HASHED))
        assert model.detect(batch).tolist() == [[1.0] * HASHED] * 6


def test_ridge_votes_with_the_share_it_is_given():
    model = build(start="ridge")
    weight = torch.randn(BITS, 5)
    bias = torch.randn(5)
    model.start_at(model.ridge, weight, bias)
    batch, bits = bit_batch()
    logits = model(batch)
    torch.testing.assert_close(
        model.blended(logits, batch).sigmoid(), logits.sigmoid(), atol=1e-5, rtol=1e-5
    )
    model.ridge_share.fill_(0.25)
    expected = (0.75 * logits.sigmoid() + 0.25 * (bits @ weight + bias)).clamp(1e-6, 1 - 1e-6)
    torch.testing.assert_close(
        model.blended(logits, batch).sigmoid(), expected, atol=1e-5, rtol=1e-5
    )
    assert "ridge_share" in model.state_dict()
    assert torch.equal(build(blend=False).blended(logits, batch), logits)


@pytest.mark.parametrize(
    "settings",
    [
        {
            "widths": [8, 4],
            "depth": 2,
            "norm": "layer",
            "dropout": 0.1,
            "residual": True,
        },
        {"widths": [8], "norm": "batch", "init": "xavier"},
        {"widths": [], "detectors": False},
        {"widths": [8], "detectors": False, "straight": False},
        {"widths": [], "detectors": True},
    ],
)
def test_every_setting_makes_a_network_that_learns(settings):
    torch.manual_seed(0)
    model = build(**settings)
    batch, _ = bit_batch(32)
    targets = (torch.rand(32, 5) < 0.3).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        loss = F.binary_cross_entropy_with_logits(model(batch)[:, :5], targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_weights_start_as_xavier_or_he_say():
    torch.manual_seed(0)
    for init, bound in (("xavier", (6 / (BITS + 64)) ** 0.5), ("he", (6 / BITS) ** 0.5)):
        weight = build(detectors=False, widths=[64], init=init).composer[0][0].weight
        assert 0.9 * bound < weight.abs().max() <= bound


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"widths": [0]}, r"model.widths: \[0\] \(widths of 1 or more\)"),
        ({"widths": [], "straight": False}, r"leaves no way from bits to answers"),
        ({"depth": 0}, r"model.depth: 0 \(1 or more\)"),
        ({"dropout": 1.0}, r"model.dropout: 1.0"),
        ({"norm": "bach"}, r"Did you mean 'batch'\?"),
        ({"start": "rige"}, r"Did you mean 'ridge'\?"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        BitMLPConfig(**settings)
