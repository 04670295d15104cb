"""Encoders of others: code beside their files, and weights that are a pickle or lie elsewhere."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from flatout.errors import UserError
from flatout.inference.open_folder import open_folder
from flatout.models.encoder.transformer import Outputs
from tests.composed import run_train
from tests.hostile import attempts as hostile
from tests.hostile.json_changes import put
from tests.params import at_once
from tests.verbs import verb


@pytest.fixture
def encoder_with_code(models, tmp_path):
    """An encoder's folder with a module beside it that leaves a canary: `encoder_with_code(file,
    change)`.
    """
    folder = tmp_path / "encoder"
    canary = tmp_path / "canary"
    assert verb("export", models / "encoder", "--out", folder) == 0
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\nclass Evil: ...\n")

    def changed(file: str, change) -> tuple[Path, Path]:
        described = json.loads((folder / file).read_text(encoding="utf-8"))
        change(described)
        (folder / file).write_text(json.dumps(described), encoding="utf-8")
        return folder, canary

    return changed


def own_code(described):
    described["auto_map"] = dict.fromkeys(
        ("AutoConfig", "AutoModel", "AutoModelForSequenceClassification"), "evil.Evil"
    )


def own_family(described):
    own_code(described)
    described["model_type"] = "evil"


def own_kernel(described):
    described["attn_implementation"] = "flash_attention_2"


def own_tokenizer(described):
    described["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    described["tokenizer_class"] = "Evil"


CODE_BESIDE = {
    "of a known family": ("config.json", own_code, "auto_map"),
    "that a kernel fetches": (
        "config.json",
        own_kernel,
        "'flash_attention_2' names code of others",
    ),
    "of a family of its own": (
        "config.json",
        own_family,
        "comes with code of its own, which is never run",
    ),
}


@pytest.mark.parametrize("case", CODE_BESIDE)
def test_an_encoder_s_own_code_is_refused_and_never_run(
    case, encoder_with_code, tmp_path, monkeypatch, capsys
):
    file, change, message = CODE_BESIDE[case]
    folder, canary = encoder_with_code(file, change)
    capsys.readouterr()
    words = [
        "model=transformer",
        f"model.pretrained={folder}",
        "data.sample.rows=200",
        "data.sample.eval_rows=40",
    ]
    words += [f"output={tmp_path / 'runs'}", "monitor.progress=false"]
    assert run_train(words, monkeypatch) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert not canary.exists()
    exec((folder / "evil.py").read_text())  # had it been run, it would have been seen
    assert canary.exists()


@pytest.mark.parametrize("kernel", ["evil/evil", "flash_attention_2"])
def test_an_exported_folder_of_others_fetches_no_kernel(kernel, encoder_with_code):
    def name_a_kernel(described):
        described["attn_implementation"] = kernel

    folder, _ = encoder_with_code("config.json", name_a_kernel)
    with pytest.raises(UserError, match="names code of others"):
        open_folder(folder, Outputs(["a", "b"], "single"))


def test_a_tokenizer_s_own_code_is_never_run(encoder_with_code, tmp_path, monkeypatch, capsys):
    folder, canary = encoder_with_code("tokenizer_config.json", own_tokenizer)
    words = [
        "model=transformer",
        f"model.pretrained={folder}",
        "data.sample.rows=200",
        "data.sample.eval_rows=40",
    ]
    words += [f"output={tmp_path / 'runs'}", "monitor.progress=false", "trainer.max_epochs=1"]
    assert run_train(words, monkeypatch) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
    assert not canary.exists()


def weights_that_are_a_pickle(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(hostile._Payload(folder / "canary")))


def weights_elsewhere(folder: Path) -> None:
    weights_that_are_a_pickle(folder)
    files = {"x": "pytorch_model.bin", "y": "../../outside/x"}
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def weights_of_an_adapter(folder: Path) -> None:
    of_code = {"base_model_class": "call", "parent_library": "evil"}
    described = {
        "peft_type": "LORA",
        "base_model_name_or_path": "evil/base",
        "auto_mapping": of_code,
        "target_modules": ["query"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    weights_that_are_a_pickle(folder)


def a_type_that_is_a_name_in_torch(folder: Path) -> None:
    described = json.loads((folder / "config.json").read_text())
    described["dtype"] = "hub.load"
    (folder / "config.json").write_text(json.dumps(described))


WEIGHTS = [
    weights_that_are_a_pickle,
    weights_elsewhere,
    weights_of_an_adapter,
    a_type_that_is_a_name_in_torch,
]


@pytest.mark.parametrize("plant", at_once(WEIGHTS[0], of=WEIGHTS, seconds=1))
def test_weights_of_others_are_refused_in_one_message_and_no_pickle_is_read(
    plant, encoder_with_code, tmp_path, monkeypatch, capsys
):
    folder, _ = encoder_with_code("config.json", lambda described: None)
    plant(folder)
    words = ["model=transformer", f"model.pretrained={folder}", *hostile.TINY]
    capsys.readouterr()
    assert run_train([*words, f"output={tmp_path / 'runs'}"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert "model.pretrained" in said
    assert "Traceback" not in said
    assert not (folder / "canary").exists()


ODD_EXPORTS = {
    "a longest row that is no number": ("tokenizer_config.json", put("model_max_length", "x")),
    "a longest row below 0": ("tokenizer_config.json", put("model_max_length", -1)),
    "padding that the network does not know": ("tokenizer_config.json", put("pad_token", "new")),
    "a problem that is a list": ("config.json", put("problem_type", [])),
    "heads below 0": ("config.json", put("num_attention_heads", -1)),
    "half a character": ("config.json", put("id2label", {"0": "\ud800", "1": "b"})),
    "names that are numbers": ("config.json", put("architectures", [7])),
}


@pytest.mark.parametrize("name", ODD_EXPORTS)
def test_an_odd_folder_of_transformers_ends_in_one_sentence(
    name, encoder_with_code, tmp_path, capsys
):
    folder, _ = encoder_with_code(*ODD_EXPORTS[name])
    rows = tmp_path / "rows.csv"
    rows.write_text("text\nsome words\n")
    capsys.readouterr()
    assert verb("verify", folder, rows) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
