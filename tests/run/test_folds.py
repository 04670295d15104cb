"""A run's own model in folds: each row's answer is that of a run which did not see its fold."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from flatout import MonitorConfig, TextDataConfig, fit
from flatout.config import RunConfig
from flatout.data.samples.headlines import HeadlinesConfig, HeadlinesTable
from flatout.data.samples.tagged_tweets import TaggedTweetsConfig, TaggedTweetsTable
from flatout.models.textcnn import TextCNNConfig
from flatout.perf.tune.settings import tune_of
from flatout.run.folds import answers_in_folds
from tests.composed import only_folder, run_train
from tests.encoders import calm_encoder
from tests.run_files import read_csv
from tests.verbs import verb

TAGGER = calm_encoder()
QUIET = MonitorConfig(progress=False, verdict=False, rival=False)
NETWORK = TextCNNConfig(embedding=16, filters=8)


def read_rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    block = next(
        HeadlinesTable(HeadlinesConfig(rows=count, classes=3), "train").blocks(["text", "label"])
    )
    return tuple(np.array(block[name].to_pylist(), object) for name in ("text", "label"))


def read_sentences(count: int) -> list[dict[str, list[str]]]:
    sample = TaggedTweetsTable(TaggedTweetsConfig(rows=count), "train")
    return [row for block in sample.blocks(["tokens", "tags"]) for row in block.to_pylist()]


def as_column(lists: list[list[str]]) -> np.ndarray:
    found = np.empty(len(lists), object)
    found[:] = lists
    return found


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_each_row_is_answered_by_a_run_on_the_other_folds_and_nothing_is_left_of_it(tmp_path):
    texts, labels = read_rows(160)
    folds = np.arange(160) % 2
    lines = list[str]()
    data = TextDataConfig(
        source=pa.table({"text": texts, "label": labels}), batch_size=16, max_length=20
    )
    settings = RunConfig(
        data=data, model=NETWORK, trainer={"max_epochs": 1}, tune=tune_of("off"), seed=3
    )
    found = answers_in_folds(
        settings, texts, labels, sorted(set(labels)), folds, 0.0, 600.0, lines.append
    )
    sides = [
        pa.table({"text": texts[folds == fold], "label": labels[folds == fold]}) for fold in (0, 1)
    ]
    for fold, judged in enumerate(sides):
        data = TextDataConfig(train=sides[1 - fold], test=judged, batch_size=16, max_length=20)
        predictor = fit(
            data, NETWORK, max_epochs=1, seed=3, output="by_hand", monitor=QUIET
        ).predictor
        assert predictor.labels.classes == sorted(set(labels))
        shares = predictor.shares(predictor.outputs(judged["text"].combine_chunks()))
        np.testing.assert_allclose(found[folds == fold], shares.numpy(), rtol=1e-6)
    assert lines[0] == "network: training 1 of 2 of the run's model, some 0 s in all"
    assert len(lines) == 3
    assert lines[2].startswith("network: the run's model was trained 2 times, in ")
    assert not list(tmp_path.glob("outputs*"))


@pytest.mark.soak(seconds=8)
def test_each_word_is_answered_by_a_tagger_that_saw_no_sentence_of_its_fold(tmp_path):
    rows = read_sentences(160)
    lines = list[str]()
    # the last ones are taught and never judged
    folds = np.append(np.arange(150) % 2, np.full(10, -1))
    types = ["none", *sorted({tag[2:] for row in rows for tag in row["tags"]} - {""})]
    given = {"problem": "tags", "batch_size": 16, "max_length": 40}
    data = TextDataConfig(source=pa.Table.from_pylist(rows), **given)
    settings = RunConfig(
        data=data, model=TAGGER, trainer={"max_epochs": 1}, tune=tune_of("off"), seed=3
    )
    words = as_column([row["tokens"] for row in rows])
    tags = as_column([row["tags"] for row in rows])
    found = answers_in_folds(settings, words, tags, types, folds, 0.0, 600.0, lines.append)
    words_of = np.repeat(np.arange(160), [len(row["tokens"]) for row in rows])
    assert found.shape == (len(words_of), len(types))
    assert not found[folds[words_of] < 0].any()
    for fold in (0, 1):
        judged = [row for row, own in zip(rows, folds, strict=True) if own == fold]
        train = [row for row in rows if row not in judged]
        test = [row for row in rows if row in judged]
        data = TextDataConfig(
            train=pa.Table.from_pylist(train), test=pa.Table.from_pylist(test), **given
        )
        fitted = fit(data, TAGGER, max_epochs=1, seed=3, output="by_hand", monitor=QUIET).predictor
        expected = fitted.tags(
            pa.array([row["tokens"] for row in test], pa.list_(pa.large_string()))
        )
        shares = found[folds[words_of] == fold]
        # a word is a token or more
        is_seen = np.concatenate([np.arange(len(row["tokens"])) < 38 for row in test])
        assert not shares[~is_seen].any()
        assert is_seen.mean() > 0.5
        assert set(shares.sum(axis=1).round(4).tolist()) <= {0.0, 1.0}
        names = [types.index(name[2:] or "none") for name in fitted.names]
        np.testing.assert_allclose(shares[:, names[::2]], expected.types, rtol=1e-5)
        # of a type, the shares of its two tags are together
        is_outside = (expected.ids == 0) & shares.any(axis=1)
        np.testing.assert_allclose(
            shares[is_outside, 0], expected.probabilities[is_outside], rtol=1e-5
        )
        own = shares[np.arange(len(shares)), np.array(names)[expected.ids]]
        assert (own >= expected.probabilities - 1e-6)[shares.any(axis=1)].all()


def test_what_takes_too_long_or_fails_is_left_out_with_a_line():
    texts, labels = read_rows(60)
    folds = np.arange(60) % 2
    lines = list[str]()
    settings = RunConfig(data=TextDataConfig(source="rows.csv"), model=NETWORK, tune=tune_of("off"))
    assert (
        answers_in_folds(
            settings, texts, labels, sorted(set(labels)), folds, 90.0, 60.0, lines.append
        )
        is None
    )
    assert lines == [
        "network: left out: 2 trainings of the run's model take 180 s. Give it more time: for=TIME."
    ]
    labels[folds == 0] = "the same"
    assert (
        answers_in_folds(
            settings, texts, labels, sorted(set(labels)), folds, 0.0, 60.0, lines.append
        )
        is None
    )
    assert lines[-1].startswith(
        "network: left out: data.label: no label of the test rows is one of the training"
    )


@pytest.mark.soak(seconds=6)
def test_an_audit_of_a_run_trains_its_model_in_folds_and_suspects_say_what_each_answers(
    monkeypatch, capfd
):
    texts, labels = read_rows(400)
    with Path("rows.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *zip(texts, labels, strict=True)])
    words = [
        "data.source=rows.csv",
        "model=textcnn",
        "model.embedding=16",
        "trainer.max_epochs=2",
        "name=mine",
    ]
    assert run_train([*words, "monitor.verdict=false", "output=runs"], monkeypatch) == 0
    run = only_folder(Path("runs/mine"))
    capfd.readouterr()
    assert verb("audit", run, "folds=2", "out=other", "for=1s") == 0
    assert "network: left out: " in capfd.readouterr().out
    assert verb("audit", run, "folds=2") == 0
    assert "network: the run's model was trained 2 times" in capfd.readouterr().out
    suspects = read_csv(Path("audit/suspects.csv"))
    assert suspects
    assert all({each["words"], each["network"]} <= set(labels) for each in suspects)
    assert any(each["words"] != each["network"] for each in suspects)
    assert [path.name for path in Path("runs/mine").iterdir()] == [run.name]
    with (run / "overrides.txt").open("a", encoding="utf-8") as words:
        words.write("\n+callbacks.mine._target_=mine.Callback\n")
    assert verb("audit", run, "folds=2", "out=third") == 0
    assert "network: left out: the run has classes of its own" in capfd.readouterr().out


@pytest.mark.soak(seconds=8)
def test_an_audit_of_a_tagger_has_its_view_of_each_entity(monkeypatch, capfd):
    lines = [json.dumps(row) for row in read_sentences(400)]
    Path("rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = [
        "data.source=rows.jsonl",
        "data.problem=tags",
        "task=tagging",
        "model=transformer",
        "model.hidden=16",
    ]
    words += [
        "model.layers=1",
        "model.heads=2",
        "trainer.max_epochs=1",
        "name=mine",
        "monitor.verdict=false",
    ]
    assert run_train([*words, "output=runs"], monkeypatch) == 0
    capfd.readouterr()
    assert verb("audit", only_folder(Path("runs/mine")), "folds=2") == 0
    assert "network: the run's model was trained 2 times" in capfd.readouterr().out
    suspects = read_csv(Path("audit/suspects.csv"))
    types = {tag[2:] or "no entity" for line in lines for tag in json.loads(line)["tags"]}
    assert suspects
    assert all({each["given"], each["words"], each["network"]} <= types for each in suspects)
