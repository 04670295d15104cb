"""Stores built in parts, and plans of more rows than one order holds: the same bytes, and what
parts cost.

`--pretrained FOLDER` takes that folder's tokenizer; without it one is made from the sample's own
texts.
"""

from __future__ import annotations

import importlib.util
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.csv

from benchmarks.claim import (
    Claim,
    Options,
    at_least,
    at_most,
    bounded,
    in_turn,
    measured_apart,
    not_here,
    quiet,
)
from flatout.data.batches.large_plan import LargePlan
from flatout.data.batches.plan import PlanSettings
from flatout.data.samples.headlines import HeadlinesConfig, HeadlinesTable
from flatout.data.store.cache import Cache
from flatout.data.store.store import Ragged
from flatout.data.tables.formats import file
from flatout.data.texts import encoded_units
from flatout.data.texts.data import TextData
from flatout.data.texts.encoding_pass import EncodingPass
from flatout.data.texts.parts import encode_part
from flatout.data.tokens.long_texts import CUT
from flatout.data.tokens.subwords import Subwords, encode_texts
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.distributed.engine import on_ray
from flatout.files import sync_tree
from flatout.sweep.settings import Pruner, Sampler, SweeperSettings
from flatout.sweep.space import Part, SettingInterval, SettingValues
from flatout.sweep.study import JOURNAL, Study
from flatout.sweep.trial import Ending, Status

SPACE: dict[str, Part] = {
    "optim.lr": SettingInterval(1e-4, 1e-1, is_log=True),
    "model.hidden": SettingValues(("64", "128")),
    "model.layers": SettingInterval(1, 3, is_whole=True),
}
UNITS = 10
"""Units of the source that is measured; a unit has a tenth of its rows."""


def claims(options: Options) -> Iterator[Claim]:
    num_rows = options.choose(1_000_000, 200_000, 20_000)
    with tempfile.TemporaryDirectory() as folder:
        work = _Work(Path(folder), num_rows, options.pretrained)
        with quiet():
            found = list(_bytes(work))
        yield from found
        with quiet():
            found = list(_costs(work, options))
        yield from found
        yield from _memory(work, options)
        yield from _plans(Path(folder), options)
        yield from _trials(Path(folder), options.choose(1_000, 300, 20))


class _Work:
    """A source of many files, a tokenizer, and builds of it with caches of their own."""

    def __init__(self, folder: Path, num_rows: int, pretrained: str | None) -> None:
        self.folder = folder
        self.rows = folder / "rows"
        self.num_rows = num_rows
        self.rows.mkdir()
        self.tokenizer = pretrained or str(folder / "tokenizer")
        table = pa.Table.from_batches(
            list(_sample(num_rows + num_rows // UNITS).blocks(["text", "label"]))
        )
        self.texts = table.column("text").slice(0, min(num_rows, 50_000)).combine_chunks()
        step = num_rows // (2 * UNITS)
        for number in range(2 * UNITS + 2):
            self._write(table.slice(number * step, step), number)
        if pretrained is None:
            Path(self.tokenizer).mkdir()
            Subwords.train([self.texts], VocabularyConfig(kind=VocabularyKind.wordpiece)).save(
                Path(self.tokenizer)
            )
        self.unit_rows = 2 * step

    def _write(self, table: pa.Table, number: int) -> None:
        """A file; the last two are what the source grows by, and lie beside it until then."""
        folder = self.rows if number < 2 * UNITS else self.folder / "more"
        folder.mkdir(exist_ok=True)
        pyarrow.csv.write_csv(table, folder / f"part-{number}.csv")

    def data(self, cache: str) -> TextData:
        return TextData(
            source=str(self.rows), tokenizer=self.tokenizer, cache=str(self.folder / cache)
        )

    @contextmanager
    def units(self, rows: int) -> Iterator[None]:
        # files of half as many make one
        before, encoded_units.UNIT_ROWS = encoded_units.UNIT_ROWS, 2 * rows
        try:
            yield
        finally:
            encoded_units.UNIT_ROWS = before

    def built(self, cache: str, rows: int) -> dict[str, bytes]:
        """The bytes of each column of a store that is built by units of so many rows, wherever they
        lie.
        """
        data = self.data(cache)
        found = dict[str, bytes]()
        with self.units(rows):
            data.prepare_data()
        for split in data.store.splits.values():
            for name, column in split.columns.items():
                path = f"{split.name}/{name}"
                if isinstance(column, Ragged):
                    found[f"{path} lengths"] = column.lengths.tobytes()
                    rows_of = zip(
                        column.offsets[:-1].tolist(), column.lengths.tolist(), strict=True
                    )
                    column = np.concatenate(
                        [column.values[begin : begin + length] for begin, length in rows_of]
                    )
                found[path] = column.tobytes()
        return found

    def repeated_seconds(self) -> float:
        """A build that finds what its files show and its units, as parts have left them, or those
        of fewer files.
        """
        shutil.rmtree(self.folder / "grown", ignore_errors=True)
        shutil.copytree(self.folder / "units", self.folder / "grown")
        Cache(self.folder / "grown").remove(
            entry.key for entry in Cache(self.folder / "grown").entries()
        )
        sync_tree(self.folder / "grown")
        began = time.perf_counter()
        self.built("grown", self.unit_rows)
        return time.perf_counter() - began

    def seconds(self, rows: int) -> float:
        """A build into an empty cache."""
        shutil.rmtree(self.folder / "timed", ignore_errors=True)
        sync_tree(self.folder / "rows")
        data = self.data("timed")
        began = time.perf_counter()
        with self.units(rows):
            data.prepare_data()
        return time.perf_counter() - began


def _sample(rows: int) -> HeadlinesTable:
    return HeadlinesTable(HeadlinesConfig(rows=rows, eval_rows=100), "train")


def _parts(work: _Work, cache: str, number: int, count: int) -> tuple[int, int]:
    with work.units(work.unit_rows):
        return encode_part(work.data(cache).config, number, count)


def _bytes(work: _Work) -> Iterator[Claim]:
    whole = work.built("whole", 1 << 60)
    differing = []
    ways: dict[str, Callable[[], Any]] = {
        "units": lambda: None,
        "four parts": lambda: [_parts(work, "four parts", number, 4) for number in (3, 1, 4, 2)],
        "two processes at once": lambda: _at_once(work, "two processes at once"),
        "killed at 80 %": lambda: _killed(work, "killed at 80 %", UNITS * 8 // 10),
    }
    has_ray = importlib.util.find_spec("ray") is not None
    if has_ray:
        ways["Ray"] = lambda: on_ray(partial(_parts, work, "Ray"), 2, work.folder)
        ways["two nodes of Ray, one removed"] = lambda: _two_nodes(
            work, "two nodes of Ray, one removed"
        )
    again = 0
    encode = EncodingPass.write
    for way, prepare in ways.items():
        prepare()
        done = len(_units_of(work, way))
        with mock.patch.object(EncodingPass, "write", autospec=True, side_effect=encode) as counted:
            if work.built(way, work.unit_rows) != whole:
                differing.append(way)
        if way.startswith("killed"):
            again = counted.call_count - (UNITS - done)
    note = f"{', '.join(ways)}{'' if has_ray else '; Ray is not installed'}"
    yield bounded(
        "ways to build whose bytes differ from one piece", len(differing), "", most=0, note=note
    )
    yield bounded("killed at 80 %: units that were done and are done again", again, "", most=0)


def _units_of(work: _Work, cache: str) -> list[str]:
    return [entry.key for entry in Cache(work.folder / cache).of_units().entries()]


def _at_once(work: _Work, cache: str) -> None:
    processes = [
        multiprocessing.get_context("fork").Process(target=_parts, args=(work, cache, number, 2))
        for number in (1, 2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _killed(work: _Work, cache: str, after: int) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=work.built, args=(cache, work.unit_rows)
    )
    process.start()
    while process.is_alive() and len(_units_of(work, cache)) < after:
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def _two_nodes(work: _Work, cache: str) -> None:
    """Parts on two nodes of this machine, of which one goes when the first unit is there."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    node = cluster.add_node(num_cpus=1)

    def lose() -> None:
        while not _units_of(work, cache):
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=lose)
    try:
        with mock.patch.dict(os.environ, {"RAY_ADDRESS": cluster.address}):
            thread.start()
            on_ray(partial(_parts, work, cache), 4, work.folder)
        thread.join()
    finally:
        cluster.shutdown()


def _costs(work: _Work, options: Options) -> Iterator[Claim]:
    encoder = Subwords.load(work.tokenizer)
    texts = work.texts.to_pylist()

    def bare() -> float:
        began = time.perf_counter()
        encoder.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return len(texts) / (time.perf_counter() - began)

    def ours() -> float:
        began = time.perf_counter()
        encode_texts(encoder, work.texts, 128, CUT)
        return len(texts) / (time.perf_counter() - began)

    our_rate, bare_rate = in_turn([ours, bare], options.rounds)
    yield at_least("encoding, against encode_batch_fast alone", our_rate, bare_rate, "rows/s", 0.85)
    our_seconds, whole_seconds = in_turn(
        [lambda: work.seconds(work.unit_rows), lambda: work.seconds(1 << 60)],
        options.choose_rounds(3, 1, 1),
    )
    yield at_most(
        "a build by units, against one in one piece", our_seconds, whole_seconds, "s", 1.05
    )
    our_seconds, whole_seconds = in_turn(
        [work.repeated_seconds, lambda: work.seconds(work.unit_rows)],
        options.choose_rounds(3, 1, 1),
    )
    yield at_most(
        "a store of units that are all there, against a whole build",
        our_seconds,
        whole_seconds,
        "s",
        0.1,
    )
    yield from _reading(work)
    if importlib.util.find_spec("ray") is None:
        yield not_here("parts by Ray, against one process here", "Ray is not installed")
    else:
        yield _by_ray(work)
    for path in (work.folder / "more").iterdir():
        shutil.copy(path, work.rows)
    our_seconds, whole_seconds = in_turn(
        [work.repeated_seconds, lambda: work.seconds(work.unit_rows)],
        options.choose_rounds(3, 1, 1),
    )
    yield at_most(
        "a build of ten per cent more rows, against a whole one",
        our_seconds,
        whole_seconds,
        "s",
        0.15,
    )


def _reading(work: _Work) -> Iterator[Claim]:
    """What is read of the source's files, of all their bytes."""
    size = sum(path.stat().st_size for path in work.rows.iterdir())
    work.data("whole").prepare_data()
    # Files are read for their heads and rows, or for their checksums; there is no third way.
    with _counted() as read, mock.patch.object(file, "file_checksum", side_effect=AssertionError):
        work.data("whole").prepare_data()
    note = f"{2 * UNITS} files of {size / 2 / UNITS / 1e6:.1f} MB"
    yield bounded(
        "read by a second run, of the source's bytes", sum(read) / size, "", most=0, note=note
    )
    shutil.rmtree(Cache(work.folder / "four parts").of_units().folder)
    with _counted() as read:
        _parts(work, "four parts", 2, 4)
    claim = "read by one part of four, once others have looked at the files"
    note = f"three of {UNITS} pieces"
    yield bounded(f"{claim}, of the source's bytes", sum(read) / size, "", most=0.35, note=note)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """The bytes of each time that a file of a source is read."""
    read = list[int]()

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            read.append(super().readinto(buffer) or 0)
            return read[-1]

    def opened(path: Path, where: str) -> io.BufferedReader:
        return io.BufferedReader(Counted(path))

    with mock.patch.object(file, "unpacked", opened):
        yield read


def _nothing(number: int, count: int) -> None:
    """A part without work: what starting and ending Ray takes."""


def _by_ray(work: _Work) -> Claim:
    began = time.perf_counter()
    on_ray(_nothing, 2, work.folder)
    empty = time.perf_counter() - began
    began = time.perf_counter()
    on_ray(partial(_parts, work, "timed by Ray"), 2, work.folder)
    by_ray = time.perf_counter() - began - empty
    began = time.perf_counter()
    _parts(work, "timed here", 1, 1)
    here = time.perf_counter() - began
    return at_most(
        "parts by Ray, against one process here",
        by_ray,
        here,
        "s",
        1.1,
        f"Ray's start, {empty:.0f} s, left out",
    )


def _memory(work: _Work, options: Options) -> Iterator[Claim]:
    peaks = []
    for rows in (
        options.choose(1_000_000, 100_000, 2_000),
        options.choose(10_000_000, 400_000, 4_000),
    ):
        settings = {
            "rows": rows,
            "tokenizer": work.tokenizer,
            "folder": str(work.folder / f"memory-{rows}"),
        }
        peak = measured_apart("benchmarks.cluster:measure_a_build", settings)["gb"]
        peaks.append(peak)
        yield bounded(f"memory of a build of {rows:,} rows", peak, "GB", most=1.0)


def measure_a_build() -> None:
    """Most memory of its own that a build holds; mapped files are not counted."""
    settings = json.loads(sys.stdin.read())
    process = psutil.Process()
    held = int(process.memory_info().rss - process.memory_info().shared)
    watch = _Watch()
    data = TextData(
        source=None,
        sample=HeadlinesConfig(rows=settings["rows"], eval_rows=100),
        tokenizer=settings["tokenizer"],
        cache=settings["folder"],
    )
    data.prepare_data()
    print(json.dumps({"gb": (held + watch.peak()) / 1e9}))


class _Watch:
    """The most memory of its own that this process has held, looked at often."""

    def __init__(self) -> None:
        import threading

        self._most = 0
        self._process = psutil.Process()
        self._before = self._own()
        threading.Thread(target=self._look, daemon=True).start()

    def peak(self) -> int:
        """Above what was held when the watch began."""
        return max(self._most, self._own()) - self._before

    def _own(self) -> int:
        memory = self._process.memory_info()
        return int(memory.rss - memory.shared)

    def _look(self) -> None:
        while True:
            self._most = max(self._most, self._own())
            time.sleep(0.01)


def _plans(folder: Path, options: Options) -> Iterator[Claim]:
    rows = options.choose(1_000_000_000, 100_000_000, 20_000_000)
    lengths = np.memmap(folder / "lengths.bin", np.int32, "w+", shape=rows)
    for begin in range(0, rows, 1 << 24):
        lengths[begin : begin + (1 << 24)] = np.random.default_rng(begin).integers(
            5, 40, min(1 << 24, rows - begin)
        )
    lengths.flush()
    found = measured_apart(
        "benchmarks.cluster:measure_a_plan", {"path": str(folder / "lengths.bin"), "rows": rows}
    )
    yield bounded(f"plan of {rows:,} rows: memory", found["gb"], "GB", most=1.0)
    yield bounded(
        f"plan of {rows:,} rows: first batch of a later epoch", found["seconds"], "s", most=5.0
    )
    (folder / "lengths.bin").unlink()


def measure_a_plan() -> None:
    settings = json.loads(sys.stdin.read())
    lengths = np.memmap(settings["path"], np.int32, "r", shape=settings["rows"]).view(np.ndarray)
    watch = _Watch()
    began = time.perf_counter()
    LargePlan(lengths, PlanSettings(rows_per_batch=32, world=8), 3).batches(0, 1)
    print(json.dumps({"seconds": time.perf_counter() - began, "gb": watch.peak() / 1e9}))


def _trials(folder: Path, trials: int) -> Iterator[Claim]:
    """A search whose trials train nothing, a tenth of them at once: what is left is the study."""
    search = SweeperSettings(trials=trials, sampler=Sampler.tpe, pruner=Pruner.asha)
    study = Study(folder, SPACE, search, mode="max", validations=5)
    chance = np.random.default_rng(0)
    asking = list[float]()
    running = list[tuple[int, dict[str, str]]]()
    while running or study.total > len(asking):
        while len(running) < trials // 10 and len(asking) < study.total:
            began = time.perf_counter()
            asked = study.ask()
            asking.append(time.perf_counter() - began)
            assert asked is not None
            running.append(asked)
        number, settings = running.pop(int(chance.integers(len(running))))
        value = chance.normal() - abs(float(settings["optim.lr"]) - 0.01)
        is_pruned = any(study.should_end(number, count, value) for count in range(1, 6))
        study.tell(number, Ending(Status.pruned if is_pruned else Status.complete, 1.0, value))
    note = (
        f"a tenth of {trials:,} at once, {len(SPACE)} settings; the longest"
        f" {1e3 * max(asking):.0f} ms"
    )
    yield bounded(
        "asking the study for a trial", 1e3 * sum(asking) / trials, "ms", most=20, note=note
    )
    yield bounded(
        f"journal of {trials:,} trials", (folder / JOURNAL).stat().st_size / 1e6, "MB", most=5
    )
