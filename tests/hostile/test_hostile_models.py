"""Model folders of others: what is odd is refused, and code beside the weights never runs."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig

from flatout.baselines.linear_text import Arrays, QuickModel
from flatout.data.problem import Problem
from flatout.errors import UserError
from flatout.inference.fingerprint import Fingerprint
from flatout.inference.model_folder import ModelFolder
from flatout.models.bilstm import BiLSTMConfig
from flatout.models.encoder.transformer import require_no_code
from flatout.report.page import as_markdown
from flatout.run.kinds import load_predictor
from flatout.tasks.abstention import HeldOutAnswers
from tests.hostile.json_changes import put
from tests.params import at_once
from tests.verbs import verb

SOAK = pytest.mark.soak(seconds=2)


@pytest.fixture
def model(models, tmp_path):
    """Writes a changed copy: `model(which, file, change)`."""

    def changed(which: str, file: str, change) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(models / which / "model", folder)
        path = folder / file
        if callable(change):
            described = json.loads(path.read_text(encoding="utf-8"))
            found = change(described)
            path.write_text(json.dumps(described if found is None else found), encoding="utf-8")
        else:
            path.write_bytes(change.encode() if isinstance(change, str) else change)
        return folder

    return changed


HOSTILE_MODELS = [
    ("lstm", "config.json", "{"),
    ("lstm", "config.json", "[]"),
    ("lstm", "config.json", b"\xff\xfe\x00"),
    ("lstm", "config.json", "[" * 100_000),
    ("lstm", "config.json", put("schema", 99)),
    ("lstm", "config.json", put("model", "kind", "os.system")),
    ("lstm", "config.json", put("model", "kind", ["bilstm"])),
    ("lstm", "config.json", put("model", "config", "_target_", "os.system")),
    ("lstm", "config.json", put("model", "config", "hidden", "8")),
    ("lstm", "config.json", put("model", "config", "hidden", -1)),
    ("lstm", "config.json", put("model", "config", "hidden", 10**15)),
    ("lstm", "config.json", put("model", "config", {"_target_": "os.system"})),
    ("lstm", "config.json", put("problem", "../../x")),
    ("lstm", "config.json", put("scale", {"_target_": "os.system"})),
    ("lstm", "config.json", put("data", "columns", None)),
    ("lstm", "config.json", put("temperature", "x")),
    ("lstm", "config.json", put("temperature", 0)),
    ("lstm", "config.json", put("temperature", 10**400)),
    ("lstm", "config.json", put("thresholds", ["x"])),
    ("lstm", "config.json", put("thresholds", [0.5])),
    ("lstm", "config.json", put("mixture", {"network": "x", "linear": 1})),
    ("lstm", "config.json", put("problem", "regression")),
    ("lstm", "config.json", put("data", "max_length", -5)),
    ("lstm", "config.json", put("data", "max_length", 10**30)),
    ("lstm", "config.json", put("data", "label_delimiter", 7)),
    ("lstm", "config.json", put("data", "columns", "texts", [7])),
    ("lstm", "config.json", put("data", "columns", "texts", "text")),
    ("lstm", "labels.json", "{}"),
    ("lstm", "labels.json", "[]"),
    ("lstm", "labels.json", "[1, 2]"),
    ("lstm", "labels.json", json.dumps(["x"] * 7)),
    ("lstm", "tokenizer.json", "{}"),
    ("lstm", "tokenizer.json", '{"kind": "subwords", "_target_": "os.system"}'),
    ("lstm", "model.safetensors", pickle.dumps({"a": 1})),
    ("lstm", "model.safetensors", b"\xff" * 64),
    ("lstm", "model.safetensors", b""),
    ("encoder", "encoder.json", put("auto_map", {"AutoModel": "evil.Evil"})),
    ("encoder", "encoder.json", put("attn_implementation", "somebody/kernels")),
    ("encoder", "encoder.json", put("_attn_implementation", "somebody/kernels:x")),
    ("encoder", "encoder.json", put("quantization_config", {"quant_method": "x"})),
    ("encoder", "encoder.json", put("text_config", {"attn_implementation": "somebody/kernels"})),
    ("encoder", "encoder.json", put("model_type", "os.system")),
    ("encoder", "encoder.json", put("model_type", None)),
    ("encoder", "encoder.json", put("vocab_size", -3)),
    ("encoder", "encoder.json", put("pad_token_id", -3)),
    ("encoder", "encoder.json", put("hidden_size", "8; import os")),
    ("encoder", "encoder.json", "7"),
    ("encoder", "tokenizer.json", put("files", {"../x": "x"})),
    ("encoder", "tokenizer.json", put("files", {"evil.py": "import os"})),
    ("encoder", "tokenizer.json", put("files", {"/etc/x.json": "{}"})),
    ("encoder", "tokenizer.json", put("files", {"config.json": "{}"})),
    ("encoder", "tokenizer.json", put("files", {"adapter_config.json": "{}"})),
    ("encoder", "tokenizer.json", put("frame", {"_target_": "os.system"})),
    ("encoder", "tokenizer.json", put("tokenizer", "{}")),
]


@pytest.mark.parametrize(
    "number",
    at_once(*range(0, len(HOSTILE_MODELS), 3), of=range(len(HOSTILE_MODELS)), seconds=1),
)
def test_a_model_folder_of_others_is_refused_in_one_message(number, model, capsys, tmp_path):
    folder = model(*HOSTILE_MODELS[number])
    with pytest.raises(UserError):
        load_predictor(folder)
    rows = tmp_path / "rows.csv"
    rows.write_text("text\nwords\n")
    assert verb("predict", folder, rows, "--device", "cpu") == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("which", "file", "change"),
    [
        ("lstm", "config.json", put("model", "config", "hidden", 50_000)),
        ("encoder", "encoder.json", put("hidden_size", 1 << 17)),
    ],
)
def test_a_network_of_gigabytes_beside_small_weights_is_refused_before_it_is_built(
    which, file, change, model
):
    with pytest.raises(UserError, match=r"model\.safetensors: does not fit"):
        load_predictor(model(which, file, change))


class CountsAsItIsBuilt(nn.Module):
    """A network whose width is known only where tensors have numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(int(torch.ones(3).sum().item()), 1)


def test_a_network_that_computes_with_numbers_as_it_is_built_is_read(tmp_path):
    trained = CountsAsItIsBuilt()
    save_file(trained.state_dict(), tmp_path / "model.safetensors")
    read = ModelFolder(tmp_path)._with_weights(CountsAsItIsBuilt)
    assert torch.equal(read.layer.weight, trained.layer.weight)


def test_a_model_folder_that_nobody_changed_is_read(models):
    assert all(
        load_predictor(models / name).predict(["some words"]) for name in ("lstm", "encoder")
    )


def test_the_parts_of_an_encoder_name_no_code_either():
    for part in ({"auto_map": {"AutoModel": "evil.Evil"}}, {"x": {"_attn_implementation": "a/b"}}):
        with pytest.raises(UserError, match="names code of others"):
            require_no_code({"model_type": "bert", "text_config": part}, "encoder.json")
        with pytest.raises(UserError, match="names code of others"):
            require_no_code({"text_config": BertConfig(**part)}, "encoder.json")


def test_names_of_classes_are_no_markup_in_a_model_card():
    name = "# <b>a</b>\n\n![x](http://y) `c` | d"
    shown = as_markdown(name)
    assert "\n" not in shown
    assert not re.search(r"(?<!\\)[<>\[\]`|!#]", shown)
    assert as_markdown("health and fitness, 24-7") == "health and fitness, 24-7"


KEPT_ARRAYS = {
    "texts": {"sureness": np.array(["x"] * 9)},
    "fewer of one": {"wrong": np.zeros(3, bool)},
    "tables": {"rows": np.zeros((9, 1), np.int64)},
    "objects": {"rows": np.array([{}] * 9)},
    "numbers of rows that are none": {"rows": np.zeros(9)},
    "one array more": {"more": np.zeros(9)},
    "far more than its bytes": {"truth": np.zeros(1 << 27, np.float32)},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SOAK] if "far" in name else []) for name in KEPT_ARRAYS]
)
def test_odd_arrays_in_a_model_folder_are_refused(name, tmp_path):
    kept = HeldOutAnswers(np.ones(9), np.zeros(9, bool), np.ones(9), np.arange(9))
    kept.write(tmp_path)
    assert HeldOutAnswers.read(tmp_path) is not None
    np.savez_compressed(tmp_path / HeldOutAnswers.FILE, **(asdict(kept) | KEPT_ARRAYS[name]))
    with pytest.raises(UserError, match=HeldOutAnswers.FILE):
        HeldOutAnswers.read(tmp_path)


@pytest.mark.parametrize("size", [3, 1 << 17])
def test_a_fingerprint_of_another_shape_is_refused(size, tmp_path):
    Fingerprint(np.zeros(size, np.float16), 1, np.zeros((2, 4))).write(tmp_path)
    with pytest.raises(UserError, match=Fingerprint.FILE):
        Fingerprint.read(tmp_path)


LINEAR: dict[str, Callable[[Arrays], Arrays]] = {
    "hashes that are too large": lambda old: {"words.columns": old["words.columns"] + (1 << 30)},
    "hashes below 0": lambda old: {"letters.columns": old["letters.columns"] - (1 << 30)},
    "hashes that are fractions": lambda old: {"words.columns": old["words.columns"] * 0.5},
    "weights of fewer hashes": lambda old: {"coefficients": old["coefficients"][:, :3]},
    "weights of fewer classes": lambda old: {"coefficients": old["coefficients"][:1]},
    "a pair": lambda old: {"is_pair": np.array([True])},
}


@pytest.mark.parametrize("name", LINEAR)
def test_odd_arrays_of_a_linear_model_are_refused(name):
    arrays = {
        "is_pair": np.array([False]),
        **{f"{group}.columns": np.arange(5) for group in ("words", "letters")},
        **{f"{group}.idf": np.ones(5) for group in ("words", "letters")},
        "coefficients": np.zeros((3, 10)),
        "constants": np.zeros(3),
    }
    assert QuickModel.of_arrays(Problem.single, 3, arrays).predict(["some words"]).shape == (1, 3)
    with pytest.raises(UserError, match="do not fit"):
        QuickModel.of_arrays(Problem.single, 3, arrays | LINEAR[name](arrays))


LINKS = {
    "abstention.json": ("evaluate", "--calibrate"),
    "abstention.txt": ("export", "--onnx"),
}


@pytest.mark.parametrize("name", LINKS)
def test_a_link_in_a_run_of_others_is_neither_written_through_nor_copied(name, models, tmp_path):
    shutil.copytree(models / "lstm" / "model", tmp_path / "run" / "model")
    private = tmp_path / "private"
    private.write_text("kept")
    (tmp_path / "run" / "model" / name).unlink(missing_ok=True)
    (tmp_path / "run" / "model" / name).symlink_to(private)
    labels = json.loads((tmp_path / "run" / "model" / "labels.json").read_text())
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + f"some words,{labels[0]}\n" * 30)
    command, option = LINKS[name]
    files = [rows, "--device", "cpu"] if command == "evaluate" else []
    assert verb(command, tmp_path / "run", *files, option) == 2
    assert private.read_text() == "kept"
    assert not (tmp_path / "run" / "export").exists()


# Tokenizers and exports of others.


def tokenizer_with(key, value):
    def change(described):
        core = json.loads(described["tokenizer"])
        core[key] = value
        described["tokenizer"] = json.dumps(core)

    return change


def ids_above_the_network(described):
    core = json.loads(described["tokenizer"])
    core["model"]["vocab"] = {word: 1000 + n for word, n in core["model"]["vocab"].items()}
    described["tokenizer"] = json.dumps(core)


BYTES = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
ODD_TOKENIZERS = {
    "that panics as it opens": tokenizer_with(
        "normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "that panics at a text": tokenizer_with("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    "without an unknown token": tokenizer_with("model", {"type": "Unigram", "vocab": [["a", 0.0]]}),
    "of ids above the network's": ids_above_the_network,
    "that opens rows by no list": put("frame", "opening", None),
    "that opens rows by a text": put("frame", "opening", ["x"]),
    "that opens rows by an unknown id": put("frame", "opening", [5000]),
    "whose rules double a text 34 times": tokenizer_with(
        "normalizer", {"type": "Sequence", "normalizers": [DOUBLES] * 34}
    ),
    "whose rules write out bytes ten times": tokenizer_with(
        "pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 10}
    ),
    "with a file of no text": put("files", {"vocab.txt": 5}),
    "with half a character in a file": put("files", {"vocab.txt": "\ud800"}),
}


@pytest.mark.parametrize("name", ODD_TOKENIZERS)
def test_an_odd_tokenizer_in_a_model_folder_ends_in_one_sentence(name, model, tmp_path, capfd):
    folder = model("encoder", "tokenizer.json", ODD_TOKENIZERS[name])
    rows = tmp_path / "rows.csv"
    rows.write_text("text\nwords\n")
    assert verb("predict", folder, rows, "--device", "cpu") == 2
    # Rust prints lines of its own before that; the standard error is of the whole process
    *of_rust, sentence = capfd.readouterr().err.strip().splitlines()
    assert "panicked at" in "".join(of_rust) if "panics" in name else not of_rust
    assert ("no model that can be read" if "panics" in name else "tokenizer") in sentence


def test_a_tokenizer_that_fills_rows_up_to_a_length_fills_none_here(model, tmp_path):
    padding = {
        "strategy": {"Fixed": 10**8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    }
    folder = model("encoder", "tokenizer.json", tokenizer_with("padding", padding))
    assert len(load_predictor(folder).predict(["words"])) == 1


def settings_of_tokenizer(content):
    def change(described):
        described["files"]["tokenizer_config.json"] = content

    return change


ODD_SETTINGS = ["[1]", '{"tokenizer_class": "MistralCommonBackend"}', '{"added_tokens_decoder": 7}']


@pytest.mark.parametrize("content", ODD_SETTINGS)
def test_odd_settings_of_a_tokenizer_end_an_export_in_one_sentence(
    content, model, tmp_path, capsys
):
    folder = model("encoder", "tokenizer.json", settings_of_tokenizer(content))
    assert verb("export", folder, "--out", tmp_path / "exported") == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "exported").exists()


def test_an_encoder_s_settings_of_form_change_no_answer_and_no_export(models, model, tmp_path):
    form = {
        "return_dict": False,
        "output_attentions": True,
        "output_hidden_states": True,
        "chunk_size_feed_forward": 7,
    }
    folder = model("encoder", "encoder.json", lambda described: described | form)
    expected = load_predictor(models / "encoder").predict(["words of a row"])
    assert load_predictor(folder).predict(["words of a row"]) == expected
    assert verb("export", folder, "--out", tmp_path / "exported") == 0


def test_a_kind_of_model_that_is_a_number_is_refused_by_export(model, capsys):
    assert verb("export", model("lstm", "config.json", put("model", 1.5))) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.timeout(20)
def test_a_pipe_in_an_export_is_refused(model, tmp_path, capsys):
    rows = tmp_path / "rows.csv"
    rows.write_text("text\nwords\n")
    (tmp_path / "export").mkdir()
    os.mkfifo(tmp_path / "export" / "signature.json")
    folder = model("lstm", "config.json", lambda described: None)
    assert verb("verify", folder, rows, "--form", tmp_path / "export", "--device", "cpu") == 2
    assert "signature.json: is a pipe" in capsys.readouterr().err


def test_weights_that_the_disk_refuses_are_an_error_of_the_system(model, tmp_path):
    predictor = load_predictor(model("lstm", "config.json", lambda described: None))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            predictor.save(tmp_path / "kept", BiLSTMConfig())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_half_a_character_in_the_name_of_a_class_is_refused(model):
    with pytest.raises(UserError, match="is no list of names"):
        load_predictor(model("lstm", "labels.json", put(0, "\ud800")))


@pytest.mark.parametrize("key", ["n_layer", "num_layers", "num_hidden_groups", "inner_group_num"])
def test_layers_without_number_are_refused_under_every_name(key, model):
    with pytest.raises(UserError, match=f"{key} does not fit"):
        load_predictor(model("encoder", "encoder.json", put(key, 10**9)))


def experts_without_number(described):
    described |= {"model_type": "mixtral", "num_local_experts": 10**9}


def test_parts_without_number_are_refused_as_they_are_built(model):
    with pytest.raises(UserError, match=r"has fewer layers|does not fit"):
        load_predictor(model("encoder", "encoder.json", experts_without_number))


class Layers(nn.Module):
    """More layers than the file of weights can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(10**9))


def test_a_network_of_a_billion_layers_is_refused_as_it_is_built(tmp_path):
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="has fewer layers"):
        ModelFolder(tmp_path)._with_weights(Layers)


def test_answers_that_the_disk_refuses_leave_those_of_before(tmp_path):
    kept = HeldOutAnswers(np.ones(9), np.zeros(9, bool), np.ones(9), np.arange(9))
    kept.write(tmp_path)
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            kept.write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before


def test_classes_whose_names_end_in_layer_are_no_layers(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    folder = ModelFolder(tmp_path)
    names = {"TennisPlayer": 300, "age group": 301, "num_layers": 2}
    folder._require_few_layers({"label2id": names, "num_hidden_layers": 6}, "encoder.json")
    with pytest.raises(UserError, match="n_layer does not fit"):
        folder._require_few_layers({"text_config": {"n_layer": 10**9}}, "encoder.json")
