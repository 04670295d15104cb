"""The price of a run, from the summary of a short try; and on a card, by arithmetic."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch

from flatout.errors import UserError
from flatout.price.cards import CARDS, describe_checks, require_card
from flatout.price.costs import Costs
from flatout.price.elsewhere import step_seconds
from flatout.price.pace import StepPace
from flatout.price.quote import add_quotes, quote_of, spent_in
from flatout.price.settings import PriceConfig
from flatout.price.words import describe_seconds
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


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ({"host_peak_gb": 5.0, "free_gb": 10.0}, True),
        ({"host_peak_gb": 10.0, "free_gb": 5.0}, False),
        ({"host_peak_gb": 1.0, "free_gb": 5.0, "card_peak_gb": 9.0, "card_free_gb": 8.0}, False),
        ({"host_peak_gb": 1.0, "free_gb": 5.0, "card_peak_gb": 7.0, "card_free_gb": 8.0}, True),
        ({"host_peak_gb": None, "free_gb": 5.0}, True),
    ],
)
def test_lines_and_tables_say_whether_the_memory_suffices(sizes, fits):
    quote = replace(quote_of(TRIED, PRICE), **sizes)
    assert quote.fits == fits
    assert ("does not fit" in quote.cells()[1]) == (not fits)
    line = dict(quote.lines()).get("memory", "")
    assert ("does not fit" in line) == (not fits)
    for name in ("free_gb", "card_free_gb"):
        assert not line or name not in sizes or f"{sizes[name]:.1f} GB" in line


def test_the_estimate_without_corrections_stands_beside_a_corrected_one():
    assert "without" not in dict(quote_of(TRIED, PRICE).lines())["time"]
    slower = {**TRIED, "price": {**TRIED["price"], "ratios": [1.4] * 20}}
    quote = quote_of(slower, PRICE)
    raw = describe_seconds(quote.expected.raw_s)
    assert dict(quote.lines())["time"].endswith(f"; {raw} without what earlier runs correct")


def test_a_climb_takes_its_seconds_and_the_power_of_its_top():
    top = quote_of(TRIED, PRICE)
    climb = spent_in(480.0, top, PRICE)
    assert climb.cells()[0] == "8.0 min (8.0–8.0)"
    assert climb.kwh == pytest.approx(50 * 480 / 3.6e6)
    assert climb.money == pytest.approx(0.48)


def test_a_run_without_an_end_has_no_price():
    with pytest.raises(UserError, match=r"its data are a stream\. Set \+trainer\.max_steps"):
        quote_of({"price": {}}, PriceConfig())


def test_a_run_of_a_single_step_is_too_short_and_no_stream():
    plan = {**TRIED["price"]["plan"], "steps": 1}
    with pytest.raises(UserError, match=r"price: steps of this run: 1, too few"):
        quote_of({"price": {"plan": plan}}, PriceConfig())


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


def test_the_errors_of_such_arithmetic_are_named_where_a_card_was_measured():
    line = describe_checks("Transformer")
    assert line.endswith(
        "BERT-base, 16,502 tokens on an H200: 30 ms a step, by arithmetic 22 ms (2026-11-26)"
    )
    assert "0.12 ms a step, by arithmetic 0.7 ms" in describe_checks("RNN")
    assert describe_checks("TextCNN").startswith("no TextCNN was measured on a card so far")


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
