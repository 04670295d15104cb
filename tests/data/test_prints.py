"""The fingerprints of sources: read once, and again whenever a file was touched."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from tests.refusals import refused

from flatout.data.tables.formats import file
from flatout.data.tables.formats.csv_file import CsvTable
from flatout.data.tables.formats.file import FileTable
from flatout.data.tables.prints import NOTES, fingerprint_of, fingerprints_of, heads_noted
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.roles import Roles
from flatout.data.tables.sources import open_source
from flatout.data.texts.decisions import DecidedTable
from flatout.files import has_time_moved


@pytest.fixture
def reads(monkeypatch):
    """The files whose bytes are read for a fingerprint."""
    found: list[str] = []
    whole = FileTable.fingerprint
    monkeypatch.setattr(
        FileTable, "fingerprint", lambda table: found.append(table.path.name) or whole(table)
    )
    return found


def put(path: Path, text: str) -> Path:
    path.write_text(f"text,label\n{text},a\nother,b\n", encoding="utf-8")
    return path


def print_of(path: Path, cache: Path) -> str:
    return fingerprint_of(open_source(str(path), where="data.train"), cache)


def test_a_file_that_nobody_touched_is_read_once(tmp_path, reads):
    path = put(tmp_path / "rows.csv", "one")
    assert print_of(path, tmp_path / "cache") == print_of(path, tmp_path / "cache")
    assert reads == ["rows.csv"]


def test_its_fingerprint_is_the_one_of_its_bytes(tmp_path):
    path = put(tmp_path / "rows.csv", "one")
    table = open_source(str(path), where="data.train")
    assert [print_of(path, tmp_path / "cache") for _ in range(2)] == [table.fingerprint()] * 2


@pytest.mark.parametrize("how", ["at once", "time set back", "renamed over"])
def test_a_file_that_was_changed_is_read_again(tmp_path, reads, how):
    path = put(tmp_path / "rows.csv", "one")
    before = print_of(path, tmp_path / "cache")
    status = path.stat()
    if how == "renamed over":
        put(tmp_path / "new.csv", "two").replace(path)
    else:
        put(path, "two")
    if how != "at once":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert print_of(path, tmp_path / "cache") != before
    assert reads == ["rows.csv"] * 2


def test_of_many_files_the_one_that_is_touched_and_one_more_are_read_again(tmp_path, reads):
    paths = [put(tmp_path / f"part-{number}.csv", f"row {number}") for number in range(3)]
    before = print_of(tmp_path / "part-*.csv", tmp_path / "cache")
    assert print_of(tmp_path / "part-*.csv", tmp_path / "cache") == before
    assert len(reads) == 3
    put(paths[1], "row x")
    assert print_of(tmp_path / "part-*.csv", tmp_path / "cache") != before
    assert reads[3:] == ["part-1.csv"]
    put(tmp_path / "part-3.csv", "row 3")
    found = print_of(tmp_path / "part-*.csv", tmp_path / "cache")
    assert reads[4:] == ["part-3.csv"]
    assert found == print_of(tmp_path / "part-*.csv", tmp_path / "another")


def test_texts_in_folders_are_known_by_their_entries(tmp_path, monkeypatch):
    for name in ("a/1.txt", "a/2.txt", "b/3.txt"):
        (tmp_path / "rows" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "rows" / name).write_text(name, encoding="utf-8")
    before = print_of(tmp_path / "rows", tmp_path / "cache")
    table = open_source(str(tmp_path / "rows"), where="data.train")
    monkeypatch.setattr(table, "fingerprint", lambda: pytest.fail("the files are read"))
    assert fingerprint_of(table, tmp_path / "cache") == before
    (tmp_path / "rows" / "b" / "3.txt").write_text("other", encoding="utf-8")
    assert print_of(tmp_path / "rows", tmp_path / "cache") != before


def test_a_file_that_changed_after_it_was_opened_is_not_taken_from_the_note_of_another_process(
    tmp_path, reads
):
    path = put(tmp_path / "rows.csv", "one")
    table = open_source(str(path), where="data.train")
    put(path, "two")
    found = print_of(path, tmp_path / "cache")
    assert fingerprint_of(table, tmp_path / "cache") == found
    assert reads == ["rows.csv"] * 2


def test_a_cache_that_cannot_be_written_to_changes_nothing(tmp_path, reads):
    (tmp_path / "cache").write_text("a file in the folder's place", encoding="utf-8")
    path = put(tmp_path / "rows.csv", "one")
    assert print_of(path, tmp_path / "cache") == print_of(path, tmp_path / "cache")
    assert reads == ["rows.csv"] * 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"entries": 1}', "\x00"])
def test_a_damaged_note_is_written_again(tmp_path, reads, text):
    path = put(tmp_path / "rows.csv", "one")
    before = print_of(path, tmp_path / "cache")
    (note,) = (tmp_path / "cache" / NOTES).iterdir()
    note.write_text(text, encoding="utf-8")
    assert print_of(path, tmp_path / "cache") == print_of(path, tmp_path / "cache") == before
    assert reads == ["rows.csv"] * 2


def test_several_processes_may_ask_at_once(tmp_path):
    path = put(tmp_path / "rows.csv", "one")
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(print_of(path, tmp_path / "cache")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_equal_splits_are_refused_from_notes_too(tmp_path):
    tables = [
        open_source(str(put(tmp_path / name, "one")), where="data.train")
        for name in ("a.csv", "b.csv")
    ]
    for _ in range(2):
        with refused("data.test", "b.csv", "a.csv"):
            fingerprints_of(dict(zip(("train", "test"), tables, strict=True)), tmp_path / "cache")


@pytest.mark.parametrize("is_first", [False, True])
def test_decisions_about_rows_have_prints_of_their_own_beside_the_notes_of_the_file(
    tmp_path, is_first
):
    plain = open_source(str(put(tmp_path / "rows.csv", "one")), where="data.train")
    roles = Roles(("text",), "label")
    decided = [DecidedTable(plain, roles, [1], {}), DecidedTable(plain, roles, [], {1: "a"})]
    tables = [*decided, plain] if is_first else [plain, *decided]
    prints = [fingerprint_of(table, tmp_path / "cache") for table in tables]
    assert len(set(prints)) == 3
    assert [fingerprint_of(table, tmp_path / "cache") for table in tables] == prints


FILES = {
    "rows.csv": "text;label\none;a\ntwo;b\n",
    "rows.tsv": "text\tlabel\none\ta\ntwo\tb\n",
    "rows.jsonl": '{"text": "one", "label": "a"}\n{"text": "two", "label": "b"}\n',
    "rows.json": '[{"text": "one", "label": "a"}, {"text": "two", "label": "b"}]',
    "rows.conll": "one B-a\ntwo O\n\nthree O\n",
}


@pytest.fixture
def opened(monkeypatch):
    """The files that are opened to be read."""
    found: list[str] = []
    unpacked = file.unpacked
    monkeypatch.setattr(
        file, "unpacked", lambda path, where: found.append(path.name) or unpacked(path, where)
    )
    return found


def opened_by_name(source: str, cache: Path, reading: ReadingConfig | None = None):
    with heads_noted(cache, [source]):
        return open_source(source, where="data.train", reading=reading)


def of_another_time(path: Path) -> None:
    """Let a file be older than what is noted at once."""
    time.sleep(0.03)
    assert path.exists()


@pytest.mark.parametrize("name", list(FILES))
def test_what_a_file_tells_by_its_head_is_read_once(tmp_path, opened, name):
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    of_another_time(path)
    first = opened_by_name(str(path), tmp_path / "cache")
    assert opened
    opened.clear()
    again = opened_by_name(str(path), tmp_path / "cache")
    assert not opened
    assert (again.columns, again.how()) == (first.columns, first.how())
    assert list(again.blocks(again.columns)) == list(
        open_source(str(path), where="data.train").blocks(first.columns)
    )


@pytest.mark.parametrize(
    ("changed_s", "later_s", "has_moved"),
    [(100.25, 0.01, False), (100.25, 0.03, True), (100.0, 1.5, False), (100.0, 2.5, True)],
)
def test_a_disk_whose_times_are_whole_seconds_is_given_two_of_them_to_show_a_change(
    monkeypatch, changed_s, later_s, has_moved
):
    monkeypatch.setattr(time, "time_ns", lambda: int((changed_s + later_s) * 1e9))
    assert has_time_moved(int(changed_s * 1e9)) == has_moved


@pytest.mark.parametrize("change", ["a name more", "a name less", "another way of reading"])
def test_a_note_of_a_head_that_another_version_wrote_is_not_taken(
    tmp_path, opened, monkeypatch, change
):
    path = tmp_path / "rows.csv"
    path.write_text(FILES["rows.csv"], encoding="utf-8")
    of_another_time(path)
    names = CsvTable.told_by_head
    with monkeypatch.context() as other_version:
        if change == "a name more":
            other_version.setattr(CsvTable, "told_by_head", (*names, "name"))
        elif change == "a name less":
            other_version.setattr(CsvTable, "told_by_head", names[:-1])
        else:
            other_version.setattr(file, "_HEADS_AS", 0)
        opened_by_name(str(path), tmp_path / "cache")
    opened.clear()
    table = opened_by_name(str(path), tmp_path / "cache")
    assert opened
    assert (table.columns, table.delimiter) == (["text", "label"], ";")
    opened.clear()
    opened_by_name(str(path), tmp_path / "cache")
    assert not opened


def test_the_head_of_a_file_that_was_changed_or_is_read_in_another_way_is_read_again(
    tmp_path, opened
):
    path = tmp_path / "rows.csv"
    cache = tmp_path / "cache"
    path.write_text("a;b,c\n1;2,3\n4;5,6\n", encoding="utf-8")
    of_another_time(path)
    assert opened_by_name(str(path), cache).columns == ["a;b", "c"]
    assert opened_by_name(str(path), cache, ReadingConfig(delimiter=";")).columns == ["a", "b,c"]
    path.write_text("x;y,z\n1;2,3\n4;5,6\n", encoding="utf-8")
    assert opened_by_name(str(path), cache).columns == ["x;y", "z"]


def test_a_head_as_young_as_the_clock_of_the_disk_is_not_noted(tmp_path, opened, monkeypatch):
    path = put(tmp_path / "rows.csv", "one")
    monkeypatch.setattr(file, "has_time_moved", lambda changed_ns: False)
    for _ in range(2):
        opened_by_name(str(path), tmp_path / "cache")
    assert opened == ["rows.csv"] * 2


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 1}', "\x00"])
def test_a_damaged_note_of_heads_is_written_again(tmp_path, opened, text):
    path = put(tmp_path / "rows.csv", "one")
    cache = tmp_path / "cache"
    of_another_time(path)
    opened_by_name(str(path), cache)
    (note,) = (cache / NOTES).iterdir()
    note.write_text(text, encoding="utf-8")
    for _ in range(2):
        assert opened_by_name(str(path), cache).columns == ["text", "label"]
    assert opened == ["rows.csv"] * 2


def test_a_mistake_in_a_head_is_the_same_message_each_time(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text,label\n", encoding="utf-8")
    of_another_time(path)
    for _ in range(2):
        with refused("data.train", "rows.csv", "no rows", fix="data.read.columns="):
            opened_by_name(str(path), tmp_path / "cache")
