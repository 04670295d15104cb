"""The summary has one schema, is there from the start, and is never half written."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from tests.callbacks.recorded_nvml import hot_4090

from flatout.callbacks.clock import PARTS
from flatout.callbacks.gpu import CURVES, find_card
from flatout.distributed.limits import Limits
from flatout.errors import UserError
from flatout.report.summary import FILE, Summary, empty_summary, hardware, read_summary, versions

SCHEMA = {
    "schema": None,
    "status": None,
    "experiment": None,
    "begun": None,
    "command": None,
    "seed": None,
    "versions": None,
    "hardware": {
        "device",
        "count",
        "cores",
        "memory_gb",
        "precision",
        "peak_tflops",
        "peak_source",
        "cores_allowed",
        "memory_allowed_gb",
    },
    "data": {
        "source",
        "fingerprints",
        "rows",
        "classes",
        "tokens",
        "mean_length",
        "truncated_rows",
        "cache",
        "columns",
        "lengths",
        "checks",
        "sequences",
    },
    "model": {"name", "parameters", "trainable"},
    "choices": None,
    "loggers": None,
    "training": {
        "epochs",
        "steps",
        "rows_per_step",
        "seconds",
        "seconds_to_first_step",
        "resumed_from",
        "best_epoch",
        "skipped_steps",
        "out_of_memory",
    },
    "speed": {
        *(
            "rows_per_s",
            "tokens_per_s",
            "padding_share",
            "mfu",
            "step_ms",
            "step_percentiles_ms",
            "first_steps_ms",
        ),
        *("gpu", "host"),
    },
    "verdict": None,
    "evidence": set(),
    "baseline": None,
    "mixture": None,
    "rival": None,
    "truncation": None,
    "calibration": None,
    "abstention": None,
    "tune": None,
    "price": None,
    "metric": None,
    "metrics": None,
    "intervals": None,
    "findings": None,
    "artifacts": None,
}


def start(folder) -> Summary:
    summary = Summary(
        empty_summary() | {"experiment": "x", "command": "python -m train", "seed": 0},
        folder / FILE,
    )
    summary.write()
    return summary


def test_every_curve_of_the_hardware_has_its_place(tmp_path):
    summary = start(tmp_path)
    for curve in [name for name in CURVES if name.startswith(("gpu/", "host/"))]:
        summary.set(f"speed.{curve.replace('/', '.')}", 1.0)
    card = find_card(hot_4090(), 0)
    card.sample()
    summary.set("speed.gpu", card.facts())
    summary.set("hardware", Limits(1.5, 2**30).facts())
    summary.write()
    assert read_summary(tmp_path)["speed"]["gpu"]["throttled"] == {"power limit": 1.0}


def test_a_fresh_summary_has_every_key_and_says_running(tmp_path):
    start(tmp_path)
    found = read_summary(tmp_path)
    assert found.keys() == SCHEMA.keys()
    for name, keys in SCHEMA.items():
        assert keys is None or found[name].keys() == keys, name
    assert found["speed"]["step_ms"].keys() == set(PARTS)
    assert found["speed"]["gpu"].keys() >= {"utilisation", "memory_gb", "power_w"}
    assert found["data"]["rows"].keys() == {"train", "val", "test"}
    assert found["data"]["cache"].keys() == {"key", "hit", "seconds"}
    assert (found["schema"], found["status"]) == (1, "running")


def test_a_key_that_is_not_in_the_schema_is_our_own_mistake(tmp_path):
    with pytest.raises(KeyError):
        start(tmp_path).set("speed.rows_per_minute", 3)
    with pytest.raises(KeyError):
        start(tmp_path).set("training", {"hours": 3})
    with pytest.raises(KeyError):
        start(tmp_path).set("seed.first", 3)
    with pytest.raises(KeyError):
        start(tmp_path).set("verdict", {"culprit": "feed"})
    with pytest.raises(KeyError):
        start(tmp_path).set("data", {"rows": {"dev": 3}})


def test_a_section_filled_in_part_keeps_its_other_keys(tmp_path):
    summary = start(tmp_path)
    summary.set("data", {"source": "a.csv", "rows": {"train": 8, "val": 2}})
    summary.set("speed.step_ms.wait", 0.5)
    assert summary.values["data"]["rows"] == {"train": 8, "val": 2, "test": None}
    assert summary.values["data"]["cache"] == {"key": None, "hit": None, "seconds": None}


def test_verdict_and_baseline_are_null_until_known_and_then_have_all_their_keys(tmp_path):
    summary = start(tmp_path)
    assert (summary.values["verdict"], summary.values["baseline"]) == (None, None)
    summary.set("baseline", {"name": "known ceiling", "metrics": {"test/accuracy": 0.94}})
    summary.set("verdict.limit", "feed")
    assert summary.values["baseline"] == {
        "name": "known ceiling",
        "metrics": {"test/accuracy": 0.94},
    }
    keys = ("limit", "share", "mend", "fix", "predicted_gain", "cause", "sentence", "others")
    keys += ("override", "gain_low", "gain_high", "ladder")
    assert summary.values["verdict"] == dict.fromkeys(keys) | {"limit": "feed"}


def test_hardware_and_versions_are_told_without_a_model(tmp_path):
    summary = start(tmp_path)
    found = hardware(torch.device("cpu"), 1, "32-true")
    summary.set("hardware", found)
    assert found.keys() | Limits(None, None).facts().keys() == SCHEMA["hardware"]
    assert found["cores"] >= 1
    assert found["memory_gb"] > 0
    assert {"flatout", "python", "torch", "lightning", "numpy", "tokenizers"} <= versions().keys()


def test_numbers_of_any_kind_become_json(tmp_path):
    summary = start(tmp_path)
    summary.set(
        "metrics",
        {
            "a": np.float32(0.5),
            "b": torch.tensor(2),
            "c": float("nan"),
            "d": np.int64(3),
        },
    )
    summary.set("metrics", {"e": torch.tensor([1.0, float("inf")]), "f": np.array([True])})
    summary.finish("finished")
    found = read_summary(tmp_path)["metrics"]
    assert found == {
        "a": 0.5,
        "b": 2,
        "c": None,
        "d": 3,
        "e": [1.0, None],
        "f": [True],
    }


def test_a_write_that_fails_leaves_the_old_summary_whole(tmp_path, monkeypatch):
    summary = start(tmp_path)

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        summary.finish("finished")
    assert read_summary(tmp_path)["status"] == "running"
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_reader_in_the_middle_of_a_write_sees_the_old_summary(tmp_path, monkeypatch):
    summary = start(tmp_path)
    seen = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: seen.append(read_summary(tmp_path)["status"])
    )
    summary.finish("finished")
    assert (seen, read_summary(tmp_path)["status"]) == (["running"], "finished")


def test_a_missing_or_broken_summary_is_a_clear_error(tmp_path):
    with pytest.raises(UserError, match=r"no summary.json there"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text("[1]")
    with pytest.raises(UserError, match="not the summary of a run"):
        read_summary(tmp_path)
    with pytest.raises(UserError, match=r"no summary.json there"):
        read_summary(tmp_path / "summary.json")


def test_choices_are_kept_with_their_reasons(tmp_path):
    summary = start(tmp_path)
    choice = {
        "name": "feed",
        "value": "resident",
        "why": "it fits",
        "evidence": "1 MB of 8 GB",
    }
    summary.values["choices"].append(choice)
    summary.write()
    assert json.loads((tmp_path / "summary.json").read_text())["choices"] == [choice]
