"""A linear model answers with a network of few rows: in metrics, predictors and exports alike."""

from __future__ import annotations

import math
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
from flatout.config import MonitorConfig
from flatout.data import TextData
from flatout.errors import UserError
from flatout.inference.model_folder import LINEAR
from flatout.models.linear_text import QuickModel
from flatout.run.rival import score_linear
from flatout.tasks.mixture import Mixture
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


def trained(folder: Path, model: BiLSTMConfig = SMALL) -> Result:
    data = TextDataConfig(train=rows(200), test=TEST, cache=str(folder / "cache"))
    return fit(data, model, epochs=1, folder=folder / "run", monitor=QUIET)


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> Result:
    return trained(tmp_path_factory.mktemp("mixed"))


def test_few_rows_are_answered_by_both(result):
    mixture = result.summary["mixture"]
    assert mixture["used"]
    assert result.metrics["test/accuracy"] > 0.9
    assert mixture["losses"]["both"] < mixture["losses"]["network"]


def test_the_folder_answers_as_the_run_does(result):
    texts = rows(60)["text"]
    reopened = load_predictor(result.folder)
    assert (result.folder / "model" / LINEAR).is_file()
    assert reopened.predict(texts) == result.predictor.predict(texts)
    # The network has seen one epoch and knows little: without the linear model answers differ.
    alone = replace(reopened, linear=None, mixture=Mixture(1.0, 0.0))
    assert alone.predict(texts) != reopened.predict(texts)


def test_metrics_are_those_of_the_answers_that_are_given(result):
    answers = result.predict(TEST["text"])
    is_right = [answer.label == label for answer, label in zip(answers, TEST["label"], strict=True)]
    assert result.metrics["test/accuracy"] == pytest.approx(np.mean(is_right))


def test_the_rival_beside_the_score_is_the_plain_linear_model_fitted_once(tmp_path, monkeypatch):
    fitted = []
    fit_once = QuickModel.fit

    def count(model: QuickModel, *rows: Any) -> QuickModel:
        fitted.append(model)
        return fit_once(model, *rows)

    monkeypatch.setattr(QuickModel, "fit", count)
    data = TextDataConfig(train=rows(200), test=TEST, cache=str(tmp_path / "cache"))
    monitor = replace(QUIET, rival=True)
    found = fit(data, SMALL, epochs=1, folder=tmp_path / "run", monitor=monitor)
    texts = TextData(**{name: getattr(data, name) for name in ("train", "test", "cache")})
    texts.setup()
    apart = score_linear(texts, math.inf)
    assert len(fitted) == 2, "once by the run, once here"
    of_run = found.summary["rival"]["metrics"]
    assert of_run == pytest.approx({f"test/{name}": value for name, value in apart.items()})


def test_onnx_that_cannot_hold_both_is_refused_with_the_way_out(result, capsys):
    assert verb("export", result.folder, "--onnx") == 2
    assert "Train with model.ngrams=off" in capsys.readouterr().err


def test_ngrams_off_leaves_the_network_alone(tmp_path):
    result = trained(tmp_path, replace(SMALL, ngrams="off"))
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


def test_pairs_of_texts_are_answered_by_both(tmp_path):
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
