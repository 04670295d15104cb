"""`predict --at-error` of recordings: unsure classes are left out, numbers get intervals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch

from flatout import MonitorConfig, OptimConfig, RNNConfig, SequenceDataConfig, fit
from flatout.errors import UserError
from flatout.tasks.error_intervals import ErrorCollector, HeldOutErrors
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


def train_judged(folder: Path, *, classes: bool, judged: int) -> Path:
    """The folder of a run with `judged` validation rows."""
    data = SequenceDataConfig(
        train=str(recordings(folder / "train.csv", 120, 1, classes=classes)),
        validation=str(recordings(folder / "validation.csv", judged, 2, classes=classes)),
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
        epochs=4,
        folder=folder / "run",
        monitor=QUIET,
        optim=OptimConfig(lr=0.03),
    )
    return result.folder


def test_unsure_classes_are_left_out_and_the_rest_keeps_the_promise(tmp_path, capsys):
    run = train_judged(tmp_path, classes=True, judged=200)
    fresh = recordings(tmp_path / "fresh.csv", 150, 3, classes=True)
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
    require_printed(capsys.readouterr().err, f"{len(given)} of 150 answers are given")
    assert verb("evaluate", run, fresh) == 0
    assert "error of the surest answers" in capsys.readouterr().out
    assert verb("predict", run, fresh, "--at-error", "0.1%") == 2
    require_printed(capsys.readouterr().err, "200 answers to validation rows", "It takes 5,989")


def test_a_number_of_a_recording_gets_an_interval(tmp_path, capsys):
    run = train_judged(tmp_path, classes=False, judged=60)
    fresh = recordings(tmp_path / "fresh.csv", 100, 3, classes=False)
    out = tmp_path / "answers.jsonl"
    assert verb("predict", run, fresh, "--at-error", "10%", "--out", out) == 0
    truth = {row["cell"]: float(row["label"]) for row in read_csv(fresh)}
    held = 0
    for line in out.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        low, high = row["possible"]
        assert (low + high) / 2 == pytest.approx(row["prediction"], abs=1e-4)
        held += low <= truth[str(row["cell"])] <= high
    assert 90 <= held < 100


def estimates(count: int, seed: int) -> pa.Table:
    """Recordings of six samples whose target is the sensor and some noise."""
    random = np.random.default_rng(seed)
    volt = random.normal(0, 1, 6 * count)
    target = volt + random.normal(0, 0.2, 6 * count)
    cell = np.repeat(np.arange(count) + 1000 * seed, 6)
    return pa.table({"cell": cell, "volt": volt, "soc": target})


def test_estimates_get_intervals_that_hold_by_recording(tmp_path, capsys):
    data = SequenceDataConfig(
        train=estimates(100, 1),
        validation=estimates(100, 2),
        features=["volt"],
        target="soc",
        group=["cell"],
        batch_size=16,
        cache=str(tmp_path / "cache"),
    )
    optim = OptimConfig(lr=0.03)
    model = RNNConfig(hidden=4)
    run = fit(data, model, epochs=1, folder=tmp_path / "run", monitor=QUIET, optim=optim).folder
    fresh = tmp_path / "fresh.csv"
    pa.csv.write_csv(estimates(100, 3), fresh)
    out = tmp_path / "answers.csv"
    assert verb("predict", run, fresh, "--at-error", "10%", "--out", out) == 0
    promise = "at most 10 % of them lie outside of their interval (95 % confidence)"
    require_printed(capsys.readouterr().err, promise)
    rows = zip(read_csv(fresh), read_csv(out), strict=True)
    held = [
        float(answer["soc_low"]) <= float(fresh_row["soc"]) <= float(answer["soc_high"])
        for fresh_row, answer in rows
    ]
    assert 0.9 <= np.mean(held) < 1
    assert verb("evaluate", run, fresh) == 0
    require_printed(capsys.readouterr().out, "intervals at 10 %: soc ±", "of these answers outside")
    assert verb("predict", run, fresh, "--at-error", "1%") == 2
    require_printed(capsys.readouterr().err, "100 validation recordings", "It takes 398")
    more = tmp_path / "more.csv"
    pa.csv.write_csv(estimates(450, 4), more)
    assert verb("evaluate", run, more, "--json", "--calibrate") == 0
    (_, at_ten, *_) = json.loads(capsys.readouterr().out)["answer_intervals"]
    assert at_ten["error"] == 0.1
    assert at_ten["outside"] == pytest.approx(1 - np.mean(held), abs=0.03)
    assert verb("predict", run, fresh, "--at-error", "1%") == 0  # now by 450 recordings
    # of a single recording however many samples are one stretch, as they are alike
    long = estimates(450, 5)
    one = long.set_column(0, "cell", pa.array(np.zeros(len(long), np.int64)))
    pa.csv.write_csv(one, more)
    assert verb("evaluate", run, more, "--calibrate") == 2
    require_printed(capsys.readouterr().err, "too few recordings to promise any interval")


def test_forecasts_go_by_labelled_rows_of_your_own(tmp_path, capsys):
    random = np.random.default_rng(1)
    table = pa.table({"cell": np.repeat(np.arange(90), 12), "volt": random.normal(0, 1, 90 * 12)})
    data = SequenceDataConfig(
        train=table.slice(0, 360),
        validation=table.slice(360, 360),
        features=["volt"],
        target="volt",
        problem="forecast",
        lookback=4,
        horizon=2,
        group=["cell"],
        cache=str(tmp_path / "cache"),
    )
    run = fit(data, RNNConfig(hidden=4), epochs=1, folder=tmp_path / "run", monitor=QUIET).folder
    one = tmp_path / "one.csv"
    pa.csv.write_csv(table.slice(720, 12), one)
    kept = HeldOutErrors.read(run / "model")
    assert kept is not None
    assert verb("evaluate", run, one, "--calibrate") == 2
    require_printed(capsys.readouterr().err, "too few recordings to promise any interval")
    own = tmp_path / "own.csv"
    pa.csv.write_csv(table.slice(720, 240), own)
    assert verb("evaluate", run, own, "--calibrate") == 0
    errors = HeldOutErrors.read(run / "model")
    assert errors is not None
    assert errors.distances.shape == (20 * 7, 2)
    assert errors.units.tolist() == np.repeat(np.arange(20), 7).tolist()
    assert verb("predict", run, own, "--at-error", "10%") == 2
    require_printed(capsys.readouterr().err, "by 20 validation recordings")


def test_of_very_many_answers_every_second_or_fourth_is_collected_across_batches():
    distances = torch.arange(21.0)[:, None]
    rows = np.arange(21)
    collector = ErrorCollector(most=6)
    for start in range(0, 21, 7):
        collector.add(distances[start : start + 7], rows[start : start + 7])
    errors = collector.held_out(rows // 10, span=1)
    assert errors is not None
    assert errors.distances.ravel().tolist() == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0]
    assert errors.units.tolist() == [0, 0, 0, 1, 1, 2]
    assert ErrorCollector().held_out(rows, span=1) is None


def test_a_recording_counts_once_however_many_answers_it_has():
    # one of a hundred recordings is far off, in a thousand answers
    distances = np.concatenate([np.full(1000, 9.0), np.full(99, 1.0)])[:, None]
    units = np.concatenate([np.zeros(1000), np.arange(1, 100)])
    rows = np.arange(1099)
    errors = HeldOutErrors.of(distances, units, rows, 1)
    assert errors.choose(0.1).tolist() == [1.0]
    # stretches of a single recording: two of ten answers each are too few
    single = HeldOutErrors.of(distances[:20], np.zeros(20), rows[:20], 10)
    with pytest.raises(UserError, match="cannot be promised by 2 validation recordings"):
        single.choose(0.1)
