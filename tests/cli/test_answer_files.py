"""Where answers are written: files and folders, replaced whole, and never half a file."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import save_file

from flatout.data.tables.output import block_writer
from flatout.errors import UserError
from tests.refusals import require_printed
from tests.run_files import model_weights
from tests.verbs import verb


def test_a_folder_is_answered_file_by_file_in_parts_and_what_is_answered_stays(
    finished, rows, tmp_path, capsys
):
    given = tmp_path / "given"
    out = tmp_path / "out"
    given.mkdir()
    for number in range(3):
        (given / f"{number}.csv").write_text(
            Path(rows).read_text() + f"{number},ballot,politics\n" * number
        )
    (given / "2.csv").rename(given / "2.tsv.csv")
    assert verb("predict", finished.folder, given, "--out", f"{out}/", "--part", "2/2") == 0
    assert "2 files of 3 not answered yet, by other parts" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["1.csv", "answers.json"]
    assert "bytes" not in json.loads((out / "answers.json").read_text())
    before = (out / "1.csv").stat()
    assert verb("predict", finished.folder, f"{given}/*.csv", "--out", out) == 0
    said = capsys.readouterr()
    assert "1 file of 3 answered before" in said.err
    assert f"written to {out}: 8 rows" in said.out
    assert (out / "1.csv").stat().st_mtime_ns == before.st_mtime_ns
    sizes = {path.name: path.stat().st_size for path in out.glob("*.csv")}
    assert len(sizes) == 3
    assert json.loads((out / "answers.json").read_text())["bytes"] == sizes
    for path in given.iterdir():
        assert verb("predict", finished.folder, path, "--out", tmp_path / "alone.csv") == 0
        assert (out / path.name).read_bytes() == (tmp_path / "alone.csv").read_bytes()


def test_a_file_that_was_changed_is_answered_again_and_folders_inside_are_named(
    finished, rows, tmp_path, capsys
):
    given = tmp_path / "given"
    out = tmp_path / "out"
    (given / "more").mkdir(parents=True)
    for name in ("a.csv", "b.csv", "more/c.csv"):
        shutil.copy(rows, given / name)
    assert verb("predict", finished.folder, given, "--out", f"{out}/") == 0
    assert f"{given}: folders in it are not read: more" in capsys.readouterr().err
    before = (out / "a.csv").stat()
    head, *lines = (given / "b.csv").read_text().splitlines(keepends=True)
    (given / "b.csv").write_text("".join([head, *lines[:1]]))
    assert verb("predict", finished.folder, given, "--out", f"{out}/") == 0
    said = capsys.readouterr()
    assert "1 file of 2 answered before" in said.err
    assert said.out.endswith(": 1 row\n")
    assert len((out / "b.csv").read_text().splitlines()) == 2
    assert (out / "a.csv").stat() == before
    assert verb("predict", finished.folder, given, "--out", tmp_path / "all.csv") == 2
    require_printed(capsys.readouterr().err, "Name a file in it", "--out FOLDER/")


def test_a_file_that_was_changed_and_got_its_time_back_is_answered_again(
    finished, rows, tmp_path, capsys
):
    given = tmp_path / "given"
    out = tmp_path / "out"
    given.mkdir()
    for name in ("a.csv", "b.csv"):
        shutil.copy(rows, given / name)
    assert verb("predict", finished.folder, given, "--out", f"{out}/") == 0
    times = (given / "b.csv").stat()
    answered = (out / "b.csv").read_text()
    (given / "b.csv").write_text(Path(rows).read_text() + "9,ballot,politics\n")
    os.utime(given / "b.csv", ns=(times.st_atime_ns, times.st_mtime_ns))
    capsys.readouterr()
    assert verb("predict", finished.folder, given, "--out", f"{out}/") == 0
    assert "1 file of 2 answered before" in capsys.readouterr().err
    assert len((out / "b.csv").read_text().splitlines()) == len(answered.splitlines()) + 1
    assert verb("predict", finished.folder, given, "--out", f"{out}/") == 0
    assert "2 files of 2 answered before" in capsys.readouterr().err


def test_answers_to_another_question_do_not_join_those_of_a_folder(
    finished, rows, tmp_path, capsys
):
    out = f"{tmp_path}/out/"
    assert verb("predict", finished.folder, rows, "--out", out, "--top-k", "2") == 0
    questions = {
        "--top-k=3": "top_k=2 there, top_k=3 here",
        "--exact": "exact=False there, exact=True here",
        "--read=encoding=cp1252": "read=[] there",
        "--text=text": "no text there, text=text here",
    }
    for changed, named in questions.items():
        capsys.readouterr()
        assert verb("predict", finished.folder, rows, "--out", out, "--top-k", "2", changed) == 2
        (line,) = capsys.readouterr().err.splitlines()
        require_printed(line, "--out: ", f"{tmp_path}/out holds", named, "another folder")
    moved = shutil.copytree(finished.folder, tmp_path / "moved" / finished.folder.name)
    assert verb("predict", moved, rows, "--out", out, "--top-k", "2") == 0
    weights = model_weights(moved)
    save_file(
        {name: 2 * each for name, each in weights.items()}, moved / "model" / "model.safetensors"
    )
    capsys.readouterr()
    assert verb("predict", moved, rows, "--out", out, "--top-k", "2") == 2
    assert "question: weights=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "rows.csv",
            "mine",
            (
                "holds files that are called as the answers, and no answers.json of theirs. Name"
                " another"
            ),
        ),
        ("answers.json", "[]", "answers.json is not of answers. Name another folder."),
        ("answers.json", "{", "answers.json is not of answers. Name another folder."),
    ],
)
def test_files_of_something_else_are_no_answers(finished, rows, tmp_path, capsys, name, text, said):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(text)
    assert verb("predict", finished.folder, rows, "--out", f"{tmp_path}/out/") == 2
    assert said in capsys.readouterr().err
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {name: text}


def test_a_table_without_a_row_is_refused_and_the_older_answers_stay(finished, tmp_path, capsys):
    pq.write_table(pa.table({"headline": pa.array([], pa.string())}), tmp_path / "none.parquet")
    answers = tmp_path / "answers.parquet"
    answers.write_bytes(b"older")
    assert verb("predict", finished.folder, tmp_path / "none.parquet", "--out", answers) == 2
    assert "none.parquet: no row" in capsys.readouterr().err
    assert answers.read_bytes() == b"older"


def test_a_failed_prediction_leaves_no_half_file(finished, tmp_path):
    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"text": "a"}\n{"text": \n')
    assert verb("predict", finished.folder, broken, "--out", tmp_path / "out.csv") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_a_file_that_was_there_is_replaced_with_a_line_and_the_one_that_is_read_is_kept(
    finished, rows, tmp_path, capsys
):
    before = (tmp_path / "rows.csv").read_text()
    assert verb("predict", finished.folder, rows, "--out", tmp_path / "rows.csv") == 2
    require_printed(capsys.readouterr().err, "rows.csv", "read", "another file")
    assert (tmp_path / "rows.csv").read_text() == before
    for said in ("", f"{tmp_path}/out.csv was there, and is replaced\n"):
        assert verb("predict", finished.folder, rows, "--out", tmp_path / "out.csv") == 0
        assert capsys.readouterr().err == said


def test_one_of_many_files_that_are_read_is_no_place_for_answers_and_an_address_is_another_place(
    tmp_path,
):
    file = tmp_path / "a.csv"
    file.write_text("x\n1\n")
    for reads in (file, tmp_path, tmp_path / "*.csv"):
        with (
            pytest.raises(UserError, match=r"a.csv is a file that is read"),
            block_writer(str(file), reads=str(reads)),
        ):
            pass
    with block_writer(str(file), reads="s3://bucket/a.csv") as write:
        write(pa.RecordBatch.from_pydict({"x": [2]}))
    assert file.read_text() == '"x"\n2\n'


def test_a_standard_output_that_is_full_is_one_message(monkeypatch):
    block = pa.RecordBatch.from_pydict({"x": [2]})
    with Path("/dev/full").open("wb", buffering=0) as full, monkeypatch.context() as changed:
        changed.setattr(sys, "stdout", SimpleNamespace(buffer=full))
        with (
            pytest.raises(UserError, match="cannot write /dev/stdout: No space left"),
            block_writer(None) as write,
        ):
            write(block)


def test_two_files_of_one_name_are_refused_whichever_parts_they_are_in(finished, tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.csv").write_text("text\nsome words\n")
    words = [
        "predict",
        finished.folder,
        f"{tmp_path}/*/x.csv",
        "--out",
        f"{tmp_path}/many/",
        "--part",
        "1/2",
    ]
    assert verb(*words) == 2
    require_printed(capsys.readouterr().err, "--out: ", "two files", "x.csv")


@pytest.mark.parametrize("out", ["/sys/out.csv", "/dev/full/out.csv", "closed/out.csv"])
def test_a_place_that_takes_no_answers_is_one_message(
    finished, rows, tmp_path, capsys, monkeypatch, out
):
    if out.startswith("closed"):
        monkeypatch.setattr(Path, "open", partialmethod(refuse, Path.open))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "closed").mkdir()
    assert verb("predict", finished.folder, rows, "--out", out) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("--out: ")


def refuse(path: Path, usual: Callable[..., Any], mode: str = "r", **others: Any) -> Any:
    """A disk that is full."""
    if "w" in mode:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return usual(path, mode, **others)


def test_a_disk_that_fills_up_on_the_way_is_one_message_and_leaves_nothing(
    finished, rows, tmp_path, capsys, monkeypatch
):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flatout.data.tables.output.pa_csv.write_csv", full)
    assert verb("predict", finished.folder, rows, "--out", tmp_path / "out.csv") == 2
    said = (
        f"--out: cannot write {tmp_path}/out.csv: No space left on device. Name a place where there"
        " is room,"
    )
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
