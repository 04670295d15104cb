"""Bottlenecks that are planted into trainings by transformers' Trainer are named first."""

from __future__ import annotations

import time
from typing import Any

import pytest
from transformers import TrainerCallback

from flatout import attach
from tests.perf.verdict.transformers_trainings import trainer_of

pytestmark = pytest.mark.soak(seconds=15)


class Sleeps(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(0.08)


PLANTED: dict[str, tuple[str, dict[str, Any], list[Any]]] = {
    "rows from a slow disk": ("data", {"slow_s": 0.015}, []),
    "rows of a fixed length": ("padding", {"are_full": False}, []),
    "activations computed again": ("recomputing", {"gradient_checkpointing": True}, []),
    "an evaluation each second step": (
        "validation",
        {"eval_strategy": "steps", "eval_steps": 2},
        [],
    ),
    "a callback that sleeps": ("callbacks", {}, [Sleeps]),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated.*")
def test_what_is_planted_is_named_first(name, tmp_path, monkeypatch):
    # Other tests on the same cores would be named.
    monkeypatch.setattr("flatout.perf.verdict.transformers_trainer.hardware_of", lambda _: [])
    cause, more, callbacks = PLANTED[name]
    planted = {"are_full": True} | more
    trainer = trainer_of(
        "a larger classification", tmp_path, *(make() for make in callbacks), **planted
    )
    found = attach(trainer)
    trainer.train()
    assert found.verdict["cause"] == cause, found.verdict["sentence"]


def test_nothing_is_named_where_nothing_is_planted(tmp_path, monkeypatch):
    monkeypatch.setattr("flatout.perf.verdict.transformers_trainer.hardware_of", lambda _: [])
    trainer = trainer_of("a larger classification", tmp_path, are_full=True)
    found = attach(trainer)
    trainer.train()
    gain_low = found.verdict["gain_low"]
    assert gain_low is None or gain_low < 1.2, found.verdict["sentence"]
