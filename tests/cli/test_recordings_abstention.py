"""`predict --at-error` of recordings: unsure classes are left out, numbers get intervals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from flatout import MonitorConfig, OptimConfig, RNNConfig, SequenceDataConfig, fit
from tests.refusals import require_printed
from tests.run_files import read_csv
from tests.verbs import verb

QUIET = MonitorConfig(progress=False, verdict=False)


def recordings(path: Path, count: int, seed: int, *, classes: bool) -> Path:
    """Recordings of four samples; their mean says the label, but for some noise."""
    random = np.random.default_rng(seed)
    levels = random.normal(0, 1, count)
    samples = np.repeat(levels, 4) + random.normal(0, 0.5, 4 * count)
    labels = np.repeat(levels, 4)
    table = {"cell": np.repeat(np.arange(count) + 1000 * seed, 4), "volt": samples}
    table["label"] = np.where(labels > 0, "up", "down") if classes else labels
    pa.csv.write_csv(pa.table(table), path)
    return path


def trained(folder: Path, *, classes: bool) -> Path:
    data = SequenceDataConfig(
        train=str(recordings(folder / "train.csv", 300, 1, classes=classes)),
        validation=str(recordings(folder / "validation.csv", 300, 2, classes=classes)),
        problem="label",
        features=["volt"],
        target="label",
        group=["cell"],
        batch_size=16,
        cache=str(folder / "cache"),
    )
    result = fit(
        data,
        RNNConfig(hidden=4),
        epochs=2,
        folder=folder / "run",
        monitor=QUIET,
        optim=OptimConfig(lr=0.03),
    )
    return result.folder


def test_unsure_classes_are_left_out_and_the_rest_keeps_the_promise(tmp_path, capsys):
    run = trained(tmp_path, classes=True)
    fresh = recordings(tmp_path / "fresh.csv", 300, 3, classes=True)
    out = tmp_path / "answers.csv"
    assert verb("predict", run, fresh, "--at-error", "5%", "--out", out) == 0
    truth = {row["cell"]: row["label"] for row in read_csv(fresh)}
    answers = read_csv(out)
    given = [row for row in answers if row["prediction"]]
    left = [row for row in answers if not row["prediction"]]
    assert min(len(given), len(left)) > 10
    wrong = sum(row["prediction"] != truth[row["cell"]] for row in given)
    assert wrong <= 0.05 * len(given)
    covered = sum(truth[row["cell"]] in row["possible"].split("|") for row in left)
    assert covered >= 0.95 * len(left)
    require_printed(capsys.readouterr().err, f"{len(given)} of 300 answers are given")
    assert verb("evaluate", run, fresh) == 0
    assert "error of the surest answers" in capsys.readouterr().out
    assert verb("predict", run, fresh, "--at-error", "0.1%") == 2
    require_printed(capsys.readouterr().err, "300 answers to validation rows", "It takes 5,989")


def test_a_number_of_a_recording_gets_an_interval(tmp_path, capsys):
    run = trained(tmp_path, classes=False)
    fresh = recordings(tmp_path / "fresh.csv", 300, 3, classes=False)
    out = tmp_path / "answers.jsonl"
    assert verb("predict", run, fresh, "--at-error", "10%", "--out", out) == 0
    truth = {row["cell"]: float(row["label"]) for row in read_csv(fresh)}
    held = 0
    for line in out.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        low, high = row["possible"]
        assert (low + high) / 2 == pytest.approx(row["prediction"], abs=1e-4)
        held += low <= truth[str(row["cell"])] <= high
    assert held >= 270
