"""Tables are read strictly as written, and what cannot be read is told with file and row."""

from __future__ import annotations

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.odd_rows import ROWS, as_csv
from tests.data.whole_tables import rows_of
from tests.refusals import refused

from flatout.data.tables.formats.file import ReadingConfig
from flatout.data.tables.formats.in_memory import table_of
from flatout.data.tables.sources import open_splits, open_table
from flatout.data.tables.table import require_columns
from flatout.errors import UserError


@pytest.mark.parametrize(
    "name", ["rows.csv", "rows.tsv", "rows.csv.gz", "rows.jsonl", "rows.json", "rows.jsonl.gz"]
)
@pytest.mark.parametrize("bom", [False, True])
def test_every_format_gives_back_what_was_written(tmp_path, name, bom):
    if ".jsonl" in name:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    elif ".json" in name:
        text = json.dumps(ROWS)
    else:
        text = as_csv(ROWS, "\t" if ".tsv" in name else ",")
    data = text.encode("utf-8-sig" if bom else "utf-8")
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    table = open_table(tmp_path / name, where="data.train")
    assert list(table.columns) == ["text", "label"]
    assert rows_of(table) == ROWS


def test_parquet_keeps_its_types(tmp_path):
    pq.write_table(pa.table({"text": ["a", None], "label": [1, 2]}), tmp_path / "rows.parquet")
    assert rows_of(open_table(tmp_path / "rows.parquet", where="x")) == [
        {"text": "a", "label": 1},
        {"text": None, "label": 2},
    ]


def test_windows_line_ends_are_no_part_of_a_value(tmp_path):
    (tmp_path / "rows.csv").write_bytes(b"text,label\r\na,1\r\nb,2\r\n")
    assert rows_of(open_table(tmp_path / "rows.csv", where="x")) == [
        {"text": "a", "label": "1"},
        {"text": "b", "label": "2"},
    ]


texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), max_size=20)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.fixed_dictionaries({"text": texts, "label": texts}), min_size=1, max_size=8))
def test_any_texts_survive_a_csv(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    path.write_text(as_csv(rows), encoding="utf-8", newline="")
    assert rows_of(open_table(path, where="x")) == rows


def test_the_fingerprint_follows_the_content_and_not_the_time(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,1\n")
    first = open_table(path, where="x").fingerprint()
    os.utime(path, (1, 1))
    assert open_table(path, where="x").fingerprint() == first
    stat = path.stat()
    path.write_text("text,label\nb,1\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert open_table(path, where="x").fingerprint() != first


def test_tables_in_memory():
    columns = {"text": ["a", "b"], "label": [1, 2]}
    expected = [{"text": "a", "label": 1}, {"text": "b", "label": 2}]
    for rows in (columns, pa.table(columns)):
        assert rows_of(table_of(rows)) == expected
    assert table_of(columns).fingerprint() == table_of(pa.table(columns)).fingerprint()
    with pytest.raises(UserError, match="cannot read rows from a int"):
        table_of(3)


def test_rows_longer_than_two_blocks_are_read(tmp_path):
    path = tmp_path / "rows.csv"
    with path.open("w") as file:
        file.write("text,label\n" + "a,1\n" * 10 + "b" * 10_000_000 + ",2\n" + "c,3\n" * 10)
    lengths = [len(row["text"]) for row in rows_of(open_table(path, where="x"))]
    assert lengths == [1] * 10 + [10_000_000] + [1] * 10


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.json", "rows.parquet"])
def test_blocks_have_no_more_rows_than_asked_for(tmp_path, name):
    rows = [{"text": f"row {i}", "label": "a"} for i in range(25)]
    if name == "rows.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    elif name == "rows.csv":
        (tmp_path / name).write_text(as_csv(rows))
    else:
        lines = [json.dumps(row) for row in rows]
        (tmp_path / name).write_text(
            "\n".join(lines) if name == "rows.jsonl" else f"[{','.join(lines)}]"
        )
    blocks = list(open_table(tmp_path / name, where="x").blocks(["text"], rows_per_block=10))
    assert [block.num_rows for block in blocks] == [10, 10, 5]
    assert blocks[-1].schema.names == ["text"]


def test_one_column_cannot_be_two_things_and_a_double_name_is_no_column():
    table = table_of(pa.table([["a"], ["b"], ["c"]], names=["text", "text", "label"]))
    with refused("data.text", "column text", "more than once"):
        require_columns(table, {"data.text": "text"})
    with refused("data.label", "'label'", "data.text"):
        require_columns(table, {"data.text": "label", "data.label": "label"})


def test_an_unused_column_may_stand_twice(tmp_path):
    (tmp_path / "rows.csv").write_text("text,note,note\na,1,2\n")
    table = open_table(tmp_path / "rows.csv", where="x")
    assert [block.to_pylist() for block in table.blocks(["text"])] == [[{"text": "a"}]]


def test_the_fingerprint_in_memory_does_not_follow_the_chunks():
    whole = pa.table({"text": ["a", "b", None, "c"]})
    chunked = pa.table({"text": pa.chunked_array([["a"], ["b", None], ["c"]])})
    assert table_of(whole).fingerprint() == table_of(chunked).fingerprint()
    assert table_of(whole).fingerprint() != table_of(whole.slice(1)).fingerprint()


def test_columns_in_memory_that_are_no_table_are_told():
    for columns in ({"text": ["a", 1]}, {"text": ["a"], "label": []}, {"text": ["\ud800"]}):
        with refused("data.test", "table of these columns"):
            table_of(columns, where="data.test")
    with pytest.raises(UserError, match="has no rows"):
        table_of({"text": []})


def test_a_list_of_rows_is_told_how_to_be_a_table():
    rows = [{"text": "a", "label": 1}, {"text": "a", "label": 1}]
    with refused("data.source", "list of rows", fix="pandas.DataFrame(rows)"):
        open_splits(rows, {}, ReadingConfig())
    tables = open_splits(
        [{"text": ["a"], "label": [1]}, {"text": ["b"], "label": [2]}], {}, ReadingConfig()
    )
    assert tables["train"].columns == ["text", "label"]


def test_a_datasets_table_is_read_without_importing_datasets():
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 2]}).select([1, 0])
    assert rows_of(table_of(rows)) == [{"text": "b", "label": 2}, {"text": "a", "label": 1}]


def test_a_pandas_table_is_read_without_its_index():
    pandas = pytest.importorskip("pandas")
    rows = pandas.DataFrame({"text": ["a", None], "label": [1, 2]}, index=[5, 6])
    assert rows_of(table_of(rows)) == [{"text": "a", "label": 1}, {"text": None, "label": 2}]


json_values = st.text(st.characters(codec="utf-8"), max_size=20) | st.none()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.fixed_dictionaries({"text": json_values}), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_any_texts_survive_json(tmp_path_factory, rows, is_array, is_ascii):
    path = tmp_path_factory.mktemp("json") / ("rows.json" if is_array else "rows.jsonl")
    lines = [json.dumps(row, ensure_ascii=is_ascii) for row in rows]
    path.write_text(
        f"[{','.join(lines)}]" if is_array else "\n".join(lines), encoding="utf-8", newline=""
    )
    assert rows_of(open_table(path, where="x")) == rows
