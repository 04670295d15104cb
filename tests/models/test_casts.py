"""One operator casts many tensors, with the numbers and gradients of one cast each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.models.encoder_cases import FLAT, batch_of, built, gradients
from torch import Tensor, nn
from torch.nn.utils import prune

from flatout.models.casts import autocast_dtype, cast_in_pass, cast_weights, share_cast
from flatout.models.encoder import network
from flatout.models.encoder.layers import FlatLayer, groups_to_cast
from flatout.models.encoder.lora import LoraConfig
from flatout.models.encoder.transformer import Transformer

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


def test_layers_whose_weights_are_cast_at_once_answer_as_under_autocast() -> None:
    torch.manual_seed(2)
    first = nn.Linear(5, 4)
    second = nn.Linear(4, 3, bias=False)
    unread = nn.Linear(2, 2)
    inputs = torch.randn(9, 5)
    found = []
    for groups in ([], [[first], [second], [unread]]):
        with torch.autocast("cpu", torch.bfloat16), cast_in_pass(torch.bfloat16, groups):
            answers = second(first(inputs).relu())
        trained = [first.weight, first.bias, second.weight]
        found.append([answers, *torch.autograd.grad(answers.float().square().sum(), trained)])
    assert all(map(torch.equal, *found))
    assert first.weight.dtype is torch.float32


def groups_of(model: Transformer) -> list[list[nn.Linear]]:
    layers = cast("list[FlatLayer]", model.in_order())
    return groups_to_cast(model.net, layers, first=0, are_first=model.is_narrow, are_compiled=False)


def trained_once(model: Transformer, groups: list[list[nn.Linear]]) -> dict[str, Tensor]:
    """Answers and gradients of a pass in bf16, in which these layers are cast at once."""
    with torch.autocast("cpu", torch.bfloat16), cast_in_pass(torch.bfloat16, groups) as joined:
        model._joined = joined
        outputs = model._answer_flat(batch_of([2, 3, 9, 21, 21]))
        assert len(joined) == sum(len(group) > 1 for group in groups)
    assert not joined
    return {"answers": outputs.detach(), **gradients(model, outputs)}


CALL_TWICE = {"albert", "deberta-v2"}  # families that call a layer more than once
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((family, kind, {}) for family in FLAT for kind in ("single", "tags")),
    ("bert", "single", {"freeze_layers": 2}),
    ("eurobert", "single", {"freeze_layers": 1}),
    ("modernbert", "words", {}),
    ("roberta", "words", {}),
]


@pytest.mark.parametrize(
    ("family", "kind", "settings"), [case for case in CASES if case[0] not in CALL_TWICE]
)
def test_an_encoder_whose_weights_are_cast_at_once_has_all_bits_of_autocast(
    family: str, kind: str, settings: dict[str, Any]
) -> None:
    model = built(family, kind=kind, **settings)
    weights = dict(model.named_parameters())
    plain = trained_once(model, [])
    at_once = trained_once(model, groups_of(model))
    # a weight that is frozen, or that nothing has read, has no gradient either way
    assert list(plain) == list(at_once)
    assert all(torch.equal(plain[name], at_once[name]) for name in plain)
    assert dict(model.named_parameters()) == weights


def test_layers_that_are_called_twice_or_compute_their_weights_cast_their_own() -> None:
    assert groups_of(built("deberta-v2")) == []
    assert groups_of(built("bert", lora=LoraConfig(rank=2))) == []
    model = built("bert")
    assert len(groups_of(model)) == 15  # of the last layer, queries and the others apart


def passed(model: Transformer, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Answers and gradients of a pass of the model, which may cast in this format."""
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(network, "dtype_of_pass", lambda module, device: dtype)
        outputs = model(batch_of([2, 3, 9, 21, 21]))
    assert not model._joined
    return {"answers": outputs.detach(), **gradients(model, outputs)}


def prune_the_head(model: Transformer) -> None:
    prune.l1_unstructured(model.net.classifier, "weight", amount=0.5)


def freeze_a_key(model: Transformer) -> None:
    model.net.get_parameter("bert.encoder.layer.0.attention.self.key.weight").requires_grad_(False)


def train_biases_alone(model: Transformer) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))


def replace_a_value(model: Transformer) -> None:
    attention = model.net.get_submodule("bert.encoder.layer.0.attention.self")
    attention.value = nn.Linear(attention.value.in_features, attention.value.out_features)


@pytest.mark.parametrize(
    "change", [prune_the_head, freeze_a_key, train_biases_alone, replace_a_value]
)
def test_what_changes_between_two_passes_is_seen_by_the_next_one(
    change: Callable[[Transformer], None],
) -> None:
    model = built("bert")
    passed(model, torch.bfloat16)
    torch.manual_seed(3)
    change(model)
    plain = passed(model, None)
    at_once = passed(model, torch.bfloat16)
    assert list(plain) == list(at_once)
    assert all(torch.equal(plain[name], at_once[name]) for name in plain)


def test_a_pass_that_fails_leaves_the_weights_in_their_places() -> None:
    layer = nn.Linear(3, 2)
    weight = layer.weight
    with pytest.raises(RuntimeError), cast_in_pass(torch.bfloat16, [[layer]]):
        assert layer.weight.dtype is torch.bfloat16
        layer(torch.ones(1, 3))
    assert layer.weight is weight
