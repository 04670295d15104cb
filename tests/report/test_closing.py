"""The closing table: legible at 80 columns and in a file, and whatever a label or a folder is
called.
"""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from flatout.report.closing import print_closing
from flatout.report.page import write_page
from flatout.report.run_report import RunReport
from flatout.report.summary import empty_summary

EVIL = "<script>[red] :smile: \\"


def filled() -> dict:
    summary = empty_summary() | {
        "experiment": "x",
        "command": "python -m train",
        "status": "finished",
    }
    summary["loggers"] = ["tensorboard"]
    summary["model"] |= {"name": "BiLSTM", "parameters": 1000}
    summary["training"] |= {"steps": 30, "seconds": 4.5}
    summary["speed"] |= {
        "rows_per_s": 1000.0,
        "tokens_per_s": 9000.0,
        "padding_share": 0.015,
    }
    summary["speed"]["step_ms"] |= {
        "wait": 0.1,
        "forward": 2.0,
        "backward": 2.5,
        "optimizer": 0.4,
        "other": 0.2,
    }
    summary["metrics"] = {"val/accuracy": 0.8, "test/loss": 0.3, "test/accuracy": 0.9}
    summary["baseline"] = {"name": "known ceiling", "metrics": {"test/accuracy": 0.94}}
    return summary


PER_CLASS = [
    {
        "class": EVIL,
        "precision": 0.5,
        "recall": 0.25,
        "f1": 0.3333,
        "support": 12,
    }
]


def printed(summary: dict, folder: Path, per_class: list[dict], width: int = 80) -> str:
    text = io.StringIO()
    print_closing(summary, folder, per_class, Console(file=text, width=width))
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_closing_table_is_plain_text_with_the_ceiling_beside(width):
    shown = printed(filled(), Path("outputs/x"), PER_CLASS, width)
    assert "\x1b" not in shown
    assert "0.9000   95.7% of the known ceiling, 0.9400" in shown
    assert "1,000 rows/s, 9,000 tokens/s, padding 1.5%" in shown
    assert "wait 1.9%, forward 38.5%" in shown
    assert "val/accuracy" not in shown
    assert max(map(len, shown.splitlines())) <= width


def test_a_score_stands_with_its_interval():
    summary = filled()
    summary["intervals"] = {"test/accuracy": [0.881, 0.9172], "test/loss": [0.01234, 0.0456]}
    shown = printed(summary, Path("outputs/x"), [])
    assert "0.9000 (0.881–0.917)   95.7% of the known ceiling, 0.9400" in shown
    assert "0.3000 (0.0123–0.0456)" in shown


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (-1.7202, 0.9),
        (0.5, -79648.173),
        (-1.7202, -79648.173),
    ],
)
def test_a_negative_score_is_no_percentage_and_gets_none(tmp_path, ours, theirs):
    summary = filled()
    summary["metrics"] = {"test/r2": ours}
    summary["baseline"] = {"name": "ridge", "metrics": {"test/r2": theirs}}
    shown = printed(summary, Path("outputs/x"), [])
    assert f"{ours:.4f}   the ridge: {theirs:.4f}" in shown
    assert "of the ridge" not in shown
    tiles = write_page(tmp_path, summary, [], []).read_text("utf-8")
    assert f"{theirs:.4f} by the ridge" in tiles
    assert "of the ridge" not in tiles


def test_mfu_and_the_card_are_told_where_they_are_known():
    assert "card" not in printed(filled(), Path("outputs/x"), [])
    summary = filled()
    summary["speed"]["mfu"] = 0.317
    summary["speed"]["gpu"] |= {
        "utilisation": 0.96,
        "memory_gb": 9.04,
        "power_w": 58.2,
        "temperature_c": 61.0,
    }
    summary["speed"]["gpu"]["throttled"] = {"power limit": 0.5, "heat": 0.25}
    summary["speed"]["gpu"]["others"] = {"processes": 2, "share": 1.0, "memory_gb": None}
    shown = " ".join(printed(summary, Path("outputs/x"), [], width=80).split())
    assert "padding 1.5%, MFU 31.7%" in shown
    assert "card busy 96%, 9.0 GB, 58 W, 61 °C, throttled 50% of the time by power limit," in shown
    assert "throttled 25% of the time by heat" in shown
    assert "shared 100% of the time (other processes: 2)" in shown


def test_labels_are_shown_as_they_are():
    assert EVIL in printed(filled(), Path("outputs/x"), PER_CLASS)


@pytest.mark.parametrize(
    "name", ["plain", "two words", "it's [bold]", ":rocket:", "long_name/" * 12]
)
def test_the_tensorboard_command_names_the_very_folder_on_one_line(name):
    folder = Path("outputs") / name
    lines = printed(filled(), folder, []).splitlines()
    assert f"run folder:  {folder}" in lines
    command = next(
        line.removeprefix("curves:").strip() for line in lines if line.startswith("curves:")
    )
    assert shlex.split(command) == ["tensorboard", "--logdir", str(folder)]


def test_a_run_that_came_to_nothing_says_so_without_failing():
    assert "no model yet, failed" in printed(
        empty_summary() | {"status": "failed"}, Path("outputs/x"), []
    )


def test_what_is_not_known_is_left_out():
    summary = filled()
    summary["speed"] |= {"tokens_per_s": None, "padding_share": None}
    summary["baseline"]["metrics"] = {"test/accuracy": 0.0}
    shown = printed(summary, Path("outputs/x"), [])
    assert "1,000 rows/s\n" in "".join(f"{line.rstrip()}\n" for line in shown.splitlines())
    assert "ceiling" not in shown


def test_a_verdict_says_what_limited_the_run_and_what_would_mend_it():
    summary = filled()
    summary["verdict"] = {
        "limit": "feed",
        "share": 0.31,
        "fix": "data.workers=2",
        "predicted_gain": None,
    }
    assert "feed 31.0%: data.workers=2" in printed(summary, Path("outputs/x"), [])
    unknown = dict.fromkeys(("limit", "share", "fix", "predicted_gain"))
    assert RunReport({"verdict": unknown}).verdict == []


def test_of_many_classes_the_best_and_the_worst_are_shown():
    rows = [PER_CLASS[0] | {"class": f"class {i:02}", "f1": i / 40} for i in range(40)]
    shown = printed(filled(), Path("outputs/x"), rows)
    assert "class 39" in shown
    assert "class 00" in shown
    assert "class 20" not in shown


def test_the_share_of_a_class_that_most_rows_have_stands_beside_the_accuracy(tmp_path):
    common = PER_CLASS[0] | {"class": "calm", "support": 97}
    rare = PER_CLASS[0] | {"class": "loud", "support": 3}
    said = printed(filled(), tmp_path, [common, rare], width=120)
    assert "0.9700 by always answering 'calm'" in said
    even = printed(filled(), tmp_path, [rare, rare | {"class": "odd"}, rare | {"class": "low"}])
    assert "always answering" not in even


def test_time_and_cost_of_a_run_have_a_row_each_and_the_raw_estimate_is_named(tmp_path):
    price = {
        "expected_s": 246.0,
        "interval_s": [216.0, 288.0],
        "raw_s": 200.0,
        "took_s": 258.0,
        "kwh": 0.0124,
        "counted": ["card"],
        "kwh_per_million_tokens": 0.031,
        "money": 0.31,
        "currency": "EUR",
    }
    text = printed(filled() | {"price": price}, tmp_path, [], width=200)
    raw = "3.3 min without what earlier runs correct"
    assert f"expected 4.1 min (3.6–4.8), took 4.3 min; {raw}" in text
    assert "0.0124 kWh (card), 0.031 kWh per million tokens, 0.31 EUR" in text
    without = printed(filled() | {"price": price | {"raw_s": 246.0}}, tmp_path, [], width=200)
    assert "took 4.3 min\n" in "\n".join(line.rstrip() + "\n" for line in without.splitlines())
    assert "without what" not in without
    assert "expected" not in printed(filled(), tmp_path, [])
