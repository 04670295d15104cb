"""Bit strings: preparing, training and rebuilding, against the way research code usually goes about
it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import torch
from torch import Tensor, nn

from benchmarks.claim import (
    Claim,
    Options,
    at_least,
    bounded,
    in_turn,
    measured_apart,
    peak_memory_gb,
    quiet,
    reaching,
)
from benchmarks.spine import bare_step, our_step
from benchmarks.usual_bits import BATCH, DROPOUT, HIDDEN, UsualLoop, usual_tensors
from flatout.bits.columns import Form, encode_table
from flatout.bits.data import BitData
from flatout.bits.encodings import EncodingConfig, EncodingKind
from flatout.bits.grams import LABEL_INDEX, LABELS, join_fields, strip_punctuation
from flatout.bits.info import GramLabels
from flatout.bits.people import FIELDS, PeopleConfig, PeopleTable
from flatout.bits.predictor import GramPredictor
from flatout.bits.reconstruct import Reconstructor, measure_rates
from flatout.bits.settings import BitsDataConfig
from flatout.bits.task import GramDecoder, GramsConfig
from flatout.checkpoints.settings import CheckpointConfig
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import PlanSettings
from flatout.distributed.limits import keep_freed_memory
from flatout.engine.optimizer import OptimConfig
from flatout.models.bit_mlp import BitMLPConfig
from flatout.run.closing import Result
from flatout.run.launch import fit

_SEEDS = 3


def claims(options: Options) -> Iterator[Claim]:
    """Preparing, training, memory, framework cost, scores and rebuilding."""
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        yield from preparing(Path(folder), options)
        yield from encoding(options)
        yield from training(Path(folder), options)
        yield from framework(Path(folder), options)
        yield from many_records(options)
        yield from scores(Path(folder), options)


def people(rows: int) -> pa.Table:
    """Built-in people with their Bloom filters as texts of 0 and 1."""
    table = PeopleTable(PeopleConfig(rows=rows))
    blocks = encode_table(table, list(FIELDS), EncodingConfig(), Form.binary)
    return pa.Table.from_batches([encoded.records for encoded in blocks])


def preparing(folder: Path, options: Options) -> Iterator[Claim]:
    """From a table in memory to bits and labels that a training step can take."""
    rows, their_rows = options.choose(100_000, 20_000, 200), options.choose(2_000, 500, 10)
    table = people(rows)
    frame = table.slice(0, their_rows).to_pandas()
    numbers = iter(range(1000))

    def ours() -> float:
        started = time.perf_counter()
        with quiet():
            BitData.of(
                BitsDataConfig(source=table, cache=str(folder / f"prepared-{next(numbers)}"))
            ).open_store()
        return rows / (time.perf_counter() - started)

    def theirs() -> float:
        started = time.perf_counter()
        usual_tensors(frame)
        return their_rows / (time.perf_counter() - started)

    fast, usual = in_turn([ours, theirs], options.rounds)
    note = f"ours {rows:,} records with a store on disk; theirs {their_rows:,} of them, in memory"
    yield at_least("preparing records (bits and labels)", fast, usual, "records/s", 50.0, note)


def encoding(options: Options) -> Iterator[Claim]:
    """How many records a minute are encoded and labelled."""
    rows = options.choose(200_000, 50_000, 500)
    blocks = list(PeopleTable(PeopleConfig(rows=rows)).blocks(FIELDS))
    raw = join_fields(
        [pa.concat_arrays([block.column(name) for block in blocks]) for name in FIELDS]
    )

    def a_minute(work: Any) -> float:
        started = time.perf_counter()
        work()
        return 60 * rows / (time.perf_counter() - started)

    for name, config in (
        ("Bloom filters", EncodingConfig()),
        ("tabulation MinHash", EncodingConfig(kind=EncodingKind.minhash)),
        ("two-step hash", EncodingConfig(kind=EncodingKind.twostep, size=1000)),
    ):
        encoder = config.build()
        made = statistics.median(
            a_minute(lambda e=encoder: e.encode(raw)) for _ in range(options.rounds)
        )
        goal = 1e6 if config.kind is EncodingKind.bloom else None
        yield reaching(f"encoding: {name}", made, "records/min", least=goal)
    index = LABEL_INDEX
    made = statistics.median(
        a_minute(lambda: index.rows(strip_punctuation(raw))) for _ in range(options.rounds)
    )
    yield reaching("2-gram labels from text", made, "records/min", least=1e6)


def training(folder: Path, options: Options) -> Iterator[Claim]:
    """An epoch, and the Dice after the same number of passes."""
    rows, passes = options.choose(20_000, 4_000, 300), options.choose(8, 3, 1)
    data = BitsDataConfig(
        sample=PeopleConfig(rows=rows), batch_size=512, cache=str(folder / "cache")
    )
    with quiet():
        usual = UsualLoop(BitData.of(data).open_store())
    times, usual_times = [], []
    results: list[Result] = []
    settings: dict[str, Any] = {
        "optim": OptimConfig(lr=1e-2),
        "checkpoint": CheckpointConfig(patience=None),
        "output": str(folder),
        "task": GramsConfig(exposure=False),
    }
    seeds = options.choose(_SEEDS, 1, 1)
    for number in range(passes):  # in turn: a pass or two of theirs, then a run of ours
        usual_times.append(usual.epoch())
        if number % (passes // seeds) == 0 and len(results) < seeds:
            with quiet():
                results.append(
                    fit(data, BitMLPConfig(), epochs=passes, seed=len(results), **settings)
                )
            times.append(_epoch_seconds(results[-1], data))
    ours, theirs = statistics.median(times), statistics.median(usual_times)
    train_rows = results[0].summary["data"]["rows"]["train"]
    note = (
        f"{passes} passes over {train_rows:,} records; ours batch 512 with recombined texts, theirs"
        " batch 64"
    )
    yield at_least(
        "training epoch", train_rows / ours, train_rows / theirs, "records/s", 20.0, note
    )
    dice = statistics.mean(result.metrics["test/dice"] for result in results)
    yield at_least(
        f"Dice after {passes} passes",
        dice,
        usual.dice(),
        "",
        1.0,
        "mean of our seeds, one of theirs",
    )
    yield from same_network(data, folder, options)


def _epoch_seconds(result: Result, data: BitsDataConfig) -> float:
    """Seconds an epoch took, without validation."""
    return result.summary["data"]["rows"]["train"] / result.summary["speed"]["rows_per_s"]


def same_network(data: BitsDataConfig, folder: Path, options: Options) -> Iterator[Claim]:
    """One hidden layer of 4,096, batch 64, on both sides: what is left when only the
    way differs.
    """
    with quiet():
        prepared = BitData.of(data).open_store()
        usual = UsualLoop(prepared)
        model = BitMLPConfig(
            detectors=False, straight=False, widths=[HIDDEN], dropout=DROPOUT, blend=False
        )
        small = BitsDataConfig(sample=data.sample, batch_size=BATCH, cache=data.cache)
    times, theirs = [], []
    for seed in range(options.choose(3, 2, 1)):
        theirs.append(usual.epoch())
        with quiet():
            result = fit(
                small,
                model,
                epochs=1,
                seed=seed,
                output=str(folder),
                task=GramsConfig(exposure=False),
            )
        times.append(_epoch_seconds(result, small))
    rows = prepared.facts["splits"]["train"]["rows"]
    note = (
        "one hidden layer of 4,096 units, batch 64 on both sides; ours in the precision that `auto`"
        " chose"
    )
    ours, usual_rate = rows / statistics.median(times), rows / statistics.median(theirs)
    yield at_least("the same network at the same batch", ours, usual_rate, "records/s", 1.0, note)


class TinyReader(nn.Module):
    """So small that a step is nothing but the framework around it."""

    layout = "flat"

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(64, 8)

    def forward(self, batch: FlatBatch) -> Tensor:
        return self.output(batch.bits(torch.float32))

    def computed_tokens(self, batch: FlatBatch) -> int:
        return batch.num_tokens


def framework(folder: Path, options: Options) -> Iterator[Claim]:
    """Microseconds a step above a bare loop that computes the same loss over the same batches."""
    steps = options.choose(3000, 1000, 20)
    table = people(8 * steps)
    encodings = EncodingConfig(size=64, hashes=2)
    with quiet():
        shares: dict[str, Any] = {
            "validation_share": 0.01,
            "test_share": 0.01,
            "cache": str(folder / "tiny"),
        }
        data = BitData.of(
            BitsDataConfig(source=table.drop_columns(["bloomfilter"]), encoding=encodings, **shares)
        ).open_store()
    feed = Feed(data.store.splits["train"], PlanSettings(rows_per_batch=8))
    labels = GramLabels(LABELS[:8], [], [1] * 8, 8)

    def task() -> GramDecoder:
        optim = OptimConfig()
        return GramDecoder(TinyReader(), GramsConfig(), optim, labels=labels, total_steps=len(feed))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sides = [lambda: bare_step(task(), feed), lambda: our_step(task(), feed, folder)]
        for side in sides:
            side()
        bare, ours = in_turn(sides, options.rounds)
    finally:
        torch.set_num_threads(threads)
    note = f"bare loop {bare:.0f} µs a step"
    yield bounded(
        "framework cost a step above a bare loop", ours - bare, "µs", most=150.0, note=note
    )


def many_records(options: Options) -> Iterator[Claim]:
    """A run over very many records, in a process of its own: bytes a record and peak memory."""
    rows = options.choose(1_000_000, 100_000, 300)
    with tempfile.TemporaryDirectory() as folder:
        found = measured_apart("benchmarks.bits:train_many", {"rows": rows, "folder": folder})
    note = (
        f"{rows:,} records, encoded, trained one pass and judged in {found['seconds']:.0f} s, Dice"
        f" {found['dice']:.4f}"
    )
    yield bounded("bytes of bits a record", found["bytes"], "bytes", most=128.0)
    yield bounded("peak memory of a run over them", found["peak_gb"], "GB", most=1.5, note=note)


def train_many() -> None:
    """The child's side of `many_records`: settings on standard input, figures on the last line of
    standard output.
    """
    settings = json.loads(sys.stdin.read())
    started = time.perf_counter()
    data = BitsDataConfig(
        sample=PeopleConfig(rows=settings["rows"]), batch_size=1024, cache=settings["folder"]
    )
    optim = OptimConfig(lr=5e-3)
    task = GramsConfig(exposure=False)
    with quiet():
        result = fit(
            data, BitMLPConfig(), epochs=1, optim=optim, task=task, output=settings["folder"]
        )
        store = BitData.of(data).open_store().store
    found = {
        "seconds": time.perf_counter() - started,
        "dice": result.metrics["test/dice"],
        "bytes": store.splits["train"].fixed("tokens").shape[1],
        "peak_gb": peak_memory_gb(),
    }
    print(json.dumps(found))


def scores(folder: Path, options: Options) -> Iterator[Claim]:
    """Dice on published people, against ridge regression; and texts rebuilt."""
    if options.data is None:
        print("    Dice on published people needs --data FOLDER")
        return
    published = options.data / "names_fakename"
    real = _read(published / "persons_2k_bloom1024.csv.gz")
    yield from _dice(
        "Dice, 2,000 people, filters made by others", real, (1280, 320), 0.97, 60, folder, options
    )
    plain = _read(published / "persons_10k.csv")
    yield from _dice(
        "Dice, 10,000 people, encoded here", plain, (6400, 1600), 0.985, 40, folder, options
    )
    yield from rebuilding(folder, options)


def _read(path: Path) -> pa.Table:
    """A table of texts, as they are written."""
    names = pa_csv.open_csv(path).schema.names
    options = pa_csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
    )
    return pa_csv.read_csv(path, convert_options=options)


def _dice(
    claim: str,
    table: pa.Table,
    sizes: tuple[int, int],
    goal: float,
    epochs: int,
    folder: Path,
    options: Options,
) -> Iterator[Claim]:
    """Mean Dice over seeds, each with its own split, beside ridge regression and the commonest
    grams.
    """
    found = []
    ridge = []
    trivial = []
    for seed in range(1 if options.quick else _SEEDS):
        order = pa.array(np.random.default_rng(seed).permutation(table.num_rows))
        shuffled = table.take(order)
        train, validation = sizes
        data = BitsDataConfig(
            source=shuffled.slice(0, train),
            validation=shuffled.slice(train, validation),
            test=shuffled.slice(train + validation),
            batch_size=BATCH,
            cache=str(folder / "cache"),
        )
        with quiet():
            result = fit(
                data,
                BitMLPConfig(),
                epochs=20 if options.quick else epochs,
                optim=OptimConfig(lr=5e-3),
                seed=seed,
                output=str(folder),
                checkpoint=CheckpointConfig(patience=None),
                task=GramsConfig(exposure=False),
            )
        baselines = result.summary["baseline"]["metrics"]
        found.append(result.metrics["test/dice"])
        ridge.append(baselines["test/dice"])
        trivial.append(
            next(value for name, value in baselines.items() if name.startswith("test/dice of"))
        )
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    listed = " ".join(f"{value:.4f}" for value in found)
    note = (
        f"{sizes[0]:,} training records, seeds {listed}, sd {spread:.4f}; theirs: ridge regression;"
        f" the 20 commonest 2-grams reach {statistics.mean(trivial):.3f}"
    )
    ours, theirs = statistics.mean(found), statistics.mean(ridge)
    yield Claim(
        claim, ours, theirs, "", ours / theirs, f"≥ {goal:g}", ours >= max(goal, theirs), note
    )


def rebuilding(folder: Path, options: Options) -> Iterator[Claim]:
    """Seconds to rebuild ten thousand texts."""
    count = 1_000 if options.quick else 10_000
    data = BitsDataConfig(
        sample=PeopleConfig(rows=2 * count),
        test_share=0.49,
        validation_share=0.05,
        cache=str(folder / "cache"),
    )
    with quiet():
        optim = OptimConfig(lr=5e-3)
        task = GramsConfig(exposure=False)
        result = fit(data, BitMLPConfig(), epochs=4, optim=optim, task=task, output=str(folder))
    predictor = result.predictor
    assert isinstance(predictor, GramPredictor)
    held = list(PeopleTable(PeopleConfig(rows=count, seed=12)).blocks(FIELDS))
    raw = join_fields([pa.concat_arrays([block.column(name) for block in held]) for name in FIELDS])
    detected = predictor.detected(EncodingConfig().build().encode(raw)).numpy()
    started = time.perf_counter()
    found = measure_rates(
        list(Reconstructor(predictor.labels.hashed, predictor.order).candidates(detected)),
        raw.to_pylist(),
    )
    seconds = (time.perf_counter() - started) * 10_000 / count
    note = (
        f"{count:,} other people: {found.at_1:.1%} right at the first try, {found.at_10:.1%}"
        " within ten"
    )
    yield bounded("rebuilding texts, 10,000 records", seconds, "s", most=120.0, note=note)
