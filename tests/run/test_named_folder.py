"""A folder that is named for a run: resumed, refused or taken, from the command line and from
Python.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flatout.checkpoints.kept import CHECKPOINTS, newest_first, set_aside
from flatout.report.summary import read_summary
from tests.composed import run_train
from tests.faults.plants import Planted, RaiseAt
from tests.faults.runs import Spec, train

TINY = [
    "data.sample.rows=200",
    "data.sample.eval_rows=40",
    "trainer.max_epochs=2",
    "data.batch_size=64",
]
FAST = [
    *TINY,
    "precision=fp32",
    "monitor.progress=false",
    "model.embedding=8",
    "model.hidden=8",
    "logger=none",
]
SAVES = ["checkpoint.every_steps=1", "monitor.verdict=false"]
BREAKS = [
    "+allow_targets=[tests]",
    "+callbacks.planted._target_=tests.faults.plants.RaiseAt",
    "+callbacks.planted.place=on_train_batch_end",
    "+callbacks.planted.step=3",
]


def command(folder: Path) -> list[str]:
    """The words of a run of some steps in a named folder."""
    return [f"hydra.run.dir={folder}/run", f"output={folder}/outputs", *FAST, *SAVES]


@pytest.fixture
def broken(tmp_path, monkeypatch) -> Path:
    """The named folder of a run that a callback has ended after step 3."""
    with pytest.raises(Planted):
        run_train([*command(tmp_path), *BREAKS], monkeypatch)
    assert read_summary(tmp_path / "run")["status"] == "failed"
    return tmp_path / "run"


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_same_command_with_resume_auto_goes_on_in_the_folder_that_it_names(
    broken, monkeypatch, capfd
):
    words = [*command(broken.parent), "resume=auto"]
    assert run_train(words, monkeypatch) == 0
    assert f"resume: continuing from step 3, in epoch 1 ({broken}/" in capfd.readouterr().out
    summary = read_summary(broken)
    assert summary["status"] == "finished"
    assert summary["training"]["resumed_from"] == 3
    assert not [
        path
        for path in (broken / CHECKPOINTS).iterdir()
        if path.name.startswith(("damaged", "replaced"))
    ]
    assert run_train(words, monkeypatch) == 0
    assert (
        f"resume: {broken} has finished; there is nothing left to train" in capfd.readouterr().out
    )


def test_resume_auto_begins_in_a_named_folder_that_is_not_there_yet(tmp_path, monkeypatch, capfd):
    assert run_train([*command(tmp_path), "resume=auto"], monkeypatch) == 0
    assert (
        f"resume: no run in {tmp_path}/run was begun by this command; a new one begins\n"
        in capfd.readouterr().out
    )
    assert read_summary(tmp_path / "run")["status"] == "finished"


def test_resume_auto_looks_at_no_other_folder_than_the_one_that_is_named(
    tmp_path, monkeypatch, capfd
):
    beside = [f"output={tmp_path}/outputs", *FAST, *SAVES]
    with pytest.raises(Planted):
        run_train([*beside, *BREAKS], monkeypatch)
    assert run_train([*command(tmp_path), "resume=auto"], monkeypatch) == 0
    assert read_summary(tmp_path / "run")["training"]["resumed_from"] is None


def test_without_resume_a_named_folder_with_checkpoints_of_an_unfinished_run_is_refused(
    broken, monkeypatch, capfd
):
    before = files_of(broken)
    assert run_train(command(broken.parent), monkeypatch) == 2
    (refusal,) = capfd.readouterr().err.splitlines()
    assert refusal.startswith(f"hydra.run.dir: {broken} ")
    assert f"resume={broken}" in refusal
    assert files_of(broken) == before


def test_resume_auto_refuses_the_unfinished_run_of_another_command(broken, monkeypatch, capfd):
    before = files_of(broken)
    capfd.readouterr()
    assert run_train([*command(broken.parent), "seed=5", "resume=auto"], monkeypatch) == 2
    printed = capfd.readouterr()
    assert f"hydra.run.dir: {broken} holds the checkpoints of a run that has not" in printed.err
    assert "a new one begins" not in printed.out
    assert files_of(broken) == before


def test_resume_auto_refuses_the_finished_run_of_another_command(tmp_path, monkeypatch, capfd):
    assert run_train(command(tmp_path), monkeypatch) == 0
    before = files_of(tmp_path / "run")
    assert run_train([*command(tmp_path), "seed=5", "resume=auto"], monkeypatch) == 2
    assert (
        f"hydra.run.dir: {tmp_path}/run holds a finished run. Name another"
        in capfd.readouterr().err
    )
    assert files_of(tmp_path / "run") == before


SMALL = Spec(trainer={"max_epochs": 2}, settings={"folder": "named"})
BROKEN = SMALL.planted(RaiseAt, place="on_train_batch_end", step=14)


def test_fit_goes_on_in_the_folder_that_it_is_given(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Planted):
        train(BROKEN, tmp_path / "runs")
    result = train(SMALL, tmp_path / "runs")
    assert result.folder == tmp_path / "named"
    assert read_summary(result.folder)["training"]["resumed_from"] == 14
    assert not (tmp_path / "named_2").exists()
    assert train(SMALL, tmp_path / "runs").folder == tmp_path / "named"
    assert "nothing left to train" in capfd.readouterr().out


def test_fit_without_resume_leaves_the_folder_and_goes_on_in_the_one_beside_it_later(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    another = replace(BROKEN, settings={"folder": "named", "seed": 1})
    for spec in (another, BROKEN):
        with pytest.raises(Planted):
            train(spec, tmp_path / "runs", resume=None)
    before = files_of(tmp_path / "named")
    result = train(SMALL, tmp_path / "runs")
    assert result.folder == tmp_path / "named_2"
    assert read_summary(result.folder)["training"]["resumed_from"] == 14
    assert files_of(tmp_path / "named") == before


def test_fit_with_other_settings_begins_beside_the_run_that_is_there(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Planted):
        train(BROKEN, tmp_path / "runs")
    result = train(replace(SMALL, settings={"folder": "named", "seed": 1}), tmp_path / "runs")
    assert result.folder == tmp_path / "named_2"
    assert "none of the 1 runs in named was begun by this command" in capfd.readouterr().out


@pytest.mark.parametrize("are_damaged", [True, False], ids=["damaged", "replaced"])
def test_a_checkpoint_that_is_set_aside_takes_the_place_of_none(tmp_path, are_damaged):
    kind = "damaged" if are_damaged else "replaced"
    for number in range(3):
        (tmp_path / "step-4").mkdir()
        (tmp_path / "step-4" / "number").write_text(f"{number}")
        set_aside(None, tmp_path, are_damaged=are_damaged)
    assert newest_first(tmp_path) == []
    names = [f"{kind}-step-4", f"{kind}-step-4_2", f"{kind}-step-4_3"]
    assert [(tmp_path / name / "number").read_text() for name in names] == ["0", "1", "2"]
