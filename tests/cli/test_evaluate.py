"""`python -m flatout evaluate`: metrics of labelled rows, wherever they come from."""

from __future__ import annotations

import errno
import gzip
import io
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from flatout import BiLSTMConfig, HeadlinesConfig, TextDataConfig, fit
from flatout.inference import run_predictor
from flatout.tasks.calibration import Sureness, calibration_error
from tests.refusals import require_printed
from tests.run_files import jsonl_of, read_csv, write_jsonl
from tests.verbs import verb


def test_evaluate_prints_metrics_and_what_it_found(finished, rows, capsys):
    assert verb("evaluate", finished.folder, rows) == 0
    said = capsys.readouterr().out
    assert "1 row with an empty text, kept as one unknown word" in said
    assert "accuracy" in said
    assert verb("evaluate", finished.folder, rows, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["intervals"]) == (3, {})


def test_evaluating_the_test_split_again_gives_the_run_s_own_metrics(finished, tmp_path, capsys):
    from flatout.data.samples.headlines import HeadlinesTable

    table = HeadlinesTable(HeadlinesConfig(rows=400, eval_rows=80, classes=3), "test")
    (block,) = table.blocks(["text", "label"])
    path = tmp_path / "test.jsonl"
    write_jsonl(path, block.to_pylist())
    assert verb("evaluate", finished.folder, path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    # fp32 here, bf16 where native there
    assert found["accuracy"] == pytest.approx(finished.metrics["test/accuracy"], abs=0.03)
    ends = finished.summary["intervals"]["test/accuracy"]
    assert ends[0] < finished.metrics["test/accuracy"] < ends[1]
    assert found["intervals"]["accuracy"] == pytest.approx(ends, abs=0.05)


def labelled_rows(folder):
    """A labelled file of a hundred rows, for blocks of a few rows."""
    file = folder / "labelled.csv"
    things = {"politics": "senate ballot", "sport": "striker playoff"}
    rows = [
        f"{label},{words} w{number % 13}\n"
        for number in range(50)
        for label, words in things.items()
    ]
    file.write_text("label,text\n" + "".join(rows))
    return file


def test_evaluating_on_several_devices_or_from_standard_input_gives_the_same(
    finished, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(run_predictor, "_ROWS_PER_BLOCK", 7)
    file = labelled_rows(tmp_path)
    said = []
    for source, devices in (
        (file, "cpu"),
        (file, "cpu,cpu,cpu"),
        ("-", "cpu"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
        assert verb("evaluate", finished.folder, source, "--device", devices, "--json") == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["rows"] == 100
    assert said[0] == said[1] == said[2]


def test_nothing_over_standard_input_is_a_mistake_of_evaluate_too(finished, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" \n")))
    assert verb("evaluate", finished.folder, "-") == 2
    said = capsys.readouterr().err
    require_printed(said, "FILE: ", "nothing", "standard input", "| flatout evaluate RUN -")


def test_gzipped_rows_come_over_standard_input_too(finished, tmp_path, monkeypatch, capsys):
    file = labelled_rows(tmp_path)
    rows = file.read_bytes()
    lines = jsonl_of(read_csv(file)).encode()
    said = []
    for given in (rows, gzip.compress(rows), gzip.compress(lines)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert verb("evaluate", finished.folder, "-", "--json") == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1] == said[2]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\x1f\x8bbroken")))
    assert verb("evaluate", finished.folder, "-") == 2
    assert capsys.readouterr().err.startswith("FILE: standard input.csv.gz: ")


def test_a_metric_that_one_row_does_not_have_is_a_dash(finished, tmp_path, capsys):
    file = tmp_path / "one.csv"
    file.write_text("\n".join(labelled_rows(tmp_path).read_text().splitlines()[:2]) + "\n")
    assert verb("evaluate", finished.folder, file) == 0
    said = capsys.readouterr().out
    assert "nan" not in said
    assert "auroc             –\n" in said


def test_a_folder_of_texts_for_each_class_is_answered_into_one_file_and_scored_by_its_folders(
    finished, tmp_path, capsys
):
    rows = read_csv(labelled_rows(tmp_path))
    for number, row in enumerate(rows):
        (tmp_path / "fold" / row["label"]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "fold" / row["label"] / f"{number}.txt").write_text(
            row["text"], encoding="utf-8"
        )
    assert verb("predict", finished.folder, tmp_path / "fold", "--out", f"{tmp_path}/answers/") == 2
    said = capsys.readouterr().err
    assert (
        "(files of a format we read). A folder of texts for each class is answered into one file."
        in said
    )
    assert (
        verb("predict", finished.folder, tmp_path / "fold", "--out", f"{tmp_path}/answers.csv") == 0
    )
    answers = {row["text"]: row["prediction"] for row in read_csv(tmp_path / "answers.csv")}
    texts = [row["text"] for row in rows]
    predicted = [each.label for each in finished.predict(texts)]
    assert answers == dict(zip(texts, predicted, strict=True))
    capsys.readouterr()
    assert verb("evaluate", finished.folder, tmp_path / "fold", "--json") == 0
    right = [answer == row["label"] for answer, row in zip(predicted, rows, strict=True)]
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(sum(right) / len(rows))


def test_standard_input_that_finds_no_room_names_the_folder_of_temporary_files(
    finished, monkeypatch, capsys
):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"label,text\na,b\n")))
    monkeypatch.setattr(shutil, "copyfileobj", refuse)
    assert verb("evaluate", finished.folder, "-") == 2
    said = capsys.readouterr().err
    require_printed(said, "TMPDIR: no space left", "it holds what comes over standard input")


def test_a_mistake_in_standard_input_names_the_option_of_the_verb_and_no_passing_file(
    finished, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"label,text\n")))
    assert verb("evaluate", finished.folder, "-") == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "FILE: standard input.csv: no rows below the line that names the columns."
    )
    assert said.endswith("name the columns: --read columns=[text,label].\n")


@pytest.fixture
def finished_elsewhere(tmp_path):
    """A run whose columns have names of their own."""
    rows = [f"what is w{number} ?,{'ab'[number % 2]}" for number in range(60)]
    file = tmp_path / "questions.csv"
    file.write_text("\n".join(["question,kind", *rows, ""]), encoding="utf-8")
    data = TextDataConfig(
        source=str(file), text="question", label="kind", cache=str(tmp_path / "cache")
    )
    config = BiLSTMConfig(embedding=8, hidden=8)
    return fit(data, config, epochs=1, output=str(tmp_path / "runs"))


def test_advice_for_a_line_without_names_is_in_the_columns_of_the_run_and_can_be_followed(
    finished_elsewhere, monkeypatch, capsys
):
    run = finished_elsewhere.folder
    for name, row, columns in (
        ("predict", "Who was Caesar ?\n", "[question]"),
        ("predict", "Who was Caesar ?,a\n", "[question,kind]"),
        ("evaluate", "Who was Caesar ?,a,9\n", "[question,kind,column3]"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(row.encode())))
        assert verb(name, run, "-") == 2
        said = capsys.readouterr().err
        assert said.endswith(f"name the columns: --read columns={columns}.\n")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(row.encode())))
        assert verb(name, run, "-", "--read", f"columns={columns}") == 0


def test_evaluate_says_how_far_sureness_is_from_being_right(
    finished, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(run_predictor, "_ROWS_PER_BLOCK", 7)
    file = labelled_rows(tmp_path)
    assert verb("evaluate", finished.folder, file, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    rows = read_csv(file)
    predictor = finished.predictor
    shares = predictor.shares(predictor.outputs(pa.array([row["text"] for row in rows])))
    targets = torch.tensor([predictor.labels.classes.index(row["label"]) for row in rows])
    assert found["calibration_error"] == pytest.approx(calibration_error(shares, targets), abs=1e-5)
    assert found["temperature"] == predictor.temperature
    assert verb("evaluate", finished.folder, file) == 0
    assert f"calibration_error {found['calibration_error']:.4f}\n" in capsys.readouterr().out


def test_the_calibration_error_of_pieces_is_that_of_all_rows():
    shares = torch.rand(500, 4).softmax(-1)
    targets = torch.randint(4, (500,))
    sureness = Sureness()
    for part in range(0, 500, 90):
        sureness.add(shares[part : part + 90], targets[part : part + 90])
    assert sureness.error() == pytest.approx(calibration_error(shares, targets))


def test_labels_that_are_written_in_another_way_are_those_of_the_run(
    finished, rows, tmp_path, capsys
):
    file = tmp_path / "other.csv"
    scores = []
    lines = read_csv(Path(rows))
    others = "".join(f'"{line["text"]}", {line["label"].upper()} \n' for line in lines)
    file.write_text(f"text,label\n{others}", encoding="utf-8")
    for each in (rows, file):
        assert verb("evaluate", finished.folder, each, "--json") == 0
        scores.append(json.loads(capsys.readouterr().out))
    assert scores[0] == scores[1]


def test_a_file_without_a_label_says_how_it_is_mended(finished, tmp_path, capsys):
    file = tmp_path / "rows.csv"
    file.write_text("text,label\nsome words,\nmore words,\n")
    assert verb("evaluate", finished.folder, file) == 2
    require_printed(capsys.readouterr().err, "no row has a label", "--label")
