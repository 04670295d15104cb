"""`python -m flatout export --for here`: forms of a classifier are measured, and the best one
answers without us.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pytest
import torch
from huggingface_hub import ModelCard
from onnx import helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic
from pyarrow import csv

from flatout import BiLSTMConfig, HeadlinesConfig, Predictor, TextCNNConfig, TextDataConfig
from flatout.data.problem import Problem
from flatout.data.samples.headlines import HeadlinesTable
from flatout.data.tables.roles import Roles
from flatout.data.tables.sources import open_table
from flatout.data.tokens.subwords import PAIR
from flatout.errors import UserError
from flatout.inference import here
from flatout.inference.export import export
from flatout.inference.folder_predictors import encoder_predictors
from flatout.inference.here import INT8, STATIC, FormMeasurement, _in_fp32, choose, remarks
from flatout.inference.model_folder import WEIGHTS
from flatout.inference.onnx_file import ONNX, errors_alone
from flatout.inference.run_predictor import FileOptions
from flatout.inference.verify import Verified
from flatout.report.page import render_text
from tests.cli.test_export import numbers, several, train_tiny
from tests.data.whole_tables import whole_table
from tests.params import at_once
from tests.refusals import refused
from tests.verbs import verb

SAMPLE = HeadlinesConfig(rows=200, eval_rows=50, classes=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("here"), TextDataConfig(sample=SAMPLE))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.csv"
    csv.write_csv(whole_table(HeadlinesTable(SAMPLE, "test"), ["text", "label"]), file)
    return file


def measured(
    name: str, file: str, throughput: float, score: float, size: float = 1.0
) -> FormMeasurement:
    verified = Verified(name, 10, 10, [], 0.0, "", False)
    return FormMeasurement(
        name, file, throughput, 1e3 / throughput, 2e3 / throughput, size, score, "", verified
    )


FOUND = [
    measured("predict", "", 100, 0.90),
    measured("transformers fp32", WEIGHTS, 50, 0.90, 8),
    measured("onnxruntime fp32", ONNX, 60, 0.90, 9),
    measured("onnxruntime int8", INT8, 45, 0.896, 2),
]


@pytest.mark.parametrize(
    ("best", "points", "file"),
    [
        ("throughput", 0.5, ONNX),
        ("latency", 0.5, ONNX),
        ("size", 0.5, INT8),
        ("size", 0.3, WEIGHTS),
    ],
)
def test_the_best_form_loses_no_more_than_it_may(best, points, file):
    assert choose(FOUND, best, points, Problem.single).file == file


def test_an_error_may_grow_by_so_many_per_cent():
    found = [measured("predict", "", 9, 2.0), measured("int8", INT8, 9, 2.02)]
    assert choose(found, "size", 1.0, Problem.regression).file == INT8
    with refused("--allow-points", "0.5 points"):
        choose(found, "size", 0.5, Problem.regression)


def test_a_form_that_does_not_pay_is_named():
    first, last = remarks(FOUND, FOUND[2], "throughput")
    assert first == "onnxruntime int8 does not pay here: 0.90× of transformers fp32 for throughput"
    assert (
        last
        == "best for throughput: onnxruntime fp32, 0.60× of this run's predict, which is faster but"
        " needs flatout"
    )


@pytest.mark.soak(seconds=20)
@pytest.mark.parametrize("best", ["size", "latency"])
def test_the_folder_of_the_best_form_answers_as_the_run_does(
    run, rows, tmp_path, monkeypatch, capfd, best
):
    folder = tmp_path / "here"
    if best == "latency":  # then bf16 is among the forms on any processor
        monkeypatch.setattr(here, "bf16_is_native_on_cpu", lambda: True)
    assert (
        verb(
            "export",
            run,
            "--for",
            "here",
            "--rows",
            rows,
            "--best",
            best,
            "--allow-points",
            100,
            "--out",
            folder,
        )
        == 0
    )
    out, err = capfd.readouterr()
    assert err == ""
    assert f"written to {folder}" in out
    certificate = json.loads((folder / "verify.json").read_text())
    names = [each["name"] for each in certificate["measured"]]
    lines = out.splitlines()
    assert [line.startswith(name) for name, line in zip(names, lines[2:], strict=False)] == [
        True
    ] * len(names)
    assert names[:2] == ["predict", "transformers fp32"]
    assert names[-3:] == [
        "onnxruntime fp32",
        "onnxruntime int8",
        "onnxruntime static int8",
    ]
    chosen = next(each for each in certificate["measured"] if each["name"] == certificate["form"])
    assert best != "size" or chosen["size"] == min(
        each["size"] for each in certificate["measured"][1:]
    )
    weights = {WEIGHTS, ONNX, INT8, STATIC} & {path.name for path in folder.iterdir()}
    assert weights == {chosen["file"]}
    assert chosen["size"] == pytest.approx((folder / chosen["file"]).stat().st_size / 1e6, rel=0.05)
    assert all(
        0 < each["latency"] <= each["slowest"] and each["throughput"] > 0
        for each in certificate["measured"]
    )

    card = (folder / "README.md").read_text()
    (scored,) = ModelCard(card).data.eval_results or ()
    assert (scored.task_type, scored.dataset_name, scored.metric_type) == (
        "text-classification",
        "rows.csv",
        "accuracy",
    )
    assert scored.metric_value == pytest.approx(chosen["score"], abs=1e-4)
    assert "200 train rows" in card
    assert f"accuracy {chosen['score']:.4f}" in card
    assert "none was given" in card

    # int8 of so small a run may answer otherwise
    assert verb("verify", run, rows, "--form", folder) in (0, 1)
    form = "transformers" if chosen["file"] == WEIGHTS else str(folder / chosen["file"])
    said = capfd.readouterr().out
    assert form in said
    assert ("transformers" in said) == (chosen["file"] == WEIGHTS)

    texts = csv.read_csv(rows)["text"].to_pylist()
    answers = Predictor.load(run).predict(texts)
    monkeypatch.setattr(sys, "argv", ["predict.py", *texts])
    runpy.run_path(str(folder / "predict.py"))
    said = capfd.readouterr().out.splitlines()
    same = [line.startswith(f"{each.label} (") for line, each in zip(said, answers, strict=True)]
    assert np.mean(same) >= (0.9 if chosen["file"] in (INT8, STATIC) else 1.0)


@pytest.mark.parametrize(
    "problem", [Problem.single, *at_once(of=[Problem.multi, Problem.regression], seconds=2)]
)
def test_the_program_beside_the_weights_answers_as_the_run_does(
    tmp_path, monkeypatch, capfd, problem
):
    data = {Problem.multi: several, Problem.regression: lambda: numbers("grade")}.get(
        problem, lambda: None
    )()
    predictor = Predictor.load(train_tiny(tmp_path, data))
    export(predictor, tmp_path)
    least = predictor.least_shares().tolist()
    asked = {"onnx": False, "is_encoder": True, "is_mixed": False, "file": WEIGHTS}
    asked |= {"problem": problem.value, "least": least}
    (tmp_path / "predict.py").write_text(render_text("predict.py", **asked))
    texts = ["oak 3 of ten", "fern and slate", "rose 8 of ten", "A senate, a ballot!"]
    monkeypatch.setattr(sys, "argv", ["predict.py", *texts])
    capfd.readouterr()
    runpy.run_path(str(tmp_path / "predict.py"))
    said = [line.rpartition(": ")[0] for line in capfd.readouterr().out.splitlines()]
    monkeypatch.setattr(sys, "argv", ["predict.py"])
    with pytest.raises(SystemExit, match="Answers texts: "):
        runpy.run_path(str(tmp_path / "predict.py"))
    answers = predictor.predict(texts)
    if problem is Problem.regression:
        assert [float(each) for each in said] == pytest.approx(
            [each.label for each in answers], abs=1e-2
        )
    elif problem is Problem.multi:
        assert said == [", ".join(each.label) for each in answers]
    else:
        assert said == [f"{each.label} ({each.probability:.3f})" for each in answers]


@pytest.mark.soak(seconds=2)
def test_forms_read_the_columns_of_the_run(run, rows, tmp_path):
    predictor = Predictor.load(run)
    export(predictor, tmp_path)
    own = predictor.score_table(
        open_table(rows, where="FILE"), FileOptions(), [predictor], lambda rows: None
    )
    predictor.roles = Roles(("headline",), "topic")
    csv.write_csv(
        csv.read_csv(rows).rename_columns(["headline", "topic"]), tmp_path / "renamed.csv"
    )
    (form,) = encoder_predictors(predictor, tmp_path).values()
    table = open_table(tmp_path / "renamed.csv", where="FILE")
    found = form.score_table(table, FileOptions(), [form], lambda rows: None)
    assert found.values["accuracy"] == own.values["accuracy"]
    words = replace(
        form, logits_of=lambda given: torch.zeros(*given["input_ids"].shape, 9), where="words.onnx"
    )
    with pytest.raises(
        UserError,
        match=r"words\.onnx: answers each token, not each row\. Take it out of the folder",
    ):
        words.outputs(pa.array(["a text"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--for", "here"], "--for here: needs labelled rows. Name their file with --rows FILE."),
        (["--rows", "ROWS"], "--rows: is for --for here alone. Add it."),
        (["--allow-points", "0.5"], "--allow-points: is for --for here alone. Add it."),
        (
            ["--for", "here", "--rows", "ROWS", "--allow-points=-1"],
            "--allow-points: -1 (0 or more)",
        ),
        (["--for", "here", "--rows", "none.csv"], "none.csv"),
        (["--for", "here", "--rows", "UNKNOWN"], "labels that the run does not know: 'weather'"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_no_folder(run, rows, tmp_path, capfd, words, said):
    (tmp_path / "unknown.csv").write_text("text,label\nrain over the lake,weather\n")
    places = {"ROWS": rows, "UNKNOWN": tmp_path / "unknown.csv"}
    assert (
        verb("export", run, *(places.get(word, word) for word in words), "--out", tmp_path / "out")
        == 2
    )
    assert said in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["unknown.csv"]


@pytest.mark.parametrize(
    "model",
    [
        BiLSTMConfig(embedding=8, hidden=8),
        *at_once(of=[TextCNNConfig(embedding=8, filters=8)], seconds=8),
    ],
)
def test_the_best_form_of_a_network_on_words_answers_without_us(
    rows, tmp_path, monkeypatch, capfd, model
):
    run = train_tiny(tmp_path, TextDataConfig(sample=SAMPLE), model)
    folder = tmp_path / "here"
    capfd.readouterr()
    words = ["--rows", rows, "--best", "size", "--allow-points", 100, "--out", folder]
    assert verb("export", run, "--for", "here", *words) == 0
    said = capfd.readouterr()
    assert said.err == ""
    forms = ["predict", "onnxruntime fp32", "onnxruntime int8", "onnxruntime static int8"]
    assert "left in fp32: DynamicQuantizeLSTM" not in said.out
    certificate = json.loads((folder / "verify.json").read_text())
    assert [each["name"] for each in certificate["measured"]] == forms
    sizes = {each["name"]: each["size"] for each in certificate["measured"]}
    assert sizes["onnxruntime int8"] != sizes["onnxruntime fp32"] == sizes["predict"] > 0
    (chosen,) = folder.glob("*.onnx")
    names = {"README.md", "predict.py", "signature.json", "tokenizer.json", "verify.json"}
    names |= {"abstention.json", "abstention.npz", chosen.name}
    assert {path.name for path in folder.iterdir()} == names
    assert f"answered by a {type(model).__name__.removesuffix('Config')}." in (
        folder / "README.md"
    ).read_text(encoding="utf-8")

    texts = ["", *csv.read_csv(rows)["text"].to_pylist()]
    answers = Predictor.load(run).predict(texts)
    monkeypatch.setattr(sys, "argv", ["predict.py", *texts])
    runpy.run_path(str(folder / "predict.py"))
    lines = capfd.readouterr().out.splitlines()
    same = [line.startswith(f"{each.label} (") for line, each in zip(lines, answers, strict=True)]
    assert np.mean(same) >= 0.9
    # int8 of so small a run may answer otherwise
    assert verb("verify", run, rows, "--form", folder) in (0, 1)
    assert str(chosen) in capfd.readouterr().out


def test_pairs_of_texts_are_refused(run, rows, tmp_path, capfd):
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    file = copied / "model" / "config.json"
    settings = json.loads(file.read_text())
    settings["data"]["columns"]["join"] = PAIR
    file.write_text(json.dumps(settings))
    assert verb("export", copied, "--for", "here", "--rows", rows) == 2
    assert "--for here does not read pairs of texts" in capfd.readouterr().err


def test_a_matrix_that_stays_in_fp32_is_named_and_others_are_not(tmp_path):
    values = np.random.default_rng(0).random((8, 8), np.float32)
    weights = [
        numpy_helper.from_array(values, "weight"),
        numpy_helper.from_array(values[:1], "slope"),
    ]
    nodes = [
        helper.make_node("MatMul", ["rows", "weight"], ["sums"]),
        helper.make_node("PRelu", ["sums", "slope"], ["out"]),
    ]
    ends = [
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 8])]
        for name in ("rows", "out")
    ]
    made = helper.make_model(
        helper.make_graph(nodes, "net", *ends, weights), opset_imports=[helper.make_opsetid("", 20)]
    )
    with errors_alone():
        quantize_dynamic(made, tmp_path / "int8.onnx", per_channel=True)
    assert _in_fp32(made.graph) == "MatMul (1×), PRelu (1×)"
    assert _in_fp32(onnx.load(tmp_path / "int8.onnx").graph) == "PRelu (1×)"
