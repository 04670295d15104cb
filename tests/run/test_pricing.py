"""A run keeps what it was expected to take and took."""

from __future__ import annotations

import pytest

from flatout import TextCNNConfig, TextDataConfig
from flatout.ladder.compare_runs import describe_spent
from flatout.report.run_report import RunReport
from tests.fitting import quiet_fit

TABLE = {
    "text": [f"word{number % 9} and nr{number}" for number in range(80)],
    "label": ["x", "y"] * 40,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of the same steps."""
    folder = tmp_path_factory.mktemp("runs")
    data = TextDataConfig(source=TABLE, batch_size=8, cache=str(folder / "cache"))
    model = TextCNNConfig(embedding=4, filters=4, ngrams="off")
    price = {"per_hour": 3.6, "watts": 100.0}
    return [
        quiet_fit(data, model, epochs=2, folder=folder / name, price=price).summary["price"]
        for name in ("first", "second")
    ]


def test_parts_add_up_to_what_the_run_took(runs):
    price = runs[0]
    assert sum(price["took_parts_s"].values()) == pytest.approx(price["took_s"], rel=0.05)
    assert price["plan"]["steps"] == 2 * price["plan"]["steps_an_epoch"]
    assert price["plan"]["validations"] == 2
    assert price["money"] == pytest.approx(price["took_s"] / 1_000)
    assert price["kwh"] == pytest.approx(price["took_s"] * 100 / 3.6e6)
    assert RunReport({"price": price}).cost.endswith("EUR")
    assert "kWh (price.watts)" in RunReport({"price": price}).cost
    assert RunReport({"price": price}).spent == {"kwh": price["kwh"], "money": price["money"]}


def test_two_groups_are_compared_by_what_their_runs_took(runs):
    first, second = ([{"price": price}] for price in runs)
    sentence = describe_spent(first, second)
    assert sentence.startswith("a run took ")
    assert [unit in sentence for unit in (" s,", " kWh,", " EUR")] == [True] * 3
    assert describe_spent(first, [{"price": None}]) == ""


def test_the_second_run_of_equal_steps_is_expected_by_the_first(runs):
    first, second = runs
    assert RunReport({"price": first}).time == ""  # over before it could be said
    raw_s = first["took_s"] - first["took_parts_s"]["evaluation"]
    assert second["raw_s"] >= 0.5 * raw_s
    assert RunReport({"price": second}).time.startswith("expected ")
