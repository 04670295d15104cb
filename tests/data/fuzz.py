"""Tables of every format, damaged in every way: no traceback ever, and what is accepted
round-trips.

`python -m tests.data.fuzz 10000` runs so many cases, each time others, and says how many were
accepted.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flatout.data.checks.checkup import check
from flatout.data.tables.sources import open_source
from flatout.data.texts.settings import TextDataConfig
from flatout.errors import UserError

Row = dict[str, Any]
Rows = list[Row]

texts = st.text(st.characters(codec="utf-8"), max_size=12)
labels = st.sampled_from(["a", "b", "b ", "B", "NA", "007", "1.0", "", "é", "<x>"]) | texts


def as_csv(rows: Rows, delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(rows[0] if rows else ["text", "label"])
    writer.writerows(row.values() for row in rows)
    return text.getvalue().encode()


def as_jsonl(rows: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_parquet(rows: Rows) -> bytes:
    file = io.BytesIO()
    pq.write_table(table_of(rows), file)
    return file.getvalue()


def as_arrow(rows: Rows) -> bytes:
    file = io.BytesIO()
    pyarrow.feather.write_feather(table_of(rows), file, compression="uncompressed")
    return file.getvalue()


def as_arrow_stream(rows: Rows) -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table_of(rows).schema) as stream:
        stream.write_table(table_of(rows))
    return file.getvalue()


def table_of(rows: Rows) -> pa.Table:
    return pa.Table.from_pylist(rows, pa.schema([("text", pa.string()), ("label", pa.string())]))


def as_conll(rows: Rows) -> bytes:
    """Each row a sentence: the words of its text, tagged by its label."""
    sentences = []
    for row in rows:
        tag = ["O", "B-a", "I-a", "E-b"][len(row["label"]) % 4]
        words = ["".join(word.split()) or "x" for word in row["text"].split()] or ["x"]
        sentences.append("\n".join(f"{word}\t{tag}" for word in words))
    return "\n\n".join(sentences).encode()


TEXTS = "texts"
"""A folder with a folder a class; the bytes are those of one of its files."""
FORMATS: dict[str, Callable[[Rows], bytes]] = {
    "rows.csv": as_csv,
    "rows.tsv": lambda rows: as_csv(rows, "\t"),
    "rows.csv.gz": lambda rows: gzip.compress(as_csv(rows)),
    "rows.jsonl": as_jsonl,
    "rows.json": lambda rows: json.dumps(rows).encode(),
    "rows.jsonl.gz": lambda rows: gzip.compress(as_jsonl(rows)),
    "rows.parquet": as_parquet,
    "rows.arrow": as_arrow,
    "rows.feather": as_arrow_stream,
    "rows.parquet.gz": lambda rows: gzip.compress(as_parquet(rows)),
    "rows.conll": as_conll,
    TEXTS: lambda rows: "\n".join(row["text"] for row in rows).encode(),
}


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Some bytes after a few accidents."""
    for accident in draw(
        st.lists(st.sampled_from(["flip", "cut", "drop", "insert", "repeat", "swap"]), max_size=3)
    ):
        start = draw(st.integers(0, len(data)))
        stop = min(len(data), start + draw(st.integers(1, 40)))
        if accident == "flip" and start < len(data):
            data = (
                data[:start]
                + bytes([data[start] ^ (1 << draw(st.integers(0, 7)))])
                + data[start + 1 :]
            )
        elif accident == "cut":
            data = data[:start]
        elif accident == "drop":
            data = data[:start] + data[stop:]
        elif accident == "insert":
            data = (
                data[:start]
                + draw(
                    st.binary(max_size=6) | st.sampled_from([b'"', b"\0", b"\xff\xfe", b"\n", b"{"])
                )
                + data[start:]
            )
        elif accident == "repeat":
            data = data[:stop] + data[start:stop] + data[stop:]
        elif accident == "swap":
            data = data[start:] + data[:start]
    return data


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Rows, bytes, dict[str, Any]]:
    """A file's name, the rows that were written, its bytes, and settings to read it with."""
    values = draw(st.lists(st.tuples(texts, labels), max_size=12))
    rows = [{"text": text, "label": label} for text, label in values]
    name = draw(st.sampled_from(sorted(FORMATS)))
    whole = FORMATS[name](rows)
    problem = draw(st.sampled_from(["single", "single", "multi", "regression", "tags"]))
    return (
        name,
        rows,
        draw(st.just(whole) | damaged(whole)),
        {"problem": problem, "label_delimiter": "|"},
    )


def run_case(folder: Path, case: tuple[str, Rows, bytes, dict[str, Any]]) -> str:
    """Check a file and read it back; what came of it."""
    name, rows, data, given_settings = case
    path = folder / name
    if name == TEXTS:
        for label in ("a", "b"):
            (path / label).mkdir(parents=True)
            (path / label / "1.txt").write_bytes(b"fine")
        (path / "a" / "2.txt").write_bytes(data)
    else:
        path.write_bytes(data)
    try:
        check(TextDataConfig(train=str(path), text="text", label="label", **given_settings))
    except UserError as mistake:
        assert "Traceback" not in str(mistake) and str(mistake).count("\n") == 0, repr(str(mistake))
        outcome = "refused"
    else:
        outcome = "accepted"
    try:
        table = open_source(str(path), where="data.train")
        read = [row for block in table.blocks(table.columns) for row in block.to_pylist()]
    except UserError:
        return outcome if outcome == "refused" else "refused"
    if data == FORMATS[name](rows) and rows and name not in ("rows.conll", TEXTS):
        assert read == rows, (read, rows)
    again = folder / "again.parquet"
    pq.write_table(pa.Table.from_batches(list(table.blocks(table.columns))), again)
    back = open_source(str(again), where="data.train")
    assert [row for block in back.blocks(back.columns) for row in block.to_pylist()] == read
    return outcome


def fuzz(number: int, *, is_fixed: bool) -> Counter[str]:
    """Run so many cases; how many were accepted and refused."""
    counts: Counter[str] = Counter()

    @settings(
        max_examples=number,
        derandomize=is_fixed,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def run(case: tuple[str, Rows, bytes, dict[str, Any]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            counts[run_case(Path(folder), case)] += 1

    run()
    return counts


if __name__ == "__main__":
    print(dict(fuzz(int(sys.argv[1]) if len(sys.argv) > 1 else 2_000, is_fixed=False)))
