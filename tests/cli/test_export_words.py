"""`python -m flatout export --onnx` of networks on words: the file answers as the run does,
whatever the rows beside a row.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pytest
import torch
from onnxruntime import InferenceSession
from tokenizers import Tokenizer
from torch import Tensor

from flatout import BiLSTMConfig, HeadlinesConfig, Predictor, TextCNNConfig, TextDataConfig
from flatout.data.checks.cleaning import CleaningConfig, Escapes
from flatout.data.tokens.long_texts import Long
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.models.words import Pooling
from tests.cli.test_export import numbers, several, train_tiny
from tests.params import at_once
from tests.verbs import verb

LONGEST = 40
LONG = "striker playoff goal senate " * LONGEST
ROWS = {
    "one word": ["goal"],
    "one row of the longest": [LONG],
    "words that are unknown": ["zyx qwv", "ünknown 42 goal"],
    "no word, alone": [""],
    "no word, beside others": ["", "a senate, a ballot!", "  "],
    "mixed lengths": ["goal", LONG, "comet 42", "", "a senate, a ballot!", "goal " * 7],
    "characters of ours": ["goal \ue000 comet \ue002\ue001", "a\ue000b"],
    "64 rows": [" ".join(["goal", "comet", "senate"] * (1 + row % 20)) for row in range(64)],
}
BILSTM = BiLSTMConfig(embedding=8, hidden=8, layers=2)


def data(**settings: Any) -> TextDataConfig:
    sample = HeadlinesConfig(rows=200, eval_rows=50, classes=3)
    return TextDataConfig(sample=sample, max_length=LONGEST, **settings)


def answer(folder: Path, texts: list[str]) -> Tensor:
    """Logits as somebody gets them who has onnxruntime and tokenizers alone."""
    rows = Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(texts)
    inputs = {
        "tokens": np.array([row.ids for row in rows], np.int64),
        "lengths": np.array([sum(row.attention_mask) for row in rows]),
    }
    (logits,) = InferenceSession(folder / "model.onnx").run(None, inputs)
    return torch.from_numpy(logits)


def assert_answers_as_the_run(run: Path, texts: list[str]) -> None:
    predictor = Predictor.load(run)
    expected = predictor.outputs(pa.array(texts)) / predictor.temperature
    torch.testing.assert_close(answer(run / "export", texts), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module", params=at_once("bilstm", of=["bilstm", "textcnn"], seconds=4))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its export beside it."""
    folder = tmp_path_factory.mktemp("words")
    model = BILSTM if request.param == "bilstm" else TextCNNConfig(embedding=8, filters=8)
    finished = train_tiny(folder, data(), model)
    assert verb("export", finished, "--onnx") == 0
    return finished


@pytest.mark.parametrize("rows", ROWS)
def test_the_file_answers_as_the_run_does(run: Path, rows: str) -> None:
    assert_answers_as_the_run(run, ROWS[rows])


def test_rows_are_told_apart(run: Path) -> None:
    assert answer(run / "export", ROWS["mixed lengths"]).std(0).max() > 0.01


def test_the_folder_holds_the_file_its_tokenizer_and_its_signature(run: Path) -> None:
    names = {path.name for path in (run / "export").iterdir()}
    model = {"model.onnx", "signature.json", "tokenizer.json"}
    assert names == {*model, "abstention.json", "abstention.npz"}
    signature = json.loads((run / "export" / "signature.json").read_text(encoding="utf-8"))
    assert signature["labels"] == Predictor.load(run).labels.classes
    assert signature["inputs"] == {"tokens": ["rows", "length"], "lengths": ["rows"]}
    model = (run / "export" / "model.onnx").read_bytes()
    assert str(Path.cwd()).encode() not in model and b"flatout" not in model


def test_verify_holds_the_file_to_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"text": text}) for texts in ROWS.values() for text in texts]
    rows.write_text("\n".join(lines), encoding="utf-8")
    assert verb("verify", run, rows) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "each form holds, 0 changed rows allowed"
    (line,) = [line for line in said if "model.onnx" in line]
    assert f"same answer in {len(lines)} of {len(lines)} rows" in line


def test_verify_refuses_the_folder_of_other_labels(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (run / "export").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "signature.json").write_text('{"labels": ["yes", "no"]}')
    (tmp_path / "rows.csv").write_text("text\ngoal\n")
    assert verb("verify", run, tmp_path / "rows.csv", "--form", tmp_path) == 2
    assert "its labels are yes, no, those of the run" in capsys.readouterr().err


def test_directions_are_turned_by_operators_not_by_lengths_of_the_example(run: Path) -> None:
    graph = onnx.load(run / "export" / "model.onnx").graph
    counts = Counter(node.op_type for node in graph.node)
    if counts["Conv"]:
        assert counts["LSTM"] == 0
        return
    assert counts["LSTM"] == 4, "two directions of two layers"
    for entry in graph.input:
        assert [axis.dim_param for axis in entry.type.tensor_type.shape.dim] in (
            ["rows", "length"],
            ["rows"],
        )


@pytest.mark.parametrize("pooling", at_once(of=["last", "mean", "attention"], seconds=4))
def test_each_pooling_answers_the_same(tmp_path: Path, pooling: str) -> None:
    model = BiLSTMConfig(embedding=8, hidden=8, pooling=Pooling(pooling))
    run = train_tiny(tmp_path, data(), model)
    assert verb("export", run, "--onnx") == 0
    assert_answers_as_the_run(run, ROWS["mixed lengths"])


@pytest.mark.parametrize("kind", at_once(of=["bpe", "wordpiece"], seconds=4))
def test_pieces_of_words_answer_the_same(tmp_path: Path, kind: str) -> None:
    run = train_tiny(tmp_path, data(vocabulary=VocabularyConfig(kind=VocabularyKind(kind))), BILSTM)
    assert verb("export", run, "--onnx") == 0
    for texts in ROWS.values():
        assert_answers_as_the_run(run, texts)


@pytest.mark.parametrize("labels", at_once("regression", of=["regression", "multi"], seconds=4))
def test_numbers_and_several_labels_answer_the_same(tmp_path: Path, labels: str) -> None:
    table = numbers("grade") if labels == "regression" else several()
    table.vocabulary = VocabularyConfig(min_frequency=1)
    run = train_tiny(tmp_path, table, TextCNNConfig(embedding=8, filters=8, ngrams="off"))
    assert verb("export", run, "--onnx") == 0
    texts = ["grade 3 of ten", "oak 7", "", "rose rose"]
    assert_answers_as_the_run(run, texts)
    signature = json.loads((run / "export" / "signature.json").read_text(encoding="utf-8"))
    if labels == "regression":
        assert answer(run / "export", texts).mean() > 900
    else:
        assert signature["thresholds"] == Predictor.load(run).least_shares().tolist()
    rows = run / "rows.csv"
    rows.write_text("text\n" + "\n".join(filter(None, texts)) + "\n")
    assert verb("verify", run, rows) == 0


@pytest.mark.soak(seconds=3)
def test_texts_that_the_tokenizer_would_cut_elsewhere_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = VocabularyConfig(kind=VocabularyKind.wordpiece)
    run = train_tiny(tmp_path, data(long=Long.head_tail, vocabulary=pieces), BILSTM)
    assert verb("export", run, "--onnx", "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "cut the texts that the run reads with data.long=head_tail. Train with" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.soak(seconds=3)
def test_escapes_that_the_tokenizer_does_not_decode_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoded = CleaningConfig(escapes=Escapes.decode)
    run = train_tiny(tmp_path, data(clean=decoded), TextCNNConfig(embedding=8, filters=8))
    capsys.readouterr()
    assert verb("export", run, "--onnx") == 0
    assert "texts with escapes (\\u00e9): the run decodes them" in capsys.readouterr().out


def test_answers_that_differ_are_not_handed_over(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outputs = Predictor.outputs
    monkeypatch.setattr(Predictor, "outputs", lambda *given: outputs(*given) + 8e-5)
    assert verb("export", run, "--onnx", "--out", tmp_path / "out") == 2
    assert "export: model.onnx answers otherwise: logits differ by" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_onnx_it_is_one_sentence(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert verb("export", run, "--out", tmp_path / "out") == 2
    assert "is exported as ONNX. Add --onnx." in capsys.readouterr().err
    monkeypatch.setattr("flatout.cli.export.find_spec", lambda name: None)
    assert verb("export", run, "--onnx", "--out", tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--onnx: needs the package onnx, onnxscript, onnxruntime. Install it with" in line
    assert list(tmp_path.iterdir()) == []
