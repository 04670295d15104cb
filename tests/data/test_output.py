"""Answers as files: what a spreadsheet would run is a text there."""

from __future__ import annotations

import csv
import gc
import os
import pty
import resource
import signal
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatout.data.tables.output import block_writer
from flatout.errors import UserError
from flatout.files import unguard_cell, write_table

TEXTS = ["=1+1", "@somebody says", None, "-5 degrees", " =2", "=cmd|' /C calc'!A0"]
CALLS = ["+1+cmd|' /C calc'!A0", "-2+3+cmd|x!A0", "@SUM(1,2)", "\t=1", "+HYPERLINK(x)", "@x\n|y!A0"]
NO_CALLS = [
    "@somebody (see below)",
    "@user|how|nice|!|I|am",
    "+49 (0)30",
    "-5",
    "a\t=1",
    "a+SUM(1)",
]
BLOCK = pa.RecordBatch.from_pydict(
    {"text": TEXTS, "share": [0.5] * 6, "labels": [["=a", "b"], [], ["c"], [], [], []]}
)


def test_a_csv_of_answers_holds_no_formula(tmp_path, capsys):
    with block_writer(str(tmp_path / "answers.csv")) as write:
        write(BLOCK)
        write(BLOCK)
    lines = (tmp_path / "answers.csv").read_text().splitlines()
    assert lines[:3] == [
        '"text","share","labels"',
        '"\'=1+1",0.5,"\'=a|b"',
        '"@somebody says",0.5,""',
    ]
    assert lines[6] == '"\'=cmd|\' /C calc\'!A0",0.5,""'
    assert "6 cells that begin with '=', or" in capsys.readouterr().err


def test_a_csv_of_answers_calls_nothing_by_other_signs(tmp_path, capsys):
    with block_writer(str(tmp_path / "answers.csv")) as write:
        write(pa.RecordBatch.from_pydict({"+cmd|x!A0": [*CALLS, *NO_CALLS]}))
    with (tmp_path / "answers.csv").open(newline="") as file:
        rows = [row[0] for row in csv.reader(file)]
    assert rows == ["'+cmd|x!A0", *(f"'{text}" for text in CALLS), *NO_CALLS]
    assert "6 cells that begin with '=', or call something" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    ],
    ids=str,
)
def test_a_formula_is_guarded_in_columns_of_every_type_of_text_and_in_names(tmp_path, kind):
    if pa.types.is_dictionary(kind):
        column = pa.array(["=1+1", None, "b = c"]).dictionary_encode()
    else:
        column = pa.array(["=1+1", None, "b = c"], kind)
    with block_writer(str(tmp_path / "answers.csv")) as write:
        write(pa.RecordBatch.from_arrays([column], names=["=cmd|x!A0"]))
    lines = (tmp_path / "answers.csv").read_text().splitlines()
    assert lines == ['"\'=cmd|x!A0"', '"\'=1+1"', "", '"b = c"']


def test_a_table_that_is_written_holds_no_formula_and_every_text_can_be_read_back(tmp_path):
    texts = [
        "=1+1",
        "-x",
        "+x",
        "@sum",
        "\tx",
        "'=1",
        "''-x",
        "'quoted'",
        "-0.5",
        "+inf",
        "plain",
        "",
    ]
    write_table(tmp_path / "rows.csv", [["=name", "number"], *([text, -1] for text in texts)])
    with (tmp_path / "rows.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["'=name", "number"]
    assert [cell for cell, _ in rows[:4]] == ["'=1+1", "'-x", "'+x", "'@sum"]
    assert [cell for cell, _ in rows[8:]] == ["-0.5", "+inf", "plain", ""]
    assert not any(cell.startswith(("=", "@", "\t")) for cell, _ in rows)
    assert [unguard_cell(cell) for cell, _ in rows] == texts
    assert {number for _, number in rows} == {"-1"}


def test_a_csv_holds_lists_bytes_and_tables_in_cells_as_texts(tmp_path):
    bits = pa.array([[1, 0], [0, 1]], pa.list_(pa.uint8(), 2))
    columns = {"bits": bits, "gaps": [["a", None, "b"], None]}
    columns |= {"packed": [b"\x01\xff", None], "more": [{"id": 1, "day": "x"}, None]}
    with block_writer(str(tmp_path / "answers.csv")) as write:
        write(pa.RecordBatch.from_pydict(columns))
    lines = (tmp_path / "answers.csv").read_text().splitlines()
    assert lines[1:] == ['"1|0","a||b","01ff","{""id"": 1, ""day"": ""x""}"', '"0|1",,,"null"']


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_other_formats_keep_every_text(tmp_path, capsys, ending):
    path = tmp_path / f"answers.{ending}"
    with block_writer(str(path)) as write:
        write(BLOCK)
    if ending == "parquet":
        assert pq.read_table(path)["text"].to_pylist() == TEXTS
    else:
        assert '"text": "=1+1"' in path.read_text()
    assert capsys.readouterr().err == ""


def test_an_error_between_two_blocks_leaves_no_file_and_no_other_message(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    with (
        pytest.raises(ValueError, match="row 7"),
        block_writer(str(tmp_path / "answers.parquet")) as write,
    ):
        write(BLOCK)
        raise ValueError("row 7")
    gc.collect()
    assert not found
    assert not list(tmp_path.iterdir())


def test_sentences_are_written_a_word_a_line_whatever_is_in_a_word(tmp_path):
    sentences = pa.RecordBatch.from_pydict(
        {"words": [["a\tb", "c\n"], [], ["d"]], "tags": [["X", None], [], ["Y"]]}
    )
    for suffix, written in (
        ("conll", "a b\tX\nc\t_\n\n\nd\tY\n\n"),
        ("conllu", CONLL_U_WRITTEN),
    ):
        path = tmp_path / f"answers.{suffix}"
        with block_writer(str(path), formats=[f".{suffix}"]) as write:
            write(sentences)
        assert path.read_text("utf-8") == written


_REST = "\t_" * 6
CONLL_U_WRITTEN = f"1\ta b\t_\tX{_REST}\n2\tc\t_\t_{_REST}\n\n\n1\td\t_\tY{_REST}\n\n"


def test_answers_on_a_terminal_act_on_nothing(monkeypatch):
    ours, terminal = pty.openpty()
    block = pa.RecordBatch.from_pydict({"text": ["naïve \x1b[2J\x9b2J", "plain"]})
    with os.fdopen(terminal, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        with block_writer(None) as write:
            write(block)
        shown = os.read(ours, 1000).decode()
    os.close(ours)
    assert shown.splitlines() == ['"text"', r'"naïve \x1b[2J\x9b2J"', '"plain"']


def test_answers_in_a_pipe_hold_the_characters_of_the_texts(capfdbinary):
    block = pa.RecordBatch.from_pydict({"text": ["naïve \x1b[2J"]})
    with block_writer(None) as write:
        write(block)
    assert capfdbinary.readouterr().out == '"text"\n"naïve \x1b[2J"\n'.encode()


def test_a_limit_of_the_size_of_files_is_one_sentence(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with (
            pytest.raises(UserError, match="cannot write"),
            block_writer(str(tmp_path / "answers.csv")) as write,
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
            write(BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []
