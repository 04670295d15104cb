"""Whether answers can be relied on: faults planted into exports, the bits of exact answers, their
price, and speed.

Models have random weights that a short training moved: whether their answers are good does not
matter here. Bits are looked at in a small encoder, since random batches are mostly filled up; speed
is that of MiniLM's sizes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv
from safetensors.torch import load_file, save_file

from benchmarks.claim import Claim, Options, at_least, at_most, bounded, in_turn, quiet
from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    BitsDataConfig,
    HeadlinesConfig,
    MonitorConfig,
    PeopleConfig,
    TaggedTweetsConfig,
    TextDataConfig,
    TransformerConfig,
    TweetsConfig,
    fit,
    load_predictor,
)
from flatout.__main__ import main
from flatout.bits.encodings import EncodingConfig
from flatout.bits.task import GramsConfig
from flatout.data.samples.headlines import HeadlinesTable
from flatout.data.samples.tweets import TweetsTable
from flatout.engine.precision import bf16_is_native_on_cpu
from flatout.inference.export import export_encoder, quiet_library
from flatout.inference.folder_predictors import encoder_predictors
from flatout.inference.forms import Form, answer_mixed_rows, forms_of_run, together
from flatout.inference.verify import SplitAnswer, Verified, verify
from flatout.models.textcnn import TextCNNConfig

SETS: dict[str, Any] = {
    "headlines": HeadlinesConfig(),
    "headlines of 40 topics": HeadlinesConfig(classes=40),
    "tweets": TweetsConfig(),
}
"""What an encoder learns before its forms are measured."""
_WORDS = np.array("senate ballot striker playoff comet orbit goal vote 42 the of".split())


def claims(options: Options) -> Iterator[Claim]:
    with tempfile.TemporaryDirectory() as folder:
        yield _faults_claim(Path(folder, "faults"))
        runs = _runs(Path(folder), options)
        large = _encoder(
            Path(folder, "large"), options.choose(384, 384, 32), options.choose(6, 6, 2)
        )
        rows = runs["encoder"][1]
        for kind, (run, own) in runs.items():
            yield _bits_claim(kind, run, own, options)
        yield _price_claim("BiLSTM", *runs["BiLSTM"], options)
        yield _price_claim("MiniLM", large, rows[: options.choose(3_000, 200, 40)], options)
        yield from _pipeline_claims(large, rows[: options.choose(1_000, 200, 40)], options)
        for name, sample in list(SETS.items())[: options.choose(3, 1, 1)]:
            yield from _form_claims(name, sample, Path(folder, name), options)


def change(file: Path, **values: Any) -> None:
    """Other values in a file of JSON."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def _shift_positions(run: Path) -> None:
    file = run / "export" / "model.safetensors"
    name = "bert.embeddings.position_embeddings.weight"
    weights = load_file(file)
    save_file(weights | {name: weights[name].roll(1, 0)}, file, metadata={"format": "pt"})


def _turn_labels(run: Path) -> None:
    names = json.loads((run / "export" / "config.json").read_text())["id2label"]
    turned = [*list(names.values())[1:], names["0"]]
    change(run / "export" / "config.json", id2label=dict(zip(names, turned, strict=True)))


def _lose_window(run: Path) -> None:
    change(run / "export" / "config.json", layer_types=["full_attention", "full_attention"])


def _of_tokenizer(**values: Any) -> Callable[[Path], None]:
    return lambda run: change(run / "export" / "tokenizer_config.json", **values)


FAULTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "positions are shifted by one": (
        "bert",
        _shift_positions,
        "rows of any length, alone too: positions",
    ),
    "a window is ignored": ("modernbert", _lose_window, ""),
    "the mask is ignored": (
        "bert",
        _of_tokenizer(model_input_names=["input_ids"]),
        "the rows beside a row",
    ),
    "labels are permuted": ("bert", _turn_labels, "labels in another order"),
    "rows are cut on the other side": (
        "bert",
        _of_tokenizer(truncation_side="left"),
        "long rows, from 150 words",
    ),
    "the temperature is another": (
        "bert",
        lambda run: change(run / "model" / "config.json", temperature=1.0),
        "another temperature",
    ),
}
"""Faults planted into a run with its export: the family, how, and what verify takes each for."""


def planted_rows() -> list[str]:
    """Forty rows of one word to two hundred, of which some are cut."""
    random = np.random.default_rng(0)
    return [
        " ".join(random.choice(_WORDS, size))
        for size in [*random.integers(1, 60, 36), 150, 170, 190, 200]
    ]


def exported_run(folder: Path, family: str) -> Path:
    """A tiny run with its export beside it, its weights spread out so that rows are told apart."""
    more = {"local_attention": 8} if family == "modernbert" else {}
    model = TransformerConfig(family=family, hidden=32, layers=2, heads=4, settings=more)
    run = _fit(
        folder, TextDataConfig(sample=HeadlinesConfig(rows=200, eval_rows=50, classes=3)), model
    )
    weights = load_file(run / "model" / "model.safetensors")
    random = torch.Generator().manual_seed(3)
    spread = {
        name: each + 0.2 * torch.randn(each.shape, generator=random) if each.ndim > 1 else each
        for name, each in weights.items()
    }
    save_file(spread, run / "model" / "model.safetensors")
    change(run / "model" / "config.json", temperature=1.4)
    (run / "export").mkdir()
    export_encoder(lambda: load_predictor(run), run / "export", run / "export", onnx=False)
    return run


def judged(run: Path, rows: list[str]) -> Verified:
    """What verify says of the export beside a run."""
    predictor = load_predictor(run)
    reference, forms = forms_of_run(predictor, [], encoder_predictors(predictor, run / "export"))
    return verify(forms[-1], rows, [SplitAnswer.of(answer) for answer in reference.answers(rows)])


def _faults_claim(folder: Path) -> Claim:
    sound = {family: exported_run(folder / family, family) for family in ("bert", "modernbert")}
    rows = planted_rows()
    found = []
    assert all(judged(run, rows).holds(0) for run in sound.values())
    for number, (name, (family, plant, _)) in enumerate(FAULTS.items()):
        run = Path(shutil.copytree(sound[family], folder / str(number)))
        plant(run)
        found += [name] * (not judged(run, rows).holds(0))
    note = f"{', '.join(found)}; the two sound exports hold"
    return Claim(
        "planted faults found by verify",
        len(found),
        len(FAULTS),
        "",
        None,
        "all",
        len(found) == len(FAULTS),
        note,
    )


def _fit(folder: Path, data: Any, model: Any, epochs: int = 1, **settings: Any) -> Path:
    data.cache = str(folder / "cache")
    quiet_run = MonitorConfig(progress=False, verdict=False)
    with quiet():
        return fit(
            data,
            model,
            epochs=epochs,
            output=str(folder),
            monitor=quiet_run,
            logger="none",
            **settings,
        ).folder


def _headlines() -> TextDataConfig:
    return TextDataConfig(sample=HeadlinesConfig(rows=64, eval_rows=16, classes=8))


def _encoder(folder: Path, hidden: int, layers: int) -> Path:
    return _fit(
        folder, _headlines(), TransformerConfig(hidden=hidden, layers=layers, heads=hidden // 32)
    )


def _runs(folder: Path, options: Options) -> dict[str, tuple[Path, list[Any]]]:
    """A run of each kind, and rows for it."""
    count = options.choose(10_000, 400, 40)
    texts = HeadlinesTable(HeadlinesConfig(rows=10, eval_rows=count, classes=8), "test")
    rows = [text for block in texts.blocks(["text"]) for text in block.column(0).to_pylist()]
    bits = np.random.default_rng(0).integers(0, 2, (count, 1024))
    people = BitsDataConfig(
        sample=PeopleConfig(rows=300), encoding=EncodingConfig(size=1024, hashes=8)
    )
    tweets = TextDataConfig(sample=TaggedTweetsConfig(rows=64, eval_rows=16), problem="tags")
    width = options.choose(128, 128, 8)
    return {
        "encoder": (_encoder(folder / "a", 32, 2), rows),
        "BiLSTM": (
            _fit(folder / "b", _headlines(), BiLSTMConfig(embedding=width, hidden=width)),
            rows,
        ),
        "TextCNN": (
            _fit(folder / "c", _headlines(), TextCNNConfig(embedding=width, filters=width)),
            rows,
        ),
        "tags": (
            _fit(folder / "d", tweets, TransformerConfig(hidden=32, heads=4)),
            [row.split() for row in rows],
        ),
        "bit strings": (
            _fit(
                folder / "e", people, BitMLPConfig(widths=[width]), task=GramsConfig(exposure=False)
            ),
            ["".join(map(str, row)) for row in bits],
        ),
    }


def _bits_claim(kind: str, run: Path, rows: list[Any], options: Options) -> Claim:
    """Rows with another answer, to the last bit, in random batches of one row to forty."""
    batchings = options.choose(20, 4, 2)

    def differing(is_exact: bool, seeds: range) -> int:
        predictor = load_predictor(run, exact=is_exact)
        expected = [SplitAnswer.of(answer) for answer in predictor.predict(rows)]
        found: set[int] = set()
        for seed in seeds:
            others = map(SplitAnswer.of, answer_mixed_rows(predictor, rows, seed))
            found |= {
                row
                for row, pair in enumerate(zip(others, expected, strict=True))
                if pair[0] != pair[1]
            }
        return len(found)

    plain = differing(False, range(1))
    name = f"{kind}, exact: rows of {len(rows):,} with a differing bit"
    note = f"over {batchings} random batchings; without exact {plain:,} over one"
    return bounded(name, differing(True, range(batchings)), "", most=0, note=note)


def _price_claim(kind: str, run: Path, rows: list[Any], options: Options) -> Claim:
    """Time of exact answers in whole batches against the usual ones."""
    sides = [load_predictor(run, exact=is_exact) for is_exact in (True, False)]
    for each in sides:
        each.predict(rows[:20])
    ours, theirs = in_turn(
        [partial(_seconds, each, rows) for each in sides], options.choose_rounds(3, 2, 1)
    )
    return at_most(
        f"{kind}: time of exact answers, against usual ones",
        ours,
        theirs,
        "s",
        1.5,
        f"{len(rows):,} rows",
    )


def _seconds(predictor: Any, rows: list[Any]) -> float:
    began = time.perf_counter()
    predictor.predict(rows)
    return time.perf_counter() - began


def _pipeline_claims(run: Path, rows: list[str], options: Options) -> Iterator[Claim]:
    """Rows a second, against a pipeline of transformers on the export, as given and sorted by
    length.
    """
    from transformers import pipeline

    export = run / "export"
    export.mkdir()
    export_encoder(lambda: load_predictor(run), export, export, onnx=False)
    predictor = load_predictor(run)
    with quiet_library():
        theirs = pipeline("text-classification", str(export), batch_size=32, device="cpu")
    in_order = sorted(rows, key=len)

    def rate(answer: Callable[[list[str]], Any], given: list[str]) -> float:
        began = time.perf_counter()
        answer(given)
        return len(given) / (time.perf_counter() - began)

    sides = [(predictor.predict, rows), (theirs, rows), (theirs, in_order)]
    ours, usual, best = in_turn(
        [partial(rate, *each) for each in sides], options.choose_rounds(3, 2, 1)
    )
    yield at_least("predict, against a pipeline in batches of 32", ours, usual, "rows/s", 5.0)
    yield at_least("predict, against a pipeline of sorted rows", ours, best, "rows/s", 1.3)
    exported = encoder_predictors(predictor, export)
    reference = forms_of_run(predictor, [], {})[0]
    found = verify(
        Form("", next(iter(exported.values())), together),
        rows,
        list(map(SplitAnswer.of, reference.answers(rows))),
    )
    note = f"largest difference {found.largest_difference:.1e}"
    yield bounded(
        "rows that the export answers otherwise", len(rows) - found.same, "rows", most=0, note=note
    )


def _form_claims(name: str, sample: Any, folder: Path, options: Options) -> Iterator[Claim]:
    """What `export --for here` chooses for throughput: its speed, its score, and whether others
    open it.
    """
    count = options.choose(1_000, 200, 40)
    hidden = options.choose(256, 128, 32)
    layers = options.choose(4, 2, 2)
    sample = replace(sample, rows=options.choose(6_000, 2_000, 64), eval_rows=count)
    model = TransformerConfig(hidden=hidden, layers=layers, heads=hidden // 32)
    run = _fit(folder, TextDataConfig(sample=sample), model, epochs=options.choose(3, 1, 1))
    table = (TweetsTable if isinstance(sample, TweetsConfig) else HeadlinesTable)(sample, "test")
    csv.write_csv(pa.Table.from_batches(table.blocks(["text", "label"])), folder / "rows.csv")
    chosen_folder = folder / "here"
    with quiet():
        main(
            [
                "export",
                str(run),
                "--for",
                "here",
                "--rows",
                str(folder / "rows.csv"),
                "--out",
                str(chosen_folder),
            ]
        )
    certificate = json.loads((chosen_folder / "verify.json").read_text())
    own, *others = certificate["measured"]
    chosen = next(each for each in others if each["name"] == certificate["form"])
    least = 1.5 if bf16_is_native_on_cpu() else 1.0
    yield at_least(
        f"{name}: {chosen['name']}, against predict",
        chosen["throughput"],
        own["throughput"],
        "rows/s",
        least,
    )
    note = (
        f"{chosen['score']:.4f} of {own['score']:.4f}, and {own['interval'].strip()} of {count:,}"
        " rows"
    )
    yield bounded(
        f"{name}: score lost by it",
        max(0.0, own["score"] - chosen["score"]),
        "",
        most=0.005,
        note=note,
    )
    changed = {each["name"]: each["verified"]["rows"] - each["verified"]["same"] for each in others}
    of_fp32 = [count for form, count in changed.items() if form.endswith("fp32")]
    note = ", ".join(f"{form} {count}" for form, count in changed.items())
    yield bounded(
        f"{name}: answers of fp32 exports that differ", sum(of_fp32), "", most=0, note=note
    )
