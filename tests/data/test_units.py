"""Texts encoded by the unit: whichever process encodes them, and whenever, the store is the same to
the byte.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.data.wordpieces import train_wordpieces
from tests.params import at_once
from tests.refusals import refused

from flatout import TextDataConfig
from flatout.data.store.cache import Cache, shards_of
from flatout.data.store.store import Ragged, Store, read_manifest
from flatout.data.tables.formats import csv_file
from flatout.data.texts import encoded_units, encoding_pass, vocabulary_pass
from flatout.data.texts.data import TextData
from flatout.data.texts.parts import encode_part
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.distributed.engine import in_processes
from flatout.distributed.processes import wait_until_warm, warm_start
from flatout.errors import UserError

FILES = 8
ROWS = 50
UNIT = 100
"""Rows of a unit: two files."""


def write_files(folder: Path, files: int = FILES) -> str:
    folder.mkdir(exist_ok=True)
    for number in range(files):
        rows = [
            f"w{number * 7 + row} likes w{row * row % 41} of {'x' * (row % 9)}y,{'ab'[row % 2]}"
            for row in range(ROWS)
        ]
        (folder / f"part-{number}.csv").write_text(
            "\n".join(["text,label", *rows, ""]), encoding="utf-8"
        )
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_wordpieces([f"w{number} likes of xxy" for number in range(60)]).save(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(encoded_units, "UNIT_ROWS", 2 * UNIT)


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """How many texts each call encoded."""
    counts: list[int] = []
    encode = encoding_pass.encode_texts

    def counting(encoder: object, texts: pa.Array, *how: Any) -> Any:
        counts.append(len(texts))
        return encode(encoder, texts, *how)

    monkeypatch.setattr(encoding_pass, "encode_texts", counting)
    return counts


def data_of(source: str, cache: Path, **settings: Any) -> TextData:
    return TextData(source=source, cache=str(cache), **settings)


def built(source: str, cache: Path, **settings: Any) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The bytes of every column of a store, wherever they lie, and its facts."""
    data = data_of(source, cache, **settings)
    data.prepare_data()
    store = data.store
    found = {"tokenizer.json": store.read_text("tokenizer.json").encode()}
    for split in store.splits.values():
        for name, column in split.columns.items():
            path = f"{split.name}/{name}"
            if isinstance(column, Ragged):
                found[f"{path} lengths"] = column.lengths.tobytes()
                found[path] = b"".join(
                    column.values[begin : begin + length].tobytes()
                    for begin, length in zip(
                        column.offsets[:-1].tolist(), column.lengths.tolist(), strict=True
                    )
                )
                assert column.offsets[-1] == len(column.values)
            else:
                found[path] = column.tobytes()
    return found, store.facts


def shards_in(cache: Path) -> dict[str, set[str]]:
    """The shards of each store of a cache."""
    return {entry.key: shards_of([entry]) for entry in Cache(cache).entries()}


def units_in(cache: Path | str) -> list[Path]:
    return sorted(path for path in Cache(cache).of_units().folder.glob("*") if path.is_dir())


WAYS: dict[str, dict[str, Any]] = {
    "words": {},
    "word pieces": {"vocabulary": VocabularyConfig(kind=VocabularyKind.wordpiece, size=200)},
    "texts alone": {"problem": "none"},
    "cut": {"max_length": 5},
    "groups": {"split_by": "group", "group": "text"},
}
LONG: dict[str, dict[str, Any]] = {
    "windows": {
        "long": "windows",
        "window": 6,
        "overlap": 2,
        "max_length": 24,
    },
    "both ends": {"long": "head_tail", "max_length": 6},
}


@pytest.mark.parametrize("way", at_once("windows", *list(WAYS)[:2], of=[*WAYS, *LONG], seconds=1))
def test_parts_joined_are_the_store_that_is_built_at_once(
    way, tokenizer, tmp_path, monkeypatch, encoded
):
    settings = WAYS[way] if way in WAYS else LONG[way] | {"tokenizer": tokenizer}
    source = write_files(tmp_path / "rows")
    monkeypatch.setattr(encoded_units, "UNIT_ROWS", 1 << 30)
    whole, facts = built(source, tmp_path / "whole", **settings)
    monkeypatch.setattr(encoded_units, "UNIT_ROWS", 2 * UNIT)
    by_units, unit_facts = built(source, tmp_path / "units", **settings)
    config = data_of(source, tmp_path / "parts", **settings).config
    done = [encode_part(config, number, 3) for number in (3, 1, 2)]
    assert sum(units for units, _ in done) == FILES * ROWS // UNIT
    encoded.clear()
    joined, joined_facts = built(source, tmp_path / "parts", **settings)
    assert not encoded
    assert by_units == joined == whole
    assert joined_facts == unit_facts == facts
    [(key, shards)] = shards_in(tmp_path / "parts").items()
    assert shards == {path.name for path in units_in(tmp_path / "parts")}
    assert len(shards) == FILES * ROWS // UNIT
    assert not (tmp_path / "parts" / key / "train" / "tokens.bin").exists()
    assert shards_in(tmp_path / "units") == {key: shards}
    assert not any(shards_in(tmp_path / "whole").values())


def test_a_damaged_unit_is_encoded_again_and_kept(tokenizer, tmp_path, encoded):
    config = data_of(write_files(tmp_path / "rows"), tmp_path / "cache", tokenizer=tokenizer).config
    encode_part(config, 1, 1)
    units = Cache(config.cache).of_units().folder
    damaged = sorted(path for path in units.glob("*") if path.is_dir())[0]
    for file in damaged.glob("**/*.bin"):
        file.unlink()
    encoded.clear()
    assert encode_part(config, 1, 1)[1] == FILES * ROWS // UNIT - 1
    assert sum(encoded) == UNIT
    encoded.clear()
    assert encode_part(config, 1, 1)[1] == FILES * ROWS // UNIT
    assert not encoded


def test_a_part_that_is_begun_again_encodes_nothing_twice(tokenizer, tmp_path, encoded):
    config = data_of(write_files(tmp_path / "rows"), tmp_path / "cache", tokenizer=tokenizer).config
    assert encode_part(config, 1, 2) == (2, 0)
    encoded.clear()
    assert encode_part(config, 1, 2) == (2, 2)
    assert not encoded


def killed_at_unit(source: str, cache: Path, tokenizer: str, number: int) -> None:
    """Build in a process that is killed when a unit of this number is to be written."""

    def build() -> None:
        units = iter(range(number))
        write = Cache.open_or_build_key

        def writing(*given: Any) -> Any:
            if next(units, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*given)

        Cache.open_or_build_key = writing
        data_of(source, cache, tokenizer=tokenizer).prepare_data()

    process = multiprocessing.get_context("fork").Process(target=build)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_build_killed_three_times_repeats_only_the_unit_it_was_at(
    tokenizer, tmp_path, encoded, capfd
):
    source = write_files(tmp_path / "rows")
    cache = tmp_path / "cache"
    for number in (1, 1, 1):
        killed_at_unit(source, cache, tokenizer, number)
    files, facts = built(source, cache, tokenizer=tokenizer)
    assert sum(encoded) == (FILES * ROWS // UNIT - 3) * UNIT
    assert "cache: 3 of 4 units were encoded before" in capfd.readouterr().err
    assert (files, facts) == built(source, tmp_path / "fresh", tokenizer=tokenizer)


def test_a_source_that_has_grown_encodes_what_is_new(tokenizer, tmp_path, encoded):
    source = write_files(tmp_path / "rows")
    cache = tmp_path / "cache"
    built(source, cache, tokenizer=tokenizer)
    write_files(tmp_path / "rows", FILES + 1)
    encoded.clear()
    grown = built(source, cache, tokenizer=tokenizer)
    assert sum(encoded) == ROWS
    assert grown == built(source, tmp_path / "fresh", tokenizer=tokenizer)


def test_another_length_or_another_text_is_another_unit(tokenizer, tmp_path, encoded):
    source = write_files(tmp_path / "rows")
    cache = tmp_path / "cache"
    built(source, cache, tokenizer=tokenizer)
    encoded.clear()
    built(source, cache, tokenizer=tokenizer, max_length=100)
    assert sum(encoded) == FILES * ROWS
    first = tmp_path / "rows" / "part-0.csv"
    first.write_text(
        first.read_text(encoding="utf-8").replace("w1 likes", "w1 liked"), encoding="utf-8"
    )
    encoded.clear()
    built(source, cache, tokenizer=tokenizer)
    assert sum(encoded) == UNIT


def test_a_damaged_unit_is_encoded_again(tokenizer, tmp_path, encoded):
    source = write_files(tmp_path / "rows")
    cache = tmp_path / "cache"
    encode_part(data_of(source, cache, tokenizer=tokenizer).config, 1, 1)
    unit = sorted(path for path in Cache(cache).of_units().folder.glob("*") if path.is_dir())[0]
    (unit / "train" / "tokens.bin").write_bytes(
        b"\0" * (unit / "train" / "tokens.bin").stat().st_size
    )
    encoded.clear()
    assert built(source, cache, tokenizer=tokenizer) == built(
        source, tmp_path / "fresh", tokenizer=tokenizer
    )
    assert sum(encoded) == UNIT + FILES * ROWS


@pytest.mark.parametrize("block_bytes", at_once(5_000, of=[5_000, 12_000, 1 << 21], seconds=1))
@pytest.mark.parametrize("damage", ["first", *at_once(of=["last", "all but one"], seconds=1)])
def test_units_that_end_at_other_rows_lose_no_row_and_repeat_none(
    block_bytes, damage, tokenizer, tmp_path, encoded, monkeypatch
):
    source = str(tmp_path / "rows.csv")
    rows = [
        f"w{row} likes w{row * row % 41} of {'x' * (row % 9)}y,{'ab'[row % 2]}"
        for row in range(3_000)
    ]
    Path(source).write_text("\n".join(["text,label", *rows, ""]), encoding="utf-8")
    whole = built(source, tmp_path / "whole", tokenizer=tokenizer)
    config = data_of(source, tmp_path / "cache", tokenizer=tokenizer).config
    monkeypatch.setattr(csv_file, "_CSV_BLOCK_BYTES", 8_000)
    assert encode_part(config, 1, 1)[0] > 5
    units = sorted(units_in(config.cache), key=first_row)
    for unit in {"first": units[:1], "last": units[-1:], "all but one": units[:3] + units[4:]}[
        damage
    ]:
        shutil.rmtree(unit)
    monkeypatch.setattr(csv_file, "_CSV_BLOCK_BYTES", block_bytes)
    assert built(source, tmp_path / "cache", tokenizer=tokenizer) == whole
    encoded.clear()
    encode_part(config, 1, 1)
    assert not encoded


def test_parts_whose_readers_end_units_at_other_rows_are_joined_to_the_same_store(
    tokenizer, tmp_path, monkeypatch
):
    source = str(tmp_path / "rows.csv")
    rows = [f"w{row} likes w{row * row % 41},{'ab'[row % 2]}" for row in range(2_000)]
    Path(source).write_text("\n".join(["text,label", *rows, ""]), encoding="utf-8")
    whole = built(source, tmp_path / "whole", tokenizer=tokenizer)
    config = data_of(source, tmp_path / "cache", tokenizer=tokenizer).config
    for number, block_bytes in ((1, 8_000), (2, 5_000)):
        monkeypatch.setattr(csv_file, "_CSV_BLOCK_BYTES", block_bytes)
        assert encode_part(config, number, 2)[0] > 2
    assert built(source, tmp_path / "cache", tokenizer=tokenizer) == whole


def first_row(unit: Path) -> int:
    """The least number of a row of a unit."""
    splits = Store(unit, read_manifest(unit)).splits.values()
    return min(int(split.fixed("rows")[0]) for split in splits)


@pytest.fixture
def trained(monkeypatch) -> list[list[str]]:
    """The texts that each vocabulary was made of."""
    found: list[list[str]] = []
    train = vocabulary_pass.train_encoder

    def training(texts: Iterable[pa.Array], *given: Any) -> Any:
        kept = list(texts)
        found.append([text for block in kept for text in block.to_pylist()])
        return train(iter(kept), *given)

    monkeypatch.setattr(vocabulary_pass, "train_encoder", training)
    return found


def test_a_vocabulary_is_made_once_for_all_parts_and_for_the_build_that_joins_them(
    tmp_path, trained
):
    source = write_files(tmp_path / "rows")
    config = data_of(source, tmp_path / "cache").config
    for number in (2, 1):
        encode_part(config, number, 2)
    joined = built(source, tmp_path / "cache")
    assert len(trained) == 1
    assert joined == built(source, tmp_path / "fresh")
    built(
        source,
        tmp_path / "cache",
        vocabulary=VocabularyConfig(kind=VocabularyKind.wordpiece, size=200),
    )
    assert len(trained) == 3


def test_a_large_source_gives_a_sample_of_texts_to_its_vocabulary_in_whatever_order_they_stand(
    tmp_path, trained, monkeypatch
):
    monkeypatch.setattr(vocabulary_pass, "VOCABULARY_ROWS", 80)
    source = write_files(tmp_path / "rows")
    _, facts = built(source, tmp_path / "cache", split_by="content")
    (tmp_path / "turned").mkdir()
    for number in range(FILES):
        (tmp_path / "rows" / f"part-{number}.csv").rename(
            tmp_path / "turned" / f"part-{FILES - number}.csv"
        )
    built(str(tmp_path / "turned"), tmp_path / "cache", split_by="content")
    first, second = trained
    assert 40 < len(first) < 120
    assert sorted(first) == sorted(second) != first
    assert "vocabulary: of some 80 training rows, taken by a hash of the text" in facts["lines"]


def test_a_unit_has_no_rows_of_two_pieces_and_a_part_takes_whole_ones(
    tokenizer, tmp_path, encoded, monkeypatch
):
    monkeypatch.setattr(encoded_units, "UNIT_ROWS", 2 * ROWS)
    config = data_of(write_files(tmp_path / "rows"), tmp_path / "cache", tokenizer=tokenizer).config
    assert [encode_part(config, number, 3) for number in (1, 2, 3)] == [
        (3, 0),
        (3, 0),
        (2, 0),
    ]
    assert sum(encoded) == FILES * ROWS
    monkeypatch.setattr(encoded_units, "UNIT_ROWS", FILES * ROWS)  # two pieces for three parts
    config = data_of(config.source, tmp_path / "another", tokenizer=tokenizer).config
    assert [encode_part(config, number, 3)[0] for number in (1, 2, 3)] == [1, 1, 0]


@pytest.fixture
def warm_server():
    """The server whose children parts are, with all its imports done."""
    warm_start()
    wait_until_warm()


def test_parts_that_processes_do_at_once_are_the_store_of_one(
    tokenizer, tmp_path, encoded, warm_server
):
    source = write_files(tmp_path / "rows")
    config = data_of(source, tmp_path / "cache", tokenizer=tokenizer).config
    assert in_processes(partial(small_part, config), 2) == [(2, 0), (2, 0)]
    joined = built(source, tmp_path / "cache", tokenizer=tokenizer)
    assert not encoded
    assert joined == built(source, tmp_path / "fresh", tokenizer=tokenizer)


def small_part(config: TextDataConfig, number: int, count: int) -> tuple[int, int]:
    encoded_units.UNIT_ROWS = 2 * UNIT
    return encode_part(config, number, count)


def test_a_mistake_in_a_part_and_a_part_that_is_killed_end_all_with_one_message(warm_server):
    with pytest.raises(UserError, match=r"^data.source: part 1 is wrong$"):
        in_processes(wrong_part, 2)
    with refused("--parts", "killed", fix="The same command"):
        in_processes(killed_part, 2)


def wrong_part(number: int, count: int) -> None:
    if number == 1:
        raise UserError("data.source", "part 1 is wrong")


def killed_part(number: int, count: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
