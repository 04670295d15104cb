"""Every bench prints its rows, whole and in one form.

Their figures are for `python -m flatout bench`.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from benchmarks import BENCHES, claim
from benchmarks.defaults import SETS
from benchmarks.quality import TASKS

from tests.params import at_once
from tests.verbs import verb

COLUMNS = {
    "claim": str,
    "ours": float,
    "theirs": float | None,
    "unit": str,
    "ratio": float | None,
    "goal": str,
    "holds": bool,
    "note": str,
    "applies": bool,
}
"""The columns of a row, which tools that read the tables rely on."""
FIRST_ROWS = {
    "spine": [
        "store to padded batches, against datasets",
        "framework cost a step above a bare loop",
    ],
    "shortcuts": ["saved a step: plug_optimization (the fast loop)"],
    "defaults": ["ag_news, 250 rows", "cr, 250 rows"],
    "operators": [
        "LSTM on windows, fp32: operators of a step",
        "LSTM on windows, bf16: operators of a step",
    ],
    "shapes": [
        "headlines, 32 rows, flat: padding that shapes add",
        "headlines, 128 rows, flat: padding that shapes add",
    ],
    "sources": [
        "reading and checking a csv, against datasets reading it",
        "checking rows in memory",
    ],
    "headlines": [
        "BiLSTM epoch, against the usual loop",
        "the same, against tokenising in the loop",
    ],
    "bits": ["preparing records (bits and labels)", "encoding: Bloom filters"],
    "protections": [
        "protections above a step, an encoder of 2 layers",
        "protections above a step, bit strings",
    ],
    "sequences": ["training epoch against the usual loop", "training epoch against a tuned loop"],
    "loaders": [
        "windows a second, against a Dataset of rows",
        "memory of a loader, against a Dataset of rows",
    ],
    "bert": [
        "albert, flat: largest difference of a logit",
        "albert, flat: largest difference of a gradient",
    ],
    "answers": [
        "planted faults found by verify",
        "encoder, exact: rows of 400 with a differing bit",
    ],
    "abstention": [
        "sample headlines: draws in which at most 1% is wrong",
        "sample headlines: draws in which at most 5% is wrong",
    ],
    "drift": [
        "sample headlines: files of its own source that are named",
        "sample headlines: files of another source that are named",
    ],
    "audit": [
        "headlines, 5 % uniform: precision of as many suspects",
        "headlines, 5 % uniform: recall",
    ],
    "reuse": [
        "an epoch that reads 4 of 6 layers, against full fine-tuning",
        "an epoch that reads 4 of 6 layers, against computing them",
    ],
    "gpu": ["fork server: its processes find no CUDA context", "python -m train: test accuracy"],
    "rates": [
        "BERT-base, 750 tokens a step: tokens a second",
        "BERT-base, 4,096 tokens a step: tokens a second",
    ],
    "price": [
        "BiLSTM, 20,000 headlines, batches of 64",
        "BiLSTM, 20,000 headlines, batches of 256",
    ],
    "tune": ["BiLSTM, defaults: chosen against as set", "BiLSTM, defaults: time to choose"],
    "scale": [
        "bert_tiny: two processes, one thread each",
        "tokens of the fullest of 2 ranks above the mean",
    ],
    "cluster": [
        "ways to build whose bytes differ from one piece",
        "killed at 80 %: units that were done and are done again",
    ],
    "doctor_run": [
        "transformers: rows padded to 192 tokens",
        "planted scripts named first, of 1",
    ],
    "doctor": ["8 batches of 4 a step", "a callback that waits"],
    "quality": ["tweeteval_emotion, test macro_f1", "tweeteval_irony, test f1"],
}
IN_SECONDS = ["spine", "shortcuts", "sources", "gpu"]
"""Those whose smallest sizes take a few seconds; the others are soak tests."""


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """The verb hushes Lightning for good."""
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    yield
    log.setLevel(before)


def measured_here(function: str, settings: dict[str, Any]) -> dict[str, Any]:
    """In the place of a process of its own, whose memory is what is measured there."""
    module, _, name = function.partition(":")
    printed = io.StringIO()
    with mock.patch("sys.stdin", io.StringIO(json.dumps(settings))), redirect_stdout(printed):
        getattr(importlib.import_module(module), name)()
    return json.loads(printed.getvalue().splitlines()[-1])


def rows_of(name: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    """The rows that the verb writes."""
    assert verb("bench", name, "--quick", "--json", folder / "rows.json", *more) == 0
    return json.loads((folder / "rows.json").read_text(encoding="utf-8"))


def require_rows(name: str, rows: list[dict[str, Any]], printed: str) -> None:
    assert [row["claim"] for row in rows[:2]] == FIRST_ROWS[name]
    for row in rows:
        assert list(row) == list(COLUMNS)
        assert all(isinstance(as_float(row[column]), kind) for column, kind in COLUMNS.items()), row
        assert f"\n{row['claim']}" in printed
    assert printed.split()[:6] == ["claim", "ours", "theirs", "ratio", "goal", "holds"]


ON_PUBLISHED_SETS = ("defaults", "quality")  # these need --data


def as_float(value: object) -> Any:
    """A whole number counts as a figure; true and false do not."""
    return float(value) if type(value) is int else value


def test_every_bench_has_its_rows_checked():
    assert FIRST_ROWS.keys() == BENCHES.keys()


@pytest.mark.parametrize("name", at_once(*list(IN_SECONDS)[::2], of=IN_SECONDS, seconds=1))
def test_a_bench_prints_and_writes_its_rows(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(claim, "Options", partial(claim.Options, tiny=True))
    if hasattr(module := importlib.import_module(f"benchmarks.{name}"), "measured_apart"):
        monkeypatch.setattr(module, "measured_apart", measured_here)
    require_rows(name, rows_of(name, tmp_path), capsys.readouterr().out)


@pytest.mark.soak(seconds=120)
@pytest.mark.parametrize("name", [name for name in BENCHES if name not in ON_PUBLISHED_SETS])
def test_a_quick_bench_prints_and_writes_its_rows(name, tmp_path, capsys):
    if name == "bert":
        pytest.importorskip("accelerate", reason="the Trainer's side needs the extra bench")
    require_rows(name, rows_of(name, tmp_path), capsys.readouterr().out)


@pytest.mark.soak(seconds=180)
def test_the_bench_of_published_data_reads_a_folder_a_data_set(tmp_path, capsys):
    for task in TASKS:
        write_data_set(tmp_path / "data" / task.folder, task.suffix)
    write_data_set(tmp_path / "data" / "newsgroups20", ".parquet")
    given = ["--data", str(tmp_path / "data")]
    rows = rows_of("quality", tmp_path, *given)
    require_rows("quality", rows, capsys.readouterr().out)
    assert len(rows) == len(TASKS) - 1  # without the largest, and without the articles
    assert verb("bench", "quality", "--json", tmp_path / "rows.json", *given) == 0
    whole = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    require_rows("quality", whole, capsys.readouterr().out)
    assert len(whole) == len(TASKS) + 1


@pytest.mark.soak(seconds=180)
def test_the_bench_of_first_runs_reads_a_folder_a_data_set(tmp_path, capsys):
    for name in SETS:
        write_data_set(tmp_path / "data" / name, ".parquet")
    given = ["--data", str(tmp_path / "data"), "--only", " 250", "--rounds", "1"]
    rows = rows_of("defaults", tmp_path, *given)
    require_rows("defaults", rows, capsys.readouterr().out)
    assert [row["claim"] for row in rows[-2:]] == [
        "cells not below the rival",
        "cells above the rival",
    ]


def test_the_bench_of_first_runs_names_the_folders_it_wants(capsys):
    assert verb("bench", "defaults", "--only", "subj, 250") == 2
    assert "Set --data to a folder that holds subj." in capsys.readouterr().err


def test_the_bench_of_first_runs_has_fewer_sets_for_an_encoder(capsys):
    assert verb("bench", "defaults", "--pretrained", "x", "--only", "newsgroups20") == 2
    assert "(ag_news, 250 rows, cr, 250 rows, huffpost41, 250" in capsys.readouterr().err


@pytest.mark.soak(seconds=60)
def test_the_bench_of_published_data_reads_long_articles_in_windows_and_cut(tmp_path, capsys):
    write_data_set(tmp_path / "data" / "newsgroups20", ".parquet")
    (row,) = rows_of(
        "quality", tmp_path, "--data", str(tmp_path / "data"), "--only", "newsgroups20"
    )
    assert row["claim"] == "newsgroups20, windows against cut, test accuracy"
    assert row["holds"] == (row["ours"] >= row["theirs"])
    assert "newsgroups20" in capsys.readouterr().out


def write_data_set(folder: Path, suffix: str) -> None:
    """Two words a class, in each split other ones beside them."""
    import pandas as pd

    folder.mkdir(parents=True)
    for number, split in enumerate(("train", "validation", "test")):
        words = ["bad", "good"]
        rows = [(f"{words[row % 2]} day {number}{row}", row % 2) for row in range(40)]
        frame = pd.DataFrame(rows, columns=["text", "label"])
        frame.to_csv(
            folder / f"{split}.csv", index=False
        ) if suffix == ".csv" else frame.to_parquet(folder / f"{split}.parquet")


def test_the_bench_of_published_data_names_the_folders_it_wants(capsys):
    assert verb("bench", "quality", "--quick") == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "bench quality: needs published data sets. Set --data to a folder that holds"
    )
    assert all(task.folder in said for task in TASKS[:-1])
    assert verb("bench", "quality", "--only", "newsgroups20") == 2
    assert "holds newsgroups20" in capsys.readouterr().err


def test_the_bench_of_published_data_names_its_rows_where_none_is_asked_for(tmp_path, capsys):
    assert verb("bench", "quality", "--data", str(tmp_path), "--only", "weather") == 2
    said = capsys.readouterr().err
    assert said.startswith("--only: no row with 'weather'")
    assert "newsgroups20" in said


def test_an_unknown_bench_is_refused_with_the_nearest_name(capsys):
    assert verb("bench", "spin") == 2
    assert "Did you mean 'spine'?" in capsys.readouterr().err
