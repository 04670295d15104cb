"""`predict --with rival`: where the rival wins clearly it is kept, named, and answers alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout import Result, TextDataConfig, fit, load_predictor
from flatout.inference.model_folder import RIVAL
from flatout.report.run_report import RunReport
from flatout.tasks.abstention import HeldOutAnswers
from tests.refusals import require_printed
from tests.run.test_mixing import QUIET, SMALL, TEST, rows
from tests.verbs import verb


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> Result:
    folder = tmp_path_factory.mktemp("rival")
    data = TextDataConfig(train=rows(200), test=TEST, cache=str(folder / "cache"), batch_size=128)
    model = replace(SMALL, ngrams="off")
    monitor = replace(QUIET, rival="always")
    return fit(data, model, epochs=1, folder=folder / "run", monitor=monitor)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "rows.csv"
    lines = [f"{text},{label}" for text, label in zip(*TEST.values(), strict=True)]
    path.write_text("\n".join(["text,label", *lines, ""]), encoding="utf-8")
    return path


def test_a_rival_that_wins_clearly_is_kept_and_its_command_is_named(result):
    assert result.summary["rival"]["kept"]
    command = "python -m flatout predict RUN FILE --with rival answers with it"
    assert command in RunReport(result.summary).rival
    answers = load_predictor(result.folder, answer_with="rival").predict(TEST["text"])
    labels = [answer.label for answer in answers]
    accuracy = np.mean(np.array(labels) == np.array(TEST["label"]))
    assert accuracy == result.summary["rival"]["metrics"]["test/accuracy"]
    assert accuracy > result.metrics["test/accuracy"]


def with_numbers(table: dict[str, list[str]]) -> dict[str, list[Any]]:
    """The same texts; the label of each is how long its word is."""
    return {"text": table["text"], "label": [float(len(label)) for label in table["label"]]}


def test_a_rival_that_answers_with_numbers_is_kept_too(tmp_path):
    train = with_numbers(rows(200))
    test = with_numbers(TEST)
    data = TextDataConfig(train=train, test=test, problem="regression", batch_size=128)
    monitor = replace(QUIET, rival="always")
    model = replace(SMALL, ngrams="off")
    result = fit(data, model, epochs=1, folder=tmp_path / "run", monitor=monitor)
    assert result.summary["rival"]["kept"]
    answers = load_predictor(result.folder, answer_with="rival").predict(TEST["text"])
    errors = np.array([answer.label for answer in answers]) - test["label"]
    rmse = float(np.sqrt(np.mean(errors**2)))
    assert rmse == pytest.approx(result.summary["rival"]["metrics"]["test/rmse"], rel=1e-4)
    assert rmse < result.metrics["test/rmse"]


def test_predict_evaluate_and_verify_take_the_rival(result, file, tmp_path, capsys):
    out = tmp_path / "answers.csv"
    assert verb("predict", result.folder, file, "--with", "rival", "--out", out) == 0
    assert verb("verify", result.folder, file, "--with", "rival") == 0
    assert "each form holds" in capsys.readouterr().out
    assert verb("evaluate", result.folder, file, "--with", "rival") == 0
    accuracy = result.summary["rival"]["metrics"]["test/accuracy"]
    require_printed(capsys.readouterr().out, f"accuracy          {accuracy:.4f}")


def test_the_network_of_a_run_without_a_linear_model_answers_as_the_run(result):
    alone = load_predictor(result.folder, answer_with="network")
    assert alone.predict(TEST["text"]) == result.predict(TEST["text"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--with", "nobody"], "--with: 'nobody' (rival, network)"),
        (["--with", "rival", "--at-error", "5%"], "--at-error: is promised without --with rival"),
    ],
)
def test_what_cannot_be_is_refused(options, said, result, file, capsys):
    assert verb("predict", result.folder, file, *options) == 2
    assert capsys.readouterr().err.startswith(said)


def test_rows_calibrate_the_answers_of_the_run_and_of_no_part_of_it(result, file, capsys):
    kept = (result.folder / "model" / HeldOutAnswers.FILE).read_bytes()
    assert verb("evaluate", result.folder, file, "--calibrate", "--with", "rival") == 2
    require_printed(capsys.readouterr().err, "--calibrate: is of the run's own answers")
    assert (result.folder / "model" / HeldOutAnswers.FILE).read_bytes() == kept


def test_a_run_that_kept_no_rival_says_why(result, file, capsys):
    kept = result.folder / "model" / RIVAL
    aside = kept.rename(kept.with_suffix(".aside"))
    assert verb("predict", result.folder, file, "--with", "rival") == 2
    aside.rename(kept)
    require_printed(capsys.readouterr().err, "this run has kept no rival: it was left out, or did")
