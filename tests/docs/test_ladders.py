"""Published ladders: their tables stand between two marks, and promises are judged by what the
rounds allow.
"""

from __future__ import annotations

import json

import pytest
from docs.pictures import ladders

from flatout.ladder.rungs import read_ladder
from tests.composed import CONF

FIGURES = {
    "tokens_per_s": None,
    "wait_share": 0.1,
    "padding_share": None,
    "startup_s": 1.0,
    "memory_gb": 0.5,
}


def rung(
    name: str,
    value: float | None,
    *,
    factor=None,
    low=None,
    high=None,
    measures="training",
    skipped="",
) -> dict:
    measured = None if value is None else {"value": value, "low": low, "high": high}
    return {
        **FIGURES,
        "name": name,
        "promised": "2–3×" if factor else "",
        "factor": factor,
        "measures": measures,
        "measured": measured,
        "cumulative": None
        if skipped
        else {
            "value": value or 1.0,
            "low": None,
            "high": None,
        },
        "verdict": "pays" if value else None,
        "skipped": skipped,
        "rows_per_s": 100.0,
        "spread": 0.01,
        "device_share": None,
    }


def ladder(name: str = "tweets", ratio: float = 5.0, *, quality=None) -> dict:
    rungs = [
        rung("foot", None),
        rung("bf16", 1.5, factor=[2, 3], low=1.4, high=1.6),
        rung("caching", 2.5, factor=[2, 3], low=1.0, high=9.0, measures="startup"),
        rung("fused | kernel", 1.9, factor=[2, 3], low=1.5, high=2.2),
        rung("padding", 4.0, factor=[2, 3], low=3.5, high=5.0),
        rung("all devices", None, factor=[7, 7], skipped="no GPUs"),
        rung("flatout", 2.0),
    ]
    whole = {
        "foot": "foot",
        "top": "flatout",
        "minutes_before": 2.0,
        "minutes_after": 0.4,
    }
    whole |= {
        "ratio": {"value": ratio, "low": 4.0, "high": 6.0},
        "startup_before_s": 1.0,
        "startup_after_s": 2.0,
    }
    return {
        "name": name,
        "title": f"On {name}",
        "command": f"python -m flatout ladder +ladder={name} for=6m output=somewhere",
        "device": "a card, 2 cores",
        "date": "2026-11-22",
        "versions": {"torch": "2.13.0"},
        "in_all": "",
        "rows": 100,
        "rungs": rungs,
        "whole": whole,
        "skipped": [{"name": "all devices", "why": "no GPUs"}],
        "quality": quality,
        "seconds": 300.0,
    }


def quality() -> dict:
    groups = [
        {"name": "foot", "mean": 80.0, "sd": 0.5},
        {"name": "flatout", "mean": 80.3, "sd": 0.4},
    ]
    difference = {"value": 0.3, "low": -0.2, "high": 0.8}
    return {
        "metric": "accuracy",
        "seeds": 3,
        "groups": groups,
        "difference": difference,
        "sentence": "no loss",
    }


@pytest.fixture
def runs(tmp_path):
    """Two runs of a ladder, of which the first compared quality, a third that was ended, and one of
    another.
    """
    for folder, found in {
        "ladder_tweets/1": ladder(quality=quality()),
        "ladder_tweets/2": ladder(ratio=5.5),
        "ladder_tweets/3": {
            name: value for name, value in ladder(ratio=0.2).items() if name != "seconds"
        },
        "ladder_headlines/1": ladder("headlines"),
    }.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "ladder.json").write_text(json.dumps(found), encoding="utf-8")
    return ladders.read_runs([tmp_path])


def test_a_run_with_compared_quality_is_shown_and_the_other_is_its_repeat(runs):
    assert list(runs) == ["headlines", "tweets"]
    assert [run["whole"]["ratio"]["value"] for run in runs["tweets"]] == [5.0, 5.5]
    row = next(line for line in ladders.summary_table(runs) if line.startswith("|`tweets`"))
    assert "|5.00× (4.00–6.00)|5.50× (10% apart)|2.0 min|24.0 s|" in row
    assert "accuracy 80.00 → 80.30, 3 seeds|+0.30 (-0.20 to +0.80)|" in row


def test_tables_stand_between_the_marks_and_replace_older_ones(runs):
    text = f"before\n\n{ladders.BEGIN}\nold\n{ladders.END}\n\nafter\n"
    once = ladders.published(text, runs)
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    assert ladders.published(once, runs) == once
    assert "somewhere" not in once
    assert "fused \\| kernel" in once
    assert [once.count(f"(pictures/ladder_{name}.png)") for name in ladders.PICTURED] == [1, 1]
    columns = [line.count("|") for line in once.splitlines() if line.startswith("|bf16")]
    assert len(set(columns)) == 1


def test_a_document_without_the_marks_is_refused(runs):
    with pytest.raises(SystemExit, match=r"ladder\.md: no lines"):
        ladders.published("no marks", runs)


def test_promises_are_kept_missed_or_left_open(runs):
    words = [
        ladders.judge(each) for each in ladder()["rungs"] if each["factor"] and each["measured"]
    ]
    assert words == [ladders.LESS, ladders.KEPT, ladders.OPEN, ladders.MORE]
    lines = ladders.promise_lines([ladder()])
    counted = (
        "1 brought less, 1 brought what was promised, 1 brought more, 1 left open, as rounds"
        " differ."
    )
    assert lines[0].startswith(f"Of 4 promises that could be measured here: {counted}")
    assert "Not measurable here: all devices (`tweets`)." in lines[0]
    assert lines[4].startswith("|`tweets`|bf16|")
    assert ladders.REASONS["bf16"] in lines[4]


def test_every_reason_belongs_to_a_rung():
    names = {
        rung.name for path in (CONF / "ladder").glob("*.yaml") for rung in read_ladder(path).rungs
    }
    assert set(ladders.REASONS) <= names
