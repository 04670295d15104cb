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

from flatout.perf.verdict.evidence import LEAST_GAIN, Evidence
from flatout.perf.verdict.findings import gain_of
from flatout.perf.verdict.rules import findings, verdict
from tests.perf.verdict.quiet_evidence import CARD, QUIET, spending, trying

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


def test_a_run_near_the_roof_and_one_that_is_not_are_told_apart():
    assert "near the roof" in verdict(replace(QUIET, mfu=0.62))["sentence"]
    told = verdict(QUIET)
    assert told["cause"] == "nothing"
    assert "near the roof" not in told["sentence"]
    assert told["fix"] is None


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


def test_a_feed_that_there_was_no_time_to_try_is_named_as_untested():
    said = verdict(replace(spending(wait=10.0), untested="data.feed=workers data.workers=4"))
    assert said["fix"] == "try data.feed=workers data.workers=4"
    assert said["predicted_gain"] is None
    assert "data.workers=4 (untested)" in said["sentence"]
    assert said["override"] == "data.feed=workers data.workers=4"


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
