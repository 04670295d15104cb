"""A run whose texts are cut says what the cut rows score beside the whole ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout import BiLSTMConfig, CheckpointConfig, OptimConfig, fit
from flatout.data.texts.data import TextData
from flatout.data.texts.settings import TextDataConfig
from flatout.data.tokens.vocabulary import VocabularyConfig
from flatout.inference.text import Predictor
from flatout.tasks.classification import Classifier
from tests.params import at_once
from tests.run_files import read_log
from tests.trainers import quiet_trainer

WORDS = np.array("oak fern rose slate flint basalt".split())
# without the linear model, which reads whole texts
MODEL = BiLSTMConfig(embedding=16, hidden=16, ngrams="off")


def rows_of(count: int, long: int, seed: int, problem: str = "single") -> dict[str, Any]:
    """Texts whose last words decide: so many of them are long, and cut at 12 tokens say nothing."""
    random = np.random.default_rng(seed)
    kinds = random.integers(2, size=count)
    texts = []
    for row, kind in enumerate(kinds):
        before = ["of"] * 30 if row < long else []
        deciding = WORDS[random.integers(3, size=8) + 3 * kind]
        texts.append(" ".join([*before, *deciding]))
    named = ["plant", "stone"]
    labels: list[Any] = [named[kind] for kind in kinds]
    if problem == "multi":
        labels = [[each] for each in labels]
    elif problem == "regression":
        labels = [float(kind) for kind in kinds]
    return {"text": texts, "label": labels}


def settings(test: dict[str, Any], problem: str = "single", **changed: Any) -> TextDataConfig:
    more: dict[str, Any] = {
        "batch_size": 16,
        "max_length": 12,
        "vocabulary": VocabularyConfig(min_frequency=1),
    }
    train = rows_of(160, 40, 1, problem)
    return TextDataConfig(train=train, test=test, problem=problem, **{**more, **changed})


@pytest.mark.parametrize(
    ("problem", "metric"),
    [
        ("single", "accuracy"),
        *at_once(of=[("multi", "micro_f1"), ("regression", "rmse")], seconds=2),
    ],
)
def test_cut_and_whole_rows_are_scored_apart(
    problem: str, metric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = rows_of(90, 40, 2, problem)
    result = fit(
        settings(test, problem),
        MODEL,
        optim=OptimConfig(lr=0.02),
        epochs=4,
        folder=tmp_path / "run",
    )
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["truncation"]
    assert (found["metric"], found["cut_rows"], found["whole_rows"]) == (f"test/{metric}", 40, 50)
    line = (
        f"test/{metric} by length: {found['cut']:.4f} on 40 cut rows, {found['whole']:.4f} on 50"
        " whole rows"
    )
    for said in (
        capsys.readouterr().out,
        *((tmp_path / "run" / name).read_text() for name in ("log.txt", "report.html")),
    ):
        assert said.count(line) == 1
    if problem == "single":
        answers = [each.label for each in Predictor.load(tmp_path / "run").predict(test["text"])]
        right = np.array(answers) == np.array(test["label"])
        assert (found["cut"], found["whole"]) == pytest.approx(
            (right[:40].mean(), right[40:].mean())
        )
        assert found["whole"] > found["cut"] + 0.2
        assert result.metrics["test/accuracy"] == pytest.approx(
            (40 * found["cut"] + 50 * found["whole"]) / 90
        )


@pytest.mark.soak(seconds=3)
def test_the_metric_that_decides_is_scored_and_a_test_cut_short_scores_nothing(
    tmp_path: Path,
) -> None:
    test = rows_of(90, 40, 2)
    given: dict[str, Any] = {"checkpoint": CheckpointConfig(metric="macro_f1"), "epochs": 1}
    result = fit(settings(test), MODEL, folder=tmp_path / "run", **given)
    assert result.summary["truncation"]["metric"] == "test/macro_f1"
    short = fit(
        settings(test, eval_batch_size=16),
        MODEL,
        folder=tmp_path / "short",
        trainer={"limit_test_batches": 1},
        epochs=1,
    )
    assert short.summary["truncation"] is None
    assert "by length" not in read_log(tmp_path / "short")


@pytest.mark.parametrize(("rows", "cut"), [(90, 29), *at_once(of=[(60, 31), (90, 0)], seconds=1)])
def test_few_cut_or_few_whole_rows_are_not_compared(
    rows: int, cut: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fit(settings(rows_of(rows, cut, 2)), MODEL, epochs=1, folder=tmp_path / "run")
    assert result.summary["truncation"] is None
    assert "by length" not in capsys.readouterr().out


@pytest.mark.soak(seconds=3)
def test_whole_rows_of_the_longest_length_are_not_taken_for_cut_ones(tmp_path: Path) -> None:
    test = rows_of(90, 40, 2)
    test["text"][40] = " ".join(["of"] * 12)
    result = fit(settings(test), MODEL, epochs=1, folder=tmp_path / "one")
    assert "on 40 cut rows (and 1 whole ones of their length), " in read_log(tmp_path / "one")
    assert [result.summary["truncation"][f"{each}_rows"] for each in ("cut", "equal", "whole")] == [
        40,
        1,
        49,
    ]
    test["text"][40:50] = [" ".join(["of"] * 12)] * 10
    assert (
        fit(settings(test), MODEL, epochs=1, folder=tmp_path / "ten").summary["truncation"] is None
    )


def test_a_plain_trainer_tests_any_loader_although_rows_were_cut(tmp_path: Path) -> None:
    given = rows_of(90, 40, 2)
    data = TextData(
        train=rows_of(200, 60, 1), test=given, max_length=12, cache=str(tmp_path / "cache")
    )
    task = Classifier(MODEL)
    trainer = quiet_trainer(tmp_path)
    trainer.fit(task, datamodule=data)
    trainer.test(task, datamodule=data, verbose=False)
    assert task.truncation()["cut_rows"] == 40
    trainer.test(task, dataloaders=data.train_dataloader(), verbose=False)
    assert task.truncation() == {}
