"""Runs that ended by patience, by time or on a full disk, and what a later command does there."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest

from flatout.checkpoints.kept import CHECKPOINTS
from flatout.errors import UserError
from flatout.report.summary import read_summary
from tests.faults.plants import Planted, RaiseAt, SignalAt
from tests.faults.runs import Spec, attempt, run_folder, saved_step, train
from tests.params import at_once
from tests.run.short_runs import SMALL
from tests.run_files import read_log


def test_a_run_of_no_steps_is_no_success(tmp_path):
    with pytest.raises(UserError, match="limit_train_batches"):
        train(replace(SMALL, trainer={"limit_train_batches": 0}), tmp_path / "runs")
    with pytest.raises(UserError, match=r"trainer\.max_steps: 0"):
        train(replace(SMALL, trainer={"max_steps": 0}), tmp_path / "runs")


@pytest.mark.soak(seconds=2)
def test_time_that_runs_out_inside_a_step_lets_it_end(tmp_path):
    spec = replace(
        SMALL, accumulate=3, batch_size=4, trainer={"max_epochs": 500, "max_time": "00:00:00:01"}
    )
    folder = train(spec, tmp_path / "runs").folder
    steps = read_summary(folder)["training"]["steps"]
    assert saved_step(folder) == steps
    assert 0 < steps < 5_000


def test_a_full_disk_in_mid_run_is_told_in_one_message(tmp_path, monkeypatch):
    from flatout.checkpoints.folder import FolderCheckpointIO

    saved = []
    plain = FolderCheckpointIO.save_checkpoint

    def refuse(self, checkpoint, path, storage_options=None):
        saved.append(path)
        if len(saved) == 3:
            monkeypatch.setattr("flatout.checkpoints.folder.write_synced", no_space)
        plain(self, checkpoint, path, storage_options)

    def no_space(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FolderCheckpointIO, "save_checkpoint", refuse)
    with pytest.raises(
        UserError, match=r"^checkpoint: no space left in .*needs about .* MB, .* free"
    ):
        train(SMALL, tmp_path / "runs")
    monkeypatch.undo()
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    assert saved_step(run_folder(tmp_path / "runs")) == 6
    assert read_summary(train(SMALL, tmp_path / "runs").folder)["training"]["resumed_from"] == 6


def test_metrics_that_cannot_be_written_stop_no_training(tmp_path, monkeypatch):
    def refuse(self, step, epoch, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flatout.callbacks.run_curves.MetricsFile.on_flush", refuse)
    with pytest.warns(RuntimeWarning, match="MetricsFile ends here"):
        assert read_summary(train(SMALL, tmp_path / "runs").folder)["status"] == "finished"


def stopped_early(tmp_path: Path) -> Spec:
    """A run of eight epochs whose patience has ended after two validations."""
    spec = replace(
        SMALL,
        trainer={"max_epochs": 8},
        optim={"lr": 1e-9},
        checkpoint={"patience": 1, "min_delta": 0.5},
    )
    assert read_summary(train(spec, tmp_path / "runs").folder)["training"]["steps"] == 20
    return spec


@pytest.mark.parametrize(
    ("trainer", "patience", "steps"),
    [({"max_epochs": 8}, None, 80), *at_once(of=[({"max_epochs": 9}, 1, 30)], seconds=2)],
    ids=["patience", "epochs"],
)
def test_a_run_that_stopped_early_goes_on_when_more_is_asked_for(
    tmp_path, trainer, patience, steps
):
    spec = replace(
        stopped_early(tmp_path),
        trainer=trainer,
        checkpoint={"patience": patience, "min_delta": 0.5},
    )
    summary = read_summary(train(spec, tmp_path / "runs").folder)
    assert summary["training"]["steps"] == steps
    assert summary["training"]["resumed_from"] == 20


def test_a_run_that_stopped_early_has_finished(tmp_path, capfd):
    train(stopped_early(tmp_path), tmp_path / "runs")
    assert "has finished" in capfd.readouterr().out


@pytest.mark.soak(seconds=7)
def test_more_time_is_used(tmp_path):
    spec = replace(SMALL, trainer={"max_epochs": 1000, "max_time": "00:00:00:01"})
    first = read_summary(train(spec, tmp_path / "runs").folder)["training"]["steps"]
    more = train(
        replace(spec, trainer={"max_epochs": 1000, "max_time": "00:00:00:05"}), tmp_path / "runs"
    )
    assert read_summary(more.folder)["training"]["steps"] > first


def test_a_finished_run_of_other_settings_is_refused_too(tmp_path):
    folder = train(SMALL, tmp_path / "runs").folder
    with pytest.raises(UserError, match="seed was 0 and is 7"):
        train(replace(SMALL, settings={"seed": 7}), tmp_path / "runs", resume=str(folder))


def test_a_best_that_is_damaged_is_told_and_replaced(tmp_path):
    spec = replace(SMALL, checkpoint={"patience": None, "min_delta": 1.0})
    folder = train(spec, tmp_path / "runs").folder / CHECKPOINTS
    assert (folder / "best").readlink().name == "step-10"
    (folder / "step-10" / "state.json").write_text("{}")
    with pytest.warns(UserWarning, match="the best checkpoint so far counts no more"):
        train(replace(spec, trainer={"max_epochs": 3}), tmp_path / "runs")
    assert (folder / "best").readlink().name == "step-30"


@pytest.mark.soak(seconds=2)
def test_a_best_by_another_metric_counts_no_more(tmp_path):
    folder = train(SMALL, tmp_path / "runs").folder / CHECKPOINTS
    with pytest.warns(UserWarning, match="was accuracy and is loss"):
        train(
            replace(SMALL, trainer={"max_epochs": 3}, checkpoint={"metric": "loss"}),
            tmp_path / "runs",
        )
    assert (folder / "best").readlink().name == "step-30"


def test_checkpoints_that_were_passed_over_count_for_none(cut_short):
    folder = run_folder(cut_short) / CHECKPOINTS
    (folder / "step-14" / "state.json").unlink()
    train(replace(SMALL, checkpoint={"every_steps": 1}), cut_short)
    assert (folder / "damaged-step-14").is_dir()
    assert {path.name for path in folder.glob("step-*")} >= {"step-19", "step-20"}


def test_a_run_that_had_no_checkpoint_writes_its_metrics_afresh(tmp_path):
    with pytest.raises(Planted):
        spec = replace(
            SMALL, checkpoint={"every_steps": None}, monitor={"flush_every": 1, "progress": False}
        )
        train(spec.planted(RaiseAt, place="on_before_optimizer_step", step=0), tmp_path / "runs")
    run = run_folder(tmp_path / "runs")
    (run / "metrics.csv").write_text("step,epoch\n1,0.1\n2,0.2\n")
    train(SMALL, tmp_path / "runs")
    assert (run / "metrics.csv").read_text().count("\n1,") == 0


class Odd(L.Callback):
    """Its state is nothing a checkpoint can hold."""

    def state_dict(self):
        return {"seen": {1, 2}}


def test_a_callback_with_an_odd_state_is_named_before_a_step_is_taken(tmp_path):
    with pytest.raises(UserError, match=r"checkpoint: value /callbacks/Odd/seen is a set"):
        train(SMALL.planted(Odd), tmp_path / "runs")
    assert saved_step(run_folder(tmp_path / "runs")) == 0


def test_the_clock_ends_no_step_of_several_batches(tmp_path):
    spec = replace(SMALL, accumulate=3, batch_size=4, trainer={"val_check_interval": "00:00:00:01"})
    with pytest.raises(UserError, match="Give a number of batches, or set"):
        train(spec, tmp_path / "runs")


@pytest.mark.soak(seconds=2)
def test_a_signal_after_the_last_step_ends_the_run_and_nothing_is_lost(tmp_path):
    spec = SMALL.planted(SignalAt, place="on_train_end", step=1, number=signal.SIGTERM)
    assert attempt(spec, tmp_path / "runs") == 128 + signal.SIGTERM
    assert read_summary(run_folder(tmp_path / "runs"))["status"] == "interrupted"
    assert attempt(SMALL, tmp_path / "runs") == 0
    assert read_summary(run_folder(tmp_path / "runs"))["training"]["resumed_from"] == 20


class RemovesTheRun(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            # TensorBoard's thread may write a file while this goes on
            folder = Path(trainer.default_root_dir)
            while folder.exists():
                shutil.rmtree(folder, ignore_errors=True)


def test_a_folder_that_is_removed_in_mid_run_ends_it_in_one_message(tmp_path, capsys):
    with pytest.raises(UserError, match=r"^output: .* is gone: it was removed or moved while"):
        train(replace(SMALL, logger="tensorboard").planted(RemovesTheRun), tmp_path / "runs")
    assert "Traceback" not in capsys.readouterr().err


class InterruptsEvaluation(L.Callback):
    def on_validation_start(self, trainer, pl_module):
        if trainer.state.fn == "validate":
            raise KeyboardInterrupt


def test_ctrl_c_in_the_evaluation_names_what_is_missing_and_a_resume_makes_it(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(SMALL.planted(InterruptsEvaluation), tmp_path / "runs")
    folder = run_folder(tmp_path / "runs")
    assert (
        "training is complete; evaluation and report are missing:"
        ' resume=auto makes them, in a script fit(…, resume="auto")' in read_log(folder)
    )
    train(SMALL, tmp_path / "runs")
    summary = read_summary(folder)
    assert (summary["status"], summary["training"]["resumed_from"]) == ("finished", 20)


def test_ctrl_c_behind_the_evaluation_says_that_the_report_is_missing(tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flatout.run.run.write_verdict", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, tmp_path / "runs")
    log = read_log(run_folder(tmp_path / "runs"))
    assert "training is complete; the report is missing: resume=auto makes it" in log
