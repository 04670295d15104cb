"""Reading and checking a table, against `datasets` reading it and checking nothing."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import xxhash

from benchmarks.claim import (
    Claim,
    Options,
    at_most,
    bounded,
    in_turn,
    measured_apart,
    peak_memory_gb,
    reaching,
)
from flatout.data.checks.checkup import check
from flatout.data.checks.survey import TextSurvey
from flatout.data.samples.headlines import HeadlinesConfig, HeadlinesTable
from flatout.data.texts.opening import open_source
from flatout.data.texts.settings import TextDataConfig
from flatout.distributed.limits import keep_freed_memory

_COLUMNS = ["text", "label"]


def claims(options: Options) -> Iterator[Claim]:
    """Time against reading alone, rows a second, memory, and splits that are the same
    everywhere.
    """
    keep_freed_memory()  # as the command does; the other side has it too
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = options.choose(1_000_000, 100_000, 500)
        path = write_headlines(folder / "rows.csv", rows)
        yield reading(path, rows, folder, options)
        yield checking(rows, options)
        yield from memory(path, rows, folder, times=5)
        yield same_splits(path)


def write_headlines(path: Path, rows: int) -> Path:
    """A csv of built-in headlines."""
    table = HeadlinesTable(HeadlinesConfig(rows=rows), "train")
    schema = pa.schema([(name, pa.string()) for name in _COLUMNS])
    with pa_csv.CSVWriter(path, schema) as writer:
        for block in table.blocks(_COLUMNS):
            writer.write_batch(block.cast(schema))
    return path


def reading(path: Path, rows: int, folder: Path, options: Options) -> Claim:
    """The whole of `flatout check` against `datasets` loading the same csv again."""
    import datasets

    datasets.disable_progress_bars()
    caches = count()

    def ours() -> float:
        os.sync()  # what the other side has written is on disk before either is timed
        started = time.perf_counter()
        check(TextDataConfig(source=str(path)))
        return time.perf_counter() - started

    def theirs() -> float:
        os.sync()
        started = time.perf_counter()
        cache = folder / f"datasets-{next(caches)}"
        datasets.load_dataset("csv", data_files=str(path), cache_dir=str(cache))
        return time.perf_counter() - started

    # Many rounds: the other side takes 0.27 to 0.72 s in one process, as its memory lies.
    fast, usual = in_turn([ours, theirs], 3 * options.rounds)
    note = (
        f"{rows:,} rows, {path.stat().st_size / 1e6:.0f} MB; theirs reads and writes its own file,"
        " checks nothing"
    )
    return at_most(
        "reading and checking a csv, against datasets reading it", fast, usual, "s", 1.5, note
    )


def checking(rows: int, options: Options) -> Claim:
    """The checks alone, on rows that lie in memory."""
    table = pa.Table.from_batches(
        HeadlinesTable(HeadlinesConfig(rows=rows), "train").blocks(_COLUMNS)
    )
    config = TextDataConfig(train=table)
    source = open_source(config)

    def rate() -> float:
        started = time.perf_counter()
        TextSurvey(source).run(lambda done: None)
        return rows / (time.perf_counter() - started)

    note = "gaps, repeats, conflicts, leaks, classes, lengths, odd characters, splits"
    return reaching(
        "checking rows in memory",
        in_turn([rate], options.rounds)[0],
        "rows/s",
        least=1_000_000,
        note=note,
    )


def memory(path: Path, rows: int, folder: Path, *, times: int) -> Iterator[Claim]:
    """Peak memory of checking a file and one of so many times the rows, each in a process of its
    own.
    """
    large = write_headlines(folder / "large.csv", times * rows)
    small_gb, large_gb = (
        measured_apart("benchmarks.sources:check_apart", {"path": str(each)})["peak_gb"]
        for each in (path, large)
    )
    note = f"{rows:,} rows {small_gb:.2f} GB, {times * rows:,} rows {large_gb:.2f} GB"
    yield bounded(
        f"memory for {times} times the rows, as a multiple",
        large_gb / small_gb,
        "",
        most=1.25,
        note=note,
    )


def check_apart() -> None:
    """The child's side of `memory`."""
    keep_freed_memory()
    check(TextDataConfig(source=json.loads(sys.stdin.read())["path"]))
    print(json.dumps({"peak_gb": peak_memory_gb()}))


def same_splits(path: Path) -> Claim:
    """Splits by hash from a csv, from the same rows in memory, and from another process."""
    in_memory = {"train": pa_csv.read_csv(path)}
    digests = {
        split_digest(TextDataConfig(source=str(path))),
        split_digest(TextDataConfig(**in_memory)),
        measured_apart("benchmarks.sources:split_apart", {"path": str(path)})["digest"],
    }
    return bounded(
        "different splits of the same rows",
        len(digests) - 1,
        "",
        most=0,
        note=f"digest {min(digests)}",
    )


def split_apart() -> None:
    """The child's side of `same_splits`."""
    print(
        json.dumps(
            {"digest": split_digest(TextDataConfig(source=json.loads(sys.stdin.read())["path"]))}
        )
    )


def split_digest(config: TextDataConfig) -> str:
    """A checksum of the split of every row."""
    surveyed = TextSurvey(open_source(config)).run(lambda done: None)
    return xxhash.xxh3_64_hexdigest(surveyed.fates["train"].tobytes())
