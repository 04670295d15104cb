"""Sweeps, runs and exports of others, opened by commands that continue or judge them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flatout.cli.doctor import _require_of_a_verdict
from flatout.cli.sweep import _is_near, _trusts
from flatout.errors import UserError
from flatout.inference.onnx_file import keep_onnxruntime_silent
from flatout.run.answers import settable_answers
from flatout.run.confirmed import _keeps_step_rows
from tests.hostile.paths import _begun, _resume


def test_a_sweep_of_others_takes_nobody_to_another_folder(tmp_path, monkeypatch):
    (tmp_path / "bait").mkdir()
    (tmp_path / "work").mkdir()
    folder = _begun(tmp_path, place=str(tmp_path / "bait"))
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(UserError, match=r"was begun in .*bait\. If you know it, go there first"):
        _resume(folder)
    assert Path.cwd() == tmp_path / "work"


@pytest.mark.parametrize(
    "word",
    [
        "output= /elsewhere",
        "output='/elsewhere'",
        "output=/elsewhere",
        "output=str(/elsewhere)",
        "output=choice(/elsewhere)",
    ],
)
def test_the_folder_that_a_sweep_names_is_the_one_that_hydra_reads(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "runs" / "sweeps" / "now"
    assert not _is_near(word, sweep)
    assert _is_near("output='runs'", sweep)
    assert _is_near(f"output={tmp_path}/others", sweep)


def test_a_sweep_of_others_with_a_second_name_of_a_file_is_not_resumed(tmp_path, monkeypatch):
    (tmp_path / "bait").mkdir()
    folder = _begun(tmp_path, place=str(tmp_path))
    (tmp_path / "mine").write_text("mine")
    os.link(tmp_path / "mine", folder / "journal.log")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="has another name, too"):
        _resume(folder)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_launcher_or_sweeper_of_a_sweep_s_folder_is_typed_again():
    for word in ("hydra/launcher=submitit_local", "hydra/sweeper=basic", "hydra.job.name=x"):
        assert _trusts(word)
    for word in ("hydra/launcher=flatout", "hydra/sweeper=flatout", "trials=20", "seed=1"):
        assert not _trusts(word)


def test_a_verdict_of_others_is_confirmed_where_a_verdict_could_say_so(tmp_path):
    for override in (
        "output=/elsewhere",
        "data.batch_size=512 resume=/elsewhere",
        "+callbacks.x._target_=lightning.pytorch.callbacks.ModelCheckpoint",
        "~callbacks.x=1",
        "hydra.run.dir=/elsewhere",
    ):
        with pytest.raises(UserError, match="which no verdict does"):
            _require_of_a_verdict(override, tmp_path)
    for override in (
        "data.batch_size=512 data.accumulate=1 data.effective_batch=null",
        "~callbacks.slow",
        "++trainer.val_check_interval=1.0 ++trainer.check_val_every_n_epoch=1",
        "checkpoint.every_steps=null checkpoint.every_minutes=5",
        "data.feed=workers data.workers=4 threads=1",
        "model.freeze_layers=4 model.reuse=true",
    ):
        _require_of_a_verdict(override, tmp_path)


def test_onnxruntime_reports_to_nobody_unless_you_say_so(monkeypatch):
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)
    keep_onnxruntime_silent()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    keep_onnxruntime_silent()
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "0"


def test_an_answer_of_others_is_one_word_of_a_command_line():
    answers = {"data.batch_size": "128 output=/elsewhere", "data.workers": [1], "precision": "bf16"}
    answers |= {"data.feed": "a b", "data.accumulate": 2}
    found = settable_answers({"tune": {"values": answers}})
    assert found == {"precision": "bf16", "data.accumulate": 2}


@pytest.mark.parametrize("size", [64, None])
def test_a_confirmation_of_others_changes_no_rows_of_a_step(size):
    data = {"batch_size": size, "accumulate": 2}
    assert _keeps_step_rows({"data.workers": -5}, data)
    assert _keeps_step_rows({"data.batch_size": 128, "data.accumulate": 1}, data) == (size == 64)
    for odd in ([1, 2], "abc", -64, 64.0, None, True):
        values = {"data.batch_size": odd, "data.accumulate": 1}
        assert not _keeps_step_rows(values, data)
