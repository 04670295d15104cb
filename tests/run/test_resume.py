"""The same command goes on with its run: found, compared, refused with the difference, or said to
be finished.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from dataclasses import replace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train as command_line
from flatout.checkpoints.kept import CHECKPOINTS
from flatout.distributed.signals import requeue_with_slurm
from flatout.engine import precision
from flatout.errors import UserError
from flatout.report.summary import read_summary
from flatout.run.claimed_folders import LOCK
from flatout.run.resume import read_same_start
from tests.composed import only_folder
from tests.faults.plants import Planted, RaiseAt
from tests.faults.runs import run_folder, saved_step, train
from tests.params import at_once
from tests.refusals import refused
from tests.run.short_runs import BROKEN, SMALL, contents
from tests.run_files import read_csv
from tests.warm import begin_warm


def test_the_same_settings_go_on_from_the_newest_checkpoint(cut_short, capfd):
    result = train(SMALL, cut_short)
    assert "resume: continuing from step 14, in epoch 2" in capfd.readouterr().out
    assert result.folder == run_folder(cut_short)
    assert len(list((cut_short / "case").iterdir())) == 1
    summary = read_summary(result.folder)
    assert summary["status"] == "finished"
    assert summary["training"]["resumed_from"] == 14
    assert summary["training"]["steps"] == 20


@pytest.mark.soak(seconds=3)
def test_rows_of_metrics_and_points_of_curves_are_not_doubled(tmp_path):
    with pytest.raises(Planted):
        train(replace(BROKEN, logger="tensorboard"), tmp_path / "runs")
    time.sleep(1.1)  # TensorBoard reads files in the order of the seconds they were begun in
    folder = train(replace(SMALL, logger="tensorboard"), tmp_path / "runs").folder
    steps = [(row["step"], bool(row["val/loss"])) for row in read_csv(folder / "metrics.csv")]
    assert len(steps) == len(set(steps))
    curves = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=True)
    curves.Reload()
    points = [event.step for event in curves.Scalars("train/loss")]
    assert points == sorted(set(points))
    assert points[-1] == 20


def test_a_finished_run_is_not_trained_again(tmp_path, capfd):
    first = train(SMALL, tmp_path / "runs")
    before = contents(first.folder)
    capfd.readouterr()
    again = train(SMALL, tmp_path / "runs")
    assert "has finished; there is nothing left to train" in capfd.readouterr().out
    assert again.metrics == first.metrics
    assert again.objective == first.objective
    assert again.predict(["oak elm"])[0].label in "abc"
    assert contents(first.folder) == before


def test_a_finished_run_goes_on_when_more_epochs_are_asked_for(tmp_path, capfd):
    first = train(SMALL, tmp_path / "runs")
    more = train(replace(SMALL, trainer={"max_epochs": 3}), tmp_path / "runs")
    assert "resume: continuing from step 20" in capfd.readouterr().out
    assert more.folder == first.folder
    assert read_summary(more.folder)["training"]["steps"] == 30


def test_a_run_goes_on_in_its_number_format_although_products_are_now_timed_otherwise(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(precision, "bf16_is_native_on_cpu", lambda: True)
    monkeypatch.setattr(precision, "bf16_share", lambda: 1.8)
    with pytest.raises(Planted):
        train(replace(BROKEN, precision="auto"), tmp_path / "runs")
    assert (
        "precision: fp32 (bf16 is native on this CPU, but not faster; a matrix product in bf16"
        " takes 1.80×" in capfd.readouterr().out
    )
    monkeypatch.setattr(precision, "bf16_share", lambda: 0.2)
    result = train(replace(SMALL, precision="auto"), tmp_path / "runs")
    assert "precision: fp32 (as at the beginning of this run" in capfd.readouterr().out
    assert result.folder == run_folder(tmp_path / "runs")
    assert read_summary(result.folder)["training"]["resumed_from"] == 14


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (replace(SMALL, optim={"lr": 0.5}), "optim.lr was null and is 0.5"),
        (
            replace(SMALL, data={"validation_share": 0.2}),
            "data.validation_share was 0.1 and is 0.2",
        ),
        *at_once(
            of=[
                (replace(SMALL, batch_size=24), "rows a step was 12 and is 24"),
                (replace(SMALL, settings={"seed": 3}), "seed was 0 and is 3"),
                (replace(SMALL, precision="bf16"), "precision was 32-true and is bf16-mixed"),
                (
                    replace(SMALL, trainer={"max_epochs": 2, "limit_train_batches": 5}),
                    "steps an epoch was 10 and is 5",
                ),
            ],
            seconds=1,
        ),
    ],
    ids=["optim", "data", "batch", "seed", "precision", "part of each epoch"],
)
def test_a_changed_run_is_refused_with_the_difference_and_nothing_is_touched(
    cut_short, spec, words
):
    folder = run_folder(cut_short)
    before = contents(folder)
    with pytest.raises(UserError, match="not the run that was begun") as refused:
        train(spec, cut_short, resume=str(folder))
    assert words in str(refused.value)
    assert "resume_anyway=true" in str(refused.value)
    assert contents(folder) == before


def test_changed_rows_are_refused(cut_short):
    rows = cut_short.parent / "rows.csv"
    rows.write_text(rows.read_text().replace("oak", "OAK"))
    with pytest.raises(UserError, match="the data or its encoding has changed"):
        train(SMALL, cut_short)


def test_a_changed_run_goes_on_when_that_is_asked_for(cut_short, capfd):
    folder = run_folder(cut_short)
    spec = replace(SMALL, optim={"lr": 0.01}, settings={"resume_anyway": True})
    assert train(spec, cut_short, resume=str(folder)).folder == folder
    assert "resume: resuming although optim.lr was null and is 0.01" in capfd.readouterr().out


def test_other_weights_are_refused_whatever_is_asked_for(cut_short):
    spec = replace(SMALL, family="encoder", settings={"resume_anyway": True})
    with pytest.raises(UserError, match="the model has other weights"):
        train(spec, cut_short, resume=str(run_folder(cut_short)))


def test_fewer_epochs_than_have_begun_are_refused(cut_short):
    with refused("trainer.max_epochs", 1, "epoch 2"):
        train(replace(SMALL, trainer={"max_epochs": 1}), cut_short)


@pytest.mark.soak(seconds=2)
def test_another_command_begins_a_new_run_and_says_so(cut_short, capfd):
    result = train(replace(SMALL, settings={"seed": 1}), cut_short)
    assert "none of the 1 runs in" in capfd.readouterr().out
    assert read_summary(result.folder)["training"]["resumed_from"] is None


def test_the_newest_run_is_the_one_that_began_last_although_the_clock_went_back(tmp_path):
    names = ["2026-10-25_02-50-00", "2026-10-25_02-10-00"]  # in the night summer time ends
    for name in names:
        with pytest.raises(Planted):
            train(BROKEN, tmp_path / "runs", resume=None)
        (newest,) = (
            path for path in (tmp_path / "runs" / "case").iterdir() if path.name not in names
        )
        newest.rename(newest.with_name(name))
    assert train(SMALL, tmp_path / "runs").folder.name == names[1]
    began = [read_summary(tmp_path / "runs" / "case" / name)["begun"] for name in names]
    assert began == sorted(began)
    assert all(moment.endswith("+00:00") for moment in began)


def test_without_resume_a_new_run_begins_and_the_old_one_is_named(cut_short, capfd):
    result = train(SMALL, cut_short, resume=None)
    assert (
        f"({os.path.relpath(sorted((cut_short / 'case').iterdir())[0])}): resume=auto"
        in capfd.readouterr().out
    )
    assert result.folder != sorted((cut_short / "case").iterdir())[0]


def test_a_run_without_a_checkpoint_starts_from_the_beginning_and_says_so(tmp_path, capfd):
    with pytest.raises(Planted):
        train(SMALL.planted(RaiseAt, place="on_train_start", step=0), tmp_path / "runs")
    result = train(SMALL, tmp_path / "runs")
    assert "has no checkpoint yet: it starts from the beginning" in capfd.readouterr().out
    assert read_summary(result.folder)["training"]["steps"] == 20


def test_a_changed_run_without_a_checkpoint_is_refused_and_keeps_its_words(tmp_path, capfd):
    with pytest.raises(Planted):
        train(SMALL.planted(RaiseAt, place="on_train_start", step=0), tmp_path / "runs")
    folder = run_folder(tmp_path / "runs")
    words = (folder / "config.yaml").read_text(encoding="utf-8")
    another = replace(SMALL, optim={"lr": 0.5})
    with pytest.raises(
        UserError, match=r"not the run that was begun: optim\.lr was \S+ and is 0\.5\. Set it back"
    ):
        train(another, tmp_path / "runs", resume=str(folder))
    assert (folder / "config.yaml").read_text(encoding="utf-8") == words
    train(replace(another, settings={"resume_anyway": True}), tmp_path / "runs", resume=str(folder))
    assert "resuming although optim.lr was" in capfd.readouterr().out


def test_without_a_whole_checkpoint_left_nothing_starts_silently(cut_short, capfd):
    for path in (run_folder(cut_short) / CHECKPOINTS).glob("step-*"):
        (path / "MANIFEST.json").unlink()
    with pytest.raises(UserError, match="has no whole checkpoint left"):
        train(SMALL, cut_short)
    assert capfd.readouterr().out.count("passed over") == 3
    again = train(replace(SMALL, settings={"resume_anyway": True}), cut_short)
    assert read_summary(again.folder)["training"]["steps"] == 20


def test_a_dangling_link_is_no_reason_to_start_afresh(cut_short, capfd):
    last = run_folder(cut_short) / CHECKPOINTS / "last"
    last.unlink()
    last.symlink_to("step-999")
    train(SMALL, cut_short)
    assert "continuing from step 14" in capfd.readouterr().out


@pytest.mark.parametrize("is_there", [False, True])
def test_a_rank_without_the_checkpoint_asks_for_one_disk_and_for_no_removal(is_there, tmp_path):
    checkpoint = tmp_path / "step-126"
    if is_there:
        checkpoint.mkdir()
    with pytest.raises(UserError, match="resume needs one disk") as refused:
        read_same_start(checkpoint, 1)
    assert f"rank 1 {'sees other files in' if is_there else 'does not see'} {checkpoint}" in str(
        refused.value
    )
    assert "Remove" not in str(refused.value)


def test_a_folder_that_is_no_run_is_told(tmp_path):
    with pytest.raises(UserError, match=r"no summary\.json there"):
        train(SMALL, tmp_path / "runs", resume=str(tmp_path))


def test_a_folder_that_another_process_trains_in_is_left_alone(cut_short, monkeypatch):
    monkeypatch.setattr("flatout.run.claimed_folders._PATIENCE_S", 0.2)
    # a file: NFS shares no locks of folders
    handle = os.open(run_folder(cut_short) / LOCK, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="still being trained in"):
        train(SMALL, cut_short)
    os.close(handle)
    assert train(SMALL, cut_short).folder == run_folder(cut_short)


def test_two_whole_checkpoints_are_kept_and_the_best(tmp_path):
    folder = (
        train(replace(SMALL, checkpoint={"every_steps": 1}), tmp_path / "runs").folder / CHECKPOINTS
    )
    names = sorted(path.name for path in folder.iterdir() if not path.is_symlink())
    assert {"step-20", "step-19", (folder / "best").readlink().name} == set(names)
    assert (folder / "last").readlink().name == "step-20"


def test_an_interval_inside_a_step_is_moved_to_its_end(tmp_path, capfd):
    spec = replace(
        SMALL, accumulate=3, batch_size=4, trainer={"max_epochs": 1, "val_check_interval": 4}
    )
    folder = train(spec, tmp_path / "runs").folder
    assert "validation every: 6 batches (a step is never cut in two" in capfd.readouterr().out
    assert [row["step"] for row in read_csv(folder / "metrics.csv") if row["val/loss"]] == [
        "2",
        "4",
        "6",
        "8",
        "10",
    ]


def test_slurm_is_asked_for_another_turn_after_its_warning(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert requeue_with_slurm(signal.SIGTERM) is None
    assert requeue_with_slurm(signal.SIGUSR1) == "SLURM job 17 is queued again"
    assert (tmp_path / "asked").read_text() == "requeue 17\n"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "9")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    assert requeue_with_slurm(signal.SIGUSR1) == "SLURM job 9_4 is queued again"
    monkeypatch.delenv("SLURM_JOB_ID")
    assert requeue_with_slurm(signal.SIGUSR1) is None


@pytest.mark.soak(seconds=5)
def test_the_same_words_on_the_command_line_go_on_with_the_run(tmp_path, capfd):
    small = [
        "data.sample.rows=400",
        "model.hidden=8",
        "trainer.max_epochs=400",
        "checkpoint.patience=null",
    ]
    words = [*small, f"output={tmp_path}/outputs", "checkpoint.every_steps=20"]
    first = begin_warm(["train", *words])
    first.wait_for_words("\nepoch")
    os.kill(first.pid, signal.SIGTERM)
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 143
    assert "stopped by SIGTERM after step" in said
    folder = only_folder(tmp_path / "outputs" / "default")
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    step = saved_step(folder)
    begun = step // 4 + 1
    longer = [word.replace("max_epochs=400", f"max_epochs={begun + 2}") for word in words]
    command_line.main([*longer, "resume=auto"])
    assert f"resume: continuing from step {step}" in capfd.readouterr().out
    assert [path.name for path in (tmp_path / "outputs" / "default").iterdir()] == [folder.name]
    command_line.main([*longer, "resume=auto"])
    assert "nothing left to train" in capfd.readouterr().out
