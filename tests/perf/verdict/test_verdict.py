"""Each cause is told from what was measured, with a fix and what it is worth; quiet runs are told
that all is well.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from flatout.perf.verdict import experiments
from flatout.perf.verdict.evidence import LEAST_GAIN, Evidence, Tried
from flatout.perf.verdict.findings import gain_of
from flatout.perf.verdict.rules import findings, verdict

QUIET = Evidence(
    device="cpu",
    steps=400,
    batches=400,
    rows_per_batch=128.0,
    batch_size=128,
    ms={
        "wait": 0.1,
        "forward": 8.0,
        "backward": 16.0,
        "optimizer": 2.0,
        "validation": 0.5,
        "other": 0.5,
    },
    mfu=0.3,
    threads=2,
    cores=2,
    machine_cores=2,
    alone_ms=26.0,
    counts={"logging": 8, "checkpoint": 3, "validation": 2},
    epochs=2,
)
CARD = replace(
    QUIET,
    device="cuda",
    gpu={
        "utilisation": 0.95,
        "temperature_c": 61.0,
        "power_w": 280.0,
    },
)


def spending(evidence: Evidence = QUIET, **ms: float) -> Evidence:
    return replace(evidence, ms=evidence.ms | ms)


def trying(
    cause: str, override: str, ratio: float, evidence: Evidence = QUIET, **changed
) -> Evidence:
    settings = {
        "rows_per_batch": evidence.rows_per_batch,
        "batches_per_step": evidence.accumulate,
    } | changed
    tried = Tried(
        cause=cause, override=override, as_was=1000.0, rows_per_s=1000.0 * ratio, **settings
    )
    return replace(evidence, tried=[*evidence.tried, tried])


PLAIN = {
    "data": (spending(wait=20.0), "data.feed=threaded", None),
    "callbacks": (
        replace(spending(callbacks=27.1), callbacks={"mine": 27.0}),
        "~callbacks.mine",
        2.29,
    ),
    "logging": (
        replace(spending(logging=27.1), flush_every=1, counts=QUIET.counts | {"logging": 400}),
        "monitor.flush_every=50",
        2.25,
    ),
    "validation": (
        replace(spending(validation=27.1), counts={"validation": 40, "checkpoint": 41}),
        "++trainer.val_check_interval=1.0 ++trainer.check_val_every_n_epoch=1",
        2.2,
    ),
    "checkpoint": (
        replace(spending(checkpoint=27.1), counts={"validation": 2, "checkpoint": 200}),
        "checkpoint.every_steps=null checkpoint.every_minutes=10",
        2.51,
    ),
    "optimizer": (spending(optimizer=40.0), None, None),
    "precision": (replace(CARD, native="fp16"), "precision=fp16", None),
    "batch": (spending(other=30.0), "data.batch_size", None),
    "compile": (replace(QUIET, compiled={"graphs": 9, "seconds": 5.42}), "compile=false", 2.31),
    "memory": (
        replace(QUIET, host={"swap_in_mb_per_s": 40.0, "swap_out_mb_per_s": 2.0}),
        "data.batch_size",
        None,
    ),
    "cpu": (
        replace(QUIET, host={"machine_cpu_share": 1.0, "process_cpu_cores": 0.8}),
        "end the other programs",
        None,
    ),
    "throttling": (
        replace(CARD, gpu=CARD.gpu | {"throttled": {"heat": 0.7}}),
        "cool the card",
        None,
    ),
    "shared": (
        replace(CARD, gpu=CARD.gpu | {"others": {"processes": 2, "share": 0.9}}),
        "CUDA_VISIBLE_DEVICES",
        None,
    ),
    "reads": (
        replace(spending(CARD, other=30.0), reads={"mine": 14.0}, callbacks={"mine": 0.4}),
        "~callbacks.mine",
        None,
    ),
    "ranks": (replace(QUIET, world=2, ranks=[{"forward": 8.0}, {"forward": 24.0}]), "rank 1", 2.44),
    "communication": (
        replace(
            QUIET,
            world=2,
            ranks=2
            * [
                {
                    "forward": 8.0,
                    "backward": 18.0,
                    "alone": 9.0,
                }
            ],
        ),
        "data.accumulate=2",
        1.46,
    ),
}


@pytest.mark.parametrize("cause", PLAIN)
def test_what_was_measured_names_its_cause(cause):
    evidence, fix, gain = PLAIN[cause]
    told = verdict(evidence)
    assert told["cause"] == cause, told["sentence"]
    assert fix is None or fix in told["fix"]
    assert gain is None or told["predicted_gain"] == pytest.approx(gain, rel=0.02)
    assert told["sentence"].startswith("limited by ")
    assert 0 < told["share"] <= 1
    assert json.loads(json.dumps(told)) == told


def test_steps_that_were_not_compiled_count_beside_the_compilers_clock():
    clocked, _, gain = PLAIN["compile"]
    told = verdict(replace(clocked, eager_ms=clocked.model_ms / 10))
    without = clocked.total_ms / (clocked.total_ms - 0.9 * clocked.model_ms)
    assert told["predicted_gain"] == pytest.approx(without, abs=0.001)
    assert without > 2 * gain
    assert told["gain_low"] < gain < without < told["gain_high"]
    assert "uncompiled" in told["sentence"]


def test_batches_that_go_through_in_pieces_are_memory_s_fault():
    told = verdict(replace(QUIET, pieces=4))
    assert (told["cause"], told["fix"]) == (
        "memory",
        "for encoders try model.gradient_checkpointing=true",
    )
    assert "each batch goes through in 4 pieces" in told["sentence"]
    others = verdict(replace(QUIET, pieces=4, native="bf16"))
    assert {others["fix"], *(each["fix"] for each in others["others"])} == {"try precision=bf16"}


def test_where_the_rows_of_a_step_were_set_its_exchange_is_mended_by_more_of_them():
    evidence, _, gain = PLAIN["communication"]
    told = verdict(replace(evidence, effective_batch=256))
    assert (told["cause"], told["fix"]) == ("communication", "data.effective_batch=512")
    assert told["predicted_gain"] == pytest.approx(gain, rel=0.02)


@pytest.mark.parametrize(
    ("evidence", "is_told"),
    [
        (spending(wait=20.0), True),
        (spending(wait=4.0), False),
        (replace(spending(callbacks=27.1), callbacks={"mine": 27.0}), True),
        (replace(QUIET, host={"machine_cpu_share": 1.0, "process_cpu_cores": 0.8}), True),
        (replace(QUIET, host={"machine_cpu_share": 1.0, "process_cpu_cores": 1.3}), False),
        (QUIET, False),
    ],
)
def test_what_plainly_holds_a_run_back_is_told_at_once(evidence, is_told):
    assert any(each.is_plain for each in findings(evidence)) is is_told


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


def test_a_run_near_the_roof_and_one_that_is_not_are_told_apart():
    assert "near the roof" in verdict(replace(QUIET, mfu=0.62))["sentence"]
    told = verdict(QUIET)
    assert told["cause"] == "nothing"
    assert "near the roof" not in told["sentence"]
    assert told["fix"] is None


def test_a_mend_that_is_worth_little_is_not_named():
    assert verdict(trying("precision", "precision=bf16", 1.05))["cause"] == "nothing"
    assert verdict(trying("precision", "precision=bf16", 0.5))["cause"] == "nothing"
    assert verdict(spending(wait=1.0))["cause"] == "nothing"


def test_the_power_limit_is_not_mended_by_cooling():
    told = verdict(replace(CARD, gpu=CARD.gpu | {"throttled": {"power limit": 0.9}}))
    assert "nvidia-smi -pl" in told["fix"]
    assert "280 W" in told["sentence"]


def test_a_card_at_its_power_limit_whose_clocks_hardly_sink_is_not_held_down():
    held = CARD.gpu | {"throttled": {"power limit": 0.9}, "most_sm_clock_mhz": 1980.0}
    assert verdict(replace(CARD, gpu=held | {"sm_clock_mhz": 1900.0}))["cause"] == "nothing"
    told = verdict(replace(CARD, gpu=held | {"sm_clock_mhz": 1320.0}))
    assert told["cause"] == "throttling"
    assert told["share"] == pytest.approx(1 / 3, abs=1e-3)
    assert "in 90% of the samples" in told["sentence"]
    assert "1320 MHz of 1980" in told["sentence"]


def test_a_card_whose_host_works_ahead_is_not_waiting_for_reads_of_a_few_numbers():
    assert verdict(replace(CARD, reads={"mine": 14.0}))["cause"] == "nothing"


@given(
    some.dictionaries(some.sampled_from(sorted(QUIET.ms)), some.floats(0, 1e4)),
    some.lists(
        some.tuples(some.sampled_from(["data", "batch", "precision"]), some.floats(0.01, 100.0)),
        max_size=4,
    ),
)
def test_whatever_was_measured_there_is_one_verdict_and_gains_are_ordered(ms, tried):
    evidence = replace(QUIET, ms=ms or {"forward": 1.0})
    for cause, ratio in tried:
        evidence = trying(cause, "a.b=1", ratio, evidence)
    told = verdict(evidence)
    assert told["cause"]
    assert told["sentence"]
    assert len(told["others"]) <= 3
    for finding in findings(evidence):
        gain = finding.gain
        assert gain is None or (gain.low <= gain.value <= gain.high and math.isfinite(gain.high))
        assert gain is None or gain.value >= LEAST_GAIN
        assert not (finding.is_recommended and gain.low <= 1.05)
        assert 0 <= finding.share <= 1 + 1e-9
    for each in evidence.tried:
        assert gain_of(evidence, each).low > 0


def test_every_rule_is_silent_on_a_quiet_run():
    for evidence in (QUIET, CARD):
        assert findings(evidence) == []


def test_evidence_comes_back_from_a_summary():
    evidence = trying("data", "a.b=1", 2.0)
    kept = json.loads(json.dumps(asdict(evidence))) | {"from_a_later_version": 1}
    assert Evidence.from_dict(kept) == evidence


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


def test_a_feed_that_there_was_no_time_to_try_is_named_as_untested():
    said = verdict(replace(spending(wait=10.0), untested="data.feed=workers data.workers=4"))
    assert said["fix"] == "try data.feed=workers data.workers=4"
    assert said["predicted_gain"] is None
    assert "data.workers=4 (untested)" in said["sentence"]
    assert said["override"] == "data.feed=workers data.workers=4"


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


def test_evidence_of_a_version_without_bounds_is_still_read():
    kept = asdict(trying("data", "a.b=1", 2.0))
    for name in ("low", "high"):
        del kept["tried"][0][name]
    assert Evidence.from_dict(kept).tried[0].speedup.value == pytest.approx(2.0)


def test_cores_that_others_take_come_before_what_little_the_run_could_change():
    busy = replace(spending(callbacks=4.0), callbacks={"mine": 4.0})
    busy.host = {"machine_cpu_share": 1.0, "process_cpu_cores": 1.0}
    said = verdict(busy)
    assert said["cause"] == "cpu"
    assert [each["cause"] for each in said["others"]] == ["callbacks"]


def test_others_take_no_more_from_a_run_than_it_asked_for():
    busy = {"machine_cpu_share": 1.0, "process_cpu_cores": 0.7}
    for cores in (2, 64):
        said = verdict(replace(QUIET, threads=1, machine_cores=cores, host=busy))
        assert said["cause"] == "cpu"
        assert said["share"] == pytest.approx(0.3)
    assert (
        verdict(replace(QUIET, threads=1, host=busy | {"process_cpu_cores": 0.85}))["cause"]
        == "nothing"
    )


def test_a_checkpoint_an_epoch_is_not_too_many_where_nothing_validates():
    once = replace(spending(checkpoint=27.1), epochs=10, counts={"checkpoint": 10})
    assert verdict(once)["cause"] != "checkpoint"
    assert verdict(replace(once, counts={"checkpoint": 100}))["cause"] == "checkpoint"


def test_a_checkpoint_every_ten_minutes_is_not_too_many_in_an_epoch_of_hours():
    # steps of 54 ms, so 10 hours
    long = replace(spending(checkpoint=27.1), epochs=1, batches=667_000)
    assert verdict(replace(long, counts={"checkpoint": 60}))["cause"] != "checkpoint"
    assert verdict(replace(long, counts={"checkpoint": 600}))["cause"] == "checkpoint"


def test_one_thread_that_has_its_core_is_not_held_back_by_those_who_use_the_other():
    alone = replace(QUIET, threads=1, host={"machine_cpu_share": 1.0, "process_cpu_cores": 0.97})
    assert verdict(alone)["cause"] == "nothing"
    said = verdict(trying("threads", "threads=2", 1.33, alone, low=1.2, high=1.45))
    assert (said["cause"], said["override"]) == ("threads", "threads=2")
    assert verdict(replace(alone, host=alone.host | {"process_cpu_cores": 0.6}))["cause"] == "cpu"


def test_dropout_is_never_sold_for_speed():
    """Runs of earlier versions tried steps without it; less dropout learns something else."""
    assert (
        verdict(trying("dropout", "model.dropout=0", 3.0, low=2.8, high=3.2))["cause"] == "nothing"
    )


def test_sixteen_bits_that_were_not_tried_are_a_cause_on_a_card_alone():
    assert verdict(replace(CARD, native="bf16"))["fix"] == "try precision=bf16"
    assert verdict(replace(QUIET, native="bf16"))["cause"] == "nothing"


def test_freezing_is_named_after_all_else_as_a_change_of_what_is_learned():
    tuned = replace(QUIET, tuned_layers=6, epochs=3)
    found = verdict(tuned)
    assert found["cause"] == "nothing"
    assert found["override"] is None
    (other,) = found["others"]
    assert other["override"] == "model.freeze_layers=4 model.reuse=true"
    # 4 of 6 layers: two thirds of both passes, and in one epoch of three the forward pass stays.
    assert other["share"] == pytest.approx((8 * 2 / 3 + 16) * 2 / 3 / 27.1, rel=1e-3)
    assert 1.8 < other["gain_low"] < other["gain"] < other["gain_high"]
    assert (
        "training all 6 layers (to freeze 4 saves this, and learns something else)"
        in other["sentence"]
    )
    slower = trying("precision", "precision=fp16", 1.3, replace(tuned, native="fp16"))
    assert [each.cause for each in findings(slower)] == ["precision", "layers"]
    assert verdict(slower)["cause"] == "precision"


def test_freezing_is_not_named_where_layers_are_frozen_or_one_epoch_trains():
    assert findings(replace(QUIET, tuned_layers=0)) == []
    assert findings(replace(QUIET, tuned_layers=6, epochs=1)) == []


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
