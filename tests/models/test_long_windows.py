"""A text in windows answers what its windows answer one by one, fed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.encoders import calm_encoder
from tests.faults.plants import Planted, RaiseAt
from tests.faults.runs import write_rows
from tests.params import at_once
from tests.verbs import verb
from torch import Tensor
from torch.nn import functional

from flatout import OptimConfig, TransformerConfig, fit
from flatout.checkpoints.settings import CheckpointConfig
from flatout.data.batches.flat_batch import FlatBatch, cut_batch, flat_batch
from flatout.data.texts.settings import TextDataConfig
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.errors import UserError
from flatout.inference.folder_predictors import predictors_of_folder
from flatout.inference.forms import through_library
from flatout.inference.text import Predictor
from flatout.models.encoder.transformer import Outputs, Transformer
from flatout.models.encoder.windows import Windows

SIZE = 6
ROWS = [[5, 6], [5, 6, 7, 8, 9, 10, 11], list(range(5, 17)), list(range(20, 49))]


def windows_of(row: list[int]) -> list[list[int]]:
    return [row[start : start + SIZE] for start in range(0, len(row), SIZE)]


BY_HAND = [windows_of(row) for row in ROWS]


def built(how: str, family: str = "bert", kind: str = "single") -> Transformer:
    torch.manual_seed(3)
    still: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
    config = TransformerConfig(
        family=family, hidden=32, layers=2, heads=4, windows=Windows(how), **still
    )
    model = config.build(
        Outputs(["a", "b", "c"], kind), vocabulary_size=60, padding_id=1, separator_id=None
    )
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1) if weight.ndim > 1 else None
    model.set_windows(SIZE, Windows(how))
    if model.window_query is not None:
        torch.nn.init.normal_(model.window_query)
    return model


def answers_by_hand(model: Transformer, how: str) -> Tensor:
    """Each window in a batch of its own, through the same network without windows."""
    model.window = 0
    pooled = []
    for windows in BY_HAND:
        answers = torch.cat([model(flat_batch([window])) for window in windows])
        pooled.append(answers.mean(0) if how == "mean" else answers.amax(0))
    model.window = SIZE
    return torch.stack(pooled)


def attended_by_hand(model: Transformer) -> Tensor:
    """Windows one by one; for each text the head's last layer answers the mean of their vectors,
    weighted.
    """
    assert model.window_query is not None
    *_, last = (each for each in model.head_modules() if isinstance(each, torch.nn.Linear))
    model.window = 0
    found = []
    vectors = list[Tensor]()
    hook = last.register_forward_pre_hook(
        lambda _, given: vectors.append(given[0].reshape(-1, given[0].shape[-1]))
    )
    for windows in BY_HAND:
        for window in windows:
            model(flat_batch([window]))
        # a head that reads all tokens answers their mean
        own = torch.stack([each.mean(0) for each in vectors])
        weights = torch.softmax(torch.stack([vector @ model.window_query for vector in own]), 0)
        found.append(sum(weight * vector for weight, vector in zip(weights, own, strict=True)))
        vectors.clear()
    hook.remove()
    model.window = SIZE
    return last(torch.stack(found))[:, :3]


def losses(logits: Tensor, kind: str) -> Tensor:
    if kind == "single":
        return functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0]))
    return functional.binary_cross_entropy_with_logits(
        logits, (torch.arange(12) % 2).view(4, 3).float()
    )


@pytest.mark.parametrize("kind", ["single", *at_once(of=["multi"], seconds=1)])
@pytest.mark.parametrize("how", ["mean", "max", "attention"])
# the last runs padded
@pytest.mark.parametrize("family", ["bert", "deberta-v2", "modernbert", "eurobert", "deberta"])
def test_a_text_has_the_answer_and_gradients_of_its_windows_fed_by_hand(
    family: str, how: str, kind: str
) -> None:
    model = built(how, family, kind)
    found = []
    by_hand = attended_by_hand(model) if how == "attention" else answers_by_hand(model, how)
    for logits in (model(flat_batch(ROWS)), by_hand):
        model.zero_grad()
        losses(logits, kind).backward()
        gradients = {
            name: weight.grad
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }
        found.append((logits.detach(), gradients))
    (ours, our_gradients), (theirs, their_gradients) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, gradient in their_gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta"])
def test_tokens_of_a_row_have_the_answers_and_gradients_of_its_windows_fed_by_hand(
    family: str,
) -> None:
    model = built("mean", family, "tags")
    weights = torch.randn(sum(map(len, ROWS)), 3)
    found = []
    each_window_alone = [[window] for window in chain.from_iterable(BY_HAND)]
    for window, batches in ((SIZE, [ROWS]), (0, each_window_alone)):
        model.window = window
        logits = torch.cat([model(flat_batch(batch)) for batch in batches])
        model.zero_grad()
        (logits * weights).sum().backward()
        gradients = {
            name: weight.grad
            for name, weight in model.named_parameters()
            if weight.grad is not None
        }
        found.append((logits.detach(), gradients))
    (ours, our_gradients), (theirs, their_gradients) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, gradient in their_gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-5, atol=1e-5)


def test_a_piece_of_a_batch_keeps_the_windows_of_a_text_together() -> None:
    model = built("mean").eval()
    batch = flat_batch(ROWS)
    with torch.inference_mode():
        whole = model(batch)
        pieces = [model(piece) for piece in cut_batch(batch, 3)]
    assert len(pieces) == 3
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-5, atol=1e-5)


def test_products_of_windows_are_counted_as_those_of_rows() -> None:
    model = built("mean")
    counted = model.training_flops(np.array([len(row) for row in ROWS]))
    model.window = 0
    assert counted == model.training_flops(
        np.array([len(window) for row in BY_HAND for window in row])
    )


def test_padded_windows_count_their_padding() -> None:
    batch: FlatBatch = flat_batch(ROWS)
    assert built("mean", "deberta").computed_tokens(batch) == SIZE * sum(map(len, BY_HAND))
    assert built("mean").computed_tokens(batch) == batch.num_tokens


WORDS = np.array("oak fern rose slate flint basalt".split())


def texts(problem: str) -> TextDataConfig:
    """Long texts of words of two kinds: the last words decide, where a cut text has none left."""
    random = np.random.default_rng(0)
    kinds = random.integers(2, size=120)
    rows = [
        [*["of"] * random.integers(0, 30), *WORDS[random.integers(3, size=9) + 3 * kind]]
        for kind in kinds
    ]
    label_of: list[Any] = ["plant", "stone"]
    if problem == "regression":
        label_of = ["1", "2"]
    elif problem == "multi":
        label_of = [["plant"], ["stone"]]
    return TextDataConfig(
        train={
            "text": [" ".join(row) for row in rows],
            "label": [label_of[kind] for kind in kinds],
        },
        problem=problem,
        long="windows",
        window=16,
        overlap=3,
        max_length=64,
        batch_size=16,
        vocabulary=VocabularyConfig(min_frequency=1),
    )


SMALL = calm_encoder(hidden=32)


def test_an_export_says_where_its_tokenizer_cuts_otherwise_than_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = TextDataConfig()
    data = replace(
        texts("single"), long="head_tail", window=plain.window, overlap=plain.overlap, max_length=20
    )
    fit(data, SMALL, epochs=1, folder=tmp_path / "run")
    assert verb("export", tmp_path / "run") == 0
    assert (
        "its tokenizer cuts their end off, the run cuts out their middle" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "problem", at_once("single", of=["single", "multi", "regression"], seconds=2)
)
def test_a_run_on_windows_learns_predicts_and_exports_text_by_text(
    problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fit(
        texts(problem), SMALL, optim=OptimConfig(lr=0.01), epochs=5, folder=tmp_path / "run"
    )
    assert (
        result.summary["data"]["rows"]["test"] == result.summary["data"]["lengths"]["test"]["rows"]
    )
    predictor = Predictor.load(tmp_path / "run")
    assert predictor.model.window == 16
    long = pa.array(["of " * 25 + "oak fern rose " * 3, "of " * 25 + "slate flint basalt " * 3])
    plant, stone = predictor.outputs(long)[
        :, predictor.labels.classes.index("stone") if problem != "regression" else 0
    ]
    assert plant < stone - 0.3
    assert len(predictor.predict(long.to_pylist())) == 2
    torch.testing.assert_close(
        through_library(predictor).outputs(long), predictor.outputs(long), rtol=1e-5, atol=1e-5
    )
    predictor.exact = True
    beside = pa.concat_arrays([pa.array(["oak", "of " * 40]), long.take([1, 0])])
    assert torch.equal(predictor.outputs(beside)[2:].flip(0), predictor.outputs(long))
    assert verb("export", tmp_path / "run") == 0
    assert (
        "it answers one window of 16 tokens; a text has the mean of its windows' logits"
        in capsys.readouterr().out
    )
    settings = json.loads((tmp_path / "run" / "export" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 16
    with pytest.raises(
        UserError, match=r"its tokenizer cuts the texts that the run reads with data\.long=windows"
    ):
        predictors_of_folder(predictor, tmp_path / "run" / "export")


def test_an_attention_over_windows_is_learned_kept_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(SMALL, windows=Windows.attention)
    fit(texts("single"), model, optim=OptimConfig(lr=0.01), epochs=5, folder=tmp_path / "run")
    predictor = Predictor.load(tmp_path / "run")
    query = predictor.model.window_query
    assert query is not None
    assert query.abs().max() > 0.001
    long = pa.array(
        ["of " * 25 + "oak fern rose " * 3, "of " * 25 + "slate flint basalt " * 3, "of rose"]
    )
    torch.testing.assert_close(
        through_library(predictor).outputs(long), predictor.outputs(long), rtol=1e-5, atol=1e-5
    )
    plant, stone, _ = predictor.outputs(long)[:, predictor.labels.classes.index("stone")]
    assert plant < stone - 0.3
    assert verb("export", tmp_path / "run") == 0
    assert (
        "the mean of its windows' logits, weighted by an attention that stays in the run"
        in capsys.readouterr().out
    )


@pytest.mark.soak(seconds=3)
def test_a_run_with_an_attention_over_windows_continues_to_the_same_weights(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    write_rows(rows)
    words = {
        "text": "text",
        "label": "label",
        "vocabulary": VocabularyConfig(min_frequency=1),
    }
    data = TextDataConfig(
        train=str(rows), **words, long="windows", window=6, overlap=1, max_length=32, batch_size=24
    )
    model = replace(SMALL, windows=Windows.attention)
    how: dict[str, Any] = {
        "checkpoint": CheckpointConfig(every_steps=1),
        "resume": "auto",
        "name": "case",
    }
    fit(data, model, **how, epochs=2, output=str(tmp_path / "whole"))
    with pytest.raises(Planted):
        plants = {"plant": RaiseAt("on_train_batch_end", 3)}
        fit(data, model, **how, epochs=2, output=str(tmp_path / "cut"), callbacks=plants)
    fit(data, model, **how, epochs=2, output=str(tmp_path / "cut"))
    (whole,), (cut,) = (list((tmp_path / each).glob("case/*/model")) for each in ("whole", "cut"))
    assert (whole / "model.safetensors").read_bytes() == (cut / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("problem", "long", "why"),
    [
        ("single", "cut", r", and there are none\. Leave it out, or set data"),
        ("tags", "windows", r" into one answer, and tags have one a word\. Leave it out\.$"),
    ],
)
def test_an_attention_is_refused_where_no_text_has_windows(
    problem: str, long: str, why: str, tmp_path: Path
) -> None:
    message = rf"^model\.windows: attention joins the windows of a text{why}"
    data = TextDataConfig(train="rows.jsonl", problem=problem, long=long, max_length=256)
    with pytest.raises(UserError, match=message):
        fit(data, replace(SMALL, windows=Windows.attention), epochs=1, folder=tmp_path / "run")


def test_windows_are_refused_where_the_network_is_given(tmp_path: Path) -> None:
    message = (
        r"^data\.long: windows, which a network of your own does not read\. Set data\.long=cut\.$"
    )
    pieces = VocabularyConfig(kind=VocabularyKind.wordpiece, min_frequency=1)
    with pytest.raises(UserError, match=message):
        fit(
            replace(texts("single"), vocabulary=pieces),
            built("mean"),
            epochs=1,
            folder=tmp_path / "run",
        )
