"""What decides whether a store fits its source is the source's content: not its size, its time, or
its name.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.stores import open_store

from flatout.bits import preparation
from flatout.bits.settings import BitsDataConfig
from flatout.data.info import TextInfo
from flatout.data.tables.prints import NOTES
from flatout.data.tables.sources import open_source
from flatout.data.texts.settings import TextDataConfig
from flatout.data.tokens.vocabulary import VocabularyConfig
from flatout.errors import UserError

ROWS = 60


def csv_with(word: str) -> str:
    return "text,label\n" + "".join(f"row {i} {word},{'ab'[i % 2]}\n" for i in range(ROWS))


def put_csv(path: Path, word: str) -> Path:
    path.with_suffix(".csv").write_text(csv_with(word), encoding="utf-8")
    return path.with_suffix(".csv")


def put_gzipped_parquet(path: Path, word: str) -> Path:
    held = io.BytesIO()
    rows = {"text": [f"row {i} {word}" for i in range(ROWS)], "label": list("ab") * (ROWS // 2)}
    pq.write_table(pa.table(rows), held, compression="none", use_dictionary=False)
    path = path.with_suffix(".parquet.gz")
    path.write_bytes(gzip.compress(held.getvalue(), compresslevel=0, mtime=0))
    return path


def put_folder(path: Path, word: str) -> Path:
    for i in range(ROWS):
        file = path / "ab"[i % 2] / f"{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"row {i} {word}", encoding="utf-8")
    return path


KINDS: dict[str, Callable[[Path, str], Path]] = {
    "csv": put_csv,
    "parquet.gz": put_gzipped_parquet,
    "folder": put_folder,
}


def files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def words_of(data: TextInfo) -> set[str]:
    """Every word that training rows of the store hold."""
    tokens = np.unique(data.store.splits["train"].ragged("tokens").values)
    return {data.vocabulary.tokenizer.id_to_token(int(token)) for token in tokens}


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_in_place_of_the_same_size_and_time_is_trained_on(tmp_path, kind):
    def prepare() -> TextInfo:
        return open_store(
            TextDataConfig(source=str(path), vocabulary=VocabularyConfig(min_frequency=1))
        )

    path = KINDS[kind](tmp_path / "rows", "old")
    before = {file: file.stat() for file in files_of(path)}
    first = prepare()
    assert prepare().report.hit

    KINDS[kind](tmp_path / "rows", "new")
    for file, status in before.items():
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        after = file.stat()
        same = (status.st_size, status.st_mtime_ns, status.st_ino)
        assert (after.st_size, after.st_mtime_ns, after.st_ino) == same
    second = prepare()
    assert not second.report.hit
    assert second.report.key != first.report.key
    assert "new" in words_of(second)
    assert "old" not in words_of(second)
    assert "old" in words_of(first)


def test_records_edited_in_place_at_the_same_size_and_time_are_other_records(tmp_path):
    path = tmp_path / "people.csv"
    rows = [f"anna{i:03d},meier,{i:02x}ff" for i in range(100)]
    path.write_text("\n".join(["first,last,bloomfilter", *rows]) + "\n", encoding="utf-8")
    before = path.stat()

    def prepare():
        return open_store(BitsDataConfig(source=str(path)))

    first = prepare()
    path.write_text(path.read_text(encoding="utf-8").replace("ff\n", "0f\n"), encoding="utf-8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second = prepare()
    assert not second.report.hit
    assert [
        set(data.store.splits["train"].fixed("tokens")[:, 1].tolist()) for data in (first, second)
    ] == [{255}, {15}]


def test_records_that_change_while_they_are_read_end_the_build(tmp_path, monkeypatch):
    path = tmp_path / "people.csv"
    rows = [f"anna{i:03d},meier,{i:02x}ff" for i in range(100)]
    path.write_text("\n".join(["first,last,bloomfilter", *rows]) + "\n", encoding="utf-8")
    survey = preparation.survey_records

    def then_changed(*given: Any) -> Any:
        found = survey(*given)
        path.write_text(path.read_text(encoding="utf-8").replace("ff\n", "0f\n"), encoding="utf-8")
        return found

    monkeypatch.setattr(preparation, "survey_records", then_changed)
    with pytest.raises(UserError, match=r"people.csv changed while it was read"):
        open_store(BitsDataConfig(source=str(path)))
    assert not [
        path
        for path in (tmp_path / "cache").iterdir()
        if not path.name.startswith((".lock-", NOTES))
    ]


def test_a_file_that_changes_after_it_was_opened_is_read_as_it_is_now(tmp_path):
    path = put_gzipped_parquet(tmp_path / "rows", "old")
    table = open_source(str(path), where="data.train")
    put_gzipped_parquet(tmp_path / "rows", "new")
    fingerprint = table.fingerprint()
    assert fingerprint == open_source(str(path), where="data.train").fingerprint()
    assert next(table.blocks(["text"])).column("text")[0].as_py() == "row 0 new"


def test_a_file_whose_columns_change_after_it_was_opened_is_refused(tmp_path):
    path = put_csv(tmp_path / "rows", "old")
    table = open_source(str(path), where="data.train")
    path.write_text(csv_with("old").replace("text,label", "label,text"), encoding="utf-8")
    with pytest.raises(UserError, match=r"rows.csv changed while it was read"):
        table.fingerprint()
