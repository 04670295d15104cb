"""One case of each fault: a run is harmed once, the same command runs again, and the same bytes
come out.

`tests/soak/test_faults.py` plants the same faults by hundreds.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.checkpoints.kept import CHECKPOINTS, find_checkpoint
from tests.faults import disks, ranks, stores
from tests.faults.plants import STEPS, KillAt, KillInSave, NotANumberAt, Planted, RaiseAt, SignalAt
from tests.faults.runs import Spec, attempt, differences, run_folder, said, saved_step, train
from tests.fitting import own_cache

SMALL = Spec(trainer={"max_epochs": 2})
"""Two epochs of ten steps, a checkpoint every third step."""
TWO_RANKS = Spec(batch_size=6, trainer={"devices": 2, "max_epochs": 2})
WITHOUT_CHANCE = replace(SMALL, dropout=0.0)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run of SMALL that nothing happened to."""
    place = tmp_path_factory.mktemp("untouched")
    with own_cache(place):
        yield train(SMALL, place / "runs").folder


def finish(spec: Spec, folder: Path) -> Path:
    """The folder of a harmed run after the same command ran again."""
    assert attempt(spec, folder) == 0, said(folder)
    return run_folder(folder)


def test_a_kill_in_the_middle_of_a_step_changes_no_byte(tmp_path, untouched):
    killed = SMALL.planted(KillAt, place="on_before_optimizer_step", step=7)
    assert attempt(killed, tmp_path / "runs") == -signal.SIGKILL
    assert saved_step(run_folder(tmp_path / "runs")) == 6
    assert differences(finish(SMALL, tmp_path / "runs"), untouched) == []


def test_a_kill_in_the_middle_of_a_save_changes_no_byte(tmp_path, untouched):
    assert attempt(SMALL.planted(KillInSave, number=3), tmp_path / "runs") == -signal.SIGKILL
    checkpoints = run_folder(tmp_path / "runs") / CHECKPOINTS
    assert list(checkpoints.glob(".step-*")), "half a checkpoint lies there"
    assert saved_step(run_folder(tmp_path / "runs")) == 6
    assert differences(finish(SMALL, tmp_path / "runs"), untouched) == []
    assert not list(checkpoints.glob(".step-*"))


def test_sigterm_saves_the_step_and_says_so_in_the_exit_code(tmp_path, untouched):
    asked = SMALL.planted(SignalAt, place="on_train_batch_end", step=7, number=signal.SIGTERM)
    assert attempt(asked, tmp_path / "runs") == 128 + signal.SIGTERM
    folder = run_folder(tmp_path / "runs")
    assert saved_step(folder) - int((folder / STEPS).read_text()) in (0, 1)
    assert "stopped by SIGTERM after step" in said(tmp_path / "runs")
    assert 'resume=auto resumes there, in a script fit(…, resume="auto")' in said(tmp_path / "runs")
    assert differences(finish(SMALL, tmp_path / "runs"), untouched) == []


def test_sigusr1_saves_the_step_and_queues_the_slurm_job_again(tmp_path, untouched, monkeypatch):
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(scontrol.parent), prepend=":")
    asked = SMALL.planted(SignalAt, place="on_validation_end", step=1, number=signal.SIGUSR1)
    with monkeypatch.context() as in_slurm:
        in_slurm.setenv("SLURM_JOB_ID", "17")
        assert attempt(asked, tmp_path / "runs") == 128 + signal.SIGUSR1
    assert (tmp_path / "asked").read_text() == "requeue 17\n"
    assert "SLURM job 17 is queued again" in said(tmp_path / "runs")
    assert differences(finish(SMALL, tmp_path / "runs"), untouched) == []


def test_a_kill_at_the_end_of_an_epoch_changes_no_byte(tmp_path, untouched):
    killed = SMALL.planted(KillAt, place="on_train_epoch_end", step=10)
    assert attempt(killed, tmp_path / "runs") == -signal.SIGKILL
    assert differences(finish(SMALL, tmp_path / "runs"), untouched) == []


def test_a_callback_that_raises_loses_no_row_and_repeats_none(tmp_path, untouched):
    with pytest.raises(Planted):
        train(SMALL.planted(RaiseAt, place="on_validation_start", step=10), tmp_path / "runs")
    assert differences(train(SMALL, tmp_path / "runs").folder, untouched) == []


def test_an_output_that_is_no_number_changes_no_weight(tmp_path, untouched):
    spoilt = SMALL.planted(NotANumberAt, step=7, value=float("nan"))
    assert attempt(spoilt, tmp_path / "runs") == 2
    assert "not finite at step 8 (rows " in said(tmp_path / "runs")
    assert differences(finish(SMALL, tmp_path / "runs"), untouched) == []


@pytest.mark.soak(seconds=10)
def test_a_dead_rank_ends_both_and_the_run_resumes_to_the_same_bytes(tmp_path):
    assert attempt(TWO_RANKS, tmp_path / "whole") == 0, said(tmp_path / "whole")
    killed = TWO_RANKS.planted(KillAt, place="on_train_batch_end", step=7, rank=1)
    assert attempt(killed, tmp_path / "runs") == 1
    assert "rank 1 of 2 was ended by SIGKILL" in said(tmp_path / "runs")
    assert differences(finish(TWO_RANKS, tmp_path / "runs"), run_folder(tmp_path / "whole")) == []


def test_a_run_on_one_rank_resumes_on_two_with_the_same_losses(tmp_path):
    whole = train(WITHOUT_CHANCE, tmp_path / "whole").folder
    stopped = WITHOUT_CHANCE.planted(
        SignalAt, place="on_train_batch_end", step=6, number=signal.SIGTERM
    )
    assert attempt(stopped, tmp_path / "runs") == 128 + signal.SIGTERM
    resumed = finish(replace(TWO_RANKS, dropout=0.0), tmp_path / "runs")
    assert ranks.alike(resumed, whole) == []


@pytest.mark.parametrize("name", disks.DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(name, tmp_path):
    for step in (3, 6, 9):
        disks.save(tmp_path, step)
    newest = tmp_path / CHECKPOINTS / "step-9"
    disks.DAMAGES[name](newest, random.Random(1))
    start, lines = find_checkpoint(tmp_path / CHECKPOINTS)
    assert start is not None
    assert start.step == 6
    assert disks.is_of(start.checkpoint, 6)
    assert not newest.exists() or any(str(newest) in line for line in lines)


def test_a_wrong_bit_in_a_checkpoint_is_found(tmp_path):
    assert [found for found in disks.flipped_bits(tmp_path, 60) if found] == []


def test_a_wrong_bit_in_a_store_is_found():
    assert stores.flips_detected(60, seed=1, folder=disks.in_memory()) == (60, 60)


@pytest.mark.parametrize("name", ["kill", "full disk"])
def test_a_store_is_whole_or_absent_after_a_build_that_ended_half_way(name):
    assert stores.survives_in_the_middle(name, folder=disks.in_memory())


@pytest.mark.xdist_group("timing")
def test_a_killed_builder_of_a_store_is_replaced_within_five_seconds():
    assert stores.seconds_to_replace() < 5


def test_a_step_has_the_same_rows_however_it_is_divided(tmp_path):
    assert [found for found in ranks.plans(tmp_path, 300) if found] == []


# The planted faults themselves: a harness that finds nothing must not be one that does nothing.


def test_a_planted_fault_ends_its_run(tmp_path):
    spec = Spec(trainer={"max_epochs": 1})
    assert (
        attempt(spec.planted(RaiseAt, place="on_train_batch_end", step=4), tmp_path / "raised") == 1
    )
    assert "Planted" in said(tmp_path / "raised")
    assert saved_step(run_folder(tmp_path / "raised")) == 4
    asked = spec.planted(SignalAt, place="on_train_batch_start", step=4, number=signal.SIGHUP)
    assert attempt(asked, tmp_path / "asked") == 129


def test_runs_of_other_seeds_differ(tmp_path, untouched):
    assert (
        differences(
            train(replace(SMALL, settings={"seed": 1}), tmp_path / "other").folder, untouched
        )
        != []
    )
