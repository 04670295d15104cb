"""Every fault of `bench faults`, as often as CI has time for: what is taken up again comes to the same bytes."""

from __future__ import annotations

import signal

import pytest
from benchmarks.faults import disks, killed, ranks, switches
from benchmarks.faults.plants import RaiseAt, SignalAt
from benchmarks.faults.runs import Spec, attempt, run_folder, said, saved_step

NO_STRACE = pytest.mark.skipif(not disks.has_strace(), reason="faults at single system calls are made by strace")


def wrong(problems) -> list[str]:
    return [each[0] for each in problems if each]


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_with_the_same_bytes(tmp_path):
    assert wrong(killed.random_kills(tmp_path, 40)) == []


@pytest.mark.slow
def test_a_signal_at_any_phase_loses_at_most_a_step_and_tells_itself_in_the_exit_code(tmp_path):
    assert wrong(killed.signals_at_any_phase(tmp_path, 40)) == []


@pytest.mark.slow
def test_runs_that_end_around_the_edges_of_epochs_go_on_to_the_same_bytes(tmp_path):
    assert wrong(killed.epoch_edges(tmp_path, 72)) == []


@pytest.mark.slow
def test_a_callback_that_raises_loses_no_row_and_repeats_none(tmp_path):
    assert wrong(killed.exceptions_of_callbacks(tmp_path, 40)) == []


@pytest.mark.slow
def test_a_rank_that_is_harmed_ends_both_and_the_run_goes_on(tmp_path):
    assert wrong(ranks.one_of_two_harmed(tmp_path, 8)) == []


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_ranks(tmp_path):
    assert wrong(ranks.other_numbers_of_ranks(tmp_path, 6)) == []


@pytest.mark.slow
def test_settings_that_may_decide_nothing_decide_nothing(tmp_path):
    assert wrong(switches.without_effect(tmp_path)) == []


@pytest.mark.slow
def test_outputs_that_are_no_number_change_no_weight(tmp_path):
    assert wrong(ranks.not_a_number(tmp_path, 38)) == []


@pytest.mark.slow
def test_outputs_of_one_rank_that_are_no_number_change_no_weight_on_either(tmp_path):
    assert wrong(ranks.not_a_number_on_either(tmp_path, 2)) == []


@NO_STRACE
@pytest.mark.slow
def test_a_kill_at_any_call_of_a_save_loses_nothing(tmp_path):
    assert wrong(disks.killed_in_a_save(tmp_path)) == []


@NO_STRACE
@pytest.mark.slow
def test_a_disk_that_refuses_any_call_of_a_save_is_told_and_loses_nothing(tmp_path):
    assert wrong(disks.errors_in_a_save(tmp_path)) == []


def test_however_a_step_is_divided_it_has_the_same_rows(tmp_path):
    assert wrong(ranks.plans(tmp_path, 5_000)) == []


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_taken(tmp_path):
    assert wrong(disks.damaged_newest(tmp_path, 60)) == []


def test_a_wrong_bit_anywhere_in_a_checkpoint_is_found(tmp_path):
    assert wrong(disks.flipped_bits(tmp_path, 500)) == []


# The planted faults themselves: a harness that finds nothing must not be one that does nothing.


def test_a_planted_fault_ends_its_run(tmp_path):
    spec = Spec(trainer={"max_epochs": 1})
    assert attempt(spec.planted(RaiseAt, place="on_train_batch_end", step=4), tmp_path / "raised") == 1
    assert "Planted" in said(tmp_path / "raised") and saved_step(run_folder(tmp_path / "raised")) == 4
    asked = spec.planted(SignalAt, place="on_train_batch_start", step=4, number=signal.SIGHUP)
    assert attempt(asked, tmp_path / "asked") == 129


@pytest.mark.slow
def test_runs_of_other_seeds_are_told_apart(tmp_path):
    reference = killed.References(tmp_path)
    reference.make([Spec()])
    other = Spec(settings={"seed": 1})
    assert killed.ended(other, tmp_path / "other", reference.of(Spec())[0]) != []
