"""From what a person names to tables: files, patterns, folders, saved data sets, rows in memory."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.whole_tables import rows_of
from tests.refusals import refused
from tests.run_files import jsonl_of

from flatout import TextDataConfig
from flatout.data.checks.checkup import check
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.sources import open_source, open_splits
from flatout.data.tables.table import Table
from flatout.errors import UserError

ROWS = [{"text": f"text {i}", "label": "ab"[i % 2]} for i in range(12)]


def csv_of(rows, delimiter=",") -> str:
    return (
        "\n".join([delimiter.join(rows[0]), *(delimiter.join(row.values()) for row in rows)]) + "\n"
    )


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def texts_and_labels(table: Table) -> list[dict[str, Any]]:
    return rows_of(table, ["text", "label"])


def splits_of(source, **given) -> dict[str, list[dict]]:
    return {
        split: texts_and_labels(table)
        for split, table in open_splits(source, given, ReadingConfig()).items()
    }


def test_a_pattern_reads_its_files_in_the_order_a_person_counts(tmp_path):
    for number in (10, 9, 1):
        put(tmp_path / f"part-{number}.csv", csv_of([{"text": f"file {number}", "label": "a"}]))
    table = open_source(str(tmp_path / "part-*.csv"), where="data.train")
    assert [row["text"] for row in texts_and_labels(table)] == ["file 1", "file 9", "file 10"]
    assert table.how() == "3 files: comma between values, UTF-8"


def test_files_of_several_formats_and_orders_of_columns_are_one_table(tmp_path):
    files = [
        put(tmp_path / "a.csv", csv_of(ROWS[:4])),
        put(
            tmp_path / "b.jsonl.gz",
            jsonl_of([dict(reversed(row.items()), more=1) for row in ROWS[4:8]]),
        ),
    ]
    pq.write_table(pa.Table.from_pylist(ROWS[8:]), tmp_path / "c.parquet")
    table = open_source([*map(str, files), str(tmp_path / "c.parquet")], where="data.train")
    assert texts_and_labels(table) == ROWS
    assert table.columns == ["text", "label"]
    assert table.locate(6) == f"{files[1]}:2"


@pytest.mark.parametrize("words", [{}, {"label": "label"}])
def test_the_one_file_that_lacks_a_column_is_named_with_its_own_columns(tmp_path, words):
    for name, head in (
        ("a", "text,label"),
        ("b", "text,x"),
        ("c", "label,text"),
    ):
        (tmp_path / f"{name}.csv").write_text(f"{head}\none,two\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        check(TextDataConfig(source=str(tmp_path), **words))
    said = (
        f"data.label: no column 'label' in {tmp_path}/b.csv, which others have (columns: text, x)"
    )
    assert str(caught.value).startswith(said)


def test_columns_that_every_file_has_are_to_choose_from(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text(
            "sms,category,target\none,two,three\n", encoding="utf-8"
        )
    with refused("data.label", "'category' or 'target'", fix="data.label=COLUMN"):
        check(TextDataConfig(source=[str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]))


def test_an_empty_name_is_not_the_folder_one_works_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("text,label\none,two\n", encoding="utf-8")
    with refused("data.source", "empty"):
        check(TextDataConfig(source=""))


def test_the_same_content_in_another_order_of_files_is_another_fingerprint(tmp_path):
    a, b = (
        str(put(tmp_path / f"{name}.csv", csv_of(ROWS[:3] + ROWS[i:])))
        for i, name in ((5, "a"), (6, "b"))
    )
    assert (
        open_source([a, b], where="x").fingerprint() != open_source([b, a], where="x").fingerprint()
    )


@pytest.mark.parametrize(
    "name", ["valid.csv", "validation-00000-of-00001.csv", "dev.csv", "Val.csv", "eval_set.csv"]
)
def test_a_folder_with_files_named_after_splits(tmp_path, name):
    put(tmp_path / "train.csv", csv_of(ROWS[:8]))
    put(tmp_path / name, csv_of(ROWS[8:10]))
    put(tmp_path / "test.jsonl", jsonl_of(ROWS[10:]))
    put(tmp_path / "README.md", "# about")
    assert splits_of(str(tmp_path)) == {
        "train": ROWS[:8],
        "validation": ROWS[8:10],
        "test": ROWS[10:],
    }


def test_a_split_in_pieces_below_data_as_the_hub_keeps_it(tmp_path):
    (tmp_path / "data").mkdir()
    for number, rows in enumerate((ROWS[:5], ROWS[5:8])):
        pq.write_table(
            pa.Table.from_pylist(rows), tmp_path / "data" / f"train-0000{number}-of-00002.parquet"
        )
    pq.write_table(
        pa.Table.from_pylist(ROWS[8:]), tmp_path / "data" / "test-00000-of-00001.parquet"
    )
    assert splits_of(str(tmp_path)) == {"train": ROWS[:8], "test": ROWS[8:]}


def test_a_folder_of_texts_a_class(tmp_path):
    for number, (label, split) in enumerate(
        (each, part) for part in ("train", "test") for each in "ab"
    ):
        put(tmp_path / split / label / f"{number}.txt", f"text\n{number}")
        put(tmp_path / split / label / "picture.png", "no text")
    splits = open_splits(str(tmp_path), {}, ReadingConfig())
    assert texts_and_labels(splits["train"]) == [
        {"text": "text\n0", "label": "a"},
        {"text": "text\n1", "label": "b"},
    ]
    assert splits["test"].how() == "2 files in 2 folders, 2 files of other endings left alone"
    assert splits["test"].locate(2) == "b/3.txt"


def test_any_format_may_be_gzipped(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    named_dataset().to_parquet(str(tmp_path / "named.parquet"))
    for name in ("rows.parquet", "named.parquet"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert texts_and_labels(open_source(str(tmp_path / "rows.parquet.gz"), where="x")) == ROWS
    assert [
        row["label"]
        for row in texts_and_labels(open_source(str(tmp_path / "named.parquet.gz"), where="x"))
    ] == NAMED
    for label in "ab":
        put(tmp_path / "texts" / label / "1.txt.gz", f"text {label}")
    assert [
        row["text"] for row in texts_and_labels(open_source(str(tmp_path / "texts"), where="x"))
    ] == [
        "text a",
        "text b",
    ]


@pytest.mark.parametrize("name", ["1.txt", "1.txt.gz"])
def test_a_file_too_long_for_a_text_is_told_before_it_is_held(tmp_path, name):
    put(tmp_path / "a" / name, "long " * (14 << 20))
    with refused("x", f"a/{name}", "64 MB"):
        texts_and_labels(open_source(str(tmp_path), where="x"))


def test_a_text_that_changes_changes_the_folder_s_fingerprint(tmp_path):
    put(tmp_path / "a" / "1.txt", "one")
    put(tmp_path / "b" / "1.txt", "two")
    before = open_source(str(tmp_path), where="x").fingerprint()
    put(tmp_path / "b" / "1.txt", "owt")
    assert open_source(str(tmp_path), where="x").fingerprint() != before


def named_dataset(number: int = 6) -> datasets.Dataset:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = {
        "text": [f"text {i}" for i in range(number)],
        "label": [i % 2 for i in range(number - 1)] + [-1],
    }
    return datasets.Dataset.from_dict(rows, features=features)


NAMED = ["cat", "dog", "cat", "dog", "cat", None]


def test_a_saved_data_set_gives_its_splits_and_the_names_of_its_classes(tmp_path):
    datasets.DatasetDict(train=named_dataset(), test=named_dataset()).save_to_disk(
        str(tmp_path / "saved")
    )
    splits = splits_of(str(tmp_path / "saved"))
    assert splits.keys() == {"train", "test"}
    assert [row["label"] for row in splits["train"]] == NAMED


def test_class_names_of_a_parquet_file_and_of_an_arrow_file_are_used(tmp_path):
    named_dataset().to_parquet(str(tmp_path / "rows.parquet"))
    named_dataset().save_to_disk(str(tmp_path / "saved"))
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    for path in (tmp_path / "rows.parquet", arrow):
        assert [
            row["label"] for row in texts_and_labels(open_source(str(path), where="x"))
        ] == NAMED


def test_lists_of_class_numbers_are_lists_of_names_and_a_row_without_one_has_none(tmp_path):
    names = datasets.Sequence(datasets.ClassLabel(names=["cat", "dog"]))
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    labels = [[0], None, [], [1, 0]]
    found = datasets.Dataset.from_dict({"text": list("abcd"), "label": labels}, features=features)
    table = found.data.table
    expected = [["cat"], None, [], ["dog", "cat"]]
    large = pa.large_list(pa.int64())
    for way in (
        table,
        table.set_column(1, "label", table["label"].cast(large)).replace_schema_metadata(
            table.schema.metadata
        ),
    ):
        for first in (0, 1):
            rows = texts_and_labels(open_source(way.slice(first), where="x"))
            assert [row["label"] for row in rows] == expected[first:]


def test_views_of_texts_are_texts(tmp_path):
    table = pa.Table.from_pylist(ROWS, pa.schema([(name, pa.string_view()) for name in ROWS[0]]))
    pq.write_table(table, tmp_path / "rows.parquet")
    for source in (table, str(tmp_path / "rows.parquet")):
        opened = open_source(source, where="x")
        blocks = list(opened.blocks(opened.columns))
        assert {str(kind) for block in blocks for kind in block.schema.types} == {"large_string"}
        assert [row for block in blocks for row in block.to_pylist()] == ROWS


def test_tables_of_python_are_read_whatever_they_are():
    frame = pd.DataFrame(ROWS)
    for rows in (
        frame,
        pa.Table.from_pandas(frame),
        datasets.Dataset.from_pandas(frame),
        frame.to_dict("list"),
    ):
        assert texts_and_labels(open_source(rows, where="data.train")) == ROWS


def test_a_dictionary_of_tables_gives_the_splits():
    parts = datasets.DatasetDict(train=named_dataset(), validation=named_dataset(4))
    assert {split: len(rows) for split, rows in splits_of(parts).items()} == {
        "train": 6,
        "validation": 4,
    }
    frames = {"train": pd.DataFrame(ROWS[:8]), "test": pd.DataFrame(ROWS[8:])}
    assert splits_of(frames) == {"train": ROWS[:8], "test": ROWS[8:]}


def test_datasets_with_other_blocks_have_one_fingerprint():
    whole = named_dataset(6)
    parts = datasets.concatenate_datasets([whole.select(range(2)), whole.select(range(2, 6))])
    assert (
        open_source(whole, where="x").fingerprint() == open_source(parts, where="x").fingerprint()
    )
    assert (
        open_source(whole, where="x").fingerprint()
        != open_source(named_dataset(4), where="x").fingerprint()
    )


def test_a_split_may_not_be_given_twice(tmp_path):
    put(tmp_path / "train.csv", csv_of(ROWS[:8]))
    put(tmp_path / "test.csv", csv_of(ROWS[8:]))
    with refused("data.source", "several parts", allowed="parts: english, german"):
        splits_of({"english": pd.DataFrame(ROWS[:8]), "german": pd.DataFrame(ROWS[8:])})
    with pytest.raises(UserError, match=r"data.test: data.source has test rows already"):
        splits_of(str(tmp_path), test=str(tmp_path / "train.csv"))


@pytest.mark.parametrize(
    ("content", "delimiter"),
    [
        ("text;label\nHello, world;a\nmore, and; more;b\n".replace("; more", " more"), ";"),
        ("text\tlabel\nHello, world\ta\n", "\t"),
        ('text|label\n"a|b"|x\n', "|"),
        ("text,label\na;b,x\nc;d,y\n", ","),
        ("text\nonly one column\n", ","),
        ('text;label\n"with, commas; and more";x\n', ";"),
    ],
)
def test_the_delimiter_is_found_out(tmp_path, content, delimiter):
    table = open_source(str(put(tmp_path / "rows.csv", content)), where="data.train")
    assert table.delimiter == delimiter
    assert len(table.columns) == len(content.splitlines()[0].split(delimiter))


def test_quotes_can_be_a_part_of_values(tmp_path):
    path = str(put(tmp_path / "rows.tsv", 'text\tlabel\n"open\ta\nsaid "hi"\tb\n'))
    table = open_source(path, where="data.train", reading=ReadingConfig(quote=""))
    assert [row["text"] for row in texts_and_labels(table)] == ['"open', 'said "hi"']


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-le", "latin-1", "shift_jis"])
def test_other_encodings_are_read_as_named(tmp_path, encoding):
    word = "テスト" if encoding == "shift_jis" else "café"
    rows = [{"text": f"{word} {i}" * 400, "label": "a"} for i in range(900)]
    path = tmp_path / "rows.csv"
    path.write_bytes(csv_of(rows).encode(encoding))
    assert (
        texts_and_labels(
            open_source(str(path), where="x", reading=ReadingConfig(encoding=encoding))
        )
        == rows
    )


def test_a_file_edited_in_place_with_the_same_size_and_time_is_noticed(tmp_path):
    import os

    path = put(tmp_path / "rows.csv", csv_of(ROWS))
    before = open_source(str(path), where="x").fingerprint()
    stat = path.stat()
    put(path, csv_of(ROWS).replace("text 3", "text X"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert open_source(str(path), where="x").fingerprint() != before


def test_a_block_never_holds_more_rows_than_asked_for(tmp_path):
    table = open_source(str(put(tmp_path / "rows.csv", csv_of(ROWS * 50))), where="x")
    counts = [block.num_rows for block in table.blocks(["text"], rows_per_block=100)]
    assert max(counts) <= 100
    assert np.sum(counts) == 600


@pytest.mark.parametrize("name", ["rows.xlsx", "rows.TXT", "rows.sqlite"])
def test_a_file_that_is_not_there_is_no_data_set_of_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"data.source: no such file: {name}"):
        open_splits(name, {}, ReadingConfig())


def read_while(act) -> int:
    """Bytes that this process reads from files meanwhile."""

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])

    before = so_far()
    act()
    return so_far() - before


def test_opening_a_table_reads_a_few_lines_of_it(tmp_path):
    file = put(
        tmp_path / "rows.csv",
        csv_of([{"text": f"a short text {i}", "label": "a"} for i in range(50_000)]),
    )
    assert file.stat().st_size > 1_000_000
    assert read_while(lambda: open_source(str(file), where="data.train")) < 300_000


@pytest.mark.parametrize("words", [1, 1_000])
def test_a_delimiter_is_found_in_rows_of_any_length(tmp_path, words):
    """The first rows have a comma more, as often as not; by the semicolon all fit, in whatever
    megabyte they lie.
    """
    labels = ["c", "a, b", "a, b"]
    rows = [{"text": "so, so " * words, "label": labels[i % 3]} for i in range(300)]
    table = open_source(str(put(tmp_path / "rows.csv", csv_of(rows, ";"))), where="data.train")
    assert (list(table.columns), len(texts_and_labels(table))) == (["text", "label"], 300)


def test_without_the_package_of_the_hub_a_name_is_refused_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"no file or folder ag_news, .*'flatout\[hub\]'"):
        open_splits("ag_news", {}, ReadingConfig())
