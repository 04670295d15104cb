"""Tables that cannot be read, or that readers would swallow: told with file and row."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.whole_tables import rows_of
from tests.refusals import refused

from flatout.data.tables.formats.file import ReadingConfig
from flatout.data.tables.formats.in_memory import table_of
from flatout.data.tables.sources import open_splits, open_table
from flatout.data.tables.table import require_columns
from flatout.errors import UserError

_NOBODY = 65534


BROKEN = {
    "missing": ("rows.csv", None, r"no such file: .*rows.csv\. Did you mean 'rows.tsv'\?"),
    "empty": ("rows.csv", b"", "rows.csv is empty"),
    "unknown format": ("rows.xlsx", b"PK", r"is no format we read \(.csv, .tsv"),
    "not UTF-8": (
        "rows.csv",
        b"text,label\na,1\nb\xe9,2\n",
        r"line 3: byte 0xe9 is not UTF-8.*Set data.read.encoding=cp1252",
    ),
    "ragged": (
        "rows.csv",
        b"text,label\na,1\nb,2,3\n",
        r"row 2: expected 2 columns, got 3.*Quote values",
    ),
    "twice the same column": ("rows.csv", b"text,text\na,1\n", "has column text more than once"),
    "broken json line": ("rows.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not valid JSON"),
    "json line that is no object": (
        "rows.jsonl",
        b'{"text": "a"}\n[1]\n',
        "line 2: a list where an object is needed",
    ),
    "json with mixed types": (
        "rows.jsonl",
        b'{"text": "a"}\n{"text": 3}\n',
        r"row 2: text is 3 \(int64\), rows before",
    ),
    "parquet cut short": ("rows.parquet", b"PAR1abc", "not a whole parquet file"),
    "gzip cut short": (
        "rows.csv.gz",
        gzip.compress(b"text,label\na,1\n" * 50)[:-20],
        "not a whole gzip file",
    ),
    "no gzip at all": ("rows.csv.gz", b"text,label\na,1\n", "is no gzip file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_is_told_with_file_and_row(tmp_path, case):
    name, content, message = BROKEN[case]
    (tmp_path / "rows.tsv").write_text("text\tlabel\n")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        rows_of(open_table(tmp_path / name, where="data.train"))
    assert str(caught.value).startswith("data.train: ")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        open_table(tmp_path, where="data.train")
    with refused("FILE", allowed="one file", fix="--out FOLDER/"):
        open_table(tmp_path, where="FILE")


def test_all_missing_columns_are_named_at_once():
    table = table_of({"text": ["a"], "label": ["b"]})
    with refused("data.text and data.label", "'texts'", "'lable'") as caught:
        require_columns(table, {"data.text": "texts", "data.label": "lable"})
    assert caught.value.allowed == "columns: text, label"
    for nearest in ("'text'", "'label'"):
        assert nearest in caught.value.hint


# What readers usually guess, swallow or give up on.

READ_AS_WRITTEN = {
    "a quote inside a value": (
        "rows.csv",
        b'text,label\n5" nails,1\n"say ""hi""",2\n',
        [['5" nails', "1"], ['say "hi"', "2"]],
    ),
    "windows line ends in a value": (
        "rows.csv",
        b'text,label\r\n"a\r\nb",1\r\n',
        [["a\r\nb", "1"]],
    ),
    "old line ends": ("rows.csv", b"text,label\ra,1\rb,2\r", [["a", "1"], ["b", "2"]]),
    "no line end at the end": ("rows.csv", b"text,label\na,1\nb,", [["a", "1"], ["b", ""]]),
    "a line end in a column's name": ("rows.csv", b'text,"la\nbel"\na,1\n', [["a", "1"]]),
    "a NUL": ("rows.csv", b"text,label\na\x00b,1\n", [["a\x00b", "1"]]),
    "a date": (
        "rows.jsonl",
        b'{"t": "2020-01-01"}\n{"t": "2020-01-02T03:04:05Z"}\n',
        [["2020-01-01"], ["2020-01-02T03:04:05Z"]],
    ),
    "a key left out": (
        "rows.jsonl",
        b'{"t": "a"}\n\n{"t": "b", "l": 1}\n',
        [["a", None], ["b", 1]],
    ),
    "an array over several lines": (
        "rows.json",
        b'[\n {"t": "a"},\n {"t": "b"}\n]\n',
        [["a"], ["b"]],
    ),
}


@pytest.mark.parametrize("case", READ_AS_WRITTEN)
def test_values_are_what_is_written(tmp_path, case):
    name, content, expected = READ_AS_WRITTEN[case]
    (tmp_path / name).write_bytes(content)
    assert [
        list(row.values()) for row in rows_of(open_table(tmp_path / name, where="x"))
    ] == expected


TOLD = {
    "only a header": (
        "rows.csv",
        b"text,label\n\n",
        "no rows below the line that names the columns",
    ),
    "only a header of recordings": (
        "rows.csv",
        b"t,rpm,bar,wear\n",
        r"data\.read\.columns=\[column1,column2,column3,column4\]",
    ),
    "no header": ("rows.csv", b"\n\n", "the first line is no list of columns"),
    "a header that is not UTF-8": (
        "rows.csv",
        b"t\xe9xt,label\na,1\n",
        "line 1: byte 0xe9 is not UTF-8",
    ),
    "an open quote": (
        "rows.csv",
        b'text,label\na,1\nb,"2\nc,3\n',
        "row 2: a quote is opened in line 3 and not closed",
    ),
    "an open quote that eats a comma": (
        "rows.csv",
        b'text,label\n"a,1\nc,3\n',
        r"row 1: .* got 1 \(line 2\).*quote",
    ),
    "too few values": (
        "rows.csv",
        b'text,label\n"a\nb",1\nc\n',
        r"row 2: expected 2 columns, got 1 \(line 4\)",
    ),
    "no objects": ("rows.jsonl", b"\n\n", "no rows"),
    "an empty array": ("rows.json", b"[]", "no rows"),
    "an array cut short": (
        "rows.json",
        b'[{"text": "a"}, {"text": "b"',
        "row 2: not valid JSON.*Write one object a line",
    ),
    "an array with more behind it": (
        "rows.json",
        b'[{"text": "a"}] {"text": "b"}',
        "row 1: the array ends here",
    ),
    "an array of numbers": ("rows.json", b"[1, 2]", "row 1: a int where an object is needed"),
    "an array that is not UTF-8": (
        "rows.json",
        b'[{"text": "a"},\n{"text": "\xe9"}]',
        "line 2: byte 0xe9 is not UTF-8",
    ),
    "a json line that is not UTF-8": (
        "rows.jsonl",
        b'{"t": "a"}\n{"t": "\xe9"}\n',
        "line 2: byte 0xe9 is not UTF-8",
    ),
    "half a letter in json": (
        "rows.jsonl",
        b'{"t": "a"}\n{"t": "\\ud800"}\n',
        r"row 2: t is '\\ud800' \(no text",
    ),
    "zeros that look like UTF-32": ("rows.jsonl", b"\x00\x00[[]", "line 1: not valid JSON"),
    "a number too large": (
        "rows.jsonl",
        b'{"t": 1}\n{"t": 99999999999999999999999}\n',
        "row 2: t is 99999999999999999999999",
    ),
    "a number that would be rounded": (
        "rows.jsonl",
        b'{"t": 12345678901234567890}\n',
        "row 1: t is 12345678901234567890",
    ),
    "json that is too deep": (
        "rows.jsonl",
        b'{"t": ' + b"[" * 100_000 + b"\n",
        "line 1: not valid JSON",
    ),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_readers_swallow_is_told_too(tmp_path, case):
    name, content, message = TOLD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        rows_of(open_table(tmp_path / name, where="data.train"))
    assert str(caught.value).startswith(f"data.train: {tmp_path / name}")
    assert str(caught.value).encode()


def test_a_full_disk_of_temporary_files_is_named_where_a_file_is_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet.gz"
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "rows.parquet")
    path.write_bytes(gzip.compress((tmp_path / "rows.parquet").read_bytes()))
    full = partial(Path("/dev/full").open, "r+b", 0)
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    with refused("TMPDIR", "no space left", fix="rows.parquet.gz is unpacked there"):
        rows_of(open_table(path, where="data.train"))


def test_a_file_cut_short_inside_its_rows_is_told(tmp_path):
    pq.write_table(
        pa.table({"text": ["a" * 50] * 1000}), tmp_path / "rows.parquet", compression="none"
    )
    data = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(data[:-40])
    with pytest.raises(UserError, match="not a whole parquet file"):
        open_table(tmp_path / "rows.parquet", where="x")


def test_parquet_without_rows_or_with_broken_texts_is_told(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(UserError, match="no rows"):
        open_table(tmp_path / "none.parquet", where="x")
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xe9")]
    )
    pq.write_table(pa.table({"text": broken}), tmp_path / "broken.parquet")
    with refused("x", "broken.parquet", "rows 1 to 1", "'text'", "UTF-8"):
        rows_of(open_table(tmp_path / "broken.parquet", where="x"))


def test_a_later_type_is_told_by_its_row_in_a_long_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"text": "a fairly long text to fill a block", "label": 1}\n' * 160_000
        + '{"text": "b", "label": "x"}\n'
    )
    with refused("x", "row 160001", "'x' (string)", "int64"):
        for _ in open_table(path, where="x").blocks(["text", "label"]):
            pass


def test_a_byte_that_is_no_utf_8_is_told_by_its_line_in_a_long_file_of_json(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"text": "a fairly long text to fill a block"}\n' * 40_000 + b'{"text": "caf\xe9"}\n'
    )
    with refused("x", "rows.jsonl line 40001", "0xe9", "UTF-8", fix="iconv"):
        for _ in open_table(path, where="x").blocks(["text"]):
            pass


@pytest.mark.soak(seconds=2)
def test_a_quote_left_open_in_a_long_file_is_told_by_its_line(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'text,label\na,1\na,"1\n' + b"a text of some words,3\n" * 2_000_000)
    with pytest.raises(
        UserError, match=r"row 2: longer than 16 MB from line 3 on. Is a quote opened"
    ):
        for _ in open_table(path, where="x").blocks(["text", "label"]):
            pass


def test_a_pipe_and_a_name_too_long_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(UserError, match="is a pipe or a device"):
        open_table(tmp_path / "pipe.csv", where="x")
    # From Python 3.14 on, asking whether it is a file gives no error.
    with pytest.raises(UserError, match=r"x: .*(File name too long|no such file)"):
        open_table(tmp_path / ("a" * 300 + ".csv"), where="x")


@pytest.mark.parametrize("name", ["loop.csv", "there.csv", "loop", "folder/rows.csv"])
def test_a_link_that_leads_to_itself_is_named_as_one(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for link, target in (
        ("loop.csv", "loop.csv"),
        ("there.csv", "back.csv"),
        ("back.csv", "there.csv"),
    ):
        Path(link).symlink_to(target)
    Path("loop").symlink_to("loop")
    Path("folder").symlink_to("folder")
    link = name.partition("/")[0]
    with refused("data.source", f"{link} is a link", fix="Name the file itself"):
        open_splits(name, {}, ReadingConfig())


@pytest.mark.parametrize("name", ["gone.csv", "gone"])
def test_a_link_to_a_file_that_is_gone_says_where_it_points(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).symlink_to("moved.csv")
    target = tmp_path / "moved.csv"
    with refused("data.source", f"{name} is a link to {target}"):
        open_splits(name, {}, ReadingConfig())


@pytest.fixture
def forbidden_rows() -> Iterator[Path]:
    """A file that may not be read, in a folder that may; the super-user is refused nothing, so it
    is another one.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        rows = Path(folder, "rows.csv")
        rows.write_text("text\na\n")
        rows.chmod(0)
        user = os.geteuid()
        os.seteuid(user or _NOBODY)
        try:
            yield rows
        finally:
            os.seteuid(user)


def test_a_file_without_permission_is_told(forbidden_rows):
    with pytest.raises(UserError, match=r"cannot read .*Permission denied"):
        open_table(forbidden_rows, where="x")
