"""The price of a run, from the summary of a short try; and on a card, by arithmetic."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch

from flatout.errors import UserError
from flatout.price.cards import CARDS, require_card
from flatout.price.costs import Costs
from flatout.price.elsewhere import step_seconds
from flatout.price.pace import StepPace
from flatout.price.quote import add_quotes, quote_of
from flatout.price.settings import PriceConfig
from flatout.run.short_try import CountOperators, seconds_to_try

COSTS = Costs(
    start_s=2.0,
    pace=StepPace(0.1, 0.001, 0.02),
    validation_s=1.0,
    save_s=0.5,
    evaluation_s=3.0,
    watts=50.0,
)
TRIED = {
    "data": {"tokens": 900},
    "price": {
        "costs": asdict(COSTS),
        "plan": {
            "steps": 100,
            "steps_an_epoch": 50,
            "computed_tokens": 10_000.0,
            "padding_share": 0.1,
            "validations": 2,
            "save_every_s": None,
        },
        "ratios": [],
        "counted": ["processor"],
        "busy": 0.0,
        "host_peak_gb": 0.5,
        "step": {"flops": 1e12, "bytes": 1e9, "launches": 300},
    },
}
PRICE = PriceConfig(per_hour=3.6)


def test_a_quote_has_what_the_plan_knows_and_what_was_measured():
    quote = quote_of(TRIED, PRICE)
    assert quote.length == "100 in 2 epochs, 9,000 tokens, padding 10.0%"
    assert quote.expected.parts_s["training"] == 20.0
    assert quote.kwh == pytest.approx(50 * quote.expected.value_s / 3.6e6)
    assert quote.money == pytest.approx(quote.expected.value_s / 1_000)
    names = [name for name, _ in quote.lines()]
    assert names == ["steps", "time", "parts", "memory", "energy", "money"]


def test_what_is_not_known_is_said_or_left_out():
    costs = asdict(replace(COSTS, watts=None))
    quote = quote_of({**TRIED, "price": {**TRIED["price"], "costs": costs}}, PriceConfig())
    lines = dict(quote.lines())
    assert lines["energy"].startswith("not known")
    assert "money" not in lines


def test_a_run_without_an_end_has_no_price():
    with pytest.raises(UserError, match=r"its data are a stream\. Set \+trainer\.max_steps"):
        quote_of({"price": {}}, PriceConfig())


def test_runs_one_after_the_other_are_the_sum_of_all():
    quote = quote_of(TRIED, PRICE)
    both = add_quotes([quote, quote])
    assert both.expected.value_s == 2 * quote.expected.value_s
    assert both.money == 2 * quote.money


def test_a_sum_with_an_unknown_run_is_unknown_and_not_too_low():
    quote = quote_of(TRIED, PRICE)
    of_card = replace(quote, kwh=None, counted=["card"])
    total = add_quotes([quote, of_card, replace(quote, money=None)])
    assert total.kwh is None
    assert total.money is None
    assert total.counted == ["processor", "card"]
    assert total.cells()[2:] == ("", "")


def test_a_step_on_a_card_is_bounded_by_products_memory_kernels_and_the_host():
    nothing = {"flops": 0.0, "bytes": 0.0, "launches": 0}
    assert step_seconds("h100", nothing) == 7e-4
    assert step_seconds("h100", nothing | {"flops": 989e12}) == pytest.approx(2.0)
    assert step_seconds("t4", nothing | {"bytes": 320e9}) == pytest.approx(1 / 0.7)
    assert step_seconds("a16", nothing | {"launches": 1_000}) == pytest.approx(3e-3)
    assert all(step_seconds(card, nothing) > 0 for card in CARDS)


def test_a_price_on_a_card_is_narrow_in_nothing_and_ignores_runs_here():
    here = quote_of(TRIED, PRICE)
    there = quote_of(TRIED, PRICE, card="h100", devices=2)
    expected = there.expected
    assert expected.value_s < here.expected.value_s
    assert expected.high_s / expected.value_s > 1.1
    assert there.counted == ["data sheet"]
    assert there.host_peak_gb is None
    with pytest.raises(UserError, match=r"--on: no card 'h10' \(h100, a100.*Did you mean 'h100'"):
        require_card("h10")


@pytest.mark.parametrize(
    ("run_s", "seconds"), [(-1.0, 6), (60.0, 6), (200.0, 10), (3600.0, 15), (math.inf, 15)]
)
def test_a_long_run_is_tried_longer_but_at_most_fifteen_seconds(run_s, seconds):
    assert seconds_to_try(run_s) == pytest.approx(seconds)


def test_operators_of_a_step_are_counted_without_views():
    left = torch.ones(4, 4)
    with CountOperators() as counted:
        (left.T @ left).view(16).sum()
    assert counted.launches == 2
    assert counted.bytes == 4 * (3 * 16 + 16 + 1)
