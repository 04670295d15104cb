"""A linear model answers with a network of few rows: in metrics, predictors and exports alike."""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout import (
    BiLSTMConfig,
    ClassificationConfig,
    Result,
    TextDataConfig,
    fit,
    load_predictor,
)
from flatout.baselines.linear_text import Features, Head, QuickModel
from flatout.config import MonitorConfig
from flatout.data import TextData
from flatout.data.problem import Problem
from flatout.data.texts.opening import open_source
from flatout.errors import UserError
from flatout.inference.linear_part import LINEAR, LinearPart
from flatout.inference.model_folder import ModelFolder
from flatout.inference.onnx_file import write_signature
from flatout.inference.words_onnx import LINEAR_PROGRAM
from flatout.run import linear, mixing
from flatout.run.linear import texts_of
from flatout.run.rival import score_linear
from flatout.tasks.mixture import Mixture, log_shares
from tests.verbs import verb

SMALL = BiLSTMConfig(embedding=8, hidden=8)
QUIET = MonitorConfig(progress=False, verdict=False, rival=False)
TOPICS = {"sea": "wave boat shore tide", "hill": "rock slope summit ridge"}


def rows(count: int, seed: int = 0) -> dict[str, list[str]]:
    """Texts of two topics, each with two words of its own among words of both."""
    draw = np.random.default_rng(seed)
    table: dict[str, list[str]] = {"text": [], "label": []}
    for number in range(count):
        label = list(TOPICS)[number % 2]
        own = draw.choice(TOPICS[label].split(), 2)
        others = draw.choice([f"word{other}" for other in range(40)], 6)
        table["text"].append(" ".join([*others, *own, f"nr{seed}-{number}"]))
        table["label"].append(label)
    return table


TEST = rows(50, seed=1)


def train_mixture(folder: Path, model: BiLSTMConfig = SMALL) -> Result:
    data = TextDataConfig(train=rows(200), test=TEST, cache=str(folder / "cache"))
    return fit(data, model, epochs=1, folder=folder / "run", monitor=QUIET)


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> Result:
    return train_mixture(tmp_path_factory.mktemp("mixed"))


def test_few_rows_are_answered_by_both(result):
    mixture = result.summary["mixture"]
    assert mixture["used"]
    assert result.metrics["test/accuracy"] > 0.9
    assert mixture["losses"]["both"] < mixture["losses"]["network"]


@pytest.mark.parametrize("cause", ["many rows", "a slow machine"])
def test_counts_alone_answer_with_the_network_where_a_regression_takes_too_long(
    cause, tmp_path, monkeypatch, capsys
):
    if cause == "many rows":
        monkeypatch.setattr(mixing, "_FEW_ROWS", 100)
        monkeypatch.setattr(Head, "fit", None)
    else:
        monkeypatch.setattr(mixing, "_LEAST_S_OF_FEW", 0.0)
        monkeypatch.setattr(mixing, "_SHARE", 0.0)
        monkeypatch.setattr(linear, "_TRIED_ROWS", 20)
    found = train_mixture(tmp_path)
    expected = "n-grams: Naive Bayes on them answers with the network (counts"
    assert expected in capsys.readouterr().out
    mixture = found.summary["mixture"]
    assert mixture["used"]
    assert mixture["model"] == "Naive Bayes"
    assert found.metrics["test/accuracy"] > 0.9
    texts = rows(60)["text"]
    assert load_predictor(found.folder).predict(texts) == found.predictor.predict(texts)


def test_a_linear_model_that_would_fill_the_memory_is_left_out_with_a_line(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(linear, "free_bytes", lambda: 1_000_000)
    found = train_mixture(tmp_path)
    expected = r"n-grams: left out: n-grams would take \d+\.\d GB of memory, 0\.0 GB is free"
    assert re.search(expected, capsys.readouterr().out)
    assert not found.summary["mixture"]


def test_the_folder_answers_as_the_run_does(result):
    texts = rows(60)["text"]
    reopened = load_predictor(result.folder)
    assert (result.folder / "model" / LINEAR).is_file()
    assert reopened.predict(texts) == result.predictor.predict(texts)
    # The network has seen one epoch and knows little: without the linear model answers differ.
    alone = replace(reopened, linear=None, mixture=Mixture(1.0, 0.0))
    assert alone.predict(texts) != reopened.predict(texts)
    network = load_predictor(result.folder, answer_with="network")
    labels = [answer.label for answer in alone.predict(texts)]
    assert [answer.label for answer in network.predict(texts)] == labels
    rival = load_predictor(result.folder, answer_with="rival")
    shares = reopened.linear.predict(texts).max(axis=1)
    probabilities = [answer.probability for answer in rival.predict(texts)]
    assert probabilities == pytest.approx(shares, abs=1e-5)


def test_metrics_are_those_of_the_answers_that_are_given(result):
    answers = result.predict(TEST["text"])
    is_right = [answer.label == label for answer, label in zip(answers, TEST["label"], strict=True)]
    assert result.metrics["test/accuracy"] == pytest.approx(np.mean(is_right))


def test_the_rival_beside_the_score_is_the_plain_linear_model_which_is_kept(tmp_path, monkeypatch):
    fitted = []
    fit_once = Head.fit

    def count(head: Head, *rows: Any) -> Head:
        fitted.append(head)
        return fit_once(head, *rows)

    monkeypatch.setattr(Head, "fit", count)
    monkeypatch.setattr("flatout.run.closing.wins_clearly", lambda section, values: True)
    data = TextDataConfig(train=rows(200), test=TEST, cache=str(tmp_path / "cache"))
    monitor = replace(QUIET, rival=True)
    found = fit(data, SMALL, epochs=1, folder=tmp_path / "run", monitor=monitor)
    texts = TextData(**{name: getattr(data, name) for name in ("train", "test", "cache")})
    texts.setup()
    apart = score_linear(texts, math.inf)
    assert len(fitted) == 2, "once by the run, once here"
    of_run = found.summary["rival"]["metrics"]
    assert of_run == pytest.approx({f"test/{name}": value for name, value in apart.items()})
    answers = load_predictor(found.folder, answer_with="rival").predict(TEST["text"])
    features = Features()
    features.fit(texts_of(open_source(texts.config), texts, "train"))
    shares = fitted[0].predict(features.read(TEST["text"])).max(axis=1)
    assert [answer.probability for answer in answers] == pytest.approx(shares, abs=1e-5)


def test_a_folder_in_which_the_network_has_no_weight_alone_is_refused(result, tmp_path):
    folder = shutil.copytree(result.folder / "model", tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings["mixture"]["alone"] = 0
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(UserError, match="mixture does not fit"):
        load_predictor(tmp_path, answer_with="network")


@pytest.fixture(scope="module")
def exported(result) -> Path:
    assert verb("export", result.folder, "--onnx") == 0
    return result.folder / "export"


def test_an_exported_folder_answers_as_both_do(result, exported, tmp_path, capsys):
    file = tmp_path / "rows.csv"
    texts = [*TEST["text"], "ÉCOLE naïve 日本語", "a", "wave " * 300]
    file.write_text("\n".join(["text", *texts, ""]), encoding="utf-8")
    assert verb("verify", result.folder, file) == 0
    printed = capsys.readouterr().out
    assert f"model.onnx  same answer in {len(texts)} of" in printed
    # the network's logits alone are other answers
    told = json.loads((exported / "signature.json").read_text(encoding="utf-8"))
    copy = shutil.copytree(exported, tmp_path / "alone")
    del told["linear"]
    (copy / "signature.json").write_text(json.dumps(told), encoding="utf-8")
    assert verb("verify", result.folder, file, "--form", copy) == 1


def test_the_program_of_an_exported_folder_answers_without_flatout(
    result, exported, monkeypatch, capsys
):
    program = exported / "predict.py"
    both = program.read_text(encoding="utf-8") + (exported / LINEAR_PROGRAM).read_text("utf-8")
    assert "import flatout" not in both
    assert "from flatout" not in both
    assert "import torch" not in both
    texts = ["tide and shore word3", "rock of the summit word9"]
    monkeypatch.setattr(sys, "argv", [str(program), *texts])
    monkeypatch.syspath_prepend(exported)
    runpy.run_path(str(program))
    expected = [
        f"{answer.label} ({answer.probability:.3f}): {text}"
        for answer, text in zip(result.predict(texts), texts, strict=True)
    ]
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize("problem", ["single", "multi"])
def test_the_linear_part_reads_texts_as_the_linear_model_does(problem, tmp_path):
    kind = Problem(problem)
    table = rows(60)
    classes = np.array([list(TOPICS).index(label) for label in table["label"]])
    targets = np.eye(2, dtype=int)[classes] if kind is Problem.multi else classes
    trained_model = QuickModel(kind, 2).fit(table["text"], targets)
    model = QuickModel.of_arrays(kind, 2, trained_model.arrays())
    ModelFolder(tmp_path).write_linear_model(model)
    signature = {"problem": problem, "linear": {"file": LINEAR, "weight": 0.5}}
    write_signature(tmp_path, signature)
    texts = ["", " ", "a", "Ünïcode \ue000 日本 wave!", "x " * 900 + "summit", *TEST["text"][:9]]
    expected = 0.5 * log_shares(model.predict(texts), kind)
    found = LinearPart(tmp_path).read(texts)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_ngrams_off_leaves_the_network_alone(tmp_path):
    result = train_mixture(tmp_path, replace(SMALL, ngrams="off"))
    assert result.summary["mixture"] is None
    assert not (result.folder / "model" / LINEAR).exists()
    assert torch.isfinite(torch.tensor(result.metrics["test/loss"]))


def test_several_labels_a_row_are_answered_by_both(tmp_path):
    table = rows(200)
    both = {"text": table["text"], "label": [f"{label}|text" for label in table["label"]]}
    data = TextDataConfig(
        source=both,
        problem="multi",
        label_delimiter="|",
        cache=str(tmp_path / "cache"),
    )
    result = fit(data, SMALL, epochs=1, folder=tmp_path / "run", monitor=QUIET)
    assert result.summary["mixture"]["used"]
    texts = rows(20, seed=2)
    answers = load_predictor(result.folder).predict(texts["text"])
    is_right = [
        set(answer.label) == {label, "text"}
        for answer, label in zip(answers, texts["label"], strict=True)
    ]
    assert np.mean(is_right) > 0.8


def test_pairs_of_texts_are_answered_by_both(tmp_path, capsys):
    draw = np.random.default_rng(0)
    words = [f"word{number}" for number in range(8)]
    first = draw.choice(words, 240)
    second = np.where(draw.random(240) < 0.5, first, draw.choice(words, 240))
    table = {
        "question": [f"{word} nr{number}" for number, word in enumerate(first)],
        "answer": [f"{word} nr{number}" for number, word in enumerate(second)],
        "label": np.where(first == second, "same", "other").tolist(),
    }
    data = TextDataConfig(
        source=table, text=["question", "answer"], label="label", cache=str(tmp_path / "cache")
    )
    result = fit(data, SMALL, epochs=1, folder=tmp_path / "run", monitor=QUIET)
    assert result.summary["mixture"]["used"]
    asked = [("word1 x", "word1 y"), ("word1 x", "word2 y")]
    answers = load_predictor(result.folder).predict(asked)
    assert [answer.label for answer in answers] == ["same", "other"]
    assert answers == result.predict(asked)
    assert verb("export", result.folder, "--onnx") == 2
    expected = "export: the linear model of a run on pairs of texts has no exported form."
    assert expected in capsys.readouterr().err


NUMBERS = {
    "text": rows(120)["text"],
    "label": [number + 0.5 for number in range(120)],
}


@pytest.mark.parametrize(
    ("table", "problem", "class_weights"),
    [(NUMBERS, "regression", "none"), (rows(120), "single", "auto")],
    ids=["numbers", "weighted classes"],
)
def test_ngrams_on_is_refused_where_both_cannot_be_mixed(table, problem, class_weights, tmp_path):
    data = TextDataConfig(source=table, problem=problem, cache=str(tmp_path / "cache"))
    task = ClassificationConfig(class_weights=class_weights)
    model = replace(SMALL, ngrams="on")
    with pytest.raises(UserError, match=r"model\.ngrams: on, but"):
        fit(
            data,
            model,
            epochs=1,
            folder=tmp_path / "run",
            task=task,
            monitor=QUIET,
        )
