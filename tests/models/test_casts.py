"""One operator casts many tensors, with the numbers and gradients of one cast each."""

from __future__ import annotations

import pytest
import torch

from flatout.models.casts import autocast_dtype, cast_weights, share_cast

SHAPES = [(3, 4), (4,), (2, 3, 5)]


def test_weights_cast_together_are_those_cast_one_by_one():
    weights = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    (first, second), (third,) = cast_weights(torch.bfloat16, [weights[:2], weights[2:]])
    together = [first, second, third]
    alone = [weight.bfloat16() for weight in weights]
    incoming = [torch.randn(shape).bfloat16() for shape in SHAPES]
    ours = torch.autograd.grad(together, weights, incoming)
    plain = torch.autograd.grad(alone, weights, incoming)
    for one, other in zip([*together, *ours], [*alone, *plain], strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_shared_cast_has_the_gradient_of_one_cast_a_reader(dtype):
    inputs = torch.randn(50, 3, requires_grad=True)
    factors = [torch.randn(50, 3).to(dtype) for _ in range(3)]
    gradients = []
    for readers in (share_cast(inputs, dtype, 3), [inputs.to(dtype) for _ in range(3)]):
        products = [values * factor for values, factor in zip(readers, factors, strict=True)]
        total = sum(product.float().sum() for product in products)
        gradients.append(torch.autograd.grad(total, inputs)[0])
    assert torch.equal(*gradients)


def test_products_have_autocast_s_number_format_where_it_is_on():
    cpu = torch.device("cpu")
    assert autocast_dtype(cpu) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_dtype(cpu) is torch.bfloat16
        assert autocast_dtype(torch.device("meta")) is None
