"""Stores are found by content, built once, and never trusted when they are damaged."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.data.cache import Cache, recipe_key
from flatout.data.store import Column, Ragged, Store, StoreWriter, damaged_files
from flatout.errors import UserError

RECIPE = {"source": {"train": "abc"}, "max_length": 64, "vocabulary": {"size": 10}}


def build(writer: StoreWriter) -> None:
    split = writer.split("train", {"tokens": Column("uint16", ragged=True), "targets": Column("int32")})
    for start in (0, 5):
        split.append(tokens=(np.arange(15), np.full(5, 3)), targets=np.arange(start, start + 5))
    writer.write_text("labels.json", "[]")
    writer.facts["classes"] = ["a", "b"]


def refuse(writer: StoreWriter) -> None:
    raise AssertionError("must not be built again")


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
    assert list(tmp_path.iterdir()) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
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


def test_what_a_dead_builder_left_is_taken_away(tmp_path):
    left = tmp_path / f".building-{recipe_key(RECIPE)}-999999"
    left.mkdir()
    (left / "tokens.bin").touch()
    Cache(tmp_path).open_or_build("rows.csv", RECIPE, build)
    assert not left.exists()


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
    split = writer.split("train", {"tokens": Column("uint16", ragged=True), "bits": Column("uint8", width=4)})
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
    read = [column.values[column.offsets[i] : column.offsets[i + 1]].tolist() for i in range(opened.num_rows)]
    assert read == rows
    assert column.lengths.tolist() == [len(row) for row in rows]
    assert opened.fixed("bits").shape == (len(rows), 4)
    assert damaged_files(folder) == []
