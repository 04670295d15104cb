"""The learning rate is a plain function of the step; the optimizer decays matrices only."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flatout import RunConfig
from flatout.engine import clipping
from flatout.engine.clipping import clip_gradients, gradient_norm
from flatout.engine.optimizer import OptimConfig, Schedule
from flatout.errors import UserError
from tests.refusals import refused


def test_the_rate_rises_then_falls_to_nothing():
    config = OptimConfig(lr=1.0, warmup=0.1)
    rates = [config.lr_at(step, 100) for step in range(100)]
    assert rates[:3] == [pytest.approx((i + 1) / 11) for i in range(3)]
    assert max(rates) == rates[10] == 1.0
    assert rates[-1] == pytest.approx(1 / 90)
    assert rates == sorted(rates[:11]) + sorted(rates[11:], reverse=True)


@pytest.mark.parametrize(
    ("schedule", "half_way"),
    [
        ("linear", 0.55),
        ("cosine", 0.55),
        ("constant", 1.0),
    ],
)
def test_schedules_half_way(schedule, half_way):
    config = OptimConfig(lr=1.0, warmup=0.0, schedule=Schedule(schedule), final_lr_share=0.1)
    assert config.lr_at(50, 100) == pytest.approx(half_way)


def test_a_warm_up_can_be_a_number_of_steps():
    assert OptimConfig(lr=1.0, warmup=4).lr_at(3, 1000) == 0.8


def test_biases_do_not_decay():
    groups = OptimConfig(weight_decay=0.3).build(nn.Linear(2, 2)).param_groups
    assert [(len(group["params"][0].shape), group["weight_decay"]) for group in groups] == [
        (2, 0.3),
        (1, 0.0),
    ]


@pytest.mark.parametrize("most_joined", [0, 1 << 20])
def test_the_norm_of_gradients_of_several_types_is_that_of_all_their_numbers(
    monkeypatch, most_joined
):
    monkeypatch.setattr(clipping, "_MOST_JOINED", most_joined)
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))]
    weights.append(nn.Parameter(torch.zeros(1)))  # without a gradient
    weights[0].grad = torch.tensor([1.0, 2.0, 2.0])
    weights[1].grad = torch.full((2, 2), 2.0, dtype=torch.float64)
    assert float(gradient_norm(weights)) == 5.0
    weights[0].grad[1] = torch.inf
    assert float(gradient_norm(weights)) == torch.inf


def test_clipping_shortens_long_gradients_only():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert float(clip_gradients([parameter], 0.5)) == 5.0
    assert float(parameter.grad.norm()) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("beta1", 1.0),
        ("clip", -1.0),
        ("warmup", -1.0),
    ],
)
def test_settings_out_of_range_name_themselves(field, value):
    with pytest.raises(UserError, match=f"optim.{field}: {value}"):
        OptimConfig(**{field: value})


@pytest.mark.parametrize(
    ("rule", "rate"),
    [
        ("none", 1e-3),
        ("sqrt", 2e-3),
        ("linear", 4e-3),
    ],
)
def test_the_rate_grows_with_the_rows_of_a_step(rule, rate):
    scaled = OptimConfig(lr=1e-3, scale_lr=rule, base_batch=64, warmup=4).scaled(256)
    assert scaled.highest == pytest.approx(rate)
    assert scaled.lr_at(3, 1000) == pytest.approx(rate * 0.8)  # the same warm-up, to another height
    assert scaled.scaled(256) == scaled


def test_a_smaller_step_gets_a_smaller_rate_and_a_cap_holds():
    config = OptimConfig(lr=1e-3, scale_lr="linear", base_batch=64, max_lr=3e-3)
    assert config.scaled(16).highest == pytest.approx(2.5e-4)
    assert config.scaled(6400).highest == 3e-3


def test_scaling_needs_the_rows_that_the_rate_was_chosen_for():
    with refused("optim.scale_lr", "sqrt", fix="optim.base_batch"):
        OptimConfig(scale_lr="sqrt")


class Lion(torch.optim.Optimizer):
    """Sign descent, as people write it themselves: `step` reads a group's rate and decay."""

    def __init__(self, params, lr: float = 1e-3, weight_decay: float = 0.0, beta: float = 0.9):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * weight.grad.sign())


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (OptimConfig(name="sgd", weight_decay=0.3, lr=0.1), torch.optim.SGD),
        (OptimConfig(name="adafactor", weight_decay=0.3, lr=0.1), torch.optim.Adafactor),
        (
            OptimConfig(optimizer=torch.optim.RAdam, weight_decay=0.3, lr=0.1),
            torch.optim.RAdam,
        ),
        (OptimConfig(optimizer=Lion, weight_decay=0.3, lr=0.1), Lion),
    ],
)
def test_every_optimizer_gets_the_groups_of_adamw(config, kind):
    optimizer = config.build(nn.Linear(2, 2))
    assert type(optimizer) is kind
    decays = [
        (len(group["params"][0].shape), group["weight_decay"]) for group in optimizer.param_groups
    ]
    assert decays == [(2, 0.3), (1, 0.0)]
    assert {(group["lr"], group["lr_share"]) for group in optimizer.param_groups} == {(0.1, 1.0)}


def test_the_step_of_sgd_is_that_of_torch():
    ours = nn.Linear(3, 3)
    theirs = copy.deepcopy(ours)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    config = OptimConfig(name="sgd", lr=0.1, weight_decay=0.0, arguments={"nesterov": True})
    optimizer = config.build(ours)
    for _ in range(3):
        for model, each in ((ours, optimizer), (theirs, plain)):
            each.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            each.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": nn.Linear}, r"optim\._target_: Linear is no optimizer\. Name a subclass"),
        ({"optimizer": 7}, r"optim\._target_: 7 is no optimizer"),
        (
            {"optimizer": Lion, "name": "muon"},
            r"optim\._target_: Lion beside optim\.name=muon\. Leave one of them out",
        ),
        ({"name": "sgd", "beta2": 0.9}, r"optim\.beta2: 0\.9, which sgd does not read"),
        ({"optimizer": Lion, "beta1": 0.8}, r"optim\.beta1: 0\.8, which Lion does not read"),
        (
            {"name": "sgd", "arguments": {"momentun": 0.9}},
            r"optim\.arguments: sgd cannot be made: .* unexpected keyword argument 'momentun'",
        ),
        (
            {"optimizer": torch.optim.LBFGS},
            r"optim\._target_: LBFGS cannot be made: .* per-parameter options",
        ),
    ],
)
def test_what_no_optimizer_can_be_made_of_is_refused_before_any_data_are_read(settings, message):
    with pytest.raises(UserError, match=message):
        OptimConfig(**settings)


def test_a_checkpoint_keeps_the_name_of_a_class_and_nothing_is_imported_by_it():
    config = OptimConfig(optimizer="evil.Evil")
    with pytest.raises(UserError, match=r"optim\._target_: evil\.Evil is a name that a checkpoint"):
        config.build(nn.Linear(2, 2))


@pytest.mark.parametrize("optimizer", [torch.optim.RAdam, torch.optim.Adafactor])
def test_sliced_weights_refuse_states_of_other_shapes(optimizer):
    with pytest.raises(UserError, match=f"fsdp: does not work with {optimizer.__name__}, whose"):
        RunConfig(
            optim=OptimConfig(optimizer=optimizer), trainer={"strategy": "fsdp", "devices": 2}
        )
