"""`python -m flatout build`: the store that a later run opens, made without training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.composed import run_train
from tests.verbs import verb

KINDS = {
    "texts": ["data.sample.rows=300", "data.sample.eval_rows=60"],
    "bits": ["data=bits", "data.sample.rows=200", "model=bitmlp", "task=grams"],
    "recordings": [
        "data=cells",
        "data.sample.cells=4",
        "data.sample.cycles=2",
        "data.sample.samples=50",
        "model=rnn",
        "task=sequence",
    ],
}
BORING = "lightning.pytorch.demos.boring_classes"
SHORT = ["trainer.max_epochs=1", "monitor.verdict=false", "logger=none", "precision=fp32"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_opens_the_store_that_build_made_and_build_opens_it_again(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = [*KINDS[kind], f"data.cache={tmp_path}/cache"]
    assert verb("build", *words) == 0
    said = capfd.readouterr().out
    (key,) = re.findall(r"^cache: (\w+) built in", said, re.MULTILINE)
    assert f"store: {tmp_path}/cache/{key}; python -m train with the same data.… settings opens it" in said
    assert not Path("outputs").exists()
    assert verb("build", *words) == 0
    assert f"cache: {key} opened in" in capfd.readouterr().out
    if kind == "texts":
        assert run_train([*words, *SHORT, "model.hidden=8", "model.embedding=8"], monkeypatch) == 0
        assert f"cache: {key} opened in" in capfd.readouterr().out


def test_data_of_your_own_have_no_store(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    classes = f"{BORING}.BoringModel", f"{BORING}.BoringDataModule"
    words = [f"task._target_={classes[0]}", f"data._target_={classes[1]}", f"+allow_targets=[{','.join(classes)}]"]
    assert verb("build", *words) == 2
    assert "build: a module or data of your own have no store. Call prepare_data" in capfd.readouterr().err


def test_a_wrong_column_is_one_message(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("text,label\na,b\n", encoding="utf-8")
    assert verb("build", "data.source=rows.csv", "data.text=txt") == 2
    assert "data.text: no column 'txt' in rows.csv" in capfd.readouterr().err
