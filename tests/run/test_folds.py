"""A run's own model in folds: each row's answer is that of a run which did not see its fold."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from flatout import MonitorConfig, TextDataConfig, fit
from flatout.config import RunConfig
from flatout.data.samples.headlines import HeadlinesConfig, HeadlinesTable
from flatout.models.textcnn import TextCNNConfig
from flatout.perf.tune.settings import tune_of
from flatout.run.folds import answers_in_folds
from tests.composed import only_folder, run_train
from tests.verbs import verb

QUIET = MonitorConfig(progress=False, verdict=False, rival=False)
NETWORK = TextCNNConfig(embedding=16, filters=8)


def read_rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    block = next(HeadlinesTable(HeadlinesConfig(rows=count, classes=3), "train").blocks(["text", "label"]))
    return tuple(np.array(block[name].to_pylist(), object) for name in ("text", "label"))


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_each_row_is_answered_by_a_run_on_the_other_folds_and_nothing_is_left_of_it(tmp_path):
    texts, labels = read_rows(240)
    folds, lines = np.arange(240) % 2, list[str]()
    data = TextDataConfig(source=pa.table({"text": texts, "label": labels}), batch_size=16, max_length=20)
    settings = RunConfig(data=data, model=NETWORK, trainer={"max_epochs": 2}, tune=tune_of("off"), seed=3)
    found = answers_in_folds(settings, texts, labels, folds, 0.0, 60.0, lines.append)
    sides = [pa.table({"text": texts[folds == fold], "label": labels[folds == fold]}) for fold in (0, 1)]
    for fold, judged in enumerate(sides):
        data = TextDataConfig(train=sides[1 - fold], test=judged, batch_size=16, max_length=20)
        predictor = fit(data, NETWORK, max_epochs=2, seed=3, output="by_hand", monitor=QUIET).predictor
        assert predictor.labels.classes == sorted(set(labels))
        shares = predictor.shares(predictor.outputs(judged["text"].combine_chunks()))
        np.testing.assert_allclose(found[folds == fold], shares.numpy(), rtol=1e-6)
    assert lines[0] == "network: training 1 of 2 of the run's model, some 0 s in all"
    assert len(lines) == 3 and lines[2].startswith("network: the run's model was trained 2 times, in ")
    assert not list(tmp_path.glob("outputs*"))


def test_what_takes_too_long_or_fails_is_left_out_with_a_line():
    texts, labels = read_rows(60)
    folds, lines = np.arange(60) % 2, list[str]()
    settings = RunConfig(data=TextDataConfig(source="rows.csv"), model=NETWORK, tune=tune_of("off"))
    assert answers_in_folds(settings, texts, labels, folds, 90.0, 60.0, lines.append) is None
    assert lines == ["network: left out: 2 trainings of the run's model take 180 s. Give it more time: for=TIME."]
    labels[folds == 0] = "the same"
    assert answers_in_folds(settings, texts, labels, folds, 0.0, 60.0, lines.append) is None
    assert lines[-1].startswith("network: left out: data.label: no label of the test rows is one of the training")


@pytest.mark.soak(seconds=6)
def test_an_audit_of_a_run_trains_its_model_in_folds_and_suspects_say_what_each_answers(monkeypatch, capfd):
    texts, labels = read_rows(400)
    with Path("rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *zip(texts, labels, strict=True)])
    words = ["data.source=rows.csv", "model=textcnn", "model.embedding=16", "trainer.max_epochs=2", "name=mine"]
    assert run_train([*words, "monitor.verdict=false", "output=runs"], monkeypatch) == 0
    run = only_folder(Path("runs/mine"))
    capfd.readouterr()
    assert verb("audit", run, "folds=2", "out=other", "for=1s") == 0
    assert "network: left out: " in capfd.readouterr().out
    assert verb("audit", run, "folds=2") == 0
    assert "network: the run's model was trained 2 times" in capfd.readouterr().out
    with Path("audit/suspects.csv").open(encoding="utf-8", newline="") as file:
        suspects = list(csv.DictReader(file))
    assert suspects and all({each["words"], each["network"]} <= set(labels) for each in suspects)
    assert any(each["words"] != each["network"] for each in suspects)
    assert [path.name for path in Path("runs/mine").iterdir()] == [run.name]
    with (run / "overrides.txt").open("a", encoding="utf-8") as words:
        words.write("\n+callbacks.mine._target_=mine.Callback\n")
    assert verb("audit", run, "folds=2", "out=third") == 0
    assert "network: left out: the run has classes of its own" in capfd.readouterr().out
