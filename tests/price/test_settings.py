"""Money, and limits in a user's unit."""

from __future__ import annotations

import pytest

from flatout.errors import UserError
from flatout.price.settings import Budget, PriceConfig, Target

BOTH = PriceConfig(per_hour=3.0, per_kwh=0.5)


def test_money_is_left_out_without_a_price_and_without_a_known_energy():
    assert PriceConfig().money(3_600, 1.0) is None
    assert PriceConfig(per_hour=3.0).money(1_800, None) == 1.5
    assert BOTH.money(3_600, 2.0) == 4.0
    assert BOTH.money(3_600, None) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20min", 1_200), ("90s", 90), ("1.5h", 5_400), ("0.5kWh", 18_000), ("2EUR", 2_361)],
)
def test_a_budget_is_a_time_an_energy_or_a_sum(text, seconds):
    # 100 W at 0.50 a kWh and 3.00 an hour are 3.05 an hour
    assert Budget.of(text, BOTH).seconds(BOTH, watts=100.0) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("text", ["20 horses", "min", "0min", "-3h", "2USD"])
def test_another_word_is_no_budget(text):
    with pytest.raises(UserError, match="is no budget"):
        Budget.of(text, BOTH)


def test_a_budget_needs_a_price_or_a_counter_of_energy():
    with pytest.raises(UserError, match="nothing has a price"):
        Budget.of("2EUR", PriceConfig())
    with pytest.raises(UserError, match=r"no counter.*price\.watts"):
        Budget.of("2kWh", PriceConfig()).seconds(PriceConfig(), None)


def test_a_target_is_a_metric_and_a_value():
    assert Target.of("val/accuracy:0.90") == Target("accuracy", 0.9)
    assert Target.of("loss:1e-3") == Target("loss", 0.001)
    with pytest.raises(UserError, match="until: 'accuracy' is no target"):
        Target.of("accuracy")
