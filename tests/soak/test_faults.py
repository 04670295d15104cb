"""Runs that are killed, asked to end, broken and damaged by hundreds, then run again to the same
bytes.
"""

from __future__ import annotations

import pytest

from tests.faults import agents, disks, killed, ranks, stores, switches

pytestmark = pytest.mark.soak(seconds=60)
NEEDS_STRACE = pytest.mark.skipif(
    not disks.has_strace(), reason="strace makes faults at single system calls"
)
PLACES = ["this disk", "another disk"]


@pytest.mark.soak(seconds=90)
def test_runs_killed_at_random_moments_end_with_the_same_bytes(tmp_path, rounds, survive):
    survive(killed.random_kills(tmp_path, 40 * rounds))


@pytest.mark.soak(seconds=45)
def test_a_signal_at_any_phase_loses_at_most_a_step(tmp_path, rounds, survive):
    survive(killed.signals_at_any_phase(tmp_path, 40 * rounds))


@pytest.mark.soak(seconds=70)
def test_runs_that_end_around_the_edges_of_epochs_resume_to_the_same_bytes(tmp_path, survive):
    survive(killed.epoch_edges(tmp_path, 72))


@pytest.mark.soak(seconds=45)
def test_a_callback_that_raises_anywhere_loses_no_row(tmp_path, rounds, survive):
    survive(killed.exceptions_of_callbacks(tmp_path, 40 * rounds))


@pytest.mark.soak(seconds=50)
def test_either_rank_may_be_harmed_in_any_way(tmp_path, rounds, survive):
    survive(ranks.one_of_two_harmed(tmp_path, 8 * rounds))


@pytest.mark.soak(seconds=120)
def test_a_rank_of_two_machines_may_be_killed_at_any_moment(tmp_path, survive):
    survive(agents.killed_once(tmp_path, agents.MOMENTS))


@pytest.mark.soak(seconds=120)
def test_machines_that_start_their_ranks_again_apart_meet_after_a_kill_too(tmp_path, survive):
    survive(agents.killed_once(tmp_path, agents.MOMENTS, "static"))


@pytest.mark.soak(seconds=50)
def test_runs_resume_on_other_numbers_of_ranks(tmp_path, rounds, survive):
    survive(ranks.other_numbers_of_ranks(tmp_path, 6 * rounds))


@pytest.mark.soak(seconds=20)
def test_settings_without_effect_change_no_weight(tmp_path, survive):
    survive(switches.without_effect(tmp_path))


@pytest.mark.soak(seconds=45)
def test_outputs_that_are_no_number_change_no_weight(tmp_path, rounds, survive):
    survive(ranks.not_a_number(tmp_path, 38 * rounds))


@pytest.mark.soak(seconds=15)
def test_outputs_of_one_rank_that_are_no_number_change_no_weight(tmp_path, rounds, survive):
    survive(ranks.not_a_number_on_either(tmp_path, 2 * rounds))


@NEEDS_STRACE
@pytest.mark.soak(seconds=40)
@pytest.mark.parametrize("place", PLACES)
def test_a_kill_at_any_system_call_of_a_save_loses_nothing(place, tmp_path, survive):
    with disks.folder_on(place, tmp_path) as folder:
        survive(disks.killed_in_a_save(folder))


@NEEDS_STRACE
@pytest.mark.soak(seconds=230)
def test_a_disk_that_refuses_any_system_call_of_a_save_loses_nothing(tmp_path, survive):
    survive(disks.errors_in_a_save(tmp_path))


@pytest.mark.soak(seconds=5)
def test_damaged_newest_checkpoints_are_named(tmp_path, rounds, survive):
    survive(disks.damaged_newest(tmp_path, 60 * rounds))


@pytest.mark.soak(seconds=5)
def test_a_wrong_bit_anywhere_in_a_checkpoint_is_found(tmp_path, rounds, survive):
    survive(disks.flipped_bits(tmp_path, 500 * rounds))


@pytest.mark.soak(seconds=15)
def test_plans_of_any_number_of_ranks_have_the_same_rows_in_a_step(tmp_path, rounds, survive):
    survive(ranks.plans(tmp_path, 5_000 * rounds))


@pytest.mark.soak(seconds=20)
def test_a_wrong_bit_anywhere_in_a_store_is_found(rounds, survive):
    detected, tried = stores.flips_detected(500 * rounds, seed=0, folder=disks.in_memory())
    survive([[]] * detected + [["a wrong bit passed"]] * (tried - detected))


@pytest.mark.soak(seconds=60)
def test_a_build_may_be_killed_or_refused_at_every_step(rounds, survive):
    survived, tried = stores.write_faults_survived(
        each_refusal=rounds > 1, folder=disks.in_memory()
    )
    assert tried >= 120
    survive([[]] * survived + [["a store or its neighbour was lost"]] * (tried - survived))


@pytest.mark.soak(seconds=15)
def test_killed_builders_are_replaced_within_a_second(rounds, survive):
    seconds = [stores.seconds_to_replace() for _ in range(2 * rounds)]
    problems: list[list[str]] = []
    for each in seconds:
        problems.append([] if each < 1 else [f"after {each:.1f} s"])
    survive(problems)
