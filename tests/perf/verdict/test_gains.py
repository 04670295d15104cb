"""What a fix would be worth: gains, their bounds, and which of several fixes is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flatout.perf.verdict import experiments
from flatout.perf.verdict.findings import gain_of
from flatout.perf.verdict.rules import findings, verdict
from tests.perf.verdict.quiet_evidence import QUIET, spending, trying


@pytest.mark.parametrize("cause", ["data", "padding", "precision", "threads"])
def test_what_was_tried_and_is_faster_is_the_mend(cause):
    evidence = trying(
        cause, f"override.of={cause}", 2.0, spending(wait=10.0) if cause == "data" else QUIET
    )
    told = verdict(evidence)
    assert (told["cause"], told["fix"]) == (cause, f"override.of={cause}")
    assert told["predicted_gain"] == pytest.approx(
        evidence.total_ms / (evidence.total_ms - 26.1 / 2), rel=0.3
    )


def test_a_larger_batch_saves_what_each_batch_costs():
    small = replace(spending(other=4.0), rows_per_batch=4.0, batch_size=4)
    told = verdict(trying("batch", "data.batch_size=64", 8.0, small, rows_per_batch=64.0))
    computed = 26.0 / 4 / 8
    other = 4.0 / 64
    seldom = 0.6 / 4  # validation and waiting
    assert told["cause"] == "batch"
    assert "optim.scale_lr" in told["sentence"]
    assert told["predicted_gain"] == pytest.approx(
        small.total_ms / 4 / (computed + other + seldom), rel=0.02
    )


def test_the_bounds_of_a_larger_batch_take_reading_for_work_of_rows_or_of_batches():
    small = replace(spending(wait=10.0), rows_per_batch=4.0, batch_size=4)
    told = verdict(trying("batch", "data.batch_size=64", 8.0, small, rows_per_batch=64.0))
    rest = 26.0 / 8 + 0.5 + (small.ms_of("other", "callbacks") / 16)  # ms of four rows
    of_rows = small.total_ms / (rest + 10.0)
    of_batches = small.total_ms / (rest + 10.0 / 16)
    assert told["gain_low"] < of_rows < told["predicted_gain"] < of_batches < told["gain_high"]


def test_batches_of_one_step_are_put_together_rather_than_steps_changed():
    small = replace(spending(other=4.0), rows_per_batch=4.0, batch_size=4, accumulate=8)
    evidence = trying(
        "accumulation", "data.batch_size=32 data.accumulate=1", 3.0, small, rows_per_batch=32.0
    )
    told = verdict(evidence)
    assert told["cause"] == "accumulation"
    assert "the step stays the same" in told["sentence"]


def test_a_mend_that_changes_what_is_learned_comes_after_one_that_does_not():
    slow = replace(spending(callbacks=27.1), callbacks={"mine": 27.0})
    evidence = trying("batch", "data.batch_size=512", 2.5, slow, rows_per_batch=512.0)
    told = verdict(evidence)
    assert told["cause"] == "callbacks"
    assert [each["cause"] for each in told["others"]] == ["batch"]
    tiny = trying(
        "batch", "data.batch_size=512", 30.0, spending(slow, other=90.0), rows_per_batch=512.0
    )
    assert verdict(tiny)["cause"] == "batch"


def test_of_mends_that_are_about_as_good_the_first_is_taken():
    waits = spending(wait=26.0)
    evidence = trying(
        "data",
        "data.feed=workers data.workers=8",
        2.05,
        trying("data", "data.feed=threaded", 2.0, waits),
    )
    assert verdict(evidence)["fix"] == "data.feed=threaded"


def test_a_mend_that_is_worth_little_is_not_named():
    assert verdict(trying("precision", "precision=bf16", 1.05))["cause"] == "nothing"
    assert verdict(trying("precision", "precision=bf16", 0.5))["cause"] == "nothing"
    assert verdict(spending(wait=1.0))["cause"] == "nothing"


def test_a_gain_stands_with_both_bounds_in_the_sentence_and_in_the_summary():
    said = verdict(trying("precision", "precision=bf16", 2.0, low=1.8, high=2.3))
    assert said["gain_low"] < 1.8 < said["predicted_gain"] < 2.0 < said["gain_high"]
    low = said["gain_low"]
    high = said["gain_high"]
    assert (
        f"precision=bf16 would make this run ≈ {said['predicted_gain']:.1f}× ({low:.1f}–{high:.1f})"
        in said["sentence"]
    )
    assert said["override"] == said["fix"] == said["mend"] == "precision=bf16"


@pytest.mark.parametrize(
    ("low", "is_recommended"),
    [
        (1.30, True),
        (1.05, False),
        (0.64, False),
    ],
)
def test_a_fix_is_recommended_only_where_its_lower_bound_is_worth_it(low, is_recommended):
    said = verdict(trying("data", "data.feed=workers", 1.5, spending(wait=10.0), low=low, high=1.7))
    assert said["cause"] == "data"
    assert (said["predicted_gain"] is not None) is is_recommended
    assert (said["gain_low"] is not None) is is_recommended
    assert said["fix"] == ("data.feed=workers" if is_recommended else "try data.feed=workers")
    assert ("too uncertain to promise" in said["sentence"]) is not is_recommended


def test_a_fix_that_only_slows_is_not_even_suggested():
    said = verdict(
        trying("data", "data.feed=workers", 0.64, spending(wait=10.0), low=0.6, high=0.7)
    )
    assert (said["cause"], said["fix"], said["override"], said["predicted_gain"]) == (
        "data",
        None,
        None,
        None,
    )


def test_noise_in_what_was_tried_names_no_cause():
    assert verdict(trying("threads", "threads=2", 1.15, low=0.95, high=1.3))["cause"] == "nothing"


def test_steps_that_nothing_interrupts_may_be_quicker_so_the_upper_bound_counts_them():
    slow = replace(spending(callbacks=27.1), callbacks={"mine": 27.0})
    calm, quicker = (findings(replace(slow, alone_ms=ms))[0].gain for ms in (26.0, 13.0))
    total = slow.total_ms
    left = slow.total_ms - 27.0
    assert calm.low < total / left < calm.value < total / (left - 0.25 * 26.5) < calm.high
    assert quicker.high > calm.high * 1.2
    assert quicker.low == pytest.approx(calm.low, rel=0.05)


def test_a_try_that_is_slower_than_the_run_itself_lets_no_upper_bound_fall():
    slow = replace(spending(callbacks=27.1), callbacks={"mine": 27.0})
    steady, disturbed = (findings(replace(slow, alone_ms=ms))[0].gain for ms in (26.0, 90.0))
    assert disturbed == steady


def test_a_faster_model_leaves_the_waiting_as_it_was():
    waits = spending(wait=6.5)
    tried = trying("precision", "precision=bf16", 2.0, waits).tried[0]
    assert gain_of(waits, tried).value == pytest.approx(
        waits.total_ms / (waits.total_ms - 13), rel=0.01
    )


@pytest.mark.parametrize(
    ("cores_of_feed", "cause"),
    [
        (0.9, "nothing"),
        (0.1, "data"),
    ],
)
def test_batches_that_take_the_cores_of_the_model_are_not_waited_for_in_vain(cores_of_feed, cause):
    waits = replace(
        spending(wait=9.0), feed="your own loader", feed_alone=14_000.0, feed_cores=cores_of_feed
    )
    assert verdict(waits)["cause"] == cause


@pytest.mark.parametrize(
    ("trained_s", "most_s", "tries_s"),
    [(1, 20, 0.1), (4, 20, 1.2), (20, 20, 3.0), (100, 20, 10.0), (1_000, 20, 20.0), (20, 0.5, 0.5)],
)
def test_tries_take_a_tenth_of_a_training_and_some_seconds_of_a_short_one(
    trained_s, most_s, tries_s
):
    assert experiments.time_for_tries(trained_s, most_s) == pytest.approx(tries_s)


@pytest.mark.parametrize(
    ("wait_ms", "left_s", "feeds_s"), [(2, 2.4, 1.2), (2, 4, 2.1), (2, 10, 5), (50, 4, 4)]
)
def test_feeds_have_half_of_the_tries_where_training_waits_little(
    monkeypatch, wait_ms, left_s, feeds_s
):
    monkeypatch.setattr(experiments.time, "perf_counter", lambda: 100.0)
    ends_s = experiments.end_of_feeds(spending(wait=wait_ms), 100.0 + left_s)
    assert ends_s == pytest.approx(100.0 + feeds_s)
