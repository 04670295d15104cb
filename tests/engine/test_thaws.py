"""Captured steps end before layers thaw, and none is captured that would hardly be replayed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from flatout.engine.thaws import Thaws, why_unknown
from flatout.models.contract import Network
from flatout.models.encoder.freezing import FreezableEncoder

STEPS_AN_EPOCH = 100
EPOCHS = 6


class Layers(FreezableEncoder):
    """Three layers, of which two are frozen at first."""

    def __init__(self, thawed_over: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        for layer in self.layers[:2]:
            layer.requires_grad_(False)
        self.thaw_over(thawed_over)

    def blocks(self) -> Any:
        return list(self.layers)


@dataclass
class Training:
    """What `Thaws` asks of a task."""

    network: Layers
    steps: int = 0

    @property
    def trainer(self) -> Any:
        in_all = STEPS_AN_EPOCH * EPOCHS
        return SimpleNamespace(global_step=self.steps, estimated_stepping_batches=in_all)

    def epochs_done(self, steps: int) -> float:
        return steps / STEPS_AN_EPOCH

    def thaw_layers(self, done: int) -> None:
        self.network.thaw(self.epochs_done(done))


def test_a_stretch_ends_with_the_step_before_a_thaw() -> None:
    training = Training(Layers(thawed_over=1.5))
    thaws = Thaws(training, least=40)
    found = {}
    while training.steps < 200:
        steps = thaws.steps_to_next(50)
        if steps < 50:
            found[training.steps] = steps
        frozen = sum(not weight.requires_grad for weight in training.network.parameters())
        training.steps += steps
        thaws.follow()
        left = sum(not weight.requires_grad for weight in training.network.parameters())
        # behind the 75th and the 150th step, and nowhere else
        assert (left < frozen) == (training.steps in (75, 150))
    assert found == {50: 25, 125: 25}


def test_a_thaw_is_noticed_once_and_weights_that_somebody_else_frees_are_none() -> None:
    training = Training(Layers(thawed_over=1.5))
    thaws = Thaws(training, least=40)
    training.network.layers[0].requires_grad_(True)
    assert not thaws.notice()
    training.network.layers[0].requires_grad_(False)
    training.steps = 75
    thaws.follow()
    assert [thaws.notice(), thaws.notice()] == [True, False]


def test_nothing_is_captured_shortly_before_a_thaw() -> None:
    training = Training(Layers(thawed_over=1.5))
    thaws = Thaws(training, least=40)
    near = set()
    for step in range(200):
        training.steps = step
        thaws.follow()
        if thaws.is_near():
            near.add(step)
    assert near == {*range(36, 75), *range(111, 150)}


@pytest.mark.parametrize(
    ("thawed_over", "least", "reason"),
    [
        (1.0, 200, ""),  # 500 steps follow the last thaw
        (5.0, 200, ""),  # 250 steps lie between two thaws
        (5.9, 300, "layers thaw every 295 steps, and steps are captured from 300 on"),
    ],
)
def test_a_training_whose_thaws_lie_too_close_is_left_plain_with_the_reason(
    thawed_over: float, least: int, reason: str
) -> None:
    assert Thaws(Training(Layers(thawed_over)), least).reason_against() == reason


def test_a_network_that_thaws_by_rules_of_its_own_is_not_captured() -> None:
    class Own(Network):
        def thaw(self, epochs: float) -> bool:
            return False

    assert why_unknown(Network()) == ""
    assert why_unknown(Layers(1.0)) == ""
    assert why_unknown(Own()) == "the network decides by itself when layers thaw"
