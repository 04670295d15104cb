"""`python -m flatout predict`, and the mistakes of all verbs, told in one message."""

from __future__ import annotations

import io
import json
import threading

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from flatout import BiLSTMConfig, MonitorConfig, TextDataConfig, fit
from flatout.data.tables.reading import ReadingConfig
from flatout.inference import run_predictor
from tests.run_files import read_csv
from tests.verbs import verb


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
    assert head.startswith('"text","\'=cmd|x!A0"')
    assert first.startswith('"match","a"')
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
    file = tmp_path / "rows.csv"
    out = tmp_path / "answers.csv"
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
    file = tmp_path / "rows.csv"
    out = tmp_path / "answers.jsonl"
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
            "no bench 'spin' (spine, shortcuts, operators, shapes, sources, headlines, bits,"
            " sequences, loaders, bert, answers, abstention, drift, audit, reuse, gpu, rates,"
            " price, tune, scale, cluster, doctor, doctor_run, protections, defaults, quality)."
            " Did you mean 'spine'?"
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


def test_a_sign_of_yaml_is_a_value_to_read_by(finished, tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("id|text\n1|senate\n")
    assert verb("predict", finished.folder, tmp_path / "rows.csv", "--read", "delimiter=|") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith('"1","senate",')


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
