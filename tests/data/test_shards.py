"""A store whose tokens lie in shards: it is read as one that has them itself, and whatever harms a
shard is named.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.wordpieces import train_wordpieces
from tests.params import at_once

from flatout.cli.cache import show, verify
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import FeedKind, PlanSettings
from flatout.data.store.cache import Cache
from flatout.data.store.store import Column, DamagedStore, Store, StoreWriter, read_manifest
from flatout.data.texts import encoded_units, encoding_pass
from flatout.data.texts.data import TextData
from flatout.data.texts.parts import encode_part
from flatout.errors import UserError
from flatout.tasks.frozen_outputs import rows_between

FILES = 6
ROWS = 40
TASKS: dict[str, dict[str, Any]] = {
    "classes": {},
    "several labels": {"problem": "multi", "label_delimiter": "|"},
    "numbers": {"problem": "regression"},
    "texts alone": {"problem": "none"},
}


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(encoded_units, "UNIT_ROWS", 2 * ROWS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_wordpieces([f"w{number} x y new words" for number in range(90)]).save(folder)
    return str(folder)


def label_of(row: int, problem: str) -> str:
    if problem == "multi":
        return "|".join(name for place, name in enumerate("cab") if row % (place + 2) == 0) or "d"
    return str(row % 7 / 2) if problem == "regression" else "ab"[row % 2]


def write_files(
    folder: Path, numbers: Iterator[int] | range = range(FILES), problem: str = ""
) -> str:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        rows = [
            f"w{number * 7 + row} {'x ' * (row % 9)}y,{label_of(row, problem)}"
            for row in range(ROWS)
        ]
        (folder / f"part-{number}.csv").write_text(
            "\n".join(["text,label", *rows, ""]), encoding="utf-8"
        )
    return str(folder)


def data_of(source: str, cache: Path, **given: Any) -> TextData:
    data = TextData(source=source, cache=str(cache), max_length=16, **given)
    data.prepare_data()
    data.setup()
    return data


def in_one(source: str, cache: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> TextData:
    """The data in a store that has its tokens itself."""
    with monkeypatch.context() as once:
        once.setattr(encoded_units, "UNIT_ROWS", 1 << 30)
        return data_of(source, cache, **given)


def units_in(cache: Path) -> list[Path]:
    return sorted(path for path in (cache / ".units").glob("*") if path.is_dir())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", [FeedKind.threaded, *at_once(of=[FeedKind.resident], seconds=1)])
def test_batches_of_shards_are_those_of_one_store(task, kind, tmp_path, monkeypatch):
    source = write_files(tmp_path / "rows", problem=TASKS[task].get("problem", ""))
    sharded = data_of(source, tmp_path / "cache", **TASKS[task]).store
    whole = in_one(source, tmp_path / "whole", monkeypatch, **TASKS[task]).store
    assert len(units_in(tmp_path / "cache")) == FILES
    assert not units_in(tmp_path / "whole")
    assert sharded.facts == whole.facts
    plan = PlanSettings(rows_per_batch=16, shuffle=True)
    for split in whole.splits:
        pairs = list(
            zip(
                *(Feed(store.splits[split], plan, kind=kind) for store in (sharded, whole)),
                strict=True,
            )
        )
        assert sum(batch.num_rows for batch, _ in pairs) == whole.splits[split].num_rows
        for batch, other in pairs:
            for name in ("tokens", "offsets", "lengths", "rows", "targets"):
                one = getattr(batch, name)
                two = getattr(other, name)
                assert one is two is None or torch.equal(one, two), name
        assert np.array_equal(
            sharded.splits[split].fixed("rows"), whole.splits[split].fixed("rows")
        )


def test_rows_that_follow_each_other_over_the_end_of_a_shard_are_theirs(tmp_path, monkeypatch):
    source = write_files(tmp_path / "rows")
    sharded = data_of(source, tmp_path / "cache").store
    whole = in_one(source, tmp_path / "whole", monkeypatch).store
    plan = PlanSettings(rows_per_batch=64, shuffle=False)
    for start, stop in ((0, 90), (30, 41), (39, 80)):
        sides = [
            Feed(rows_between(store.splits["train"], start, stop), plan)
            for store in (sharded, whole)
        ]
        for batch, other in zip(*sides, strict=True):
            assert torch.equal(batch.tokens, other.tokens)


def test_of_one_parquet_file_a_part_encodes_row_groups_of_its_own(tokenizer, tmp_path, monkeypatch):
    rows = [
        {"text": f"w{row} {'x ' * (row % 9)}y", "label": "ab"[row % 2]}
        for row in range(FILES * ROWS)
    ]
    source = str(tmp_path / "rows.parquet")
    cache = tmp_path / "cache"
    read = list[list[int]]()
    pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=ROWS)
    iter_batches = pq.ParquetFile.iter_batches

    def reading(file: pq.ParquetFile, size: int, groups: range, columns: list[str]) -> Any:
        read.append(list(groups))
        return iter_batches(file, size, groups, columns)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", reading)
    config = TextData(source=source, cache=str(cache), tokenizer=tokenizer, max_length=16).config
    encode_part(config, 1, 1)
    assert len(units_in(cache)) == FILES
    shutil.rmtree(cache / ".units")
    for number in (2, 1, 3):
        read.clear()
        assert encode_part(config, number, 3) == (2, 0)
        assert read[-2:] == [[number - 1], [number + 2]]
    store = data_of(source, cache, tokenizer=tokenizer).store
    whole = in_one(source, tmp_path / "whole", monkeypatch, tokenizer=tokenizer).store
    assert store.facts == whole.facts
    assert len(units_in(cache)) == FILES
    for name, split in whole.splits.items():
        assert np.array_equal(store.splits[name].fixed("rows"), split.fixed("rows"))
        assert np.array_equal(store.splits[name].fixed("targets"), split.fixed("targets"))
        assert np.array_equal(store.splits[name].lengths("tokens"), split.lengths("tokens"))


@pytest.mark.parametrize("harm", ["missing", "changed", "cut"])
def test_a_shard_that_is_missing_or_changed_is_named_and_encoded_again(
    harm, tmp_path, monkeypatch, capsys
):
    source = write_files(tmp_path / "rows")
    cache = tmp_path / "cache"
    before = data_of(source, cache).store
    file = units_in(cache)[2] / "train" / "tokens.bin"
    content = file.read_bytes()
    file.unlink()
    if harm != "missing":
        file.write_bytes(content[:-2] if harm == "cut" else b"\1" * len(content))
    with pytest.raises(SystemExit, match="1"):
        verify(Cache(cache))
    assert (
        f"damaged: ../.units/{file.parent.parent.name}/train/tokens.bin" in capsys.readouterr().out
    )
    with pytest.warns(
        UserWarning,
        match=rf"is damaged \(\.\./\.units/{file.parent.parent.name}/train/tokens.bin\)",
    ):
        after = data_of(source, cache).store
    assert f"{FILES - 1} of {FILES} units were encoded before" in capsys.readouterr().err
    assert file.read_bytes() == content
    assert after.facts == before.facts


def test_clearing_a_store_keeps_the_shards_that_another_one_has(tokenizer, tmp_path, capsys):
    source = write_files(tmp_path / "rows")
    cache = tmp_path / "cache"
    given = {"tokenizer": tokenizer}
    first = data_of(source, cache, split_by="content", **given).store.folder.name
    write_files(tmp_path / "rows", range(FILES, FILES + 2))
    second = data_of(source, cache, split_by="content", **given).store.folder.name
    assert f"{FILES} of {FILES + 2} units were encoded before" in capsys.readouterr().err
    show(Cache(cache), whole=False)
    assert f"MB in {FILES + 2} units of large stores" in capsys.readouterr().out
    Cache(cache).clear(first)
    assert len(units_in(cache)) == FILES + 2
    assert not Cache(cache).verify()[second]
    Cache(cache).clear(second)
    assert not units_in(cache)


def test_a_class_that_comes_with_more_rows_renumbers_the_others_without_encoding_them(
    tokenizer, tmp_path, capsys, monkeypatch
):
    source = write_files(tmp_path / "rows")
    cache = tmp_path / "cache"
    given = {"tokenizer": tokenizer}
    data_of(source, cache, split_by="content", **given)
    rows = "\n".join(f"new words {number} y,aa" for number in range(2 * ROWS))
    (tmp_path / "rows" / "part-9.csv").write_text(f"text,label\n{rows}\n", encoding="utf-8")
    grown = data_of(source, cache, split_by="content", **given).store
    assert f"{FILES} of {FILES + 1} units were encoded before" in capsys.readouterr().err
    whole = in_one(source, tmp_path / "whole", monkeypatch, split_by="content", **given).store
    assert grown.facts == whole.facts
    assert grown.facts["classes"] == ["a", "aa", "b"]
    for name, split in whole.splits.items():
        assert np.array_equal(grown.splits[name].fixed("targets"), split.fixed("targets"))


def test_a_file_that_changes_while_it_is_encoded_leaves_no_unit(tokenizer, tmp_path, monkeypatch):
    source = write_files(tmp_path / "rows")
    cache = tmp_path / "cache"
    encode = encoding_pass.encode_texts

    def changing(*given: Any) -> Any:
        for path in Path(source).iterdir():
            path.write_text(
                path.read_text(encoding="utf-8").replace("w1 ", "w2 "), encoding="utf-8"
            )
        return encode(*given)

    monkeypatch.setattr(encoding_pass, "encode_texts", changing)
    with pytest.raises(UserError, match="changed"):
        encode_part(TextData(source=source, cache=str(cache), tokenizer=tokenizer).config, 1, 1)
    assert not units_in(cache)


def test_files_of_shards_are_not_held_open(tmp_path):
    data_of(write_files(tmp_path / "rows"), tmp_path / "cache")
    before = len(list(Path("/proc/self/fd").iterdir()))
    [key] = [entry.key for entry in Cache(tmp_path / "cache").entries()]
    store = Cache(tmp_path / "cache").opened(key)
    assert store is not None
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    store.splits["train"].read_single_pages()
    values = store.splits["train"].ragged("tokens").values
    maps = Path("/proc/self/smaps").read_text(encoding="ascii").split("VmFlags:")
    is_random = [
        "tokens.bin" in one and "rr" in two.split("\n")[0] for one, two in itertools.pairwise(maps)
    ]
    assert sum(is_random) == FILES
    assert values.any()


def test_a_store_larger_than_memory_and_swap_is_opened(tmp_path):
    size = 2 * (psutil.virtual_memory().total + psutil.swap_memory().total) // 4096 * 4096
    write_store(tmp_path / "store", [[3, 4]])
    with (tmp_path / "store" / "train" / "tokens.bin").open("r+b") as file:
        file.truncate(size)  # a hole, which takes no room
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"]["train/tokens.bin"]["bytes"] = size
    values = Store(tmp_path / "store", manifest).splits["train"].ragged("tokens").values
    assert values.nbytes == size
    assert values[:3].tolist() == [3, 4, 0]
    assert values[-1] == 0


def write_store(folder: Path, rows: list[list[int]], shards: list[Store] | None = None) -> Store:
    folder.mkdir(parents=True)
    writer = StoreWriter(folder)
    split = writer.split(
        "train", {"tokens": Column("uint16", ragged=True)}, "tokens" if shards else None
    )
    for shard in shards or []:
        split.append_shard(shard)
    for row in rows:
        split.append(tokens=(np.array(row, np.uint16), np.array([len(row)], np.int32)))
    writer.close({"name": folder.name})
    return Store(folder)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 65_535), max_size=5), max_size=4), min_size=1, max_size=5
    )
)
def test_rows_of_any_shards_are_read_back(tmp_path_factory, shards):
    folder = tmp_path_factory.mktemp("cache")
    parts = [
        write_store(folder / ".units" / f"{number:020x}", rows)
        for number, rows in enumerate(shards)
    ]
    tokens = write_store(folder / "store", [], parts).splits["train"].ragged("tokens")
    begins = tokens.offsets[:-1].tolist()
    found = [
        tokens.values[begin:][:length].tolist()
        for begin, length in zip(begins, tokens.lengths, strict=True)
    ]
    assert found == [row for rows in shards for row in rows]
    assert tokens.offsets[-1] == len(tokens.values)
    assert read_manifest(folder / "store")["name"] == "store"


@pytest.mark.parametrize(
    "harm",
    [
        lambda manifest, shards: shards[1].__setitem__(1, 0),  # over the first one
        lambda manifest, shards: shards[1].__setitem__(1, 100),  # within a page
        lambda manifest, shards: shards[1].__setitem__(0, "../../secret.bin"),
        lambda manifest, shards: manifest["files"].pop(shards[0][0]),
        lambda manifest, shards: manifest["files"].__setitem__(
            "../../secret.bin", {"bytes": 2, "xxh3": ""}
        ),
        lambda manifest, shards: manifest["files"][shards[0][0]].__setitem__("bytes", 3),
    ],
)
def test_a_manifest_whose_shards_cannot_be_is_damaged(harm, tmp_path):
    parts = [write_store(tmp_path / ".units" / f"{number:020x}", [[1, 2]]) for number in range(2)]
    folder = write_store(tmp_path / "store", [], parts).folder
    manifest = json.loads((folder / "manifest.json").read_bytes())
    harm(manifest, manifest["shards"]["train/tokens"])
    content = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(content)
    (folder / "manifest.sum").write_text(xxhash.xxh3_128_hexdigest(content), encoding="ascii")
    with pytest.raises(DamagedStore):
        read_manifest(folder)
