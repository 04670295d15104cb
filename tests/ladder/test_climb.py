"""Climbing within a budget, and what the figures of a climb say."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.texts.settings import TextDataConfig
from flatout.ladder import climb as climbing
from flatout.ladder import run_ladder
from flatout.ladder.chart import write_figure
from flatout.ladder.climb import (
    ROUNDS,
    TOO_SHORT,
    ClimbedRung,
    RungMeasurement,
    climb,
    measure_run,
    peak_memory_gb,
    ratio,
    rounds_of,
    seconds_of_measurement,
    slow_start,
)
from flatout.ladder.closing import closing_lines, ladder_table
from flatout.ladder.page import PAGE, write_ladder_page
from flatout.ladder.results import COSTS, PAYS, UNSURE, results
from flatout.ladder.rungs import Rung, ladder_of
from flatout.perf.notes import known_gain, machine_name, measured_before, note_ladder

LADDER = ladder_of(
    "own",
    {
        "title": "<b>own</b>",
        "kind": "text",
        "program": "headlines",
        "in_all": "9×",
        "rungs": [
            {"name": "foot"},
            {
                "name": "bf16",
                "promised": "2×",
                "factor": [2, 2],
                "change": {"precision": "bf16"},
            },
            {
                "name": "missing",
                "promised": "3×",
                "factor": [3, 4],
                "needs": ["no_such_package"],
                "change": {"x": 1},
            },
            {"name": "caching", "measures": "startup", "change": {"y": 1}},
            {"name": "top", "run": []},
        ],
    },
    "own.yaml",
)


def measured(rows_per_s: float, startup_s: float = 1.0, **more) -> RungMeasurement:
    known = {
        "tokens_per_s": None,
        "wait_share": 0.1,
        "padding_share": None,
        "memory_gb": 0.5,
    }
    return RungMeasurement(rows_per_s=rows_per_s, startup_s=startup_s, **{**known, **more})


def steps_of(**rates: list[float]) -> list[ClimbedRung]:
    """Steps of the ladder with so many rows a second in each round."""
    steps = []
    for rung in LADDER.rungs:
        found = {number: measured(rate) for number, rate in enumerate(rates.get(rung.name, []))}
        steps.append(ClimbedRung(rung, found, "" if found else TOO_SHORT))
    return steps


STEPS = {
    "foot": [100, 101, 99],
    "bf16": [150, 152, 148],
    "caching": [150, 152, 148],
    "top": [140, 145, 135],
}


@given(st.integers(1, 14))
def test_each_round_measures_each_rung_once(count):
    orders = list(rounds_of(count, count - 1))
    assert len(orders) == ROUNDS
    assert all(sorted(order) == list(range(count)) for order in orders)


@given(st.integers(3, 14))
def test_the_ends_come_first_and_later_rounds_go_from_neighbour_to_neighbour(count):
    first, *later = rounds_of(count, count - 1)
    assert first[:2] == [0, count - 1]
    for below, above in itertools.chain.from_iterable(map(itertools.pairwise, later)):
        assert abs(below - above) == 1


def test_a_top_below_the_last_rung_comes_second():
    first, *_ = rounds_of(5, top=3)
    assert first == [0, 3, 1, 2, 4]


@given(st.floats(1, 10_000), st.integers(2, 14))
def test_a_longer_budget_never_shortens_a_measurement(budget, rungs):
    assert seconds_of_measurement(2 * budget, rungs) >= seconds_of_measurement(budget, rungs) > 0


def climb_without_time(folder: Path, monkeypatch) -> tuple[list[str], list[ClimbedRung]]:
    """Names of the rungs that are measured though the budget is over, and what a climb
    then knows.
    """
    started = []

    def measure(rung: Rung, seconds: float, at: Path, *, limit_s: float) -> RungMeasurement:
        started.append(rung.name)
        return measured(100.0)

    monkeypatch.setattr(climbing, "measure_apart", measure)
    steps = climb(LADDER, lambda rung, seconds: rung, folder, budget_s=0.0, say=print)
    return started, steps


def test_a_budget_that_is_over_still_measures_the_two_ends_and_nothing_else(tmp_path, monkeypatch):
    started, steps = climb_without_time(tmp_path, monkeypatch)
    assert started == ["foot", "top"]
    assert [step.skipped for step in steps if step.rung.name != "missing"] == [
        "",
        TOO_SHORT,
        TOO_SHORT,
        "",
    ]
    found = results(LADDER, steps, rows=10, about={})
    assert not found["is_complete"]
    assert found["whole"]["ratio"]["value"] == 1.0


def test_one_round_states_no_speed_up(tmp_path, monkeypatch):
    _, steps = climb_without_time(tmp_path, monkeypatch)
    about = {"command": "", "device": "", "date": ""}
    found = results(LADDER, steps, rows=10, about=about)
    assert "speed-up: none is stated from one round; give more time with for=; promised 9×" in (
        closing_lines(found)
    )
    several = results(LADDER, steps_of(**STEPS), rows=10, about=about)
    for ladder, has_figure in ((found, False), (several, True)):
        write_ladder_page(tmp_path, ladder)
        above = (tmp_path / PAGE).read_text("utf-8").partition("<table")[0]
        assert ("×</b>in all" in above) is has_figure


@pytest.mark.parametrize(("cores", "is_named"), [(1.6, True), (0.3, False)])
def test_other_programs_that_compute_are_named(cores, is_named):
    about = {"others": {"cores": cores, "of": 4}}
    lines = closing_lines(results(LADDER, steps_of(**STEPS), rows=10, about=about))
    line = "other programs kept 1.6 of 4 cores busy: these speeds are not comparable. Measure"
    assert any(each.startswith(line) for each in lines) is is_named
    assert 0 <= run_ladder.busy_cores() <= run_ladder.cpu_count()


def test_without_two_measured_rungs_more_time_is_asked_for():
    found = results(LADDER, steps_of(), rows=10, about={})
    assert not found["is_complete"]
    assert found["whole"] is None
    assert any("Give more time with for=." in line for line in closing_lines(found))


def test_a_rung_that_needs_a_missing_package_is_named_skipped_and_counted(tmp_path, monkeypatch):
    _, steps = climb_without_time(tmp_path, monkeypatch)
    lines = closing_lines(results(LADDER, steps, rows=10, about={}))
    assert lines[0] == "3 of 5 rungs were not measured:"
    assert "missing: the package no_such_package is not installed" in lines


def test_a_rung_that_failed_in_a_later_round_was_measured():
    steps = [
        replace(step, skipped="failed: out of memory") for step in steps_of(**STEPS) if step.rounds
    ]
    found = results(LADDER, steps, rows=6_000, about={})
    assert found["skipped"] == []
    assert all(rung["cumulative"] for rung in found["rungs"])


def test_figures_of_rungs_are_ratios_of_their_rounds():
    found = results(LADDER, steps_of(**STEPS), rows=6_000, about={})
    foot, bf16, missing, caching, top = found["rungs"]
    assert foot["measured"] is None
    assert foot["cumulative"]["value"] == 1.0
    assert bf16["measured"]["value"] == pytest.approx(1.5, rel=0.02)
    assert bf16["verdict"] == PAYS
    assert missing["measured"] is None
    assert missing["skipped"]
    assert caching["measured"]["value"] == 1.0
    assert caching["verdict"] == COSTS
    assert top["against"] == "caching"
    assert top["verdict"] == COSTS
    assert found["whole"]["ratio"]["value"] == pytest.approx(1.4, rel=0.03)
    assert found["whole"]["minutes_before"] == pytest.approx(1.0)


def test_a_gain_of_two_rounds_is_unsure_for_want_of_an_interval():
    found = results(LADDER, steps_of(foot=[100, 100], bf16=[200, 200]), rows=10, about={})
    assert found["rungs"][1]["verdict"] == UNSURE


def test_a_rung_that_learns_something_else_is_no_top_and_is_compared_with_it(tmp_path, monkeypatch):
    frozen = Rung(name="frozen", measures="other learning")
    steps = [*steps_of(**STEPS), ClimbedRung(frozen, {0: measured(900.0)})]
    assert results(LADDER, steps, rows=10, about={})["whole"]["top"] == "top"
    scores = {"foot": 0.70, "top": 0.74, "frozen": 0.72}
    monkeypatch.setattr(
        run_ladder,
        "measure_apart",
        lambda name, seconds, at: measured(1.0, metrics={"accuracy": scores[name]}),
    )
    rungs = SimpleNamespace(
        count=10,
        case=SimpleNamespace(seed=0, epochs=1),
        config=SimpleNamespace(data=TextDataConfig()),
        folder=tmp_path,
        whole=lambda rung, seed: rung.name,
    )
    found = run_ladder.compare_quality(rungs, steps, 2)
    assert [group["mean"] for group in found["groups"]] == pytest.approx([70, 74, 72])
    assert found["difference"]["value"] == pytest.approx(4)
    assert found["sentence"].endswith(
        "; frozen against top: " + found["sentence"].rpartition(": ")[2]
    )
    assert "a loss beyond 0.5 points (-2.00 points" in found["sentence"]


def test_a_startup_rung_is_compared_by_its_startup():
    steps = steps_of(foot=[100.0] * 3, caching=[50.0] * 3)
    steps[3].rounds = {number: measured(50.0, startup_s=0.25) for number in range(3)}
    assert ratio(steps[0], steps[3], "startup").value == pytest.approx(4.0)
    assert ratio(steps[0], steps[3]).value == pytest.approx(0.5)


@given(st.lists(st.floats(1, 1e5), min_size=4, max_size=4), st.integers(1, 4))
def test_cumulative_ratios_are_those_of_the_foot(rates, rounds):
    names = ("foot", "bf16", "caching", "top")
    steps = steps_of(**{name: [rate] * rounds for name, rate in zip(names, rates, strict=True)})
    found = results(LADDER, steps, rows=10, about={})
    for rung in found["rungs"]:
        if rung["cumulative"]:
            assert rung["cumulative"]["value"] == pytest.approx(
                rung["rows_per_s"] / rates[0], rel=1e-9
            )


def complete() -> dict:
    about = {
        "command": "<script>alert(1)</script>",
        "date": "2026-11-22",
        "device": "a card, 2 cores",
    }
    return json.loads(json.dumps(results(LADDER, steps_of(**STEPS), rows=6_000, about=about)))


def test_the_page_shows_every_rung_and_marks_those_that_do_not_pay(tmp_path):
    found = complete()
    write_ladder_page(tmp_path, found)
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "&lt;b&gt;own" in page
    assert page.count('<tr class="does-not-pay">') == 2
    assert page.count('<tr class="skipped">') == 1
    assert "bf16: promised 2×" in page
    assert "<svg" in page


def test_a_ladder_without_a_measured_rung_has_a_page_without_a_chart(tmp_path):
    about = {"command": "c", "date": "d", "device": "e"}
    found = results(LADDER, steps_of(foot=[1.0]), rows=10, about=about)
    write_ladder_page(tmp_path, found)
    assert "<svg" not in (tmp_path / PAGE).read_text(encoding="utf-8")


def test_the_figure_goes_to_tensorboard(tmp_path):
    write_figure(tmp_path, complete()["rungs"])
    (events,) = tmp_path.glob("events.*")
    assert b"ladder/promised_and_measured" in events.read_bytes()


def test_the_table_has_a_row_for_each_rung():
    assert ladder_table(complete()).row_count == len(LADDER.rungs)


def test_a_verdict_finds_what_a_rung_brought_on_this_machine(tmp_path):
    note_ladder(tmp_path, complete(), {"bf16": "precision=bf16", "caching": ""})
    gain = known_gain(tmp_path, "precision=bf16", "a card, 2 cores")
    assert gain is not None
    assert gain.startswith("bf16 brought 1.5× (")
    assert gain.endswith("in your ladder own of 2026-11-22")
    assert known_gain(tmp_path, "precision=bf16", "another machine") is None
    assert known_gain(tmp_path, "compile=true", "a card, 2 cores") is None


def test_the_end_of_a_run_says_what_a_ladder_has_measured_for_its_fix(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    note_ladder(tmp_path, {**complete(), "device": machine_name()}, {"bf16": "precision=bf16"})
    known = measured_before("data.workers=1 precision=bf16")
    assert known is not None
    assert known.startswith("bf16 brought 1.5× (")
    assert measured_before("compile=true") is None
    assert measured_before(None) is None


def test_a_noted_key_answers_for_every_value(tmp_path):
    note_ladder(tmp_path, complete(), {"bf16": "data.batch_size"})
    assert known_gain(tmp_path, "data.batch_size=64", "a card, 2 cores") is not None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"gains": 3}', '{"name": "x", "date": "d", "device": "e", "gains": [1]}']
)
def test_a_damaged_note_is_passed_over(tmp_path, text):
    (tmp_path / "ladders").mkdir()
    (tmp_path / "ladders" / "own.json").write_text(text)
    assert known_gain(tmp_path, "precision=bf16", "e") is None


def test_slow_first_steps_are_taken_out_of_a_rate():
    # ten steps: two of 3 s, eight of 1 s; of the three that warm up none counts, and later steps
    # are 1.4 times as fast
    assert slow_start(14.0, 10, [3000.0, 3000.0, 1000.0, 1000.0, 1000.0]) == pytest.approx(1.4)
    assert slow_start(10.0, 10, [1000.0, 1000.0]) == pytest.approx(1.0)
    assert slow_start(7.0, 4, [3000.0, 2000.0, 1000.0, 1000.0]) == pytest.approx(1.75), (
        "one step is left to measure"
    )
    assert slow_start(4.0, 2, [3000.0, 1000.0]) == 1.0, "nothing is left to measure"


class Finished:
    """A job whose run has ended with this summary."""

    def __init__(self, checkpoint_ms: float, rows_per_s: float) -> None:
        parts = {
            "wait": 1.0,
            "forward": 9.0,
            "transfer": None,
            "checkpoint": checkpoint_ms,
            "validation": 500.0,
        }
        speed = {
            "rows_per_s": rows_per_s,
            "tokens_per_s": 10 * rows_per_s,
            "padding_share": 0.0,
            "step_ms": parts,
        }
        speed["first_steps_ms"] = [10.0] * 5
        self.summary = {"speed": speed, "training": {"steps": 10, "rows_per_step": 8}}
        self.metrics = {}

    def train(self, folder, overrides, *, resumes):
        return self


def test_a_checkpoint_in_a_short_measurement_costs_a_run_of_ours_nothing(tmp_path):
    # ten steps of 10 ms; a checkpoint of 100 ms is 10 ms of each step, and halves the rate of the
    # summary
    with_checkpoint = measure_run(Finished(10.0, 400.0), [], 1.0, tmp_path)
    without = measure_run(Finished(0.0, 800.0), [], 1.0, tmp_path)
    for found in (with_checkpoint, without):
        assert (found.rows_per_s, found.tokens_per_s) == pytest.approx((800.0, 8000.0))
        assert found.wait_share == pytest.approx(0.1)


def test_rounds_of_a_slow_machine_change_no_ratio_and_two_rounds_bound_none():
    steps = steps_of(foot=[100, 50, 10], bf16=[200, 100, 20])
    assert asdict(ratio(steps[0], steps[1])) == pytest.approx(
        {"value": 2.0, "low": 2.0, "high": 2.0}
    )
    few = ratio(*steps_of(foot=[100, 50], bf16=[200, 150])[:2])
    assert (few.value, few.low, few.high) == (pytest.approx(math.sqrt(6)), None, None)


def test_a_spread_is_half_the_range_over_the_median():
    assert steps_of(foot=[90.0, 100.0, 110.0])[0].spread == pytest.approx(0.1)
    assert steps_of(foot=[90.0])[0].spread is None


def test_rounds_of_a_disturbed_machine_are_named_in_the_closing_lines():
    quiet = closing_lines(results(LADDER, steps_of(**STEPS), rows=10, about={}))
    assert not any("rounds differ" in line for line in quiet)
    disturbed = closing_lines(
        results(LADDER, steps_of(**{**STEPS, "bf16": [150, 60, 150]}), rows=10, about={})
    )
    assert any(
        line.startswith("rounds differ by ±30% at bf16: Measure again") for line in disturbed
    )


def test_the_memory_of_a_rung_is_the_gpus_where_it_computes_on_one(monkeypatch):
    host = peak_memory_gb()
    assert host is None or host > 0.05
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3_000_000_000)
    assert peak_memory_gb() == 3.0
