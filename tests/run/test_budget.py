"""A run ends within its budget, with its schedule at its end; or where a target is reached."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path

import pytest

from flatout import TextCNNConfig, TextDataConfig
from flatout.errors import UserError
from flatout.price.costs import (
    TRIES_SHARE,
    TRIES_SHARE_IN_BUDGET,
    Costs,
    PlannedLengths,
    expect,
)
from flatout.price.pace import StepPace
from flatout.report.run_report import RunReport
from flatout.run import budget
from tests.faults.plants import Planted, RaiseAt
from tests.fitting import own_cache, quiet_fit

TABLE = {
    "text": [f"word{number % 9} and nr{number}" for number in range(80)],
    "label": ["x", "y"] * 40,
}
DATA = TextDataConfig(source=TABLE, batch_size=8)
MODEL = TextCNNConfig(embedding=4, filters=4, ngrams="off")
PATIENT = {"checkpoint": {"patience": None}}
COSTS = Costs(
    start_s=2.0, pace=StepPace(1.0, 0.0, 0.0), validation_s=1.0, save_s=0.5, evaluation_s=3.0
)
TRIED = {
    "costs": asdict(COSTS),
    "plan": {
        "steps": 20,
        "steps_an_epoch": 10,
        "computed_tokens": 200.0,
        "validations": 2,
        "save_every_s": None,
    },
    "ratios": [],
}


def test_the_time_of_a_run_grows_with_its_epochs():
    def seconds_of(epochs):
        return expect(COSTS, PlannedLengths.of_plan(TRIED["plan"], epochs, tries_share=0.0)).value_s

    assert seconds_of(1.0) == pytest.approx(2 + 10 + 1 + 3 + 0.5, rel=0.01)
    assert seconds_of(4.0) == pytest.approx(2 + 4 * 11.5 + 3, rel=0.01)
    assert seconds_of(2.0) == seconds_of(None)


def test_a_budget_in_which_not_one_epoch_fits_is_refused_and_leaves_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        budget, "try_run", lambda config, begin, seconds: {"price": TRIED, "mixture": None}
    )
    with pytest.raises(UserError, match=r"budget: 5s, but one epoch with its evaluation takes 1\d"):
        quiet_fit(DATA, MODEL, budget="5s", folder=tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


def test_the_verdict_of_a_run_with_a_budget_gets_a_smaller_share_of_its_time():
    def evaluation_s(share):
        lengths = PlannedLengths.of_plan(TRIED["plan"], 10.0, tries_share=share)
        return expect(COSTS, lengths).parts_s["evaluation"]

    training_s = 100.0
    assert evaluation_s(0.0) == 3.0
    assert evaluation_s(TRIES_SHARE_IN_BUDGET) == pytest.approx(3 + 0.7 * 0.03 * training_s)
    assert evaluation_s(TRIES_SHARE) == pytest.approx(3 + 0.7 * 0.1 * training_s)


@pytest.mark.parametrize(("mixture", "limits_s"), [(None, [0.5]), ({"share": 0.5}, [])])
def test_the_rival_is_trained_before_the_plan_unless_a_linear_model_answers_too(
    mixture, limits_s, tmp_path, monkeypatch
):
    asked = []
    tried = {"price": TRIED, "mixture": mixture}
    monkeypatch.setattr(budget, "try_run", lambda config, begin, seconds: tried)
    monkeypatch.setattr(budget, "scores_within", lambda *given: asked.append(given[2]))
    with pytest.raises(UserError, match="budget: 5s, but one epoch"):
        quiet_fit(DATA, MODEL, budget="5s", folder=tmp_path / "run")
    assert asked == limits_s


def test_a_wrong_budget_and_a_wrong_target_are_refused_before_anything_is_read():
    with pytest.raises(UserError, match=r"budget: 'soon' is no budget \(such as 20min"):
        quiet_fit(DATA, MODEL, budget="soon")
    with pytest.raises(UserError, match=r"until: 'fast' is no target \(such as val/accuracy"):
        quiet_fit(DATA, MODEL, until="fast")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"until": "val/accuracy:0.1"}, "until=val/accuracy:0.1"),
        ({"trainer": {"max_time": {"milliseconds": 1}}}, "trainer.max_time"),
    ],
)
def test_training_ends_where_its_target_or_time_is_reached_and_says_so(tmp_path, words, why):
    with own_cache(tmp_path):
        result = quiet_fit(DATA, MODEL, epochs=3, folder=tmp_path / "run", **words)
    assert result.summary["training"]["epochs"] <= 1
    ended = RunReport(result.summary).early_end
    assert ended.startswith("after ")
    assert why in ended


def test_patience_and_a_target_watch_one_metric_together(tmp_path):
    with own_cache(tmp_path):
        result = quiet_fit(
            DATA,
            MODEL,
            epochs=3,
            until="accuracy:2",
            checkpoint={"patience": 1, "metric": "accuracy", "min_delta": 1.0},
            folder=tmp_path / "run",
        )
    assert "checkpoint.patience=1" in RunReport(result.summary).early_end


@pytest.mark.soak(seconds=90)
def test_a_run_ends_within_its_budget_with_the_rate_at_its_end(tmp_path):
    with own_cache(tmp_path):
        result = quiet_fit(DATA, MODEL, budget="60s", folder=tmp_path / "run", **PATIENT)
    assert result.summary["price"]["took_s"] == pytest.approx(60, rel=0.1)
    with Path(tmp_path, "run", "metrics.csv").open(encoding="utf-8") as file:
        rates = [float(row["train/lr"]) for row in csv.DictReader(file) if row["train/lr"]]
    assert rates[-1] < 0.01 * max(rates)


@pytest.mark.soak(seconds=120)
def test_a_run_that_was_broken_resumes_with_its_budget(tmp_path):
    folder = tmp_path / "run"
    with own_cache(tmp_path):
        breaking = {"raise": RaiseAt("on_train_batch_end", 60)}
        with pytest.raises(Planted):
            quiet_fit(DATA, MODEL, budget="60s", folder=folder, callbacks=breaking, **PATIENT)
        result = quiet_fit(DATA, MODEL, budget="60s", folder=folder, resume=str(folder), **PATIENT)
    budgets = [choice for choice in result.summary["choices"] if choice["name"] == "budget"]
    assert budgets[0]["why"] == "as at the beginning of this run"
    assert result.summary["status"] == "finished"
