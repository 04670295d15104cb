"""`python -m flatout export --onnx` of runs on bit strings: the file answers as the run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime import InferenceSession
from tests.end_to_end.test_bits import small_fit
from tests.params import at_once
from tests.verbs import verb

from flatout import BitMLPConfig, EncodingConfig, GramPredictor
from flatout.bits.bits_onnx import export_bits


def packed(predictor: GramPredictor, count: int) -> Any:
    """Random records, from no bit to all bits."""
    fractions = np.linspace(1, 0, count).reshape(-1, 1)
    random = np.random.default_rng(1).random((count, predictor.num_inputs))
    return np.packbits(random < fractions, axis=1)


def assert_answers_as_the_run(predictor: GramPredictor, file: Path, count: int) -> None:
    records = packed(predictor, count)
    (found,) = InferenceSession(file).run(None, {"bits": records})
    np.testing.assert_allclose(found, predictor.outputs(records).numpy(), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its export beside it."""
    folder = small_fit(tmp_path_factory.mktemp("bits"), rows=300, epochs=1).folder
    assert verb("export", folder, "--onnx") == 0
    return Path(folder)


@pytest.mark.parametrize("count", [1, 2, 64, 1000])
def test_the_file_answers_as_the_run_does(run: Path, count: int) -> None:
    predictor = GramPredictor.load(run)
    assert_answers_as_the_run(predictor, run / "export" / "model.onnx", count)


def test_the_signature_names_the_grams(run: Path) -> None:
    signature = json.loads((run / "export" / "signature.json").read_text(encoding="utf-8"))
    predictor = GramPredictor.load(run)
    assert signature == {
        "inputs": {"bits": ["rows", predictor.num_inputs // 8]},
        "outputs": ["probabilities"],
        "labels": list(predictor.labels.names),
        "threshold": predictor.threshold,
    }


def test_verify_holds_the_file_to_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predictor = GramPredictor.load(run)
    texts = ["".join(map(str, np.unpackbits(row))) for row in packed(predictor, 20)]
    file = tmp_path / "rows.csv"
    file.write_text("\n".join([predictor.bits_column, *texts]))
    assert verb("verify", run, file) == 0
    said = capsys.readouterr().out
    assert f"{run / 'export' / 'model.onnx'}" in said
    assert said.count("same answer in 20 of 20 rows") == 4
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    assert verb("verify", run, file, "--form", tmp_path) == 2
    assert "model.onnx: onnxruntime cannot read it (" in capsys.readouterr().err


MODELS = {
    "plain": BitMLPConfig(widths=[16, 16], detectors=False, residual=True, norm="batch"),
    "trained detectors": BitMLPConfig(widths=[16], train_detectors=True, blend=False),
    "no hidden layer": BitMLPConfig(widths=[], norm="layer"),
}


@pytest.mark.parametrize("model", at_once("plain", of=MODELS, seconds=3))
def test_other_networks_answer_the_same(tmp_path: Path, model: str) -> None:
    predictor = small_fit(tmp_path, rows=300, epochs=1, model=MODELS[model]).predictor
    if predictor.model.ridge is not None:
        predictor.model.ridge_share.fill_(0.5)
    export_bits(predictor, tmp_path)
    assert_answers_as_the_run(predictor, tmp_path / "model.onnx", 100)


def test_sets_of_numbers_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = {"encoding": EncodingConfig(kind="twostep", hashes=4)}
    run = small_fit(tmp_path, rows=300, epochs=1, data=sets).folder
    capsys.readouterr()
    assert verb("export", run, "--onnx", "--out", tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a run on sets of numbers has no export. Answer files by python -m flatout" in line
    assert not any("out" in path.name for path in tmp_path.iterdir())
