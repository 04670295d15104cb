"""`python -m flatout`: predict, evaluate, cache and bench, with mistakes told in one message."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from benchmarks.claim import at_least, bounded, in_turn
from safetensors.torch import save_file

from flatout import BiLSTMConfig, HeadlinesConfig, MonitorConfig, TextDataConfig, fit
from flatout.cli.bench import line
from flatout.data.tables.output import block_writer
from flatout.data.tables.reading import ReadingConfig
from flatout.errors import UserError
from flatout.inference import run_predictor
from flatout.tasks.calibration import Sureness, calibration_error
from tests.run_files import jsonl_of, model_weights, read_csv, write_jsonl
from tests.stores import open_store
from tests.verbs import verb


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verbs")
    data = TextDataConfig(
        sample=HeadlinesConfig(rows=400, eval_rows=80, classes=3), cache=str(folder / "cache")
    )
    return fit(data, BiLSTMConfig(embedding=8, hidden=8), epochs=1, output=str(folder / "runs"))


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        'id,text,label\n1,"a senate, a ballot",politics\n2,,sport\n3,striker playoff goal,sport\n'
    )
    return str(path)


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.parquet"])
def test_predict_answers_every_row_in_order(finished, rows, tmp_path, name):
    assert verb("predict", finished.folder, rows, "--out", tmp_path / name) == 0
    if name.endswith(".csv"):
        found = read_csv(tmp_path / name)
    elif name.endswith(".jsonl"):
        found = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    else:
        found = pq.read_table(tmp_path / name).to_pylist()
    assert [str(row["id"]) for row in found] == ["1", "2", "3"]
    expected = finished.predict(["a senate, a ballot", "", "striker playoff goal"])
    assert [row["prediction"] for row in found] == [prediction.label for prediction in expected]
    assert [float(row["probability"]) for row in found] == pytest.approx(
        [p.probability for p in expected], abs=1e-5
    )


def test_a_text_has_the_same_answer_among_others_of_other_lengths(finished):
    """Rows are sorted by length to be answered; each answer must go back to its own row."""
    texts = ["striker playoff goal of the season", "senate", "a ballot, a vote", "", "playoff goal"]
    among_others = finished.predictor.outputs(pa.array(texts))
    alone = torch.cat([finished.predictor.outputs(pa.array([text])) for text in texts])
    torch.testing.assert_close(among_others, alone, atol=1e-4, rtol=0)
    assert len(torch.unique(among_others.round(decimals=3), dim=0)) == len(texts), (
        "answers that can be told apart"
    )


def test_a_table_of_one_text_has_one_answer(finished):
    assert finished.predictor.predict({"text": "a cat"}) == finished.predict(["a cat"])


def test_several_devices_answer_as_one_does_in_the_file_s_order(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(run_predictor, "_ROWS_PER_BLOCK", 7)
    file = tmp_path / "rows.csv"
    file.write_text(
        "text\n" + "".join(f"w{number % 13} cat w{number % 7}\n" for number in range(100))
    )
    for devices in ("cpu", "cpu,cpu,cpu"):
        out = tmp_path / f"{devices}.csv"
        assert verb("predict", finished.folder, file, "--device", devices, "--out", out) == 0
    assert (tmp_path / "cpu,cpu,cpu.csv").read_bytes() == (tmp_path / "cpu.csv").read_bytes()
    assert verb("predict", finished.folder, file, "--device", "cpu,tpu") == 2


def test_predict_guards_a_text_that_a_spreadsheet_would_run_and_a_name(finished, tmp_path, capsys):
    rows = tmp_path / "rows.csv"
    rows.write_text("text,=cmd|x!A0\nmatch,a\n=1+1 bank,=b\n", encoding="utf-8")
    out = tmp_path / "answers.csv"
    assert verb("predict", finished.folder, rows, "--out", out) == 0
    head, first, second = out.read_text(encoding="utf-8").splitlines()
    assert head.startswith('"text","\'=cmd|x!A0"') and first.startswith('"match","a"')
    assert second.startswith('"\'=1+1 bank","\'=b"')
    assert "2 cells that begin with '='" in capsys.readouterr().err


def test_predict_writes_to_standard_output(finished, rows, capfdbinary):
    assert verb("predict", finished.folder, rows) == 0
    assert (
        capfdbinary.readouterr().out.splitlines()[0]
        == b'"id","text","label","prediction","probability"'
    )


def test_columns_that_only_other_runs_write_are_kept_and_those_this_one_writes_give_way_once(
    finished, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(run_predictor, "_ROWS_PER_BLOCK", 2)
    file, out = tmp_path / "rows.csv", tmp_path / "answers.csv"
    file.write_text(
        "entities,text,candidates,probability\n"
        + "".join(f"e{row},cat {row},c,mine\n" for row in range(5))
    )
    assert verb("predict", finished.folder, file, "--out", out) == 0
    found = read_csv(out)
    assert list(found[0]) == ["entities", "text", "candidates", "prediction", "probability"]
    assert [row["entities"] for row in found] == [f"e{row}" for row in range(5)]
    assert all(0 < float(row["probability"]) <= 1 for row in found)
    said = capsys.readouterr().err
    assert said.count("probability left out: the answers have columns of that name") == 1
    assert "entities" not in said


def test_the_column_of_the_texts_may_be_named_like_an_answer(finished, tmp_path):
    file, out = tmp_path / "rows.csv", tmp_path / "answers.jsonl"
    file.write_text("prediction\nstriker playoff goal\n")
    assert verb("predict", finished.folder, file, "--text", "prediction", "--out", out) == 0
    assert (
        json.loads(out.read_text())["prediction"]
        == finished.predict("striker playoff goal")[0].label
    )


BOM = "\ufeff"
WRITTEN = {
    "lines": '{"text": "a cat"}\n{"text": "goal"}\n',
    "lines after a mark of their encoding": BOM + '{"text": "a cat"}\n{"text": "goal"}\n',
    "array": '\n [{"text": "a cat"},\n {"text": "goal"}]',
    "array after a mark of its encoding": BOM + '[{"text": "a cat"}, {"text": "goal"}]',
    "csv": "text\na cat\ngoal\n",
    "csv after a mark of its encoding": BOM + "text\na cat\ngoal\n",
}


@pytest.mark.parametrize("written", WRITTEN)
def test_how_standard_input_is_written_is_told_by_its_first_character(
    finished, tmp_path, monkeypatch, written
):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(WRITTEN[written].encode())))
    assert verb("predict", finished.folder, "-", "--out", tmp_path / "out.jsonl") == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in found] == ["a cat", "goal"]


def test_evaluate_prints_metrics_and_what_it_found(finished, rows, capsys):
    assert verb("evaluate", finished.folder, rows) == 0
    said = capsys.readouterr().out
    assert "1 row with an empty text kept as one unknown word" in said
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
    for source, devices in ((file, "cpu"), (file, "cpu,cpu,cpu"), ("-", "cpu")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
        assert verb("evaluate", finished.folder, source, "--device", devices, "--json") == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["rows"] == 100
    assert said[0] == said[1] == said[2]


def test_nothing_over_standard_input_is_a_mistake_of_evaluate_too(finished, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" \n")))
    assert verb("evaluate", finished.folder, "-") == 2
    said = capsys.readouterr().err
    assert "FILE: nothing came over standard input. Write: command | flatout evaluate RUN -" in said


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
    assert "nan" not in said and "auroc             –\n" in said


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
    assert (
        "no row has a label. Name the column of labels with --label, or another file."
        in capsys.readouterr().err
    )


MISTAKES = [
    (["predict", "nowhere", "ROWS"], "nowhere: no such run."),
    (["predict", "RUN", "nowhere.csv"], "FILE: no such file: nowhere.csv"),
    (["predict", "RUN", "ROWS", "--text", "txt"], "--text: no column 'txt'"),
    (
        ["predict", "RUN", "ROWS", "--out", "rows.xlsx"],
        "--out: cannot write .xlsx (.csv, .jsonl, .parquet)",
    ),
    (
        ["predict", "RUN", "ROWS", "--read", "columns=[a"],
        "--read: cannot read 'columns=[a'. Put quotes",
    ),
    (["predict", "RUN", "ROWS", "--part", "1/2"], "--part: is of many files. Write --out FOLDER/"),
    (
        ["predict", "RUN", "ROWS", "--out", "many/", "--parts", "2"],
        "--parts: is for --on ray alone. Add it.",
    ),
    (
        ["predict", "RUN", "ROWS", "--out", "many/", "--part", "3/2"],
        "--part: '3/2' (I/N with I from 1 to N). Write",
    ),
    (["predict", "RUN", "nowhere/x.csv", "--out", "many/"], "FILE: no such file: nowhere/x.csv."),
    (
        ["predict", "RUN", "nowhere/*.csv", "--out", "many/"],
        "FILE: no file fits nowhere/*.csv. Patterns are",
    ),
    (
        ["evaluate", "RUN", "ROWS", "--label", "id"],
        "labels that the run does not know: '1', '2', '3'",
    ),
    (["predict", "RUN", "ROWS", "--device", "gpu"], "--device: no device 'gpu' here (auto, cpu"),
    (["predict", "RUN", "ROWS", "--top-k", "-1"], "--top-k: -1 (1 or more)"),
    (
        ["predict", "RUN", "ROWS", "--precision", "bf61"],
        "--precision: 'bf61' (auto, fp32, tf32, bf16, fp16). Did you mean 'bf16'?",
    ),
    (
        ["bench", "spin"],
        (
            "no bench 'spin' (spine, shortcuts, sources, headlines, bits, sequences, loaders, bert,"
            " answers, audit, reuse, gpu, tune, scale, cluster, doctor, protections, quality). Did"
            " you mean 'spine'?"
        ),
    ),
    (["bench", "spine", "--only", "waiting"], "--only: bench spine cannot leave rows out"),
    (["bench", "spine", "--plain"], "--plain: bench spine has no rows in plain Trainers"),
    (["bench", "doctor", "--rounds", "0"], "--rounds: 0 rounds"),
    (["bench", "quality"], "bench quality: needs published data sets."),
    (["cache", "clear", "nope"], "cache clear: no store 'nope'"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_message_and_exit_code_2(finished, rows, capsys, arguments, message):
    places = {"RUN": str(finished.folder), "ROWS": rows}
    assert verb(*(places.get(argument, argument) for argument in arguments)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_folder_is_answered_file_by_file_in_parts_and_what_is_answered_stays(
    finished, rows, tmp_path, capsys
):
    given, out = tmp_path / "given", tmp_path / "out"
    given.mkdir()
    for number in range(3):
        (given / f"{number}.csv").write_text(
            Path(rows).read_text() + f"{number},ballot,politics\n" * number
        )
    (given / "2.csv").rename(given / "2.tsv.csv")
    assert verb("predict", finished.folder, given, "--out", f"{out}/", "--part", "2/2") == 0
    assert "2 files of 3 not answered yet, by other parts" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["1.csv", "answers.json"]
    assert "bytes" not in json.loads((out / "answers.json").read_text())
    before = (out / "1.csv").stat()
    assert verb("predict", finished.folder, f"{given}/*.csv", "--out", out) == 0
    said = capsys.readouterr()
    assert "1 file of 3 answered before" in said.err and f"written to {out}: 8 rows" in said.out
    assert (out / "1.csv").stat().st_mtime_ns == before.st_mtime_ns
    sizes = {path.name: path.stat().st_size for path in out.glob("*.csv")}
    assert len(sizes) == 3 and json.loads((out / "answers.json").read_text())["bytes"] == sizes
    for path in given.iterdir():
        assert verb("predict", finished.folder, path, "--out", tmp_path / "alone.csv") == 0
        assert (out / path.name).read_bytes() == (tmp_path / "alone.csv").read_bytes()


def test_a_file_that_was_changed_is_answered_again_and_folders_inside_are_named(
    finished, rows, tmp_path, capsys
):
    given, out = tmp_path / "given", tmp_path / "out"
    (given / "more").mkdir(parents=True)
    for name in ("a.csv", "b.csv", "more/c.csv"):
        shutil.copy(rows, given / name)
    assert verb("predict", finished.folder, given, "--out", f"{out}/") == 0
    assert f"{given}: folders in it are not read: more" in capsys.readouterr().err
    before = (out / "a.csv").stat()
    head, *lines = (given / "b.csv").read_text().splitlines(keepends=True)
    (given / "b.csv").write_text("".join([head, *lines[:1]]))
    assert verb("predict", finished.folder, given, "--out", f"{out}/") == 0
    said = capsys.readouterr()
    assert "1 file of 2 answered before" in said.err and "1 rows" in said.out
    assert len((out / "b.csv").read_text().splitlines()) == 2 and (out / "a.csv").stat() == before
    assert verb("predict", finished.folder, given, "--out", tmp_path / "all.csv") == 2
    assert (
        "Name a file in it; predict takes all of them with --out FOLDER/."
        in capsys.readouterr().err
    )


def test_a_file_that_was_changed_and_got_its_time_back_is_answered_again(
    finished, rows, tmp_path, capsys
):
    given, out = tmp_path / "given", tmp_path / "out"
    given.mkdir()
    for name in ("a.csv", "b.csv"):
        shutil.copy(rows, given / name)
    assert verb("predict", finished.folder, given, "--out", f"{out}/") == 0
    times = (given / "b.csv").stat()
    answered = (out / "b.csv").read_text()
    (given / "b.csv").write_text(Path(rows).read_text() + "9,ballot,politics\n")
    os.utime(given / "b.csv", ns=(times.st_atime_ns, times.st_mtime_ns))
    capsys.readouterr()
    assert verb("predict", finished.folder, given, "--out", f"{out}/") == 0
    assert "1 file of 2 answered before" in capsys.readouterr().err
    assert len((out / "b.csv").read_text().splitlines()) == len(answered.splitlines()) + 1
    assert verb("predict", finished.folder, given, "--out", f"{out}/") == 0
    assert "2 files of 2 answered before" in capsys.readouterr().err


def test_answers_to_another_question_do_not_join_those_of_a_folder(
    finished, rows, tmp_path, capsys
):
    out = f"{tmp_path}/out/"
    assert verb("predict", finished.folder, rows, "--out", out, "--top-k", "2") == 0
    questions = {
        "--top-k=3": "top_k=2",
        "--exact": "exact=False",
        "--read=encoding=cp1252": "read=[]",
    }
    for changed, named in questions.items():
        capsys.readouterr()
        assert verb("predict", finished.folder, rows, "--out", out, "--top-k", "2", changed) == 2
        said = capsys.readouterr().err
        assert (
            said
            == f"--out: the answers in {tmp_path}/out have {named}. Name another folder, or ask as"
            " before.\n"
        )
    moved = shutil.copytree(finished.folder, tmp_path / "moved" / finished.folder.name)
    assert verb("predict", moved, rows, "--out", out, "--top-k", "2") == 0
    weights = model_weights(moved)
    save_file(
        {name: 2 * each for name, each in weights.items()}, moved / "model" / "model.safetensors"
    )
    capsys.readouterr()
    assert verb("predict", moved, rows, "--out", out, "--top-k", "2") == 2
    assert "have weights=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "rows.csv",
            "mine",
            (
                "holds files that are called as the answers, and no answers.json of theirs. Name"
                " another"
            ),
        ),
        ("answers.json", "[]", "answers.json is not of answers. Name another folder."),
        ("answers.json", "{", "answers.json is not of answers. Name another folder."),
    ],
)
def test_files_of_something_else_are_no_answers(finished, rows, tmp_path, capsys, name, text, said):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(text)
    assert verb("predict", finished.folder, rows, "--out", f"{tmp_path}/out/") == 2
    assert said in capsys.readouterr().err
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {name: text}


def test_a_sign_of_yaml_is_a_value_to_read_by(finished, tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("id|text\n1|senate\n")
    assert verb("predict", finished.folder, tmp_path / "rows.csv", "--read", "delimiter=|") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith('"1","senate",')


def test_a_table_without_a_row_is_refused_and_the_older_answers_stay(finished, tmp_path, capsys):
    pq.write_table(pa.table({"headline": pa.array([], pa.string())}), tmp_path / "none.parquet")
    answers = tmp_path / "answers.parquet"
    answers.write_bytes(b"older")
    assert verb("predict", finished.folder, tmp_path / "none.parquet", "--out", answers) == 2
    assert "none.parquet: no row" in capsys.readouterr().err
    assert answers.read_bytes() == b"older"


def test_a_failed_prediction_leaves_no_half_file(finished, tmp_path):
    broken = tmp_path / "rows.jsonl"
    broken.write_text('{"text": "a"}\n{"text": \n')
    assert verb("predict", finished.folder, broken, "--out", tmp_path / "out.csv") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_a_file_that_was_there_is_replaced_with_a_line_and_the_one_that_is_read_is_kept(
    finished, rows, tmp_path, capsys
):
    before = (tmp_path / "rows.csv").read_text()
    assert verb("predict", finished.folder, rows, "--out", tmp_path / "rows.csv") == 2
    assert "rows.csv is a file that is read. Name another file." in capsys.readouterr().err
    assert (tmp_path / "rows.csv").read_text() == before
    for said in ("", f"{tmp_path}/out.csv was there, and is replaced\n"):
        assert verb("predict", finished.folder, rows, "--out", tmp_path / "out.csv") == 0
        assert capsys.readouterr().err == said


def test_one_of_many_files_that_are_read_is_no_place_for_answers_and_an_address_is_another_place(
    tmp_path,
):
    file = tmp_path / "a.csv"
    file.write_text("x\n1\n")
    for reads in (file, tmp_path, tmp_path / "*.csv"):
        with (
            pytest.raises(UserError, match=r"a.csv is a file that is read"),
            block_writer(str(file), reads=str(reads)),
        ):
            pass
    with block_writer(str(file), reads="s3://bucket/a.csv") as write:
        write(pa.RecordBatch.from_pydict({"x": [2]}))
    assert file.read_text() == '"x"\n2\n'


def test_a_standard_output_that_is_full_is_one_message(monkeypatch):
    block = pa.RecordBatch.from_pydict({"x": [2]})
    with Path("/dev/full").open("wb", buffering=0) as full, monkeypatch.context() as changed:
        changed.setattr(sys, "stdout", SimpleNamespace(buffer=full))
        with (
            pytest.raises(UserError, match="cannot write /dev/stdout: No space left"),
            block_writer(None) as write,
        ):
            write(block)


def test_two_files_of_one_name_are_refused_whichever_parts_they_are_in(finished, tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.csv").write_text("text\nsome words\n")
    words = [
        "predict",
        finished.folder,
        f"{tmp_path}/*/x.csv",
        "--out",
        f"{tmp_path}/many/",
        "--part",
        "1/2",
    ]
    assert verb(*words) == 2
    assert (
        "--out: two files are called x.csv. Answer each folder by itself."
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("out", ["/sys/out.csv", "/dev/full/out.csv", "closed/out.csv"])
def test_a_place_that_takes_no_answers_is_one_message(
    finished, rows, tmp_path, capsys, monkeypatch, out
):
    if out.startswith("closed"):
        monkeypatch.setattr(Path, "open", partialmethod(refuse, Path.open))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "closed").mkdir()
    assert verb("predict", finished.folder, rows, "--out", out) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("--out: ")


def refuse(path: Path, usual: Callable[..., Any], mode: str = "r", **others: Any) -> Any:
    """A disk that is full."""
    if "w" in mode:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return usual(path, mode, **others)


def test_a_disk_that_fills_up_on_the_way_is_one_message_and_leaves_nothing(
    finished, rows, tmp_path, capsys, monkeypatch
):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flatout.data.tables.output.pa_csv.write_csv", full)
    assert verb("predict", finished.folder, rows, "--out", tmp_path / "out.csv") == 2
    said = (
        f"--out: cannot write {tmp_path}/out.csv: No space left on device. Name a file where there"
        " is room,"
    )
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_files_are_read_as_those_of_training_were_and_as_read_says(tmp_path, capsys):
    names = ["caf\u00e9 senate", "striker goal"] * 40
    source = tmp_path / "train.csv"
    source.write_text(
        "".join(f"{name} {i};{name[0]}\n" for i, name in enumerate(names)), encoding="cp1252"
    )
    read = ReadingConfig(encoding="cp1252", delimiter=";", columns=["text", "label"])
    data = TextDataConfig(
        source=str(source), read=read, cache=str(tmp_path / "cache"), batch_size=16
    )
    quiet = {"monitor": MonitorConfig(progress=False, verdict=False), "logger": "none"}
    run = fit(
        data, BiLSTMConfig(embedding=4, hidden=4), epochs=1, output=str(tmp_path / "runs"), **quiet
    )
    assert verb("evaluate", run.folder, source) == 0
    assert (
        "read as in training: encoding=cp1252, delimiter=;, columns=['text', 'label']"
        in capsys.readouterr().err
    )
    (tmp_path / "new.csv").write_text("text\ncaf\u00e9\n", encoding="utf-8")
    words = ["--read", "encoding=utf-8", "--read", "columns=null", "--read", "delimiter=','"]
    assert (
        verb("predict", run.folder, tmp_path / "new.csv", *words, "--out", tmp_path / "out.csv")
        == 0
    )
    assert "caf\u00e9" in (tmp_path / "out.csv").read_text(encoding="utf-8")
    assert verb("predict", run.folder, source, "--read", "encodin=utf-8") == 2
    assert "--read: no setting 'encodin' (" in capsys.readouterr().err
    (tmp_path / "rows.dat").write_bytes(source.read_bytes())
    assert verb("predict", run.folder, tmp_path / "rows.dat") == 2
    assert "Name the format: --read format=csv." in capsys.readouterr().err
    assert verb("predict", run.folder, tmp_path / "rows.dat", "--read", "format=csv") == 0
    assert len(capsys.readouterr().out.splitlines()) == 81


@pytest.mark.soak(seconds=4)
def test_memory_stays_flat_on_a_long_file(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(run_predictor, "_ROWS_PER_BLOCK", 1_000)

    def grown_mb(rows: int) -> float:
        """How much more memory this process holds at most while it answers so many rows of two
        thousand bytes.
        """
        file = tmp_path / f"{rows}.jsonl"
        file.write_text(
            "".join(f'{{"text": "goal {row}", "note": "{"x" * 2_000}"}}\n' for row in range(rows))
        )
        process = psutil.Process()
        done = threading.Event()
        most = process.memory_info().rss
        before = most

        def watch() -> None:
            nonlocal most
            while not done.wait(0.005):
                most = max(most, process.memory_info().rss)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            assert verb("predict", finished.folder, file, "--out", tmp_path / "out.jsonl") == 0
        finally:
            done.set()
            watching.join()
        return (most - before) / 1e6

    grown_mb(5_000)  # what a first time keeps
    assert grown_mb(60_000) < 60, "the file alone has 120 MB"


def test_the_cache_is_listed_verified_and_cleared(tmp_path, capsys):
    open_store(TextDataConfig(sample=HeadlinesConfig(rows=50, eval_rows=10), cache=str(tmp_path)))
    assert verb("cache", "--cache", tmp_path, "list") == 0
    assert "50 + 10 + 10 rows  sample:headlines" in capsys.readouterr().out
    assert verb("cache", "--cache", tmp_path, "verify") == 0
    assert "whole" in capsys.readouterr().out
    (broken,) = tmp_path.glob("*/train/tokens.bin")
    broken.write_bytes(b"x")
    assert verb("cache", "--cache", tmp_path, "verify") == 1
    assert "damaged: train/tokens.bin" in capsys.readouterr().out
    assert verb("cache", "--cache", tmp_path, "size") == 0
    assert "1 stores" in capsys.readouterr().out
    assert verb("cache", "--cache", tmp_path, "clear") == 0
    assert "1 store removed" in capsys.readouterr().out
    assert verb("cache", "--cache", tmp_path, "list") == 0
    assert "no stores in" in capsys.readouterr().out


def test_claims_hold_or_do_not():
    assert at_least("speed", 30.0, 10.0, "rows/s", 3.0).holds
    assert not at_least("speed", 29.0, 10.0, "rows/s", 3.0).holds
    assert not bounded("wait", 1.5, "%", most=1.0).holds
    assert "NO" in line(bounded("wait", 1.5, "%", most=1.0, note="why"))
    assert set(bounded("wait", 1.5, "%", most=1.0).as_dict()) == {
        "claim",
        "ours",
        "theirs",
        "unit",
        "ratio",
        "goal",
        "holds",
        "note",
        "applies",
    }


def test_both_sides_are_measured_in_turn():
    order = []
    found = in_turn(
        [lambda: order.append("a") or len(order), lambda: order.append("b") or len(order)], rounds=3
    )
    assert order == list("abbaab")
    assert found == [4, 3]


def test_benches_are_listed(capsys):
    assert verb("bench", "--list") == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {
        "spine",
        "shortcuts",
        "sources",
        "sequences",
        "tune",
        "cluster",
        "doctor",
        "headlines",
        "bits",
        "bert",
        "loaders",
        "answers",
        "audit",
        "reuse",
        "gpu",
        "scale",
        "protections",
        "quality",
    }
