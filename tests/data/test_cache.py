"""Stores are found by content, built once, and never trusted when they are damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.caches import RECIPE, build, left_in, refuse

from flatout.data.store import cache as cache_module
from flatout.data.store import store as store_module
from flatout.data.store.cache import Cache, recipe_key
from flatout.data.store.store import (
    MANIFEST,
    MANIFEST_SUM,
    Column,
    Ragged,
    Store,
    StoreWriter,
    damaged_files,
)
from flatout.errors import UserError


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
