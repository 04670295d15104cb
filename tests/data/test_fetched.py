"""Sources behind an address: fetched once, and again when they change."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from pyarrow import fs
from tests.verbs import verb

from flatout.data.store.cache import Cache
from flatout.data.tables import fetched, sources
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.sources import files_in, open_source, open_splits

TABLE = "text,label\nsome words,a\nother words,b\n"


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Path:
    """A folder behind `s3://bucket/`, read by a file system of pyarrow's that is no local one."""
    folder = tmp_path / "far" / "bucket"
    (folder / "rows").mkdir(parents=True)
    for name in ("rows/train.csv", "rows/test.csv", "one.csv"):
        (folder / name).write_text(TABLE.replace("some", name), encoding="utf-8")
    far = fs.SubTreeFileSystem(str(tmp_path / "far"), fs.LocalFileSystem())

    class Addresses:
        @staticmethod
        def from_uri(address: str) -> tuple[fs.FileSystem, str]:
            return far, address.removeprefix("s3://")

    monkeypatch.setattr(fetched.fs, "FileSystem", Addresses)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    return folder


def texts_of(given: str) -> list[str]:
    table = open_source(given, where="data.source")
    return [text for block in table.blocks(["text"]) for text in block.column("text").to_pylist()]


def test_a_file_and_a_folder_are_read_as_if_they_were_here(bucket):
    assert texts_of("s3://bucket/one.csv") == ["one.csv words", "other words"]
    splits = open_splits("s3://bucket/rows", {}, ReadingConfig())
    assert list(splits) == ["train", "test"]
    assert [Path(name).name for name in files_in("s3://bucket/rows", "FILE")] == [
        "test.csv",
        "train.csv",
    ]


def test_a_file_is_fetched_once_and_again_when_it_has_changed(bucket):
    copy = Path(fetched.fetch("s3://bucket/one.csv", "data.source"))
    before = copy.stat().st_ino
    assert Path(fetched.fetch("s3://bucket/one.csv", "data.source")).stat().st_ino == before
    (bucket / "one.csv").write_text(TABLE.replace("some", "changed"), encoding="utf-8")
    assert texts_of("s3://bucket/one.csv") == ["changed words", "other words"]
    assert copy.stat().st_ino != before


def test_opening_a_source_asks_once_for_what_it_is(bucket, monkeypatch):
    asked = []
    fetch = sources.fetch

    def noted(address, where):
        asked.append(address)
        return fetch(address, where)

    monkeypatch.setattr(sources, "fetch", noted)
    for address in ("s3://bucket/one.csv", "s3://bucket/rows"):
        open_splits(address, {}, ReadingConfig())
    assert asked == ["s3://bucket/one.csv", "s3://bucket/rows"]


def test_a_folder_loses_the_files_that_are_gone_there(bucket):
    texts_of("s3://bucket/rows/train.csv")
    copy = Path(fetched.fetch("s3://bucket/rows", "data.source"))
    (bucket / "rows" / "test.csv").unlink()
    fetched.fetch("s3://bucket/rows", "data.source")
    assert [path.name for path in copy.iterdir() if not path.name.startswith(".")] == ["train.csv"]


def test_what_a_killed_fetch_has_left_is_no_table(bucket):
    copy = Path(fetched.fetch("s3://bucket/one.csv", "data.source"))
    copy.unlink()
    copy.with_name(".one.csv.partial").write_text("text,la", encoding="utf-8")
    assert texts_of("s3://bucket/one.csv") == ["one.csv words", "other words"]


def test_clearing_the_cache_removes_the_copies(bucket, tmp_path):
    copy = Path(fetched.fetch("s3://bucket/one.csv", "data.source"))
    Cache(tmp_path / "cache").clear()
    assert not copy.exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://bucket/none.csv", "data.source: nothing is at s3://bucket/none.csv"),
        ("s3://bucket/../../etc/passwd", "leads upwards"),
    ],
)
def test_an_address_that_cannot_be_read_is_one_message(
    address, message, bucket, monkeypatch, capfd
):
    (bucket.parents[1] / "etc").mkdir()
    (bucket.parents[1] / "etc" / "passwd").touch()
    assert verb("check", f"data.source={address}") == 2
    assert message in capfd.readouterr().err


def test_two_hosts_with_one_path_have_copies_of_their_own(tmp_path, monkeypatch):
    class Hosts:
        @staticmethod
        def from_uri(address: str) -> tuple[fs.FileSystem, str]:
            host = address.removeprefix("hdfs://").partition("/")[0].rpartition("@")[2]
            return fs.SubTreeFileSystem(str(tmp_path / host), fs.LocalFileSystem()), "rows/one.csv"

    monkeypatch.setattr(fetched.fs, "FileSystem", Hosts)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    for host in ("first", "other"):
        (tmp_path / host / "rows").mkdir(parents=True)
        (tmp_path / host / "rows" / "one.csv").write_text(
            TABLE.replace("some", host), encoding="utf-8"
        )
    copies = [
        Path(fetched.fetch(f"hdfs://{host}/rows/one.csv", "data.source"))
        for host in ("first", "other", "me@first")
    ]
    assert [copy.read_text("utf-8").split()[0] for copy in copies[:2]] == ["text,label"] * 2
    assert [
        "first words" in copies[0].read_text("utf-8"),
        "other words" in copies[1].read_text("utf-8"),
    ] == [
        True,
        True,
    ]
    assert copies[2] == copies[0]
    assert "me" not in str(copies[2].relative_to(tmp_path / "cache")).split("/")[1]


def test_a_disk_that_is_full_while_fetching_is_told_as_such_and_leaves_nothing(
    bucket, tmp_path, monkeypatch, capfd
):
    def refused(source: object, copy: BinaryIO, size: int) -> None:
        copy.write(b"text")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetched.shutil, "copyfileobj", refused)
    assert verb("check", "data.source=s3://bucket/one.csv") == 2
    said = capfd.readouterr().err
    assert said.startswith(f"data.source: no space left in {tmp_path / 'cache'}: ")
    assert said.strip().endswith("Make room, or set FLATOUT_CACHE to a folder of another disk.")
    assert not list((tmp_path / "cache" / ".fetched").rglob("*one.csv*.partial"))


def test_a_file_is_fetched_to_a_disk_without_locks(bucket, monkeypatch):
    def missing(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)
    assert texts_of("s3://bucket/one.csv") == texts_of(str(bucket / "one.csv"))


def test_a_bucket_that_denies_is_one_message(bucket, capfd):
    (bucket / "one.csv").chmod(0)
    (bucket / "one.csv").unlink()
    (bucket / "one.csv").mkdir()
    (bucket / "one.csv" / "x.csv").symlink_to("/proc/self/mem")
    assert verb("check", "data.source=s3://bucket/one.csv") == 2
    error = capfd.readouterr().err
    assert error.startswith("data.source: s3://bucket/one.csv cannot be read (")
    assert error.strip().endswith("that pyarrow finds credentials for it.")


def test_a_scheme_that_nobody_knows_is_one_message(capfd):
    assert verb("check", "data.source=gopher://host/rows.csv") == 2
    said = capfd.readouterr().err
    assert "gopher://host/rows.csv cannot be read (Unrecognized filesystem" in said
    assert said.endswith("Download it first: s3://, gs://, hdfs:// and file:// are read.\n")
