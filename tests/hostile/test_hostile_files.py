"""Files of others that never end, are too large, or hold values that do not belong there.

Settings, records of model folders and tables: each ends in one sentence, and nothing is waited for.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset

import train
from flatout.config import RunConfig
from flatout.data.sequences.columns import RecordingRules
from flatout.data.sequences.info import Scaler, SequenceShape
from flatout.data.sequences.missing import Missing
from flatout.data.store.store import StoreWriter
from flatout.data.tables.formats import file
from flatout.data.tables.hub import from_disk
from flatout.data.tables.sources import open_source
from flatout.data.tables.table import as_texts, class_names
from flatout.data.texts.decisions import _read_decisions, _read_lines
from flatout.data.tokens.long_texts import LongTexts
from flatout.data.tokens.vocabulary import Vocabulary, VocabularyConfig
from flatout.errors import UserError
from flatout.files import load_json, load_yaml, read_modest
from flatout.inference.model_folder import ModelFolder, RowSettings
from flatout.inference.records import read_record
from flatout.inference.sequences import SequencePredictor
from flatout.inference.unit_check import UnitCheck
from flatout.models.bilstm import BiLSTMConfig
from flatout.models.rnn import RNNConfig
from flatout.models.words import load_vectors
from flatout.run.memory import require_memory
from flatout.tasks.error_intervals import HeldOutErrors
from flatout.tasks.mixture import Mixture
from tests.composed import run_train
from tests.refusals import refused

ENDLESS = 10**400
DEEP = 100_000
NOT_NUMBERS = [None, "x", "", True, [], {}, [[[]]], float("nan"), float("inf"), ENDLESS]


def compose(folder: Path, settings: str, capsys) -> str:
    """What `python -m train` says of a file of settings."""
    (folder / "conf" / "experiment").mkdir(parents=True)
    path = folder / "conf" / "experiment" / "mine.yaml"
    path.write_text(f"# @package _global_\n{settings}\n", encoding="utf-8")
    with pytest.raises(SystemExit) as left:
        train.main(["--config-dir", str(folder / "conf"), "experiment=mine"])
    said = capsys.readouterr().err
    assert left.value.code == 2, said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("place", ["{outside}", "${{now:/../../x}}"])
def test_a_file_names_no_folder_of_runs_outside_of_the_working_directory(
    tmp_path, monkeypatch, capsys, place
):
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    output = place.format(outside=tmp_path / "outside")

    said = compose(inside, f"output: {output!r}", capsys)

    assert said.startswith("output: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ("model: {hidden: x}", "model.hidden: 'x' does not fit"),
        ("5", "conf: a file holds no keys"),
        (f"model: {{hidden: {'1' * 400}}}", "model.hidden: 111"),
        (f"seed: {'1' * 5000}", "a number of more than 1,000 digits"),
    ],
    ids=["a text", "no keys", "400 digits", "5,000 digits"],
)
def test_a_value_that_does_not_fit_in_a_file_is_named(tmp_path, monkeypatch, capsys, settings, key):
    monkeypatch.chdir(tmp_path)
    assert key in compose(tmp_path, settings, capsys)


def test_a_pipe_or_a_huge_file_is_refused_unopened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with refused(str(tmp_path / "pipe"), "is a pipe"):
        read_modest(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(20 << 30)  # a hole: no byte of it lies on the disk
    with refused(str(tmp_path / "huge"), "21,474,836,480 bytes"):
        load_json(tmp_path / "huge")


def test_a_tokenizer_may_be_as_large_as_those_of_many_languages_are(tmp_path):
    written = Vocabulary.train([pa.array(["a b a b"])], VocabularyConfig()).to_json()
    (tmp_path / "tokenizer.json").write_bytes(written.encode() + b" " * 50_000_001)
    assert ModelFolder(tmp_path).vocabulary().to_json() == written


def test_a_text_without_end_in_depth_or_digits_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes("name: a".encode("utf-16"))
    for load in (load_json, load_yaml):
        with refused(str(path), "is not UTF-8"):
            load(path)
    path.write_text("[" * 1000, encoding="utf-8")
    for load in (load_json, load_yaml):
        with refused(str(path)):
            load(path)
    path.write_text("1" * 5000, encoding="utf-8")
    for load in (load_json, load_yaml):
        with refused(str(path)):
            load(path)
    path.write_text(
        "a: &a " + str([0] * 3000) + "\nb: [*a, *a, *a, *a, *a, *a, *a]\n", encoding="utf-8"
    )
    with refused(str(path), "refers to its own parts"):
        load_yaml(path)


def test_a_pipe_in_a_model_folder_is_refused(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "labels.json")
    with refused(str(tmp_path / "labels.json"), "is a pipe"):
        ModelFolder.find(tmp_path)


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_a_number_of_a_record_is_a_number_that_arrays_hold(value):
    with pytest.raises(UserError, match="file: mixture"):
        read_record(Mixture, {"network": 1.0, "linear": value}, "file", "mixture")


def test_a_record_gets_the_types_of_its_fields():
    values = {"max_length": 8, "columns": {}, "long_texts": {"kind": "windows", "window": 8}}
    record = read_record(RowSettings, values, "file", "data")
    assert record.long_texts == LongTexts(kind="windows", window=8)
    assert read_record(Mixture, {"network": 1, "linear": 2.5}, "file", "x") == Mixture(1, 2.5)
    with refused("file: data", "lacks some"):
        read_record(RowSettings, {"columns": {}}, "file", "data")
    with refused("file: data.group", "does not fit"):
        read_record(RowSettings, {**values, "group": "\ud800"}, "file", "data")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """The model folder of a network on recordings, which was not trained."""
    shape = SequenceShape(inputs=2, targets=1)
    rules = RecordingRules(
        columns=["a", "b"], time="t", group=[], max_gap=None, missing=Missing.refuse, targets=["y"]
    )
    config = RNNConfig(hidden=2)
    folder = tmp_path_factory.mktemp("recordings")
    SequencePredictor(
        model=config.build(shape=shape),
        shape=shape,
        rules=rules,
        scaler=Scaler([0.0] * 3, [1.0] * 3),
        names=["y"],
        step_s=1.0,
        units=UnitCheck(["a", "b"], [1.0, 1.0], None),
    ).save(folder, config)
    return folder


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("shape", "lookback"), -1),
        (("shape", "lookback"), "x"),
        (("shape", "horizon"), -1),
        (("shape", "targets"), True),
        (("rules", "columns"), []),
        (("rules", "columns"), [-1, 2]),
        (("rules", "step"), 0),
        (("rules", "time"), [1]),
        (("scaler", "shift"), [0.0]),
        (("scaler", "factor"), [0.0, 1.0, 1.0]),
        (("step_s",), "x"),
        (("sizes",), [1.0]),
        (("label_scale",), [1.0]),
        (("has_classes",), 2),
        (("config", "layers"), 10**9),
    ],
)
def test_a_setting_of_recordings_that_does_not_fit_is_refused(recordings, tmp_path, keys, value):
    described = json.loads((recordings / "config.json").read_text(encoding="utf-8"))
    assert SequencePredictor.load(recordings).columns == ["a", "b"]
    part: dict[str, Any] = described["model" if keys[0] == "config" else "data"]
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    for path in recordings.iterdir():
        os.link(path, tmp_path / path.name)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(UserError, match="layers" if keys[0] == "config" else keys[0]):
        SequencePredictor.load(tmp_path)


def test_errors_of_other_targets_than_the_folder_has_are_refused(recordings, tmp_path):
    for path in recordings.iterdir():
        os.link(path, tmp_path / path.name)
    HeldOutErrors(np.zeros((200, 3), np.float32), np.arange(200)).write(tmp_path)
    with pytest.raises(UserError, match=r"intervals\.npz: is of other targets"):
        SequencePredictor.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("detect_anomaly", "x"),
        ("limit_train_batches", float("nan")),
        ("overfit_batches", "x"),
        ("min_steps", ENDLESS),
        ("limit_val_batches", [1]),
        ("profiler", [1]),
    ],
)
def test_an_argument_of_the_trainer_that_does_not_fit_is_refused(name, value):
    with refused(f"trainer.{name}", repr(value)):
        RunConfig(trainer={name: value})


def test_a_network_whose_bytes_no_computer_counts_is_refused():
    def build(config):
        return config.build(num_outputs=2, vocabulary_size=9)

    with refused("model.hidden=1000000000", "needs about 9.2 EB"):
        require_memory(BiLSTMConfig(hidden=10**9), build, torch.device("cpu"))


def test_a_line_without_end_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "LONGEST_ROW", 999)
    path = tmp_path / "rows.csv"
    long_line = "é" * 5000
    path.write_bytes(f"text,label\na,b\n{long_line}\n".encode())
    open_source(str(path), where="data.source")._require_utf8()
    path.write_bytes(f"text,label\na,b\n{long_line}\nc,".encode() + b"\xff\n")
    with pytest.raises(UserError, match="line 4"):
        open_source(str(path), where="data.source")._require_utf8()


def test_a_number_of_endless_digits_in_a_table_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "label": ' + "9" * 5000 + "}\n", encoding="utf-8")
    with refused("data.source", "endless digits"):
        list(open_source(str(path), where="data.source").blocks(["text", "label"]))


def test_names_of_classes_nested_without_end_are_none():
    features = b'{"info": {"features":' + b"[" * DEEP
    assert class_names(pa.schema([]).with_metadata({"huggingface": features})) == {}


ODD_LISTS = (
    "defaults: text",
    "defaults: {model: bilstm}",
    "defaults: [7]",
    "defaults: [{7: a}]",
    "defaults: [{model: {a: b}}]",
    "defaults: [{/model: bilstm, /data: text}]",
    "defaults: [{/: x}]",
    'defaults: [{/model: "\\ud800"}]',
    "# @package",
    "# @package a b",
)


@pytest.mark.parametrize("text", ODD_LISTS, ids=lambda text: text[:40])
def test_a_list_of_defaults_that_is_none_is_refused(text, tmp_path, monkeypatch, capsys):
    said = refusal_of_experiment(text, tmp_path, monkeypatch, capsys)
    assert said.startswith("conf: a file cannot be composed")


def test_an_option_too_long_for_the_name_of_a_file_is_refused(tmp_path, monkeypatch, capsys):
    text = f"defaults: [{{/model: {'x' * 5000}}}]"
    said = refusal_of_experiment(text, tmp_path, monkeypatch, capsys)
    # from Python 3.14 on there is no such file; before, looking for it is an error of the system
    assert said.startswith(("model: no option 'xxx", "conf: a file cannot be composed"))


def refusal_of_experiment(
    text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What a run says to an experiment file that begins with this text."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "odd.yaml").write_text(f"{text}\nname: x\n")
    assert run_train([f"--config-dir={folder}", "+experiment=odd"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_a_line_of_decisions_that_is_longer_than_its_head_is_read_by_the_columns_it_has(tmp_path):
    file = tmp_path / "e.csv"
    file.write_text("row\n1,2,3\n", encoding="utf-8")
    assert _read_lines("data.exclude", str(file)) == [{"row": "1"}]


def test_a_row_s_number_of_thousands_of_digits_is_refused(tmp_path):
    file = tmp_path / "e.csv"
    file.write_text(f"row\n{'9' * 5000}\n", encoding="utf-8")
    with pytest.raises(UserError, match="names row"):
        _read_decisions("data.exclude", str(file), {})


def test_a_file_of_the_kernel_which_has_no_size_is_read_to_a_bound_only():
    with pytest.raises(UserError, match="has no end"):
        read_modest(Path("/proc/self/status"), 10)


def test_files_of_gigabytes_without_a_line_are_no_decisions_and_no_vectors(tmp_path):
    file = tmp_path / "zeros"
    with file.open("wb") as zeros:
        zeros.truncate(1 << 31)  # takes no room on the disk
    with pytest.raises(UserError, match="a csv of some rows"):
        _read_lines("data.exclude", str(file))
    with pytest.raises(UserError, match="a line has 1,048,576 bytes or more"):
        load_vectors(str(file), {"a": 0}, torch.zeros(1, 2))


def test_a_head_of_thousands_of_digits_is_no_count_of_vectors(tmp_path):
    file = tmp_path / "v.txt"
    file.write_text(f"{'9' * 5000} {'9' * 5000}\n", encoding="utf-8")
    with pytest.raises(UserError, match="1 numbers a word"):
        load_vectors(str(file), {"a": 0}, torch.zeros(1, 2))


def arrays_of_others() -> dict[str, Any]:
    structs = np.zeros(2, dtype=[("a", [("b", "i4")])])
    return {
        "complex": np.zeros((2, 2), np.complex64),
        "big-endian": np.zeros((2, 2), ">f8"),
        "void": np.zeros((2, 2), "V3"),
        "a time without a unit": np.zeros((2, 2), "M8"),
        "structs in structs": structs,
        "texts beyond Unicode": np.array([(b"\xff\xff\xff\x7f",)], "S4").view("<U1"),
        "texts that are no UTF-8": np.array([(b"\xff",)], dtype=[("t", "S1")]),
        "no columns": np.zeros((10**12, 0)),
    }


@pytest.mark.parametrize("name", arrays_of_others())
def test_an_array_of_an_odd_type_is_read_or_refused_in_one_sentence(name, tmp_path):
    np.save(tmp_path / "a.npy", arrays_of_others()[name])
    try:
        table = open_source(tmp_path / "a.npy", where="data.source")
        as_numbers = [block.num_rows for block in table.blocks(table.columns, 2)]
    except UserError as refused:
        assert "a.npy" in str(refused)
    else:
        assert as_numbers[0] == 2


def test_several_arrays_under_the_name_of_one_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(UserError, match="several arrays in one file"):
        list(open_source(tmp_path / "a.npy", where="data.source").columns)


def test_a_shape_that_no_memory_holds_is_no_array(tmp_path):
    head = "{'descr': '<f8', 'fortran_order': False, 'shape': (10**30, 4)}".replace(
        "10**30", "1" * 30
    )
    head = head.ljust(117) + "\n"
    length = len(head).to_bytes(2, "little")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + length + head.encode())
    with pytest.raises(UserError, match=r"not a whole \.npy file"):
        list(open_source(tmp_path / "a.npy", where="data.source").columns)


def test_halves_become_texts():
    assert as_texts(pa.array(np.array([1, 0.5], np.float16))).to_pylist() == ["1", "0.5"]


def test_a_column_of_a_type_that_has_no_texts_is_refused():
    with pytest.raises(UserError, match="no texts can be made"):
        as_texts(pa.array([(1, 2, 3)], pa.month_day_nano_interval()))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("dataset_info.json", '{"features": {"text": {"_type": "copy"}}}'),
        ("dataset_info.json", '{"features": [1]}'),
        ("state.json", "[1]"),
        ("state.json", '{"_data_files": [], "_split": {"a": 1}}'),
    ],
)
def test_a_saved_data_set_that_says_odd_things_is_refused_in_one_sentence(file, content, tmp_path):
    Dataset.from_dict({"text": ["a"], "label": ["b"]}).save_to_disk(tmp_path)
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="not a whole data set"):
        from_disk(tmp_path, "data.source")


def test_folders_of_texts_may_have_names_that_are_no_utf_8(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff"))
    folder.mkdir()
    (folder / "one.txt").write_text("words", encoding="utf-8")
    (block,) = open_source(tmp_path, where="data.source").blocks(["label", "text"])
    assert block.to_pylist() == [{"label": "a\\udcff", "text": "words"}]
    (tmp_path / "store").mkdir()
    StoreWriter(tmp_path / "store").close({"found in": str(folder)})
    assert load_json(tmp_path / "store" / "manifest.json")["found in"] == str(folder)


def test_a_data_set_of_rows_that_were_never_written_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", shape=(10**13,), dtype="u1", chunks=(1 << 20,))
    with pytest.raises(UserError, match="bytes, and 0 stored"):
        list(open_source(tmp_path / "a.h5", where="data.source").columns)


@pytest.mark.parametrize("kind", ["V3", ">c8", h5py.ref_dtype])
def test_a_data_set_of_an_odd_type_is_read_or_refused_in_one_sentence(kind, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", shape=(2,), dtype=kind)
    with pytest.raises(UserError, match=r"a\.h5"):
        list(open_source(tmp_path / "a.h5", where="data.source").blocks(["x"]))


@pytest.mark.parametrize("name", ["environ", "cmdline"])
def test_what_the_kernel_shows_of_this_process_is_no_text_of_a_folder(name, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").symlink_to(f"/proc/self/{name}")
    with pytest.raises(UserError, match="a file of the kernel"):
        list(open_source(tmp_path, where="data.source").blocks(["text"]))
