"""`predict --at-error`: unsure answers are left out, by rows that were not trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from flatout import (
    BiLSTMConfig,
    OptimConfig,
    TextDataConfig,
    load_predictor,
)
from flatout.cli.run_arguments import is_trained_on
from flatout.inference.model_folder import SETTINGS, WEIGHTS
from tests.fitting import quiet_fit
from tests.refusals import require_printed
from tests.run_files import read_csv, write_jsonl
from tests.verbs import verb


def write_rows(path: Path, rows: int, seed: int) -> Path:
    """Labelled rows; one in four has words that say nothing of its label."""
    words = {
        "politics": "senate ballot",
        "sport": "striker playoff",
        "science": "comet orbit",
    }
    random = np.random.default_rng(seed)
    lines = ["text,label"]
    for _ in range(rows):
        topic = random.choice(list(words))
        said = words[topic] if random.random() < 0.75 else "vote of 42"
        lines.append(f"{said} w{random.integers(100)},{topic}")
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on such rows, and a file of others."""
    folder = tmp_path_factory.mktemp("abstention")
    data = TextDataConfig(
        train=str(write_rows(folder / "train.csv", 400, 0)),
        validation=str(write_rows(folder / "validation.csv", 400, 1)),
        cache=str(folder / "cache"),
        batch_size=16,
    )
    model = BiLSTMConfig(embedding=8, hidden=8)
    run = quiet_fit(
        data,
        model,
        epochs=3,
        output=str(folder),
        optim=OptimConfig(lr=0.02),
    )
    return run, write_rows(folder / "fresh.csv", 300, 2)


def test_a_run_keeps_the_error_of_its_surest_validation_rows(trained):
    run, _ = trained
    cuts = run.summary["abstention"]
    assert [cut["share"] for cut in cuts[:3]] == [1.0, 0.95, 0.9]
    assert cuts[0]["error"] == pytest.approx(1 - run.metrics["val/accuracy"])
    assert all(cut["error"] <= cut["at_most"] for cut in cuts)
    assert min(cut["at_most"] for cut in cuts) < 0.05 < cuts[0]["error"]
    assert "error of the surest answers" in (run.folder / "report.html").read_text("utf-8")


def test_predict_leaves_unsure_answers_out_and_names_what_is_possible(trained, tmp_path, capsys):
    run, path = trained
    out = tmp_path / "answers.csv"
    assert verb("predict", run.folder, path, "--at-error", "5%", "--out", out) == 0
    rows = read_csv(out)
    given = [row for row in rows if row["prediction"]]
    left = [row for row in rows if not row["prediction"]]
    assert min(len(given), len(left)) > 50
    assert sum(row["prediction"] != row["label"] for row in given) <= 0.05 * len(given)
    assert {row["possible"] for row in given} == {""}
    assert sum(row["label"] in row["possible"].split("|") for row in left) >= 0.95 * len(left)
    line = f"{len(given)} of 300 answers are given; at most 5 % of them are wrong"
    require_printed(capsys.readouterr().err, f"{line} (95 % confidence)", "the same source")
    answers = load_predictor(run.folder, at_error=0.05).predict([row["text"] for row in rows])
    assert [answer.label or "" for answer in answers] == [row["prediction"] for row in rows]
    assert ["|".join(answer.possible or []) for answer in answers] == [
        row["possible"] for row in rows
    ]


@pytest.mark.parametrize("error", ["0", "1", "-3%", "abc", "nan"])
def test_an_error_that_is_no_share_is_refused(trained, error, capsys):
    run, path = trained
    assert verb("predict", run.folder, path, f"--at-error={error}") == 2
    assert capsys.readouterr().err == f"--at-error: {error} (above 0 and below 1, as 5% or 0.05)\n"


def test_a_value_that_begins_as_an_option_is_refused_with_how_it_is_written(trained, capsys):
    run, path = trained
    assert verb("predict", run.folder, path, "--at-error", "-x") == 2
    require_printed(
        capsys.readouterr().err,
        "--at-error",
        "begins with '-'",
        "--at-error=VALUE.",
    )


def test_an_error_that_cannot_be_promised_is_refused_with_the_rows_that_it_takes(
    trained, tmp_path, capsys
):
    run, path = trained
    out = tmp_path / "answers.csv"
    assert verb("predict", run.folder, path, "--at-error", "0.5%", "--out", out) == 2
    require_printed(
        capsys.readouterr().err,
        "400 answers to validation rows",
        "It takes 1,196 rows",
    )
    assert not out.exists()


def test_evaluate_prints_the_error_by_share_and_calibrates_by_other_rows(trained, tmp_path, capsys):
    run, path = trained
    copy = shutil.copytree(run.folder / "model", tmp_path / "model")
    assert verb("evaluate", copy, path, "--json") == 0
    cuts = json.loads(capsys.readouterr().out)["abstention"]
    assert verb("evaluate", copy, path, "--calibrate") == 0
    printed = capsys.readouterr().out
    assert "answered  surer than  error  at most" in printed
    assert f"{cuts[0]['error']:.1%}" in printed
    kept = load_predictor(copy).held_out
    assert len(kept.rows) == 300
    assert [cut["error"] for cut in kept.cuts()] == [cut["error"] for cut in cuts]


def test_rows_of_the_training_calibrate_nothing(trained, tmp_path, capsys):
    run, path = trained
    kept = load_predictor(run.folder).held_out
    file = path.with_name("train.csv")
    copy = shutil.copy(file, tmp_path / "labelled.csv")
    for name in (file, copy):
        assert verb("evaluate", run.folder, name, "--calibrate") == 2
        require_printed(capsys.readouterr().err, "the run has learned from", name)
    assert len(load_predictor(run.folder).held_out.rows) == len(kept.rows) == 400


@pytest.mark.parametrize("form", ["a list", "a pattern", "a folder", "a folder of splits"])
def test_each_of_several_training_files_is_known(form, tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    for name in (SETTINGS, WEIGHTS):
        (run / "model" / name).touch()
    folder = tmp_path / "data"
    folder.mkdir()
    is_split = form == "a folder of splits"
    names = ["train-0.csv", "train-1.csv"] if is_split else ["a.csv", "b.csv"]
    files = [folder / name for name in names]
    others = [folder / "test.csv"] if is_split else [tmp_path / "other.csv"]
    for file in [*files, *others]:
        file.write_text("text,label\n", encoding="utf-8")
    source = {"a list": list(map(str, files)), "a pattern": f"{folder}/*.csv"}
    settings = {"data": {"source": source.get(form, str(folder))}}
    (run / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert all(is_trained_on(str(run), str(file)) for file in files)
    assert not any(is_trained_on(str(run), str(file)) for file in others)


def test_predict_names_a_file_that_is_unlike_the_training_texts(trained, tmp_path, capsys):
    run, path = trained
    assert verb("predict", run.folder, path, "--out", tmp_path / "answers.csv") == 0
    assert "unlike" not in capsys.readouterr().err
    lines = path.read_text(encoding="utf-8").splitlines()[1:41]
    lines[29] = "a b c d e f g h i j k l m n o p q r s t u v,sport"
    lines[:15] = ["words that no row of the training has ever had,politics"] * 15
    other = tmp_path / "other.csv"
    other.write_text("\n".join(["text,label", *lines, ""]), encoding="utf-8")
    assert verb("predict", run.folder, other, "--out", tmp_path / "others.csv") == 0
    printed = capsys.readouterr().err
    assert printed.startswith(f"{other}: 40% of the rows are unlike the training texts (usual:")
    assert "most unlike: rows 1, 2, 3, 4, 5" in printed
    assert (run.folder / "model" / "fingerprint.npz").stat().st_size < 1_000_000
    few = tmp_path / "few.csv"
    few.write_text("\n".join(["text,label", *lines[:3], ""]), encoding="utf-8")
    assert verb("predict", run.folder, few, "--out", tmp_path / "others.csv") == 0
    assert "unlike" not in capsys.readouterr().err


def test_a_number_gets_an_interval_and_is_never_left_out(tmp_path, capsys):
    random = np.random.default_rng(0)
    sizes = random.integers(1, 9, 200)
    noise = random.normal(0, 0.1, 200)
    texts = ["long " * size for size in sizes]
    table = {"text": texts, "label": (sizes + noise).tolist()}
    given = {
        "train": table,
        "validation": {name: rows[::-1] for name, rows in table.items()},
    }
    data = TextDataConfig(problem="regression", batch_size=50, cache=str(tmp_path), **given)
    run = quiet_fit(
        data,
        BiLSTMConfig(embedding=4, hidden=4),
        epochs=1,
        output=str(tmp_path),
    )
    assert run.summary["abstention"] == []
    file = tmp_path / "rows.jsonl"
    write_jsonl(file, [{"text": text} for text in texts])
    out = tmp_path / "answers.jsonl"
    assert verb("predict", run.folder, file, "--at-error", "10%", "--out", out) == 0
    require_printed(
        capsys.readouterr().err,
        "200 of 200 answers",
        "of them lie outside of their interval (95 % confidence)",
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    held = 0
    for row, truth in zip(rows, table["label"], strict=True):
        low, high = row["possible"]
        assert (low + high) / 2 == pytest.approx(row["prediction"], abs=1e-4)
        held += low <= truth <= high
    assert held >= 180
    (answer,) = load_predictor(run.folder, at_error=0.1).predict([texts[0]])
    assert answer.possible == pytest.approx(rows[0]["possible"], abs=1e-5)
    assert verb("predict", run.folder, file, "--at-error", "1%") == 2
    require_printed(
        capsys.readouterr().err,
        "200 answers to validation rows",
        "takes 597 rows",
    )
