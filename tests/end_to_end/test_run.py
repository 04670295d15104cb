"""Whole runs on small real tables: from Python, for every kind of label, with mistakes, with an end
before its time.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pyarrow as pa
import pytest
from tests.callbacks.recorded_nvml import hot_4090, shared_card
from tests.composed import only_folder
from tests.fitting import own_cache
from tests.params import at_once
from tests.refusals import refused
from tests.run_files import read_csv, read_log, write_jsonl
from tests.verbs import verb
from torch import nn

from flatout import (
    BiLSTMConfig,
    CheckpointConfig,
    HeadlinesConfig,
    MonitorConfig,
    OptimConfig,
    Predictor,
    TextCNNConfig,
    TextDataConfig,
    UserError,
    fit,
)
from flatout.callbacks.gpu import find_card
from flatout.callbacks.hardware_monitor import HardwareMonitor
from flatout.data.checks.cleaning import CleaningConfig, Escapes
from flatout.data.problem import Problem
from flatout.data.tokens.vocabulary import VocabularyConfig
from flatout.report.summary import read_summary

SMALL = BiLSTMConfig(embedding=16, hidden=16)
WORDS = {
    "animals": "cat dog horse".split(),
    "plants": "rose oak fern".split(),
    "stones": "granite slate marble".split(),
}


def rows_about_things(count: int, seed: int = 0) -> list[dict[str, str]]:
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        topic = list(WORDS)[random.integers(3)]
        filler = [f"w{random.integers(40)}" for _ in range(random.integers(1, 9))]
        place = random.integers(len(filler) + 1)
        words = [*filler[:place], WORDS[topic][random.integers(3)], *filler[place:]]
        rows.append({"headline": " ".join(words) + f" {number}", "category": topic})
    return rows


def write_csv(path: Path, rows: list[dict[str, str]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def small_fit(tmp_path: Path, rows: list[dict[str, str]], **settings):
    data = TextDataConfig(
        train=write_csv(tmp_path / "rows.csv", rows),
        text="headline",
        label="category",
        batch_size=32,
        vocabulary=VocabularyConfig(min_frequency=1),
    )
    settings = {
        "epochs": 8,
        "optim": OptimConfig(lr=0.01),
        "output": str(tmp_path / "runs"),
    } | settings
    return fit(data, settings.pop("model", SMALL), **settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    with own_cache(folder):
        yield small_fit(folder, rows_about_things(600), optim=OptimConfig(lr=0.02))


def test_a_table_of_ones_own_is_learnt(finished):
    assert finished.metrics["test/accuracy"] > 0.9
    assert [prediction.label for prediction in finished.predict(["a cat w3", "w1 marble"])] == [
        "animals",
        "stones",
    ]


def test_the_run_folder_is_as_promised(finished):
    names = {path.name.split(".tfevents")[0] for path in finished.folder.iterdir()}
    assert names == {
        "config.yaml",
        "overrides.txt",
        "checkpoints",
        "model",
        "events.out",
        "metrics.csv",
        "summary.json",
        "report.html",
        "log.txt",
        "splits.parquet",
        ".lock",
    }
    assert {path.name for path in (finished.folder / "model").iterdir()} == {
        "tokenizer.json",
        "model.safetensors",
        "labels.json",
        "config.json",
        "linear.safetensors",
        "abstention.npz",
        "abstention.json",
        "fingerprint.npz",
    }
    links = {path.name for path in (finished.folder / "checkpoints").iterdir() if path.is_symlink()}
    assert links == {"best", "last"}


def test_the_summary_is_finished_and_filled(finished):
    summary = read_summary(finished.folder)
    assert summary["status"] == "finished"
    assert sum(summary["data"]["rows"].values()) == 600
    assert summary["data"]["classes"] == 3
    assert summary["training"]["steps"] > 0
    assert summary["speed"]["step_ms"]["forward"] > 0
    assert 0 < summary["speed"]["mfu"] < 1
    assert summary["hardware"]["peak_source"].startswith("measured")
    assert {choice["name"] for choice in summary["choices"]} >= {"feed", "precision"}
    assert summary["metrics"]["test/accuracy"] == finished.metrics["test/accuracy"]


def test_the_saved_model_answers_like_the_one_in_memory(finished):
    texts = [row["headline"] for row in rows_about_things(30, seed=5)]
    assert Predictor.load(finished.folder).predict(texts) == finished.predict(texts)


def test_curves_have_a_row_a_flush_and_a_row_a_validation(finished):
    rows = read_csv(finished.folder / "metrics.csv")
    assert (
        sum(bool(row["val/accuracy"]) for row in rows)
        == read_summary(finished.folder)["training"]["epochs"]
    )
    assert all(row["train/loss"] or row["val/loss"] for row in rows)


def test_what_the_card_and_the_machine_were_like_stands_in_the_summary_and_the_curves(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "flatout.callbacks.hardware_watch.watched_card",
        lambda device: find_card(shared_card(), 0),
    )
    monkeypatch.setattr(
        "flatout.run.trainer.HardwareMonitor", partial(HardwareMonitor, every_s=0.02)
    )
    result = small_fit(tmp_path, rows_about_things(400), epochs=4)
    speed = read_summary(result.folder)["speed"]
    assert (speed["gpu"]["utilisation"], speed["gpu"]["power_w"]) == pytest.approx((0.99, 449.0))
    assert (speed["gpu"]["throttled"], speed["gpu"]["others"]["processes"]) == (
        {"power limit": 1.0},
        2,
    )
    assert speed["host"]["process_memory_gb"] > 0.1
    rows = read_csv(result.folder / "metrics.csv")
    assert {row["gpu/temperature_c"] for row in rows} >= {"84"}
    assert any(row["host/process_cpu_cores"] for row in rows)
    assert "throttled 100% of the time by power limit" in (result.folder / "report.html").read_text(
        encoding="utf-8"
    )


def test_a_card_that_is_lost_in_mid_run_ends_no_training(tmp_path, monkeypatch):
    machine = hot_4090()
    card = find_card(machine, 0)
    machine.cards[0].is_lost = True
    monkeypatch.setattr("flatout.callbacks.hardware_watch.watched_card", lambda device: card)
    monkeypatch.setattr(
        "flatout.run.trainer.HardwareMonitor", partial(HardwareMonitor, every_s=0.02)
    )
    result = small_fit(tmp_path, rows_about_things(150), epochs=2)
    summary = read_summary(result.folder)
    assert (summary["status"], summary["speed"]["gpu"]["power_w"]) == ("finished", None)
    log = read_log(result.folder)
    assert log.count("gpu: no longer watched (GPU is lost); training continues") == 1


@pytest.mark.parametrize(
    "model", [SMALL, *at_once(of=[TextCNNConfig(embedding=16, filters=8)], seconds=2)]
)
def test_the_same_seed_gives_the_same_result(tmp_path, model):
    rows = rows_about_things(150)
    first, second = (small_fit(tmp_path, rows, epochs=2, model=model) for _ in range(2))
    assert first.metrics == second.metrics


def test_several_labels_a_row(tmp_path):
    rows = rows_about_things(300)
    for row, other in zip(rows, rows_about_things(300, seed=1), strict=True):
        row["headline"] += " " + other["headline"]
        row["category"] = "|".join(sorted({row["category"], other["category"]}))
    data = TextDataConfig(
        train=write_csv(tmp_path / "rows.csv", rows),
        text="headline",
        label="category",
        batch_size=32,
        problem=Problem.multi,
        label_delimiter="|",
        vocabulary=VocabularyConfig(min_frequency=1),
    )
    result = fit(data, SMALL, epochs=15, optim=OptimConfig(lr=0.01), output=str(tmp_path / "runs"))
    assert result.metrics["test/micro_f1"] > 0.85
    assert set(result.predict(["cat oak"])[0].label) == {"animals", "plants"}


@pytest.mark.soak(seconds=2)
def test_numbers_for_labels(tmp_path):
    rows = rows_about_things(400)
    for row in rows:
        row["category"] = str(1000 + 100 * list(WORDS).index(row["category"]))
    data = TextDataConfig(
        train=write_csv(tmp_path / "rows.csv", rows),
        text="headline",
        label="category",
        batch_size=32,
        problem=Problem.regression,
        vocabulary=VocabularyConfig(min_frequency=1),
    )
    result = fit(data, SMALL, epochs=12, optim=OptimConfig(lr=0.01), output=str(tmp_path / "runs"))
    assert result.metrics["test/rmse"] < 40
    assert result.predict("slate")[0].label == pytest.approx(1200, abs=80)


def test_a_table_in_memory(tmp_path):
    rows = rows_about_things(120)
    table = pa.Table.from_pylist(rows).to_pydict()
    data = TextDataConfig(train=table, text="headline", label="category", batch_size=32)
    result = fit(data, SMALL, epochs=1, output=str(tmp_path / "runs"))
    assert result.summary["data"]["source"] == "table in memory"


def test_a_model_answers_rows_as_they_were_made_ready_for_training(tmp_path):
    things = {
        "cat": "animals",
        "dog": "animals",
        "slate": "stones",
        "marble": "stones",
    }
    rows = [
        {
            "title": list(things)[i % 4],
            "body": f"w{i} &amp;",
            "label": list(things.values())[i % 4],
        }
        for i in range(200)
    ]
    table = pa.Table.from_pylist(rows).to_pydict()
    data = TextDataConfig(
        train=table,
        text=["title", "body"],
        clean=CleaningConfig(escapes=Escapes.decode),
        batch_size=32,
    )
    result = fit(data, SMALL, epochs=6, optim=OptimConfig(lr=0.01), output=str(tmp_path / "runs"))
    saved = Predictor.load(result.folder)
    assert saved.roles.texts == ("title", "body")
    assert (
        saved.outputs(pa.array(["cat w1 &amp;"])).tolist()
        == saved.outputs(pa.array(["cat w1 &"])).tolist()
    )
    file = tmp_path / "more.jsonl"
    file.write_text(
        '{"title": "dog", "body": "w &amp;"}\n{"title": "marble", "body": null}\n', encoding="utf-8"
    )
    out = tmp_path / "out.jsonl"
    assert verb("predict", result.folder, file, "--out", out) == 0
    answers = [
        json.loads(line)["prediction"] for line in out.read_text(encoding="utf-8").splitlines()
    ]
    assert answers == ["animals", "stones"]


def test_files_of_different_formats_for_the_splits(tmp_path):
    rows = rows_about_things(90)
    write_jsonl(tmp_path / "test.jsonl", rows[:30])
    data = TextDataConfig(
        train=write_csv(tmp_path / "train.csv", rows[30:]),
        test=str(tmp_path / "test.jsonl"),
        text="headline",
        label="category",
        batch_size=16,
    )
    result = fit(data, SMALL, epochs=1, output=str(tmp_path / "runs"))
    counts = result.summary["data"]["rows"]
    assert counts["test"] == 30
    assert counts["train"] + counts["val"] == 60


class BagOfWords(nn.Module):
    """A model as a person writes one: it says nothing of layouts or of tokens computed."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(1_000, 3)

    def forward(self, batch):
        return self.words(batch.tokens, batch.offsets[:-1])


def test_a_model_of_ones_own_needs_nothing_but_forward(tmp_path):
    result = small_fit(tmp_path, rows_about_things(200), model=BagOfWords(), epochs=2)
    assert result.summary["speed"]["padding_share"] == 0
    assert result.predict(["a cat"])[0].label in WORDS


def test_training_stops_when_nothing_gets_better_and_the_run_says_so(tmp_path, capsys):
    result = small_fit(
        tmp_path,
        rows_about_things(100),
        epochs=30,
        optim=OptimConfig(lr=1e-9),
        checkpoint=CheckpointConfig(patience=2),
    )
    epochs = result.summary["training"]["epochs"]
    assert epochs <= 4
    (end,) = (each for each in result.summary["choices"] if each["name"] == "early end of training")
    assert end["value"] == f"after epoch {epochs} of 30"
    assert (
        end["why"] == f"val/{result.metric} was no better in 2 validations, checkpoint.patience=2"
    )
    assert end["evidence"] == f"{result.objective:.4f} after epoch {epochs - 2}, which is kept"
    line = f"early end of training: after epoch {epochs} of 30 ({end['why']}; {end['evidence']})"
    said = capsys.readouterr().out
    assert line in said
    assert f"ended early after epoch {epochs} of 30: val/" in " ".join(said.split())
    assert line in read_log(result.folder)
    page = (result.folder / "report.html").read_text()
    assert "Training ended early" in page
    assert f"after epoch {epochs} of 30: val/" in page


def test_training_to_its_last_epoch_is_no_early_end(tmp_path, capsys):
    settings = {
        "epochs": 3,
        "optim": OptimConfig(lr=1e-9),
        "checkpoint": CheckpointConfig(patience=2),
    }
    result = small_fit(tmp_path, rows_about_things(100), **settings)
    assert result.summary["training"]["epochs"] == 3
    assert not [
        each for each in result.summary["choices"] if each["name"] == "early end of training"
    ]
    assert "Training ended early" not in (result.folder / "report.html").read_text()


class StopBy(L.Callback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("planted"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_a_run_that_ends_early_says_so_in_its_summary(tmp_path, error, status):
    with pytest.raises(type(error)):
        small_fit(tmp_path, rows_about_things(100), callbacks={"stop": StopBy(error)})
    folder = only_folder(tmp_path / "runs" / "default")
    assert read_summary(folder)["status"] == status
    assert read_log(folder)
    assert status in (folder / "report.html").read_text()


MISTAKES = {
    "missing file": ({"train": "nowhere.csv"}, {}, r"data.train: no such file: nowhere.csv"),
    "missing column": ({"text": "headlin"}, {}, r"no column 'headlin'.*Did you mean 'headline'\?"),
    "one class": (
        {},
        {"category": "same"},
        r"data.label: the training rows have only one class: 'same'",
    ),
    "no text at all": ({}, {"headline": ""}, r"data.train: no rows are left for the train split"),
    "no label at all": ({}, {"category": ""}, r"data.train: no rows are left for the train split"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_the_data_is_one_clear_error_and_leaves_no_store(tmp_path, case):
    settings, change, message = MISTAKES[case]
    rows = [row | change for row in rows_about_things(40)]
    given = {
        "train": write_csv(tmp_path / "rows.csv", rows),
        "text": "headline",
        "label": "category",
    } | settings
    with pytest.raises(UserError, match=message):
        fit(TextDataConfig(**given), SMALL, output=str(tmp_path / "runs"))
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
    assert not list((tmp_path / "cache").glob(".building*"))
    assert not list((tmp_path / "runs").rglob("*.*"))


def test_empty_texts_are_dropped_and_told(tmp_path, capsys):
    rows = rows_about_things(100)
    for row in rows[:3]:
        row["headline"] = " "
    small_fit(tmp_path, rows, epochs=1)
    said = capsys.readouterr().out
    assert "with an empty text, dropped" in said or "kept as one unknown word" in said


def test_an_unknown_setting_is_refused():
    with refused("fit", "epoch", fix="'epochs'"):
        fit(epoch=3)


def test_a_length_that_is_given_twice_is_refused():
    with refused("fit", "epochs=2", "max_epochs"):
        fit(epochs=2, trainer={"max_epochs": 3})


def test_validation_must_not_be_the_training_file():
    with refused("data.validation", "a.csv", "the training file"):
        TextDataConfig(train="a.csv", validation="a.csv")


@pytest.mark.soak(seconds=10)
def test_fit_works_where_hydra_cannot_be_imported_and_imports_no_package_of_an_extra(tmp_path):
    script = f"""
import sys
sys.modules["hydra"] = sys.modules["omegaconf"] = None
from flatout import fit, TextDataConfig, BiLSTMConfig, HeadlinesConfig
sample = HeadlinesConfig(rows=300, eval_rows=50)
data = TextDataConfig(sample=sample, cache={str(tmp_path / "cache")!r})
result = fit(data, BiLSTMConfig(embedding=8, hidden=8), epochs=1, output={str(tmp_path / "runs")!r})
print("trained", result.summary["training"]["steps"], result.predict("senate")[0].label)
extras = "accelerate datasets h5py keras mlflow onnx onnxruntime peft ray trackio wandb"
print("extras", [name for name in extras.split() if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "trained 3" in done.stdout
    assert "extras []" in done.stdout


@pytest.mark.soak(seconds=2)
def test_progress_can_be_switched_off(tmp_path):
    sample = TextDataConfig(sample=HeadlinesConfig(rows=200, eval_rows=40))
    result = fit(
        sample,
        SMALL,
        epochs=1,
        monitor=MonitorConfig(progress=False),
        output=str(tmp_path / "runs"),
    )
    assert result.metrics["val/accuracy"] >= 0
