"""The page of results has a row for each finished run, read from its summary."""

from __future__ import annotations

import json
import re

import pytest
from docs.pictures import gallery

from tests.docs.blocks import ROOT, all_commands

ROW = re.compile(
    r"^\| (\w+) \| [\w.-]+: [\d,]+ / [\d,]+ (?:rows|recordings) \| \w+, [\d,]+ weights"
    r" \| (?:test|val)/\w+ -?[\d.]+(?: \([\d.]+ to [\d.]+\))? \| (?:–|[\w .-]+ -?[\d.]+) \| [\d,]+"
    r" \| (?:–|[\d.e-]+) \| [\d.]+ \|$"
)


def summary(**changed):
    """What a finished run on texts writes, as far as the page reads it."""
    return {
        "status": "finished",
        "experiment": "bert_tiny",
        "command": "python -m train +experiment=bert_tiny",
        "versions": {"torch": "2.13.0+cpu"},
        "hardware": {
            "device": "CPU",
            "cores": 2,
            "cores_allowed": None,
            "precision": "32-true",
        },
        "data": {
            "source": "sample:headlines",
            "rows": {"train": 1200, "val": 20, "test": 30},
            "sequences": None,
        },
        "model": {"name": "Transformer", "parameters": 1000},
        "training": {"seconds": 7.6},
        "price": {"kwh": 0.01234},
        "baseline": {"name": "known ceiling", "metrics": {"test/accuracy": 0.94}},
        "mixture": None,
        "rival": None,
        "metric": "accuracy",
        "metrics": {"val/accuracy": 0.5, "test/accuracy": 0.75},
        "intervals": {"test/accuracy": [0.7, 0.8]},
        **changed,
    }


@pytest.fixture
def runs(tmp_path):
    recordings = {"recordings": {"train": 9, "validation": 3, "test": 3}}
    found = {
        "one": summary(),
        "two": summary(
            experiment="battery_soc",
            data={
                "source": "sample:cells/train",
                "rows": {"train": 40, "test": 9},
                "sequences": recordings,
            },
            baseline=None,
            intervals={},
        ),
        "three": summary(status="interrupted", metrics={}),
        "four": summary(
            experiment="mine",
            rival={"name": "words", "metrics": {"test/accuracy": 0.7}},
            price={"kwh": None},
        ),
    }
    for name, values in found.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "summary.json").write_text(json.dumps(values), encoding="utf-8")
    return tmp_path / "runs"


def test_each_finished_run_is_a_row_and_each_other_experiment_is_named(runs, capsys):
    page = runs / "results.md"
    gallery.main([str(runs), "--page", str(page), "--commit", "abc1234"])
    text = page.read_text(encoding="utf-8")
    assert [row[1] for line in text.splitlines() if (row := ROW.match(line))] == [
        "battery_soc",
        "bert_tiny",
        "mine",
    ]
    assert (
        "| headlines: 1,200 / 30 rows | Transformer, 1,000 weights | test/accuracy 0.75 (0.7 to"
        " 0.8) |" in text
    )
    assert "| known ceiling 0.94 | 8 | 0.0123 | 2 |" in text
    assert "| words 0.7 | 8 | – | 2 |" in text
    assert "cells: 9 / 3 recordings" in text
    assert "Measured on CPU, torch 2.13.0+cpu, in 32-true, at commit abc1234." in text
    assert "`bloom_bigrams`" in text
    assert "`bert_tiny`," not in text
    assert "3 runs" in capsys.readouterr().out


def test_the_published_page_is_one_of_the_script():
    text = gallery.PAGE.read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if line.startswith("| ")][1:]
    named = [row[1] for line in table if (row := ROW.match(line))]
    assert len(named) == len(table) >= 5
    experiments = {path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml")}
    assert {*named, *re.findall(r"`(\w+)`", text.partition("## Repeat a row")[2])} == experiments
    commands = "\n".join(all_commands())
    assert all(f"+experiment={name}" in commands for name in named)
