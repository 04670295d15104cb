"""An encoder's view of the texts of an audit: plain means of its last layer, or a line that says
why there is none.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.cli.test_export import train_tiny
from tests.run_files import read_csv
from tests.verbs import verb
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from flatout import HeadlinesConfig, TextDataConfig, TransformerConfig
from flatout.audit import encoder_view
from flatout.audit.encoder_view import read_encoder
from flatout.data.samples.headlines import HeadlinesTable
from flatout.engine.precision import Precision
from flatout.models.encoder.transformer import Compute

SAMPLE = HeadlinesConfig(rows=200, eval_rows=50, classes=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder as transformers writes it."""
    made = tmp_path_factory.mktemp("encoder")
    run = train_tiny(made, TextDataConfig(sample=SAMPLE))
    assert verb("export", run, "--out", made / "plain") == 0
    return made / "plain"


@pytest.fixture(scope="module")
def texts() -> pa.RecordBatch:
    return next(HeadlinesTable(SAMPLE, "train").blocks(["text", "label"]))


def test_a_text_is_the_mean_of_its_tokens_as_padded_rows_have_it(folder, texts):
    lines: list[str] = []
    rows = texts["text"].to_pylist()
    found = read_encoder(
        TransformerConfig(pretrained=str(folder)), rows, 12, Precision.fp32, 60, lines.append
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    net = AutoModelForSequenceClassification.from_pretrained(folder).base_model.eval()
    given = tokenizer(rows, padding=True, truncation=True, max_length=12, return_tensors="pt")
    with torch.no_grad():
        states = net(**given).last_hidden_state
        mask = given["attention_mask"][..., None]
    means = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()
    assert found is not None
    assert np.abs(found.toarray() - means).max() < 1e-5
    assert lines == [lines[0]]
    assert f"read {int(mask.sum()):,} tokens" in lines[0]


def test_what_takes_too_long_or_is_padded_is_left_out_with_a_line(folder, texts, monkeypatch):
    monkeypatch.setattr(encoder_view, "_LOOK_S", -1.0)
    lines: list[str] = []
    model = TransformerConfig(pretrained=str(folder))
    rows = texts["text"].to_pylist()
    assert read_encoder(model, rows, 12, Precision.fp32, 1e-9, lines.append) is None
    assert (
        read_encoder(
            replace(model, compute=Compute.padded), rows, 12, Precision.fp32, 60, lines.append
        )
        is None
    )
    assert "200 texts take it" in lines[0]
    assert lines[0].endswith("Give it more time: for=TIME.")
    assert lines[1] == "encoder: left out: asked for"


@pytest.mark.soak(seconds=3)
def test_suspects_say_what_words_and_encoder_answer_alone(
    folder, texts, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    with Path("rows.csv").open("w", newline="", encoding="utf-8") as file:
        rows = zip(texts["text"].to_pylist(), texts["label"].to_pylist(), strict=True)
        csv.writer(file).writerows([("text", "label"), *rows])
    words = ["data.source=rows.csv", "model=transformer", f"model.pretrained={folder}", "folds=2"]
    assert verb("audit", *words, "for=soon") == 2
    assert "for: 'soon' is no duration (such as 90s, 30m, 2h)" in capfd.readouterr().err
    assert verb("audit", *words) == 0
    assert f"encoder: {folder} read" in capfd.readouterr().out
    suspects = read_csv(tmp_path / "audit" / "suspects.csv")
    classes = set(texts["label"].to_pylist())
    assert suspects
    assert all({each["words"], each["encoder"]} <= classes for each in suspects)
    assert any(each["words"] != each["encoder"] for each in suspects)
