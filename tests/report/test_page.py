"""The page: everything shown, nothing trusted, nothing required."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from tests.report.pages import ParsedPage

from flatout.report.figures import Curve, line_chart
from flatout.report.page import read_curves, write_page
from flatout.report.summary import empty_summary

EVIL = "<script>alert(1)</script>[red]"


def filled() -> dict:
    summary = empty_summary()
    summary |= {"experiment": EVIL, "command": "python -m train", "status": "finished"}
    summary["model"] |= {"name": "BiLSTM", "parameters": 1000}
    summary["data"]["source"] = EVIL
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
    summary["intervals"] = {"test/accuracy": [0.8812, 0.9172]}
    summary["choices"] = [
        {
            "name": "feed",
            "value": EVIL,
            "why": "fits",
            "evidence": "1 MB",
        }
    ]
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
CURVES = [
    {
        "step": "10",
        "train/loss": "2.0",
        "val/loss": "",
        "speed/rows_per_s": "900",
    },
    {
        "step": "20",
        "train/loss": "1.0",
        "val/loss": "1.2",
        "speed/rows_per_s": "1100",
    },
]


def test_the_page_shows_everything_and_runs_nothing(tmp_path):
    (tmp_path / "config.yaml").write_text(f"experiment: {EVIL}\n")
    page = write_page(tmp_path, filled(), CURVES, PER_CLASS).read_text(encoding="utf-8")
    parsed = ParsedPage(page)
    assert "script" not in parsed.tags
    assert parsed.links == []
    for shown in (
        "0.9000",
        "(0.881–0.917) 95.7% of the known ceiling",
        "1,000",
        "padding 1.5%",
        "0.333",
        "&lt;script&gt;",
        "backward 2.50 ms (48%)",
    ):
        assert shown in page


def test_the_page_has_what_the_terminal_has(tmp_path):
    summary = filled()
    summary["data"] |= {
        "rows": {
            "train": 1_800,
            "val": 100,
            "test": None,
        },
        "checks": [
            {
                "level": level,
                "source": "news.csv",
                "what": what,
                "hint": "data.clean.leaks=drop",
            }
            for level, what in (("note", "UTF-8"), ("warning", "2 rows leak"))
        ],
    }
    summary["verdict"] = {
        "limit": "wait",
        "sentence": "limited by the wait",
        "others": [{"sentence": "limited by small batches"}],
    }
    air = PER_CLASS[0] | {"class": "air", "answered": {"air": 9, "sea": 3}}
    sea = PER_CLASS[0] | {"class": "sea", "answered": {"sea": 1_200}}
    page = write_page(tmp_path, summary, CURVES, [air, sea]).read_text(encoding="utf-8")
    rows = [
        re.findall("<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall("<tr>.*?</tr>", page)
    ]
    assert "1,800 train, 100 val rows" in page
    assert re.search(r"limited by the wait<br>\s+also limited by small batches", page)
    assert ["labelled as", "air", "sea"] in rows
    assert ["air", "9", "3"] in rows
    assert ["sea", "0", "1,200"] in rows
    assert [row[0] for row in rows if "news.csv" in row] == ["warning", "note"]


def test_mfu_stands_with_its_peak_and_the_card_has_a_line(tmp_path):
    summary = filled()
    summary["speed"]["mfu"] = 0.317
    summary["hardware"] |= {"peak_tflops": 0.8853, "peak_source": "measured"}
    summary["speed"]["gpu"] |= {"utilisation": 0.96, "throttled": {EVIL: 0.5}}
    page = write_page(tmp_path, summary, CURVES, PER_CLASS).read_text(encoding="utf-8")
    assert "<b>31.7%</b>MFU <small>of 0.885 TFLOP/s</small>" in page
    assert "busy 96%, throttled 50% of the time by &lt;script&gt;" in page


def test_a_run_that_came_to_nothing_has_a_page_too(tmp_path):
    page = write_page(tmp_path, empty_summary(), read_curves(tmp_path), []).read_text(
        encoding="utf-8"
    )
    assert "no model yet" in page
    assert "None" not in page


def test_half_known_figures_and_a_half_written_row_are_shown_as_far_as_they_go(tmp_path):
    summary = empty_summary()
    summary["status"] = "failed"
    summary["speed"] |= {"rows_per_s": 10.0}
    summary["training"] |= {"seconds": 3.0}
    summary["verdict"] = {
        "limit": "<feed>",
        "share": 0.3,
        "fix": "data.workers=2",
        "predicted_gain": None,
    }
    curves = [
        *CURVES,
        {"step": "30", "train/loss": "nan"},
        {"step": "", "train/loss": "x"},
        {"train/loss": "1"},
    ]
    page = write_page(tmp_path, summary, curves, []).read_text(encoding="utf-8")
    assert '<span class="status failed">failed</span>' in page
    assert "&lt;feed&gt; 30.0%: data.workers=2" in page
    assert "nan" not in page


def test_the_curves_hold_their_points(tmp_path):
    page = write_page(tmp_path, filled(), CURVES, PER_CLASS).read_text(encoding="utf-8")
    losses, rows = (ElementTree.fromstring(svg) for svg in re.findall("<svg.*?</svg>", page))
    assert (losses.get("aria-label"), rows.get("aria-label")) == ("loss", "rows a second")
    # a dot for each value
    assert [len(list(chart.iter("use"))) for chart in (losses, rows)] == [3, 2]
    across = {dot.get("x") for dot in losses.iter("use")}
    assert len(across) == 2  # train and validation loss of step 20 stand above each other


def test_the_same_run_gives_the_same_page(tmp_path):
    first, again = (
        write_page(tmp_path, filled(), CURVES, PER_CLASS).read_bytes() for _ in range(2)
    )
    assert first == again
    assert b"matplotlib" not in first
    assert b"DejaVu" not in first


def test_a_chart_without_points_is_left_out_and_one_value_still_has_axes():
    assert line_chart("loss", [Curve("a", [])]) is None
    chart = line_chart("loss", [Curve("a", [(1, 3.0)])])
    assert len(re.findall("<text", chart.svg)) >= 4


@pytest.mark.parametrize("metric", ["micro_f1", "perplexity", "mse_scaled", "accuracy", "own"])
def test_the_metric_that_decides_is_drawn_whatever_it_is(tmp_path, metric):
    curves = [{"step": str(step), f"val/{metric}": f"{1 / step}"} for step in (1, 2, 3)]
    page = write_page(tmp_path, {**filled(), "metric": metric}, curves, []).read_text()
    charts = re.findall(r"<figure.*?</figure>|<svg.*?</svg>", page, re.DOTALL)
    assert sum(f"val/{metric}" in chart for chart in charts) == 1
