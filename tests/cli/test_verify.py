"""`python -m flatout verify`: each form of a model is held to its reference, and planted faults are
found.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from benchmarks.answers import FAULTS, change, exported_run, planted_rows
from transformers import AutoModelForSequenceClassification

from flatout import HeadlinesConfig, TextDataConfig
from flatout.inference.forms import Form, together
from flatout.inference.verify import SplitAnswer, verify
from flatout.models.encoder import layers, network
from flatout.models.encoder.attention import Scores
from tests.cli.cells import train as train_cells
from tests.cli.cells import write_cells
from tests.cli.test_export import WORDS as TAG_ROWS
from tests.cli.test_export import tagged, train_tiny
from tests.params import at_once
from tests.refusals import require_printed
from tests.verbs import verb


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.csv"
    file.write_text("text\n" + "\n".join(planted_rows()) + "\n")
    return file


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its export beside it."""
    return exported_run(tmp_path_factory.mktemp("verify"), "bert")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a family with windows."""
    return exported_run(tmp_path_factory.mktemp("windowed"), "modernbert")


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "run"))


def test_all_forms_of_a_sound_run_hold_and_the_certificate_says_so(
    exported: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb("verify", exported, rows, "--out", tmp_path / "verify.json") == 0
    said = capsys.readouterr().out.splitlines()
    assert (
        said[0].removeprefix(f"{rows.parent}/")
        == "rows.csv: 40 rows; reference: the library's layers, alone, fp32"
    )
    assert said[-1] == "each form holds, 0 changed rows allowed"
    assert len(said) == 8
    assert all("same answer in 40 of 40 rows" in line for line in said[1:-1])
    found = json.loads((tmp_path / "verify.json").read_text())
    assert found["holds"]
    assert len(found["forms"]) == 6
    assert 0 < max(form["largest_difference"] for form in found["forms"]) < 1e-4


@pytest.mark.parametrize("fault", at_once(*list(FAULTS)[::4], of=FAULTS, seconds=2))
def test_a_fault_in_an_export_is_found_and_named(
    exported: Path,
    windowed: Path,
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    family, plant, cause = FAULTS[fault]
    run = Path(shutil.copytree(exported if family == "bert" else windowed, tmp_path / "run"))
    plant(run)
    assert verb("verify", run, rows) == 1
    said = capsys.readouterr().out
    sound, judged = said.split(f"{run / 'export'}: transformers")
    assert "looks like" not in sound
    assert f"looks like: {cause}" in judged


@pytest.mark.soak(seconds=3)
def test_shifted_positions_and_a_lost_window_of_the_flat_layers_are_found(
    exported: Path,
    windowed: Path,
    rows: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    number_positions = network.number_positions
    monkeypatch.setattr(network, "number_positions", lambda *tokens: number_positions(*tokens) + 1)
    assert verb("verify", exported, rows) == 1
    flat, _, others = capsys.readouterr().out.partition("padded, in batches")
    assert flat.count("looks like: rows of any length, alone too: positions") == 4
    assert "looks like" not in others

    monkeypatch.setattr(
        layers, "Scores", lambda scale, dropout, window: Scores(scale, dropout, None)
    )
    assert verb("verify", windowed, rows) == 1
    flat, _, others = capsys.readouterr().out.partition("padded, in batches")
    assert flat.count("changed: rows") == 4
    assert "looks like" not in others


def test_anybody_s_folder_is_judged_by_transformers_row_by_row(
    exported: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb("verify", exported / "export", rows) == 0
    assert capsys.readouterr().out.count("same answer in 40 of 40 rows") == 7
    folder = Path(shutil.copytree(exported / "export", tmp_path / "theirs"))
    change(folder / "tokenizer_config.json", model_input_names=["input_ids"])
    assert verb("verify", folder, rows) == 1
    assert "transformers, in batches" in (said := capsys.readouterr().out)
    assert said.count("looks like: the rows beside a row") >= 3


def test_a_folder_without_a_head_is_judged_with_a_made_up_one_that_is_named(
    exported: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(exported / "export", tmp_path / "theirs"))
    change(folder / "config.json", architectures=["BertModel"])
    assert verb("verify", folder, rows) == 0
    assert "reference: transformers with a made-up head, alone" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["chunk", *at_once(of=["forecast"], seconds=1)])
def test_recordings_are_held_to_each_alone(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_cells(tmp_path / "runs", kind).folder
    assert verb("verify", run, write_cells(tmp_path / "cells")) == 0
    assert "reference: alone, fp32" in capsys.readouterr().out


@pytest.mark.soak(seconds=3)
def test_a_form_that_is_not_there_and_a_short_recording_are_told_from_sound_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_cells(tmp_path / "runs", "mlp").folder
    cells = write_cells(tmp_path / "cells")
    assert verb("verify", run, cells, "--form", tmp_path / "nowhere") == 2
    require_printed(capsys.readouterr().err, "nowhere: ", "no ONNX file")
    assert verb("export", run, "--onnx") == 0
    short = min(cells.iterdir())
    pq.write_table(pq.read_table(short).slice(0, 6), short)
    assert verb("verify", run, cells) == 0
    assert "model.onnx" in capsys.readouterr().out


@pytest.mark.soak(seconds=3)
def test_the_export_of_a_run_on_windows_is_left_out_unless_it_is_named(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = TextDataConfig(
        sample=HeadlinesConfig(rows=200, eval_rows=50, classes=3),
        long="windows",
        window=16,
        overlap=4,
    )
    run = train_tiny(tmp_path, data)
    assert verb("export", run) == 0
    assert verb("verify", run, rows, "--rows", 20) == 0
    assert "transformers" not in capsys.readouterr().out.rpartition("fp32\n")[2]
    assert verb("verify", run, rows, "--form", run / "export") == 2
    assert (
        "its tokenizer cuts the texts that the run reads with data.long=windows"
        in capsys.readouterr().err
    )


def test_weights_of_sixteen_bits_may_round(exported: Path, rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "narrow"
    net = AutoModelForSequenceClassification.from_pretrained(
        exported / "export", dtype=torch.bfloat16
    )
    shutil.copytree(exported / "export", folder)
    net.save_pretrained(folder)
    assert (
        verb(
            "verify",
            exported,
            rows,
            "--form",
            folder,
            "--allow",
            "10%",
            "--out",
            tmp_path / "verify.json",
        )
        == 0
    )
    named = {
        form["name"]: form for form in json.loads((tmp_path / "verify.json").read_text())["forms"]
    }
    assert 1e-3 < named[f"{folder}: transformers, bfloat16"]["largest_difference"] < 0.1


@pytest.mark.soak(seconds=3)
def test_words_with_tags_are_held_to_the_library_s_layers_and_the_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tagged(tmp_path, "bert")
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(
            json.dumps(
                {
                    "tokens": row,
                    "words": row,
                    "text": row,
                }
            )
            + "\n"
            for row in TAG_ROWS
        )
    )
    assert verb("export", run) == 0
    capsys.readouterr()
    assert verb("verify", run, file) == 0
    assert (
        capsys.readouterr().out.count(f"same answer in {len(TAG_ROWS)} of {len(TAG_ROWS)} rows")
        == 6
    )


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no tokenizer": (
        ["FOLDER", "ROWS"],
        "RUN/export: no tokenizer in it. Name a folder with config.json",
    ),
    "no weights": (
        ["WEIGHTLESS", "ROWS"],
        "WEIGHTLESS: no weights (*.safetensors) in it. Name its run, with --form.",
    ),
    "a tagger": (
        ["TAGGER", "ROWS"],
        "its model is a BertForTokenClassification, and only one that classifies texts",
    ),
    "a damaged ONNX file": (
        ["RUN", "ROWS", "--form", "OTHER"],
        "OTHER/model.onnx: onnxruntime cannot read it (",
    ),
    "labels of others": (
        ["RUN", "ROWS", "--form", "OTHER"],
        "OTHER: its labels are yes, no, maybe, those of the run",
    ),
    "rows of another kind": (["RUN", "BITS"], "no column 'text' in"),
    "no number": (
        ["RUN", "ROWS", "--allow", "few"],
        "--allow: 'few' (a number of rows, or a percentage: 3, 0.1%)",
    ),
    "a number without end": (
        ["RUN", "ROWS", "--allow", "inf"],
        "--allow: 'inf' (a number of rows, or a percentage",
    ),
    "no padding": (["PADLESS", "ROWS"], "PADLESS: its tokenizer has no token to pad rows with"),
    "options of a run": (
        ["OTHER", "ROWS", "--read", "encoding=utf8"],
        "--bits, --read, --device: are for runs. Leave",
    ),
    "a device": (
        ["OTHER", "ROWS", "--device", "cuda:9"],
        "--bits, --read, --device: are for runs. Leave them out.",
    ),
    "no rows": (["RUN", "ROWS", "--rows", "0"], "--rows: 0 (1 or more)"),
    "forms of a folder": (
        ["OTHER", "ROWS", "--form", "OTHER"],
        "--form: only a run has other forms",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(
    copied: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    other = Path(shutil.copytree(copied / "export", tmp_path / "other"))
    if mistake == "a damaged ONNX file":
        (other / "model.onnx").write_bytes(b"no graph")
    else:
        change(other / "config.json", id2label={"0": "yes", "1": "no", "2": "maybe"})
    names = ("tagger", "weightless", "padless")
    tagger, weightless, padless = (
        shutil.copytree(copied / "export", tmp_path / name) for name in names
    )
    change(padless / "tokenizer_config.json", pad_token=None)
    change(tagger / "config.json", architectures=["BertForTokenClassification"])
    (weightless / "model.safetensors").rename(weightless / "model.onnx")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copied / "export" / name).unlink()
    (tmp_path / "bits.csv").write_text("bits\n0101\n")
    places = {
        "RUN": copied,
        "FOLDER": copied / "export",
        "ROWS": rows,
        "OTHER": other,
        "BITS": tmp_path / "bits.csv",
    }
    places |= {"TAGGER": tagger, "WEIGHTLESS": weightless, "PADLESS": padless}
    words, message = MISTAKES[mistake]
    if mistake in ("rows of another kind", "no number", "a number without end", "no rows"):
        shutil.rmtree(copied / "export")
    assert verb("verify", *(places.get(word, word) for word in words)) == 2
    said = capsys.readouterr().err
    for name, place in places.items():
        said = said.replace(str(place), name)
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(
    ("given", "looks_like"),
    [
        ([[float("nan")], [1.0]], "rows of any length"),
        ([[2.0, 2.0], [1.0]], "another number of values in a row"),
    ],
    ids=["no number", "a number too many"],
)
def test_an_answer_that_is_no_number_or_has_others_beside_is_another_one(
    is_exact, given, looks_like
) -> None:
    rows = ["a", "b"]
    answers = dict(zip(rows, map(np.array, given), strict=True))
    predictor: Any = SimpleNamespace(predict=lambda rows: [answers[row] for row in rows])
    found = verify(
        Form("", predictor, together, is_exact),
        rows,
        [SplitAnswer.of(np.array([number])) for number in (2.0, 1.0)],
    )
    assert (found.same, found.changed, found.holds(0)) == (1, [1], False)
    assert found.looks_like.startswith(looks_like)
