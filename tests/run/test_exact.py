"""Exact answers: a row has the same bits beside any rows, in any order, for each kind of run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    BitsDataConfig,
    HeadlinesConfig,
    PeopleConfig,
    TaggedTweetsConfig,
    TextDataConfig,
    TransformerConfig,
    fit,
    load_predictor,
)
from flatout.bits.encodings import EncodingConfig
from flatout.bits.task import GramsConfig
from flatout.inference.forms import alone, answer_mixed_rows
from flatout.inference.verify import SplitAnswer
from flatout.models.textcnn import TextCNNConfig
from flatout.tasks.masked_language import MaskedLanguageConfig
from tests.params import at_once
from tests.refusals import refused
from tests.verbs import verb

HEADLINES = HeadlinesConfig(rows=64, eval_rows=16, classes=3)
SMALL: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4}
WORDS = np.array("senate ballot striker playoff comet orbit goal vote 42 the of".split())
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "bilstm": ({"sample": HEADLINES}, BiLSTMConfig(embedding=9, hidden=11, pooling="attention")),
    "textcnn": ({"sample": HEADLINES}, TextCNNConfig(embedding=9, filters=7)),
    "flat encoder": ({"sample": HEADLINES}, TransformerConfig(**SMALL)),
    "encoder with distances": (
        {"sample": HEADLINES},
        TransformerConfig(family="deberta-v2", **SMALL),
    ),
    "encoder with windows": (
        {"sample": HEADLINES},
        TransformerConfig(family="modernbert", **SMALL),
    ),
    "padded encoder": ({"sample": HEADLINES}, TransformerConfig(compute="padded", **SMALL)),
    "tags": (
        {"sample": TaggedTweetsConfig(rows=64, eval_rows=16), "problem": "tags"},
        TransformerConfig(**SMALL),
    ),
    "several labels": (
        {"problem": "multi", "label_delimiter": "|"},
        BiLSTMConfig(embedding=9, hidden=11),
    ),
}


def texts(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, size)) for size in random.integers(1, 12, count)]


def train(folder: Path, data: Any, model: Any, **settings: Any) -> Path:
    data.cache = str(folder / "cache")
    data.batch_size = 32
    return fit(data, model, epochs=1, output=str(folder), logger="none", **settings).folder


def assert_exact(run: Path, rows: list[Any]) -> None:
    """The same numbers in random batches, in other ones, and alone, at most to the last bit."""
    predictor = load_predictor(run, exact=True)
    try:
        assert_equal_bits(run, rows)
    except AssertionError:
        if not predictor.why_inexact:
            raise
        # What earlier tests of this process have computed decides how products are summed up.
        code = "import sys; from tests.run import test_exact as here; "
        code += "here.assert_equal_bits(sys.argv[1], sys.argv[2:])"
        subprocess.run([sys.executable, "-c", code, str(run), *rows], check=True)


def assert_equal_bits(run: Path | str, rows: list[Any]) -> None:
    predictor = load_predictor(run, exact=True)
    expected = [SplitAnswer.of(answer) for answer in predictor.predict(rows)]
    for seed in range(3):
        assert [
            SplitAnswer.of(answer) for answer in answer_mixed_rows(predictor, rows, seed)
        ] == expected
    assert [SplitAnswer.of(answer) for answer in alone(predictor, rows[:9])] == expected[:9]
    assert (note := predictor.notes())
    assert note[0].startswith("exact: ")
    near = [SplitAnswer.of(answer).numbers for answer in load_predictor(run).predict(rows)]
    np.testing.assert_allclose(
        np.concatenate([answer.numbers for answer in expected]),
        np.concatenate(near),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("kind", at_once("flat encoder", of=KINDS, seconds=9))
def test_a_row_of_texts_has_the_same_bits_in_any_batch(tmp_path: Path, kind: str) -> None:
    settings, model = KINDS[kind]
    if kind == "several labels":
        rows = texts(64)
        labels = ["|".join(sorted({row.split()[0], row.split()[-1]})) for row in rows]
        settings = settings | {"train": {"text": rows, "label": labels}}
    assert_exact(train(tmp_path, TextDataConfig(**settings), model), texts(90))


def test_an_encoding_has_the_same_bits_in_any_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    data = BitsDataConfig(
        sample=PeopleConfig(rows=150), encoding=EncodingConfig(size=256, hashes=4)
    )
    run = train(tmp_path, data, BitMLPConfig(widths=[13]), task=GramsConfig(exposure=False))
    bits = np.random.default_rng(0).integers(0, 2, (90, 256))
    assert_exact(run, ["".join(map(str, row)) for row in bits])


@pytest.mark.soak(seconds=2)
def test_logits_have_the_same_bits_too(tmp_path: Path) -> None:
    import pyarrow as pa

    settings, model = KINDS["flat encoder"]
    predictor = load_predictor(train(tmp_path, TextDataConfig(**settings), model), exact=True)
    rows = pa.array(texts(90))
    order = np.random.default_rng(1).permutation(90)
    expected = predictor.outputs(rows)
    assert torch.equal(predictor.outputs(rows.take(pa.array(order))), expected[order])
    parts = [predictor.outputs(rows.slice(start, 7)) for start in range(0, 90, 7)]
    assert torch.equal(torch.cat(parts), expected)


def test_both_verbs_answer_exactly_and_print_the_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, model = KINDS["bilstm"]
    run = train(tmp_path, TextDataConfig(**settings), model)
    label = load_predictor(run).predict("senate")[0].label
    rows = texts(90)
    found = []
    for order in (rows, rows[::-1]):
        file = tmp_path / "rows.csv"
        out = tmp_path / f"{len(found)}.csv"
        file.write_text("text,label\n" + "".join(f"{row},{label}\n" for row in order))
        capsys.readouterr()
        assert verb("predict", run, file, "--exact", "--top-k", 3, "--out", out) == 0
        price = capsys.readouterr().err.splitlines()[-1]
        assert verb("evaluate", run, file, "--exact") == 0
        assert " rows computed for 90, as each length fills whole batches" in price
        assert price in capsys.readouterr().err
        found.append(out.read_text().splitlines()[1:])
    assert found[0] == found[1][::-1]


def test_masked_words_have_no_exact_answers(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        TextDataConfig(sample=HEADLINES, problem="none"),
        TransformerConfig(**SMALL),
        task=MaskedLanguageConfig(),
    )
    with refused("exact", "masked words"):
        load_predictor(run, exact=True)
