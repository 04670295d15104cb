"""`flatout check`: what it prints, its exit codes, and its settings."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from itertools import product

import pytest

from flatout.cli.check import read_settings
from flatout.data.checks.cleaning import CleaningConfig, RowRule
from flatout.data.texts.settings import TextDataConfig
from flatout.errors import UserError
from tests.composed import compose_run
from tests.params import at_once
from tests.refusals import require_printed
from tests.run_files import write_jsonl
from tests.stores import open_store
from tests.verbs import verb


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.csv"
    lines = [f"some words of row {i},{'abc'[i % 3]}" for i in range(90)]
    path.write_text("\n".join(["headline,category", *lines, ",a"]) + "\n", encoding="utf-8")
    return str(path)


def test_a_check_ends_with_the_command_that_trains(rows, capsys):
    assert verb("check", rows, "data.max_length=4") == 0
    said = capsys.readouterr().out
    assert "columns: texts from headline, labels from category" in said
    assert "warning" in said
    assert "1 row with an empty text, dropped (row 91); data.clean.empty=keep" in said
    assert "; data.max_length=5" in said
    assert said.rstrip().endswith(f"to train: python -m train data.source={rows} data.max_length=4")


def test_the_folder_of_a_file_is_printed_once_beside_the_command(rows, capsys):
    verb("check", rows, "data.max_length=4")
    lines = capsys.readouterr().out.splitlines()
    assert sum(rows in line for line in lines) == 2
    assert "to train" in lines[-1]
    assert sum("rows.csv: " in line for line in lines) > 1


def test_the_command_at_the_end_is_one_that_works(rows, capsys, tmp_path):
    verb("check", rows)
    command = capsys.readouterr().out.rsplit("python -m train ", 1)[1].split()
    assert open_store(read_settings(TextDataConfig, command)).store.splits.keys() == {
        "train",
        "validation",
        "test",
    }


def test_strict_turns_warnings_into_exit_code_1(rows, tmp_path, capsys):
    assert verb("check", rows, "--strict") == 1
    fine = tmp_path / "fine.csv"
    words = "red blue green gold grey pink teal".split()
    lines = [
        f"{a} {b} {c},{'ab'[number % 2]}"
        for number, (a, b, c) in enumerate(product(words, repeat=3))
    ]
    fine.write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    assert verb("check", fine, "--strict") == 0


def test_options_may_stand_anywhere(rows, capsys):
    assert (
        verb("check", rows, "--strict", "data.max_length=4", "--json", "data.label=category") == 1
    )
    assert json.loads(capsys.readouterr().out)["columns"]["label"] == "category"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "check: no SOURCE"),
        (["data.label=x"], "check: no SOURCE"),
        (["a.csv", "b.csv"], "check: two sources: 'a.csv' and 'b.csv' (one). Write python"),
        (["a.csv", "data.train=b.csv"], "data.train: SOURCE is what is checked"),
        (["a.csv", "label=x"], "check: 'label=x' is no setting of the data. Write data.label=x."),
        (["a.csv", "model=textcnn"], "'model=textcnn' is no setting of the data. Leave it out"),
    ],
)
def test_one_source_is_checked(words, says, capsys):
    assert verb("check", *words) == 2
    assert says in capsys.readouterr().err


def test_what_would_end_a_run_is_exit_code_2(rows, tmp_path, capsys):
    one = tmp_path / "one.csv"
    one.write_text("text,label\n" + "".join(f"row {i},a\n" for i in range(50)), encoding="utf-8")
    assert verb("check", one) == 2
    assert "labels: the training rows have only one class: 'a'" in capsys.readouterr().out


def test_json_holds_everything_that_is_printed(rows, capsys):
    assert verb("check", rows, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["rows"].values()) == 90
    assert found["columns"] == {"text": ["headline"], "label": "category"}
    empty = next(remark for remark in found["remarks"] if "empty text" in remark["what"])
    assert (empty["level"], empty["count"], empty["rows"], empty["hint"]) == (
        "warning",
        1,
        [91],
        "data.clean.empty=keep",
    )
    assert found["lengths"]["train"]["histogram"] == [
        {"from": 4, "to": 7, "rows": found["rows"]["train"]}
    ]


def test_other_splits_make_the_source_the_training_rows(rows, tmp_path, capsys):
    dev = tmp_path / "dev.csv"
    dev.write_text("headline,category\nother words,a\n", encoding="utf-8")
    assert verb("check", rows, f"data.validation={dev}") == 0
    said = capsys.readouterr().out
    assert "rows for train 90, validation 1" in said
    assert f"python -m train data.train={rows} data.validation={dev}" in said


def test_the_training_rows_may_be_named_as_for_a_run(rows, tmp_path, capsys):
    dev = tmp_path / "dev.csv"
    dev.write_text("headline;category\nother words;a\n", encoding="utf-8")
    assert verb("check", f"data.train={rows}", f"data.validation={dev}") == 0
    assert f"python -m train data.train={rows} data.validation={dev}" in capsys.readouterr().out
    assert verb("check", f"data.source={dev}", "data.read.delimiter=;", "data.val=0.1") == 2
    assert "data.val" in capsys.readouterr().err


def test_a_check_of_tags_ends_with_their_command(tmp_path, capsys):
    path = tmp_path / "tags.jsonl"
    rows = [
        {"tokens": ["Anna", f"saw{i}", "Oslo"], "tags": ["B-PER", "O", "B-LOC"]} for i in range(60)
    ]
    write_jsonl(path, rows)
    command = f"python -m train data.source={path} data.problem=tags task=tagging model=transformer"
    for words in ([], ["data.problem=tags"]):
        assert verb("check", path, *words) == 0
        said = capsys.readouterr().out
        assert said.rstrip().endswith(f"to train: {command}")
    compose_run(shlex.split(command)[3:])


def test_escape_codes_and_markup_in_the_data_are_printed_harmlessly(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    lines = [f"word {i},{('[red]evil[/red]', chr(27) + '[31mred')[i % 2]}" for i in range(60)]
    path.write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    assert verb("check", path) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "[red]evil[/red]" in said


MISTAKES = {
    "data.labl=x": "data.labl: no such key.* Did you mean 'data.label'",
    "data.max_length=abc": r"data.max_length: 'abc' does not fit \(a whole number\)",
    "data.max_length=true": r"data.max_length: 'True' does not fit",
    "data.clean.leaks=dorp": "data.clean.leaks: 'dorp'.*Did you mean 'drop'",
    "data.clean=3": "data.clean: is a group of settings",
    "data.label.more=3": "data.label.more: data.label is no group of settings",
    "clean.leaks=drop": "command line: cannot read 'clean.leaks=drop'. Write data.KEY=VALUE",
    "data.text": "command line: cannot read 'data.text'",
    "data.text=[a": r"command line: cannot read 'data.text=\[a'",
    "data.max_length=null": "data.max_length: null does not fit",
    "data.text=title,body": r"data.text: several values .* Write 'data.text=\[FIRST,SECOND\]'",
    "data.validation_share=0.9": "data.validation_share: 0.9",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_in_a_setting_is_told_with_its_key(override):
    with pytest.raises(UserError, match=MISTAKES[override]):
        read_settings(TextDataConfig, [override])


def test_settings_are_what_they_are_for_training():
    config = read_settings(
        TextDataConfig,
        [
            "data.clean.leaks=drop",
            "data.text=[title, body]",
            "data.max_length=64",
            "data.label=007",
            "data.read.quote=",
        ],
        train={"title": ["a"], "body": ["b"], "007": ["c"]},
    )
    assert config.clean == CleaningConfig(leaks=RowRule.drop)
    assert (config.text, config.max_length, config.label) == (["title", "body"], 64, "007")


@pytest.mark.parametrize(
    "line",
    [
        "import flatout.cli.check",
        *at_once(of=["from flatout import BitsDataConfig, TextDataConfig"], seconds=2),
    ],
)
def test_a_check_starts_without_torch(line):
    code = f"import sys; {line}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_command_of_a_file_with_an_odd_name_and_delimiter_can_be_typed(tmp_path, capsys):
    path = tmp_path / "rows, and (more).csv"
    lines = [f"some words of row {i};{'ab'[i % 2]}" for i in range(60)]
    path.write_text("\n".join(["text;label", *lines]), encoding="utf-8")
    assert verb("check", path, "data.read.delimiter=';'") == 0
    typed = capsys.readouterr().out.rsplit("python -m train ", 1)[1]
    assert f"""data.source="'{path}'" """ in typed
    command = shlex.split(typed)
    assert read_settings(TextDataConfig, command).source == str(path)
    assert compose_run(command).data.read.delimiter == ";"


@pytest.fixture
def encoded(tmp_path, capsys):
    """People with an encoding in the column `clk`."""
    path = tmp_path / "encoded.csv"
    assert verb("encode", "--sample", 200, "--form", "hex", "--out", path) == 0
    path.write_text(
        path.read_text(encoding="utf-8").replace("bloomfilter", "clk", 1), encoding="utf-8"
    )
    capsys.readouterr()
    return path


def test_bit_strings_are_checked_by_the_columns_that_a_run_would_take(encoded, capsys):
    assert verb("check", encoded) == 0
    said = capsys.readouterr().out
    assert "plain text: GivenName, Surname, Birthday" in said
    assert "column of the encodings: clk; column that names each record: uid" in said
    assert said.rstrip().endswith(
        f"to train: python -m train +experiment=bloom_bigrams data.source={encoded}"
    )


def test_an_index_of_pandas_is_no_plain_text(encoded, capsys):
    first, *rest = encoded.read_text(encoding="utf-8").splitlines()
    lines = [f",{first}", *(f"{number},{line}" for number, line in enumerate(rest))]
    encoded.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert verb("check", encoded) == 0
    assert "plain text: GivenName, Surname, Birthday" in capsys.readouterr().out
    out = encoded.with_name("again.csv")
    assert verb("encode", encoded, "--columns", "GivenName,Surname", "--out", out) == 0
    encoded.write_text(",name\n0,Ann\n1,Bo\n", encoding="utf-8")
    assert verb("encode", encoded, "--out", out) == 0
    assert "encoded: name; '', an index, is not; no column" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("rows.json", '{"name": {"0": "Ann"}}', "--columns: column 'name' of"),
        ("rows.data", "name\nAnn\n", "Give it the ending of its format."),
        ("rows.csv", "name,born\n", "no rows below the line that names the columns. Add rows."),
    ],
)
def test_what_cannot_be_encoded_is_one_sentence(tmp_path, capsys, name, text, says):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    assert verb("encode", file, "--out", tmp_path / "out.csv") == 2
    assert says in capsys.readouterr().err


def test_a_check_of_bit_strings_names_the_row_that_would_end_a_run(encoded, capsys):
    rows = encoded.read_text(encoding="utf-8").splitlines()
    rows[7] = rows[7].replace('","', '","zz', 3)
    encoded.write_text("\n".join(rows) + "\n", encoding="utf-8")
    assert verb("check", encoded) == 2
    printed = capsys.readouterr().out
    require_printed(printed, "encoded.csv row 7: ", "'clk'", "258 characters", 256)


def test_a_check_of_bit_strings_counts_a_repeated_id_as_a_warning(encoded, capsys):
    rows = encoded.read_text(encoding="utf-8").splitlines()
    rows[2] = rows[2].rpartition(",")[0] + "," + rows[1].rpartition(",")[2]
    encoded.write_text("\n".join(rows) + "\n", encoding="utf-8")
    assert verb("check", encoded, "--strict", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["warnings"] == 1
    assert found["columns"]["bits"] == "clk"


def test_a_file_whose_name_is_no_utf_8_is_checked(tmp_path, capsys):
    path = tmp_path / os.fsdecode(b"caf\xe9.csv")
    lines = [f"some words of row {row},{'ab'[row % 2]}" for row in range(60)]
    path.write_text("\n".join(["text,label", *lines]))
    assert verb("check", path) == 0
    assert r"caf\udce9.csv" in capsys.readouterr().out
