"""Commands of README and docs run whole, small; and the scripts of docs/sequences.md."""

from __future__ import annotations

import csv
import logging
import re
from pathlib import Path

import pytest

from flatout.data.samples.cells import CellsConfig
from tests.composed import only_folder, run_train
from tests.docs.blocks import ROOT, all_commands, blocks, words_of_flatout, words_of_train
from tests.docs.lines_run import count_lines
from tests.docs.test_blocks import LIGHTNINGS_HINTS, TINY, put_package_of_own_parts, write_tables
from tests.run_files import read_csv
from tests.verbs import verb

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
NEEDS = {
    "/shared": "a disk of a cluster",
    "FOLDER": "a pretrained encoder or a folder of an earlier run",
    "bert-base-uncased": "a network",
    "pretrained": "a pretrained encoder",
    "ETTh1.csv": "a published file",
    "huffpost41/": "published files",
    "tweeteval_": "published files",
    "server:5000": "a server",
    "wandb": "an account",
    "trainer.devices": "several devices; tests/distributed runs two",
    "torchrun": "several devices; tests/distributed runs two",
    "songs.csv": "an encoder of full size",
    "notes.csv": "an encoder of full size; tests/tasks/test_mlm.py trains small ones",
    "people.parquet": "columns of other names; tests/bits reads them",
    "--help": "nothing: it does not train",
    "sweep": "minutes; tests/sweep runs them",
    "resume=outputs": "a run of another day",
    "_target_": "a package; tests/run/test_own_parts.py runs it",
    "a.parquet": "three files in three formats; tests/data reads them",
    "audit/suspects.csv": "an audit; tests/cli/test_audit.py reads its file",
    "cells/": "a folder of recordings; tests/data/test_sequences.py reads them",
}
"""Words of commands that do not run here, and what they need."""
SMALLER = {
    "people": ["data.sample.rows=300"],
    "bloom": ["data.sample.rows=300"],
    "minhash": ["data.sample.rows=300"],
    "twostep": ["data.sample.rows=300"],
    "battery": ["data.sample.cells=4", "data.sample.cycles=1", "data.sample.samples=60"],
}


def runnable() -> list[str]:
    """Commands of train that need nothing from elsewhere."""
    found = [each for each in all_commands() if words_of_train(each) is not None]
    can_run = []
    for command in found:
        needs_more = any(word in command for word in NEEDS)
        if not needs_more and " -m " not in command.partition("train")[2]:
            can_run.append(command)
    return can_run


@pytest.mark.soak(seconds=300)
@pytest.mark.filterwarnings(*LIGHTNINGS_HINTS)
def test_commands_of_the_pages_train(tmp_path, monkeypatch, capsys):
    put_package_of_own_parts(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    write_tables(tmp_path)
    write_more_tables(tmp_path)
    assert verb("encode", "--sample", 300, "--out", "people.csv") == 0
    broken = []
    for number, command in enumerate(runnable()):
        words = words_of_train(command) or []
        small = next((more for word, more in SMALLER.items() if word in command), TINY[:2])
        if "source" in command:
            small = []
        if "budget=" in command:
            continue  # it would train so long; tests/run/test_budget.py has short ones
        given = [
            *words,
            *small,
            "trainer.max_epochs=1",
            f"output=runs/{number}",
            "monitor.verdict=false",
        ]
        if run_train(given, monkeypatch) != 0:
            broken.append(f"{command}: {capsys.readouterr().err[-500:]}")
    assert not broken, "\n".join(broken)


@pytest.mark.soak(seconds=300)
@pytest.mark.filterwarnings(*LIGHTNINGS_HINTS)
def test_commands_of_the_pages_price_what_they_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = [words for each in all_commands() if (words := words_of_flatout(each))]
    priced = [words[1:] for words in commands if words[0] == "price"]
    assert len(priced) >= 5
    for words in priced:
        typed = " ".join(words)
        smaller = (more for word, more in SMALLER.items() if word in typed)
        small = next(smaller, TINY[:2])
        # fewer than two steps have no pace
        epochs = [] if "sweep" in typed else ["trainer.max_epochs=4"]
        assert verb("price", *words, *small, *epochs) == 0, words
        printed = capsys.readouterr().out
        are_several = any("," in word or word.startswith("+") for word in words)
        assert ("cheapest first" in printed) == are_several, words
        assert ("for nothing: the " in printed) or "--on" in words


@pytest.mark.soak(seconds=120)
@pytest.mark.filterwarnings(
    *LIGHTNINGS_HINTS, "ignore:_check_is_size will be removed:FutureWarning"
)
def test_the_scripts_of_sequences_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CellsConfig, "__init__", _few_cells(CellsConfig.__init__))
    words = [
        "+experiment=battery_soc",
        "trainer.max_epochs=1",
        "data.features=[voltage,current]",
        "monitor.verdict=false",
    ]
    assert run_train(words, monkeypatch) == 0
    run = only_folder(Path("outputs/battery_soc"))
    assert verb("export", run, "--onnx", "--out", "device") == 0
    names: dict[str, object] = {"__name__": "__page__"}
    for block in blocks():
        if block.page == "sequences.md" and block.language == "python":
            # a page is a program of this project
            exec(compile(block.text, block.place, "exec"), names)


def _few_cells(original):
    def init(self, **given):
        original(
            self,
            **{
                "cells": 4,
                "cycles": 1,
                "samples": 60,
                **given,
            },
        )

    return init


def write_more_tables(folder: Path) -> None:
    """Tables that only some pages name."""
    rows = read_csv(folder / "news.csv")
    for name, columns in (
        (
            "reviews.csv",
            lambda row, number: {
                "text": row["title"],
                "stars": number % 5,
                "author": f"a{number // 4}",
            },
        ),
        (
            "tags.csv",
            lambda row, number: {"text": row["title"], "label": f"{row['topic']}|b{number % 2}"},
        ),
    ):
        made = [columns(row, number) for number, row in enumerate(rows)]
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(made[0]))
            writer.writeheader()
            writer.writerows(made)


@pytest.mark.soak(seconds=40)
def test_about_as_many_lines_run_as_the_reading_order_says():
    page = (ROOT / "docs" / "reading_order.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", page, re.MULTILINE))
    counts = count_lines()
    found = {path: count for phase in counts.values() for path, count in phase.items()}
    assert set(listed) <= set(found)
    intro = page.split("\n", 1)[1]
    totals = re.findall(r"(\d),(\d{3}) (?:lines|more)", intro)
    for phase, (thousands, rest) in zip(counts.values(), totals, strict=True):
        assert sum(phase.values()) == pytest.approx(int(thousands + rest), rel=0.15)
