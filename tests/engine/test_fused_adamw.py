"""`FusedAdamW` has the numbers and the state of torch's AdamW, and asks for fewer operators."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.engine.fused_adamw import FusedAdamW, is_as_known
from tests.same import same

EXACT = {"rtol": 0, "atol": 0}


def make(kind: type[AdamW], **settings: Any) -> tuple[nn.Module, AdamW]:
    """Three layers, the last in double precision; biases are a group without decay.

    A fourth is frozen, and a group of its own.
    """
    torch.manual_seed(3)
    trained = [nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2).double()]
    frozen = nn.Linear(2, 2).requires_grad_(False)
    groups = [
        {"params": [layer.weight for layer in trained], "weight_decay": 0.1},
        {"params": list(frozen.parameters())},
        {"params": [layer.bias for layer in trained], "weight_decay": 0.0},
    ]
    network = nn.Sequential(*trained, frozen)
    return network, kind(groups, **{"lr": 0.01, "fused": True, **settings})


def step(network: nn.Module, optimizer: AdamW, number: int, **told: Tensor | float) -> None:
    """One step with gradients of its own, in which the second layer has one now and then."""
    torch.manual_seed(number)
    for layer_number, layer in enumerate(network):
        for weight in layer.parameters():
            has_gradient = weight.requires_grad and (layer_number != 1 or number % 3)
            weight.grad = torch.randn_like(weight) if has_gradient else None
    for name, value in told.items():
        setattr(optimizer, name, torch.as_tensor(value))
    optimizer.step()
    for name in told:
        delattr(optimizer, name)


@pytest.mark.parametrize(
    "settings", [{}, {"amsgrad": True, "maximize": True}, {"lr": torch.tensor(0.02)}]
)
def test_weights_and_state_are_those_of_torch_in_all_bits(settings):
    ours = make(FusedAdamW, **settings)
    theirs = make(AdamW, **settings)
    for network, optimizer in (ours, theirs):
        for number in range(6):
            step(network, optimizer, number, grad_scale=1.5, found_inf=float(number == 2))
        step(network, optimizer, 6)
    assert same(ours[0].state_dict(), theirs[0].state_dict(), **EXACT)
    assert same(ours[1].state_dict(), theirs[1].state_dict(), **EXACT)
    counts = [int(state["step"]) for state in ours[1].state.values()]
    assert sorted(counts) == [3, 3, 6, 6, 6, 6]


def test_torch_makes_the_state_of_adamw_as_it_is_known_here():
    assert is_as_known()


def test_a_step_without_gradients_changes_nothing():
    network, optimizer = make(FusedAdamW)
    before = copy.deepcopy(network.state_dict())
    assert optimizer.step(lambda: 3.0) == 3.0
    assert same(network.state_dict(), before, **EXACT)
    assert not optimizer.state


def test_the_state_of_an_adamw_that_was_not_fused_is_continued():
    network, unfused = make(AdamW)
    for group in unfused.param_groups:
        group["fused"] = False
    step(network, unfused, 1)
    continued, optimizer = make(FusedAdamW)
    continued.load_state_dict(network.state_dict())
    optimizer.load_state_dict(copy.deepcopy(unfused.state_dict()))
    step(network, unfused, 2)
    step(continued, optimizer, 2, grad_scale=1.0, found_inf=0.0)
    assert same(continued.state_dict(), network.state_dict(), rtol=1e-5, atol=1e-7)
    assert all(group["fused"] for group in optimizer.param_groups)
    assert not any(group["fused"] for group in unfused.state_dict()["param_groups"])


class Operators(TorchDispatchMode):
    """Notes the operators that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_steps_of_all_groups_are_counted_by_one_operator():
    weights = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:]}]
    optimizer = FusedAdamW(groups, fused=True)
    for weight in weights:
        weight.grad = torch.ones(3)
    optimizer.step()
    optimizer.found_inf = torch.tensor(0.0)
    with Operators() as operators:
        optimizer.step()
    names = [name for name in operators.names if not name.startswith("_record")]
    assert names == ["_foreach_add_", "_fused_adamw_", "_fused_adamw_", "_foreach_sub_"]
