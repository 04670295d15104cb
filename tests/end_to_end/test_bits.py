"""Whole runs on bit strings: better than ridge, the same twice, and everything a person does with
them afterwards.
"""

from __future__ import annotations

import csv
import json
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.composed import only_folder
from tests.data.whole_tables import whole_table
from tests.fitting import own_cache
from tests.refusals import refused
from tests.run_files import read_csv
from tests.stores import open_store
from tests.verbs import verb
from torch import nn

import train
from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    BitsDataConfig,
    CheckpointConfig,
    EncodingConfig,
    GramPredictor,
    GramsConfig,
    OptimConfig,
    PeopleConfig,
    Predictor,
    TextDataConfig,
    UserError,
    fit,
    load_predictor,
)
from flatout.bits.columns import Form, encode_table
from flatout.bits.grams import LABELS
from flatout.bits.people import FIELDS, PeopleTable
from flatout.report.summary import read_summary

ENCODING = EncodingConfig(size=512, hashes=8)


def small_fit(tmp_path, rows=900, model=None, **settings):
    data = settings.pop("data", {})
    config = BitsDataConfig(
        sample=PeopleConfig(rows=rows), **{"encoding": ENCODING, "batch_size": 64, **data}
    )
    settings = {
        "epochs": 6,
        "optim": OptimConfig(lr=5e-3),
        "output": str(tmp_path / "runs"),
        "logger": "none",
    } | settings
    return fit(config, model or BitMLPConfig(widths=[64]), **settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bits")
    with own_cache(folder):
        yield small_fit(folder)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """People that nobody trained on, with their filters."""
    folder = tmp_path_factory.mktemp("others")
    path = folder / "others.csv"
    blocks = encode_table(
        PeopleTable(PeopleConfig(rows=50, seed=99)), list(FIELDS), ENCODING, Form.binary
    )
    rows = [row for block in blocks for row in block.records.to_pylist()]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.soak(seconds=3)
def test_a_run_is_no_worse_than_ridge_and_says_so(finished):
    baseline = finished.summary["baseline"]
    assert baseline["name"] == "ridge regression"
    assert finished.metrics["test/dice"] >= baseline["metrics"]["test/dice"] - 0.005
    assert finished.metrics["val/dice"] >= baseline["metrics"]["val/dice"]
    assert finished.metrics["test/dice"] > 0.8
    assert baseline["metrics"]["test/dice of the 20 commonest"] < 0.4
    chosen = {choice["name"]: choice for choice in finished.summary["choices"]}
    assert chosen["ridge penalty"]["evidence"].startswith("Dice 0.")
    assert {"detectors", "ridge's vote"} <= chosen.keys()


def test_a_run_on_bits_leaves_what_every_run_leaves(finished):
    summary = read_summary(finished.folder)
    assert summary["status"] == "finished"
    assert summary["data"]["rows"].keys() == {"train", "val", "test"}
    assert summary["data"]["classes"] == 1036
    assert summary["speed"]["rows_per_s"] > 0
    assert summary["speed"]["tokens_per_s"] is None
    assert (finished.folder / "report.html").is_file()


def test_the_exposure_report_holds_every_part(finished):
    exposure = json.loads((finished.folder / "exposure.json").read_text(encoding="utf-8"))
    sizes = [point["records"] for point in exposure["learning"]]
    assert sizes == sorted(sizes)
    assert sizes[-1] == exposure["records"]["train"]
    assert exposure["learning"][-1]["model"] == pytest.approx(
        finished.metrics["test/dice"], abs=0.03
    )
    assert exposure["learning"][-1]["ridge"] == pytest.approx(
        exposure["methods"]["ridge regression"], abs=0.01
    )
    assert exposure["scores"]["dice"] == finished.metrics["test/dice"]
    rates = exposure["reconstruction"]
    assert 0 < rates["alone"]["at_1"] <= rates["alone"]["at_10"] <= 1
    page = (finished.folder / "exposure.html").read_text(encoding="utf-8")
    for words in (
        "In plain words",
        "Dice over known records",
        "2-grams that leak most",
        "Texts rebuilt",
    ):
        assert words in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.soak(seconds=2)
def test_the_same_seed_gives_the_same_run(tmp_path):
    settings = {"rows": 300, "epochs": 2, "task": GramsConfig(exposure=False)}
    first, second = (small_fit(tmp_path / name, **settings) for name in "ab")
    assert first.metrics == second.metrics
    weights = [result.predictor.model.state_dict() for result in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.soak(seconds=3)
@pytest.mark.parametrize(
    ("kind", "hashes"),
    [
        ("minhash", {}),
        ("twostep", {"hashes": 4}),
    ],
)
def test_other_encodings_are_read_too(tmp_path, kind, hashes):
    data = {"encoding": EncodingConfig(kind=kind, size=256, **hashes), "vocabulary": 300}
    result = small_fit(tmp_path, rows=600, epochs=3, data=data)
    assert (
        result.metrics["test/dice"]
        > result.summary["baseline"]["metrics"]["test/dice of the 20 commonest"]
    )
    loaded = load_predictor(result.folder)
    assert isinstance(loaded, GramPredictor)
    assert (loaded.numbers is not None) == (kind == "twostep")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            BitMLPConfig(detectors=False, widths=[32]),
            id="plain",
            marks=pytest.mark.soak(seconds=2),
        ),
        pytest.param(
            BitMLPConfig(start="random", widths=[32], blend=False),
            id="random",
            marks=pytest.mark.soak(seconds=2),
        ),
        pytest.param(BitMLPConfig(train_detectors=True, widths=[], norm="layer"), id="trained"),
    ],
)
def test_every_sort_of_network_trains_and_is_kept(tmp_path, model):
    result = small_fit(tmp_path, rows=300, model=model, epochs=2)
    assert result.metrics["val/dice"] > 0
    again = GramPredictor.load(result.folder)
    row = "01" * 256
    assert again.predict([row]) == result.predict([row])
    assert (result.folder / "exposure.html").exists() == model.detectors


def test_a_loaded_run_answers_as_it_did(finished, others):
    rows = [row["bloomfilter"] for row in read_csv(others)]
    loaded = GramPredictor.load(finished.folder)
    assert loaded.predict(rows) == finished.predict(rows)
    assert loaded.predict(rows[0]) == finished.predict(rows[:1])
    assert loaded.predict([]) == []
    first = loaded.predict(rows[:1])[0]
    assert set(first.grams) <= set(LABELS)
    assert first.probabilities == sorted(first.probabilities, reverse=True)


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.parquet"])
def test_predict_answers_grams_and_texts_in_order(finished, others, tmp_path, name):
    assert verb("predict", finished.folder, others, "--rebuild", "--out", tmp_path / name) == 0
    if name.endswith(".csv"):
        found = read_csv(tmp_path / name)
        grams = [row["prediction"].split("|") for row in found]
    else:
        path = tmp_path / name
        lines = path.read_text(encoding="utf-8").splitlines() if name.endswith(".jsonl") else []
        found = [json.loads(line) for line in lines] or pq.read_table(path).to_pylist()
        grams = [row["prediction"] for row in found]
    given = read_csv(others)
    assert [row["uid"] for row in found] == [row["uid"] for row in given]
    expected = finished.predict([row["bloomfilter"] for row in given])
    assert [sorted(row) for row in grams] == [sorted(prediction.grams) for prediction in expected]
    fields_of = itemgetter(*FIELDS)
    texts = ["".join(fields_of(row)).lower() for row in given]
    assert sum(row["rebuilt"] == text for row, text in zip(found, texts, strict=True)) > 2


def test_evaluate_scores_other_records_at_the_runs_threshold(finished, others, capsys):
    assert verb("evaluate", finished.folder, others, "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["rows"] == 50
    assert values["dice"] == pytest.approx(finished.metrics["test/dice"], abs=0.1)
    low, high = values["intervals"]["dice"]
    assert low < values["dice"] < high
    assert verb("evaluate", finished.folder, others) == 0
    assert (
        f"dice              {values['dice']:.4f} ({low:.3f}–{high:.3f})\n"
        in capsys.readouterr().out
    )


@pytest.mark.soak(seconds=3)
def test_compare_sets_runs_side_by_side(finished, tmp_path, capsys):
    other = small_fit(
        tmp_path,
        rows=300,
        epochs=1,
        data={"encoding": EncodingConfig(size=256, hashes=6, diffusion=9)},
    )
    page = tmp_path / "compare.html"
    assert verb("compare", finished.folder, other.folder, "--html", page) == 0
    said = capsys.readouterr().out
    assert "diffused over 9 bits" in said.replace("\n", " ")
    assert "Dice of the 2-grams" in said
    assert "Encodings side by side" in page.read_text(encoding="utf-8")


def test_encode_writes_what_a_run_reads(tmp_path, capsys):
    out = tmp_path / "encoded.parquet"
    arguments = ["--size", 512, "--hashes", 8, "--form", "packed", "--out", out]
    assert verb("encode", "--sample", 300, *arguments) == 0
    assert "300 records" in capsys.readouterr().err
    assert pq.read_table(out).column_names == [*FIELDS, "bloomfilter", "uid"]
    read = open_store(BitsDataConfig(source=str(out)))
    made = open_store(BitsDataConfig(sample=PeopleConfig(rows=300), encoding=ENCODING))
    assert np.array_equal(
        read.store.splits["train"].fixed("tokens"), made.store.splits["train"].fixed("tokens")
    )


def test_encode_can_leave_the_text_out_and_warns_of_the_usual_secret(tmp_path, capsys, monkeypatch):
    source = tmp_path / "people.csv"
    source.write_text("name,uid\nann,1\nbob,2\n", encoding="utf-8")
    out = tmp_path / "out.csv"
    assert verb("encode", source, "--encoding", "twostep", "--drop-text", "--out", out) == 0
    assert "which everybody knows" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8").splitlines()[0] == '"twostephash","uid"'
    monkeypatch.setenv("FLATOUT_SECRET", "swordfish")
    other = tmp_path / "other.csv"
    assert verb("encode", source, "--encoding", "twostep", "--drop-text", "--out", other) == 0
    assert "everybody" not in capsys.readouterr().err
    assert other.read_text() != out.read_text()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--uid", "ID"],
        ["--drop-text"],
    ],
    ids=" ".join,
)
def test_an_id_is_not_hashed_and_what_was_written_can_be_trained(words, tmp_path, capsys):
    source = tmp_path / "people.csv"
    out = tmp_path / "out.csv"
    source.write_text(
        "ID,name,born\n" + "".join(f"{i},ann{i},19{i}\n" for i in range(10, 40)), encoding="utf-8"
    )
    assert verb("encode", source, *words, "--out", out) == 0
    assert "encoded: name, born; ID names each record" in capsys.readouterr().err
    header = out.read_text(encoding="utf-8").splitlines()[0].replace('"', "")
    if words == ["--drop-text"]:
        assert header == "bloomfilter,ID"
        return
    assert header == "name,born,bloomfilter,ID"
    again = open_store(BitsDataConfig(source=str(out), batch_size=8))
    assert again.text_columns == ["name", "born"]
    here = open_store(BitsDataConfig(source=str(source), batch_size=8, encoding=EncodingConfig()))
    assert np.array_equal(
        again.store.splits["train"].fixed("tokens"), here.store.splits["train"].fixed("tokens")
    )


def test_encode_counts_fields_without_text(tmp_path, capsys):
    source = tmp_path / "people.csv"
    rows = [("ann", ""), ("bob", "1990"), (" ", ""), ("eve", "1991")]
    source.write_text(
        "name,born\x1b[31m\n" + "".join(f"{name},{born}\n" for name, born in rows), encoding="utf-8"
    )
    assert verb("encode", source, "--drop-text", "--out", tmp_path / "out.csv") == 0
    said = capsys.readouterr().err
    assert "\x1b" not in said
    said = said.replace("\\x1b[31m", "")
    assert "warning empty fields, which are encoded as no text: " in said
    assert "born in 2 records" in said
    assert "name in 1 record" in said
    assert verb("encode", "--sample", 20, "--out", tmp_path / "full.csv") == 0
    assert "empty fields" not in capsys.readouterr().err


def test_encode_does_not_hash_an_encoding_with_the_names(tmp_path, capsys):
    encoded = tmp_path / "encoded.csv"
    out = tmp_path / "out.csv"
    assert verb("encode", "--sample", 50, "--form", "hex", "--out", encoded) == 0
    encoded.write_text(
        encoded.read_text(encoding="utf-8").replace("bloomfilter", "clk", 1), encoding="utf-8"
    )
    assert verb("encode", encoded, "--out", out) == 2
    said = capsys.readouterr().err
    assert "look like encodings or digests, not like plain text (clk (hex of 1,024 bits))" in said
    assert not out.exists()
    assert verb("encode", encoded, "--columns", "GivenName,Surname", "--out", out) == 0


MISTAKES = {
    ("encode",): "FILE: name a file, or ask for built-in people with --sample N",
    ("encode", "--sample", "5", "--encoding", "blom"): "Did you mean 'bloom'?",
    ("encode", "--sample", "5", "--form", "list"): "--form: list (binary, hex, base64, packed)",
    ("encode", "--sample", "5", "--form", "auto"): "--form: auto (binary, hex, base64, packed)",
    (
        "encode",
        "--sample",
        "5",
        "--form",
        "packed",
    ): "--form: packed bits are bytes. Write them to a .parquet file",
    (
        "encode",
        "--sample",
        "5",
        "--encoding",
        "twostep",
        "--form",
        "hex",
    ): "--form: hex does not apply to twostep",
    ("encode", "OTHERS", "--typos", "0.5"): "--typos: is for --sample. Leave it out.",
    ("encode", "--sample", "5", "--columns", "Nme"): "--columns[0]: no column 'Nme'",
    ("encode", "--sample", "5", "--uid", "idd"): "--uid: no column 'idd'",
    ("encode", "--sample", "5", "--out", "x.txt"): "--out: cannot write .txt",
    ("export", "RUN"): "a run on bit strings is exported as ONNX. Add --onnx.",
    ("compare", "nowhere"): "nowhere: no exposure.json there",
    (
        "predict",
        "RUN",
        "OTHERS",
        "--text",
        "x",
    ): "--text: this run answers encodings. Leave it out.",
    (
        "predict",
        "RUN",
        "OTHERS",
        "--bits",
        "uid",
    ): "column 'uid': 24 bits where others have 512. Correct this row, or encode all of them",
    ("evaluate", "RUN", "OTHERS", "--bits", "blomfilter"): "Did you mean 'bloomfilter'?",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_message_and_exit_code_2(
    finished, others, tmp_path, arguments, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    places = {"RUN": finished.folder, "OTHERS": others}
    assert verb(*(places.get(argument, argument) for argument in arguments)) == 2
    said = capsys.readouterr().err
    assert MISTAKES[arguments] in said
    assert "Traceback" not in said


def test_evaluating_encodings_alone_asks_for_the_plain_texts(finished, tmp_path, capsys):
    file = tmp_path / "alone.csv"
    file.write_text(f"bloomfilter\n{'01' * 256}\n")
    assert verb("evaluate", finished.folder, file) == 2
    said = capsys.readouterr().err
    assert (
        said
        == f"plain text of the records: no column 'GivenName' in {file} (columns: bloomfilter)\n"
    )


def test_texts_and_bit_strings_are_not_mixed_up(finished):
    with refused("model", "bilstm", "bit strings", fix="model=bitmlp task=grams"):
        fit(BitsDataConfig(), BiLSTMConfig())
    with refused("model", "bitmlp", "texts", fix="data=bits"):
        fit(TextDataConfig(), BitMLPConfig())
    with pytest.raises(UserError, match="task: grams does not fit texts"):
        fit(TextDataConfig(), task=GramsConfig())
    with pytest.raises(UserError, match=r"no run on texts\. Open it with flatout\.load_predictor"):
        Predictor.load(finished.folder)


@pytest.mark.soak(seconds=3)
def test_records_that_give_nothing_away_are_called_so(tmp_path):
    random = np.random.default_rng(0)
    table = whole_table(PeopleTable(PeopleConfig(rows=400)), (*FIELDS, "uid"))
    noise = ["".join(map(str, row)) for row in random.integers(0, 2, (400, 64))]
    source = table.append_column("bloomfilter", pa.array(noise))
    result = small_fit(tmp_path, data={"source": source, "columns": list(FIELDS)}, epochs=2)
    assert result.metrics["val/dice"] >= result.summary["baseline"]["metrics"]["val/dice"]
    exposure = json.loads((result.folder / "exposure.json").read_text(encoding="utf-8"))
    assert exposure["conclusion"][0].startswith("Hardly anything")
    assert exposure["reconstruction"]["alone"]["at_10"] == 0


@pytest.mark.soak(seconds=3)
def test_a_run_on_a_file_from_another_folder_prints_its_verdicts(tmp_path, monkeypatch, capfd):
    encoded_file = tmp_path / "people of mine.csv"
    assert verb("encode", "--sample", 400, "--size", 256, "--out", encoded_file) == 0
    monkeypatch.chdir(tmp_path)
    train.main(["+experiment=bloom_bigrams", f"data.source={encoded_file}", "trainer.max_epochs=2"])
    said = " ".join(capfd.readouterr().out.split())
    for words in (
        "ridge penalty:",
        "column bloomfilter of",
        "rebuilt letter by letter",
        "of the ridge regression",
    ):
        assert words in said
    folder = only_folder(tmp_path / "outputs" / "bloom_bigrams")
    assert (folder / "exposure.html").is_file()


class OwnReader(nn.Module):
    """A network as a person writes one: it knows nothing of detectors or votes."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(512, len(LABELS))

    def forward(self, batch):
        return self.output(batch.bits(torch.float32))


def test_a_network_of_ones_own_needs_nothing_but_forward(tmp_path):
    result = small_fit(tmp_path, rows=300, model=OwnReader(), epochs=2)
    assert result.metrics["val/dice"] > 0
    assert result.predict(["01" * 256])[0].probabilities is not None
    assert not (result.folder / "exposure.html").exists()


def test_texts_are_not_rebuilt_without_detectors(tmp_path, others, capsys):
    result = small_fit(
        tmp_path, rows=300, model=BitMLPConfig(detectors=False, widths=[8]), epochs=1
    )
    assert verb("predict", result.folder, others, "--rebuild") == 2
    assert "--rebuild: this model has no detectors" in capsys.readouterr().err


@pytest.mark.soak(seconds=3)
def test_without_test_records_the_validation_records_are_judged(tmp_path):
    table = whole_table(PeopleTable(PeopleConfig(rows=400)), (*FIELDS, "uid"))
    data = {"source": table.slice(0, 300), "validation": table.slice(300)}
    result = small_fit(tmp_path, data=data, epochs=1)
    assert not any(name.startswith("test/") for name in result.metrics)
    exposure = json.loads((result.folder / "exposure.json").read_text(encoding="utf-8"))
    assert exposure["records"] == {"train": 300, "judged": 100, "rebuilt": 100}


def test_checkpoints_keep_the_best_and_patience_stops(tmp_path):
    settings = {"checkpoint": CheckpointConfig(patience=2), "task": GramsConfig(exposure=False)}
    result = small_fit(tmp_path, rows=300, epochs=12, optim=OptimConfig(lr=1e-9), **settings)
    assert result.summary["training"]["epochs"] < 12
    assert result.metric == "dice"
