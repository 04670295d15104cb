"""What a run would take on a card that is not here: arithmetic, no measurement.

The kernels of a step follow each other, so a step on a card takes the sum of three times: products
over the peak of the card, bytes over the speed of its memory, some microseconds for each kernel.

    H100, BERT-base, 16,502 tokens: 8.5e12 operations, some 10 GB, 713 kernels
    8.5 / (0.5 · 989) s + 10 / (0.7 · 3,350) s + 713 · 3 µs = 17.2 + 4.3 + 2.1 = 23.6 ms

A step that is captured still costs the host something, which bounds the steps of small networks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flatout.engine.peaks import listed_peak
from flatout.engine.precision import Precision
from flatout.errors import require
from flatout.price.cards import CARDS
from flatout.price.costs import Costs
from flatout.price.pace import StepPace

# Guesses from the notes on an H100 and an H200: fractions of the data sheet that are reached,
# seconds of the shortest kernel, and of Lightning's own work for a captured step.
_OF_PEAK = 0.5
_OF_MEMORY = 0.7
_KERNEL_S = 3e-6
_HOST_S = 7e-4
_SPREAD = 0.4  # relative error of such arithmetic


def step_seconds(card: str, step: Mapping[str, float]) -> float:
    """Seconds of a step with so many `flops`, `bytes` and `launches` on a card."""
    about = CARDS[card]
    name = about["name"]
    peak = listed_peak(name, Precision.bf16) or listed_peak(name, Precision.fp16)
    assert peak is not None
    products_s = step["flops"] / (_OF_PEAK * 1e12 * peak.tflops)
    memory_s = step["bytes"] / (_OF_MEMORY * 1e9 * about["gb_per_s"])
    return max(_HOST_S, products_s + memory_s + _KERNEL_S * step["launches"])


def move_costs(costs: Costs, card: str, devices: int, facts: Mapping[str, Any]) -> Costs:
    """The costs of the same run on cards; `facts`: what a try keeps under `price`."""
    require(
        facts["step"]["launches"] > 0,
        "--on",
        "operators are counted on a CPU, in a run of four steps or more",
        hint="Set trainer.accelerator=cpu.",
    )
    plan = facts["plan"]
    here_s = costs.pace.seconds(1, plan["computed_tokens"] / plan["steps"])
    step_s = step_seconds(card, facts["step"]) / devices
    return replace(
        costs,
        pace=StepPace(step_s, 0.0, _SPREAD),
        validation_s=costs.validation_s * step_s / here_s,
        evaluation_s=costs.evaluation_s * step_s / here_s,
        watts=CARDS[card]["watts"] * devices,
        is_guessed=True,
    )
