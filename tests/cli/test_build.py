"""`python -m flatout build`: the store that a later run opens, made without training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flatout.data.texts import encoded_units
from tests.composed import run_train
from tests.data.wordpieces import train_wordpieces
from tests.params import at_once
from tests.refusals import require_printed
from tests.verbs import verb

KINDS = {
    "texts": ["data.sample.rows=300", "data.sample.eval_rows=60"],
    "tags": ["data=tagged_tweets", "data.sample.rows=200", "model=transformer", "task=tagging"],
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


@pytest.mark.parametrize("kind", at_once("texts", of=KINDS, seconds=2))
def test_a_run_opens_the_store_that_build_made_and_build_opens_it_again(
    kind, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    words = [*KINDS[kind], f"data.cache={tmp_path}/cache"]
    assert verb("build", *words) == 0
    said = capfd.readouterr().out
    (key,) = re.findall(r"^cache: (\w+) built in", said, re.MULTILINE)
    assert (
        f"store: {tmp_path}/cache/{key}; python -m train with the same data.… settings opens it"
        in said
    )
    assert not Path("outputs").exists()
    assert verb("build", *words) == 0
    assert f"cache: {key} opened in" in capfd.readouterr().out
    if kind == "texts":
        assert run_train([*words, *SHORT, "model.hidden=8", "model.embedding=8"], monkeypatch) == 0
        assert f"cache: {key} opened in" in capfd.readouterr().out


@pytest.mark.soak(seconds=3)
def test_parts_are_joined_by_the_build_without_one(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(encoded_units, "UNIT_ROWS", 100)
    words = [
        "data=tweets",
        "data.sample.rows=300",
        "data.sample.eval_rows=100",
        f"data.cache={tmp_path}/cache",
    ]
    for part in ("1/2", "2/2", "2/2"):
        assert verb("build", *words, "--part", part) == 0
    said = capfd.readouterr().out
    assert "part 1/2: 2 units, 0 of them encoded before" in said
    assert "part 2/2: 1 unit, 1 of them encoded before" in said
    assert "without --part writes their store" in said
    assert verb("cache", "--cache", f"{tmp_path}/cache", "size") == 0
    said = capfd.readouterr().out
    assert " in 0 stores" in said
    assert " in 3 units" in said
    assert verb("build", *words) == 0
    assert "cache: 3 of 3 units were encoded before" in capfd.readouterr().err
    assert verb("cache", "--cache", f"{tmp_path}/cache", "size") == 0
    assert " in 1 stores" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "3/2"], "--part: '3/2' (I/N with I from 1 to N). Write --part 2/8."),
        (
            ["--part", "1/2", *KINDS["tags"]],
            "--part: only texts without tags are built in parts. Build without it",
        ),
        (["on=ray"], "on: ray, and this command works here. Leave it out; build takes --on ray."),
        *at_once(
            of=[
                (
                    ["--part", "1/2", *KINDS["bits"]],
                    "--part: only texts without tags are built in parts. Build without it",
                ),
                (
                    ["--on", "ray", *KINDS["bits"]],
                    "--on: only texts without tags are built in parts. Build without it",
                ),
                (["--part", "1/2", "--on", "ray"], "not allowed with argument --part"),
                (["--on", "ray", "--parts", "0"], "--parts: 0 (1 or more)"),
                (["--part", "2/3", "--parts", "3"], "--parts: is for all parts. Leave it out."),
                (["--parts", "0"], "--parts: 0 (1 or more)"),
            ],
            seconds=1,
        ),
    ],
)
def test_a_part_that_cannot_be_is_one_message(words, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert verb("build", *words) == 2
    assert message in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["--part", "3/2"],
        ["--part", "first"],
        ["--parts", "0"],
    ],
)
def test_nothing_is_said_before_a_part_that_cannot_be_is_refused(
    words, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    rows = [f"w{number} and more,{'ab'[number % 2]}" for number in range(60)]
    Path("rows.csv").write_text("\n".join(["text,label", *rows, ""]), encoding="utf-8")
    assert verb("build", *words, "data.source=rows.csv") == 2
    said = capfd.readouterr()
    assert said.err.startswith(f"{words[0]}: ")
    assert not said.out


def test_a_part_that_is_asked_for_with_other_settings_than_those_before_says_so(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    rows = [f"w{number} and {number % 9} more,{'ab'[number % 2]}" for number in range(400)]
    Path("rows.csv").write_text("\n".join(["text,label", *rows, ""]), encoding="utf-8")
    usual = ["data.source=rows.csv", f"data.cache={tmp_path}/cache"]

    def lines_of(*words: str) -> list[str]:
        assert verb("build", *usual, *words) == 0
        lines = capfd.readouterr().out.splitlines()
        return [line for line in lines if "other parts of" in line]

    assert lines_of("--part", "1/2") == []
    assert lines_of("--part", "2/2") == []
    assert lines_of("--part", "2/2", "data.max_length=4") == [
        "other parts of rows.csv were asked for with other settings (max_length changed from 128 to"
        " 4): only parts of the same settings are joined"
    ]
    (line,) = lines_of("--part", "2/3", "data.max_length=4")
    assert "(parts changed from 2 to 3)" in line
    assert lines_of("data.max_length=4") == []
    assert lines_of("--part", "1/2", "data.max_length=8") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [],
            (
                "more rows later encode all rows again: the vocabulary is made from them;"
                " data.tokenizer=FOLDER names"
            ),
        ),
        *at_once(
            of=[
                (
                    ["data.tokenizer=tokenizer", "data.split_by=stratified"],
                    "again: they may change the split of old rows;",
                ),
                (["data.tokenizer=tokenizer"], ""),
            ],
            seconds=1,
        ),
    ],
)
def test_what_makes_more_rows_encode_all_again_is_said_before_any_is_read(
    words, said, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    rows = [f"w{number} and {'x' * (number % 9)},{'ab'[number % 2]}" for number in range(60)]
    Path("rows.csv").write_text("\n".join(["text,label", *rows, ""]), encoding="utf-8")
    Path("tokenizer").mkdir()
    train_wordpieces(rows).save(Path("tokenizer"))
    usual = [
        "data.source=rows.csv",
        f"data.cache={tmp_path}/cache",
        "model=transformer",
        "model.layers=1",
    ]
    assert verb("build", *usual, *words) == 0
    first = capfd.readouterr().out.splitlines()[0]
    assert said in first if said else "more rows" not in first


def test_data_of_your_own_have_no_store(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    classes = f"{BORING}.BoringModel", f"{BORING}.BoringDataModule"
    words = [
        f"task._target_={classes[0]}",
        f"data._target_={classes[1]}",
        f"+allow_targets=[{','.join(classes)}]",
    ]
    assert verb("build", *words) == 2
    require_printed(capfd.readouterr().err, "build: ", "no store", "prepare_data")


def test_a_wrong_column_is_one_message(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("text,label\na,b\n", encoding="utf-8")
    assert verb("build", "data.source=rows.csv", "data.text=txt") == 2
    assert "data.text: no column 'txt' in rows.csv" in capfd.readouterr().err
