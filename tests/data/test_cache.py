"""Stores are found by content, built once, and never trusted when they are damaged."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.data.store import cache as cache_module
from flatout.data.store import store as store_module
from flatout.data.store.cache import Cache, recipe_key
from flatout.data.store.lock import lock
from flatout.data.store.store import (
    MANIFEST,
    MANIFEST_SUM,
    Column,
    Ragged,
    Store,
    StoreWriter,
    damaged_files,
)
from flatout.errors import UserError, out_of_space
from flatout.perf.tune.answers import AnswerStore
from flatout.sweep.many import alone_in

RECIPE = {"source": {"train": "abc"}, "max_length": 64, "vocabulary": {"size": 10}}


def build(writer: StoreWriter) -> None:
    split = writer.split(
        "train", {"tokens": Column("uint16", ragged=True), "targets": Column("int32")}
    )
    for start in (0, 5):
        split.append(tokens=(np.arange(15), np.full(5, 3)), targets=np.arange(start, start + 5))
    writer.write_text("labels.json", "[]")
    writer.facts["classes"] = ["a", "b"]


def refuse(given: object) -> None:
    raise AssertionError("must be neither built nor read again")


def left_in(folder: Path) -> list[str]:
    """What lies in a cache, without the files of locks, which stay."""
    return [path.name for path in folder.iterdir() if not path.name.startswith(".lock-")]


def test_what_was_built_is_opened_the_next_time(tmp_path):
    cache = Cache(tmp_path)
    _, first = cache.open_or_build("rows.csv", RECIPE, build)
    store, second = cache.open_or_build("rows.csv", RECIPE, refuse)
    assert (first.hit, second.hit) == (False, True)
    assert store.facts["classes"] == ["a", "b"]
    assert store.splits["train"].fixed("targets").tolist() == list(range(10))
    assert store.splits["train"].ragged("tokens").offsets.tolist() == list(range(0, 33, 3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_length": 32}, "max_length changed from 64 to 32"),
        ({"vocabulary": {"size": 20}}, "vocabulary size changed from 10 to 20"),
        ({"source": {"train": "xyz"}}, "source train changed"),
        ({"tokenizer": "new"}, "tokenizer changed"),
    ],
)
def test_a_miss_says_what_changed(tmp_path, change, reason):
    cache = Cache(tmp_path)
    assert cache.open_or_build("rows.csv", RECIPE, build)[1].reason == "first time for this data"
    assert cache.open_or_build("rows.csv", RECIPE | change, build)[1].reason == reason


@given(st.dictionaries(st.text(max_size=3), st.integers(), max_size=4))
def test_the_key_depends_on_the_content_and_not_on_the_order(recipe):
    assert recipe_key(recipe) == recipe_key(dict(reversed(recipe.items())))
    assert recipe_key(recipe) != recipe_key({**recipe, "more": 1.5})


def test_a_builder_that_fails_leaves_nothing_behind(tmp_path):
    def fail(writer: StoreWriter) -> None:
        build(writer)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        Cache(tmp_path).open_or_build("rows.csv", RECIPE, fail)
    assert left_in(tmp_path) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(st.data())
def test_a_flipped_bit_is_found_and_the_store_built_again(tmp_path_factory, data):
    cache = Cache(tmp_path_factory.mktemp("cache"))
    _, report = cache.open_or_build("rows.csv", RECIPE, build)
    folder = cache.folder / report.key
    (folder / "verified").unlink()
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    broken = data.draw(st.sampled_from(files))
    content = bytearray(broken.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    broken.write_bytes(bytes(content))
    named = "manifest.json" if broken.name == "manifest.sum" else str(broken.relative_to(folder))
    assert damaged_files(folder) == [named]
    with pytest.warns(UserWarning, match="is damaged"):
        again, report = cache.open_or_build("rows.csv", RECIPE, build)
    assert not report.hit
    assert again.splits["train"].fixed("targets").tolist() == list(range(10))


def test_a_store_cut_short_is_found(tmp_path):
    cache = Cache(tmp_path)
    _, report = cache.open_or_build("rows.csv", RECIPE, build)
    (tmp_path / report.key / "train" / "tokens.bin").write_bytes(b"")
    assert cache.verify() == {report.key: ["train/tokens.bin"]}


TOKENS = "train/tokens.bin"


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A manifest that says something else, with a checksum that fits."""

    def damage(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        content = json.dumps(change(manifest) or manifest).encode()
        (folder / MANIFEST).write_bytes(content)
        (folder / MANIFEST_SUM).write_text(xxhash.xxh3_128_hexdigest(content), encoding="ascii")

    return damage


def in_place_of(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut short": lambda folder: os.truncate(folder / TOKENS, 17),
    "emptied": lambda folder: os.truncate(folder / TOKENS, 0),
    "longer": lambda folder: os.truncate(folder / TOKENS, 4000),
    "gone": lambda folder: (folder / TOKENS).unlink(),
    "a folder in its place": lambda folder: in_place_of(folder / TOKENS),
    "text gone": lambda folder: (folder / "labels.json").unlink(),
    "text changed": lambda folder: (folder / "labels.json").write_text("{}", encoding="utf-8"),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "no checksum of the manifest": lambda folder: (folder / MANIFEST_SUM).unlink(),
    "an empty manifest": lambda folder: (folder / MANIFEST).write_bytes(b""),
    "a manifest of zeros": lambda folder: (folder / MANIFEST).write_bytes(bytes(900)),
    "a folder for a manifest": lambda folder: in_place_of(folder / MANIFEST),
    "nothing in it": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
    "a list for a manifest": rewritten(lambda manifest: [1]),
    "a manifest without files": rewritten(lambda manifest: manifest.pop("files") and None),
    "fewer than no bytes": rewritten(lambda manifest: manifest["files"][TOKENS].update(bytes=-2)),
    "fewer than no rows": rewritten(lambda manifest: manifest["splits"]["train"].update(rows=-1)),
    "a text for a number": rewritten(
        lambda manifest: manifest["splits"]["train"].update(rows="10")
    ),
    "another type": rewritten(
        lambda manifest: manifest["splits"]["train"]["columns"]["targets"].update(dtype="int64")
    ),
    "no such type": rewritten(
        lambda manifest: manifest["splits"]["train"]["columns"]["targets"].update(dtype="object")
    ),
    "a width that does not fit": rewritten(
        lambda manifest: manifest["splits"]["train"]["columns"]["targets"].update(width=3)
    ),
    "a file elsewhere": rewritten(
        lambda manifest: manifest["files"].update({"../a": {"bytes": 0, "xxh3": ""}})
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_store_damaged_in_any_way_is_built_again(tmp_path, damage):
    cache = Cache(tmp_path)
    _, report = cache.open_or_build("rows.csv", RECIPE, build)
    DAMAGES[damage](tmp_path / report.key)
    assert cache.opened(report.key) is None
    assert [bool(damaged) for damaged in cache.verify().values()] == [True]
    assert cache.entries() == [] or damaged_files(tmp_path / report.key) != [MANIFEST]
    with pytest.warns(UserWarning, match="is damaged"):
        again, report = cache.open_or_build("rows.csv", RECIPE, build)
    assert not report.hit
    assert again.splits["train"].fixed("targets").tolist() == list(range(10))
    assert cache.verify() == {report.key: []}


def test_a_damaged_store_does_not_trouble_others(tmp_path):
    cache = Cache(tmp_path)
    _, damaged = cache.open_or_build("rows.csv", RECIPE, build)
    (tmp_path / damaged.key / MANIFEST).write_bytes(b"\xff\0")
    _, report = cache.open_or_build("rows.csv", RECIPE | {"max_length": 32}, build)
    assert report.reason == "first time for this data"
    assert cache.verify() == {damaged.key: [MANIFEST], report.key: []}
    assert cache.clear() == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [TOKENS, "labels.json", MANIFEST, MANIFEST_SUM])
def test_a_change_after_the_check_is_found_though_size_and_time_are_set_back(tmp_path, name):
    cache = Cache(tmp_path)
    _, report = cache.open_or_build("rows.csv", RECIPE, build)
    path = tmp_path / report.key / name
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert cache.opened(report.key) is None


def test_bytes_are_read_once_a_boot_and_again_when_a_file_was_touched(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    _, report = cache.open_or_build("rows.csv", RECIPE, build)
    read: list[str] = []
    checksum = store_module.file_checksum
    monkeypatch.setattr(
        store_module, "file_checksum", lambda path: read.append(path.name) or checksum(path)
    )

    def files_read() -> int:
        read.clear()
        assert cache.opened(report.key) is not None
        return len(read)

    assert [files_read(), files_read()] == [0, 0]
    monkeypatch.setattr(cache_module, "boot_id", lambda: "after a restart")
    assert [files_read(), files_read()] == [5, 0]
    (tmp_path / report.key / TOKENS).touch()
    assert [files_read(), files_read()] == [5, 0]
    (tmp_path / report.key / "verified").write_bytes(b"\0{")
    assert [files_read(), files_read()] == [5, 0]


def test_two_machines_on_one_disk_each_check_once(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    _, report = cache.open_or_build("rows.csv", RECIPE, build)
    cache.opened(report.key)
    monkeypatch.setattr(cache_module, "boot_id", lambda: "the other")
    cache.opened(report.key)
    monkeypatch.undo()
    monkeypatch.setattr(store_module, "file_checksum", refuse)
    assert cache.opened(report.key) is not None


def slow_build(writer: StoreWriter) -> None:
    marker = Path(writer.folder.parent) / f"build-{time.monotonic_ns()}.txt"
    marker.touch()
    time.sleep(0.3)
    build(writer)


def open_in_child(folder: Path) -> None:
    Cache(folder).open_or_build("rows.csv", RECIPE, slow_build)


def test_of_many_processes_one_builds_and_the_others_wait(tmp_path):
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=open_in_child, args=(tmp_path,)) for _ in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0, 0, 0, 0]
    assert len(list(tmp_path.glob("build-*.txt"))) == 1


def test_what_dead_builders_left_is_taken_away_whatever_they_built(tmp_path):
    for name in (
        f".building-{recipe_key(RECIPE)}-999999",
        ".building-another-abcdef",
        ".removed-another-abcdef",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.bin").touch()
    _, report = Cache(tmp_path).open_or_build("rows.csv", RECIPE, build)
    assert left_in(tmp_path) == [report.key]


def slow_other_build(writer: StoreWriter) -> None:
    build(writer)
    (writer.folder.parent / "begun").touch()
    while not (writer.folder.parent / "go on").exists():
        time.sleep(0.01)


def open_another_in_child(folder: Path) -> None:
    _, report = Cache(folder).open_or_build(
        "rows.csv", RECIPE | {"max_length": 7}, slow_other_build
    )
    assert not report.hit


def test_a_living_builder_of_another_store_is_left_alone(tmp_path):
    child = multiprocessing.get_context("fork").Process(
        target=open_another_in_child, args=(tmp_path,)
    )
    child.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    Cache(tmp_path).open_or_build("rows.csv", RECIPE, build)
    Cache(tmp_path).clear()
    assert len(list(tmp_path.glob(".building-*"))) == 1
    (tmp_path / "go on").touch()
    child.join(30)
    assert child.exitcode == 0
    assert [entry.rows for entry in Cache(tmp_path).entries()] == [{"train": 10}]


def test_a_builder_whose_folder_was_taken_away_begins_again(tmp_path):
    times = []

    def interrupted(writer: StoreWriter) -> None:
        times.append(1)
        if len(times) == 1:
            shutil.rmtree(writer.folder)
        build(writer)

    store, _ = Cache(tmp_path).open_or_build("rows.csv", RECIPE, interrupted)
    assert len(times) == 2
    assert store.splits["train"].fixed("targets").tolist() == list(range(10))


def test_a_whole_store_is_not_taken_away_for_the_damaged_one_that_lay_there_before(tmp_path):
    cache = Cache(tmp_path)
    _, report = cache.open_or_build("rows.csv", RECIPE, build)
    damaged = cache_module._identity(tmp_path / report.key)
    cache.clear()
    store, _ = cache.open_or_build("rows.csv", RECIPE, build)
    cache._remove(store.folder, damaged)
    assert cache.opened(report.key) is not None
    assert left_in(tmp_path) == [report.key]


@pytest.mark.soak(seconds=2)
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="Windows stops no process")
def test_a_builder_that_is_stopped_is_waited_for_and_named(tmp_path, capfd, monkeypatch):
    # older tokenizers print a warning of any fork
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    child = multiprocessing.get_context("fork").Process(target=open_in_child, args=(tmp_path,))
    child.start()
    while not list(tmp_path.glob("build-*.txt")):
        time.sleep(0.01)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    threading.Timer(2.0, os.kill, [child.pid, signal.SIGCONT]).start()
    started = time.monotonic()
    _, report = Cache(tmp_path).open_or_build("rows.csv", RECIPE, refuse)
    assert report.hit and time.monotonic() - started >= 1.9
    child.join(30)
    words = (
        f"cache: waiting for process {child.pid} on {platform.node()}, which is building this store"
    )
    assert capfd.readouterr().err.splitlines() == [words]


def test_a_builder_that_is_killed_is_replaced_at_once(tmp_path):
    child = multiprocessing.get_context("fork").Process(
        target=open_another_in_child, args=(tmp_path,)
    )
    child.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    child.kill()
    child.join()
    started = time.monotonic()
    _, report = Cache(tmp_path).open_or_build("rows.csv", RECIPE | {"max_length": 7}, build)
    assert not report.hit and time.monotonic() - started < 1
    assert not list(tmp_path.glob(".building-*"))


@pytest.fixture
def without_flock(monkeypatch):
    """A disk that has no flock, as filelock sees it."""

    def missing(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", missing)


@pytest.mark.usefixtures("without_flock")
def test_without_locks_each_builds_for_itself_and_leaves_the_folders_of_others(tmp_path):
    with (
        lock(tmp_path, recipe_key(RECIPE)) as is_held,
        lock(tmp_path, recipe_key(RECIPE), waits=False) as is_free,
    ):
        assert not is_held and not is_free
    (tmp_path / f".building-{recipe_key(RECIPE)}-7@here-aaaa").mkdir()
    _, report = Cache(tmp_path).open_or_build("rows.csv", RECIPE, build)
    assert not report.hit
    Cache(tmp_path).clear()
    assert left_in(tmp_path) == [f".building-{recipe_key(RECIPE)}-7@here-aaaa"]


@pytest.mark.usefixtures("without_flock")
def test_without_locks_sweeps_and_measurements_go_on(tmp_path):
    with alone_in(tmp_path / "sweep"), alone_in(tmp_path / "sweep"):
        pass
    answers = AnswerStore(str(tmp_path))
    with answers.measuring("key", 0.1), answers.measuring("key", 0.1):
        pass


def busy_build(writer: StoreWriter) -> None:
    (writer.folder.parent / "begun").touch()
    until = time.monotonic() + 6
    while time.monotonic() < until:
        sum(number * number for number in range(10_000))
    build(writer)


def open_busily(folder: Path) -> None:
    Cache(folder).open_or_build("rows.csv", RECIPE, busy_build)


@pytest.mark.soak(seconds=7)
@pytest.mark.xdist_group("timing")
def test_a_slow_builder_that_lives_is_waited_for(tmp_path):
    child = multiprocessing.get_context("fork").Process(target=open_busily, args=(tmp_path,))
    child.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    _, report = Cache(tmp_path).open_or_build("rows.csv", RECIPE, refuse)
    assert report.hit
    child.join(30)
    assert child.exitcode == 0


class FullDisk(io.RawIOBase):
    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_the_disk_refuses_is_told_with_what_is_needed_and_what_is_free(tmp_path):
    def too_large(writer: StoreWriter) -> None:
        writer.expected_rows = 400_000_000
        split = writer.split("train", {"targets": Column("int32")})
        for _ in range(3):
            split.append(targets=np.zeros(1000))
        file = split._files["train/targets.bin"]
        file.close()
        file._file = FullDisk()
        split.append(targets=np.zeros(1000))

    message = (
        r"^data\.cache: no space left in \S+: needs about 1,600 MB, [\d,]+ MB free\. Make room"
        r" .*data\.cache=FOLDER\.$"
    )
    with pytest.raises(UserError, match=message):
        Cache(tmp_path / "cache").open_or_build("rows.csv", RECIPE, too_large)
    assert left_in(tmp_path / "cache") == []


@pytest.mark.parametrize("are_listed", [True, False])
def test_a_disk_that_gives_other_bytes_than_were_written_ends_the_build_after_some_tries(
    tmp_path, are_listed
):
    builds = []

    def build_on_bad_disk(writer: StoreWriter) -> None:
        builds.append(1)
        assert len(builds) < 9, "built without end"
        build(writer)
        file = writer._splits[0]._files["train/targets.bin"]._file
        file.flush()
        Path(file.name).write_bytes(bytes(file.tell()))

    cache = Cache(tmp_path)
    with pytest.raises(
        UserError, match=r"^cache /\S+: the store is damaged just after it was built"
    ):
        if are_listed:
            with pytest.warns(UserWarning, match="is damaged"):
                cache.open_or_build("rows.csv", RECIPE, build_on_bad_disk)
        else:
            cache.open_or_build_key(recipe_key(RECIPE), "rows.csv", build_on_bad_disk)
    assert len(builds) == 3


def test_a_damaged_unit_is_renamed_before_it_is_removed(tmp_path):
    key = recipe_key(RECIPE)
    cache = Cache(tmp_path)
    folder = cache.open_or_build_key(key, "rows.csv", build).folder
    (folder / "labels.json").write_text("{}", encoding="utf-8")
    held = os.open(folder, os.O_RDONLY)
    try:
        assert cache.open_or_build_key(key, "rows.csv", build).read_text("labels.json") == "[]"
        assert os.fstat(held).st_ino != (tmp_path / key).stat().st_ino
    finally:
        os.close(held)
    assert left_in(tmp_path) == [key]


def test_errors_of_a_source_are_not_told_as_the_caches(tmp_path):
    def unreadable(writer: StoreWriter) -> None:
        build(writer)
        raise OSError(errno.EIO, "the source's disk")

    with pytest.raises(OSError, match="the source's disk"):
        Cache(tmp_path).open_or_build("rows.csv", RECIPE, unreadable)
    assert left_in(tmp_path) == []


REFUSALS = {
    errno.ENOSPC: r"no space left in /\S+: needs about 12 MB, [\d,.]+ MB free\. Mend it\.",
    errno.EDQUOT: r"over your quota in /\S+: needs about 12 MB, [\d,.]+ MB free\. Mend it\.",
    errno.EROFS: r"/\S+ is on a disk that can only be read\. Mend it\.",
    errno.EACCES: r"no permission to write in /\S+\. Mend it\.",
    errno.EIO: r"the disk of /\S+ gives errors: it may be failing\. Mend it\.",
    errno.ENOTDIR: r"cannot write in /\S+: Not a directory\. Mend it\.",
}


@pytest.mark.parametrize("code", REFUSALS)
def test_each_refusal_has_its_words(tmp_path, code):
    error = out_of_space(
        OSError(code, os.strerror(code)), tmp_path / "not/there", 12_300_000, "here", "Mend it."
    )
    assert re.fullmatch("here: " + REFUSALS[code], str(error))


def test_a_cache_in_the_place_of_a_file_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError,
        match=(
            r"data\.cache: cannot write in .*file/cache: Not a directory\. Set data\.cache=FOLDER"
        ),
    ):
        Cache(tmp_path / "file" / "cache").open_or_build("rows.csv", RECIPE, build)


def test_entries_and_clearing(tmp_path):
    cache = Cache(tmp_path)
    _, report = cache.open_or_build("rows.csv", RECIPE, build)
    assert [(entry.key, entry.rows) for entry in cache.entries()] == [(report.key, {"train": 10})]
    with pytest.raises(UserError, match="no store 'nope'"):
        cache.clear("nope")
    assert cache.clear() == 1
    assert cache.entries() == []


rows_of_tokens = st.lists(st.lists(st.integers(0, 65_535), max_size=6), min_size=1, max_size=20)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows_of_tokens, st.integers(1, 7))
def test_what_is_written_in_any_blocks_is_read_back(tmp_path_factory, rows, block):
    folder = tmp_path_factory.mktemp("store")
    writer = StoreWriter(folder)
    split = writer.split(
        "train", {"tokens": Column("uint16", ragged=True), "bits": Column("uint8", width=4)}
    )
    for start in range(0, len(rows), block):
        some = rows[start : start + block]
        lengths = np.array([len(row) for row in some])
        split.append(
            tokens=(np.array([token for row in some for token in row]), lengths),
            bits=np.tile(np.arange(4), (len(some), 1)),
        )
    writer.close({})
    opened = Store(folder).splits["train"]
    column = opened.columns["tokens"]
    assert isinstance(column, Ragged)
    read = [
        column.values[column.offsets[i] : column.offsets[i + 1]].tolist()
        for i in range(opened.num_rows)
    ]
    assert read == rows
    assert column.lengths.tolist() == [len(row) for row in rows]
    assert opened.fixed("bits").shape == (len(rows), 4)
    assert damaged_files(folder) == []
