"""Nothing that comes from others is executed, and nothing leaves the folder of runs: each attempt
has a canary.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import lightning as L
import psutil
import pytest
import torch
from hydra.utils import instantiate
from safetensors.torch import save_file

import flatout
import train
from flatout.checkpoints.folder import MANIFEST, STATE, TENSORS, FolderCheckpointIO
from flatout.checkpoints.folder import sealed as sealed_manifest
from flatout.checkpoints.kept import shelve
from flatout.data.store.store import file_checksum
from flatout.data.tables.fetched import fetch
from flatout.distributed.processes import warm_start
from flatout.errors import UserError
from flatout.run.kinds import load_predictor
from tests.composed import run_train
from tests.faults import runs
from tests.fitting import own_cache
from tests.hostile import attempts as hostile
from tests.hostile.paths import path_cases
from tests.hostile.sending import ENVIRONMENT, sending_cases
from tests.hostile.targets import FUNCTIONS, Case, all_cases, quick_cases
from tests.params import at_once
from tests.verbs import verb

SOURCES = sorted(Path(flatout.__file__).parents[1].glob("**/*.py"))


def by_name(cases):
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.fixture(autouse=True, scope="module")
def _warm():
    warm_start()  # sweeps ask for it too, from folders that are gone when it has come up


@pytest.mark.parametrize("case", by_name(quick_cases()[::8]))
def test_a_hostile_target_is_refused_and_nothing_is_executed(case):
    found = hostile.tried(case)
    assert found.is_refused, found.said
    assert not found.is_executed
    assert "Traceback" not in found.said


@pytest.mark.parametrize("case", by_name(path_cases(full=False)[::8]))
def test_nothing_outside_of_the_folder_of_runs_is_touched(case):
    assert hostile.stayed(case)


def test_the_tables_are_as_long_as_they_are_said_to_be_and_no_case_is_there_twice():
    def name_of(case):
        return repr(case) if isinstance(case, Case) else case.name

    def different(cases):
        return len(set(map(name_of, cases)))

    assert different(quick_cases()) == len(quick_cases()) >= 60
    assert different(all_cases()) == len(all_cases()) >= 250
    assert different(path_cases(False)) == len(path_cases(False)) >= 48
    assert different(path_cases(True)) == len(path_cases(True)) >= 100


LIVE = (
    "os.mkdir",
    "os.makedirs",
    "shutil.copy",
    "joblib.load",
    "torch.load",
    "numpy.savetxt",
    "torch.os.mkdir",
)
LIVE += (
    "torch.save",
    "flatout.run.resolve.os.mkdir",
    "hydra.utils.get_class",
    "lightning.pytorch.loggers.csv_logs.os.mkdir",
)


@pytest.mark.parametrize("name", LIVE)
def test_a_payload_makes_the_canary_where_nobody_refuses_it(name):
    with hostile.bait() as place:
        (call,) = (each for each in FUNCTIONS if each["_target_"] == name)
        text = (
            json.dumps(call)
            .replace("<canary>", f"{place}/canary")
            .replace("<bait>", f"{place}/bait")
        )
        instantiate(json.loads(text))
        assert (place / "canary").exists()


PROCESSES = (
    "builtins.open as hydra.callbacks.x",
    "torch.load",
    "builtins.open in a list",
    "os.mkdir in a file's hydra.callbacks",
    "os.mkdir by YAML's own tags",
    "a file that says it was typed",
    "job_logging 0: handlers",
    "settings looked for in pkg://evilpackage",
    "a pickle that is run again",
    "importing evilpackage.inner.Evil",
)


def whole_train(words, environment, paths, said) -> None:
    """`python -m train` in a child of the warm server, which has imported everything already."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ |= environment
    sys.path.insert(0, paths)
    train.main(words)


SOAK = pytest.mark.soak(seconds=2)
IN_SECONDS = ("torch.load", "a pickle that is run again")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in IN_SECONDS else [SOAK]) for name in PROCESSES[1:]],
)
def test_the_same_holds_for_a_process_of_its_own(name, tmp_path):
    (case,) = (each for each in all_cases() if each.name == name)
    with hostile.bait() as place:
        words, environment = hostile.filled(case, place)
        words = ["--config-dir", "../conf", *words]
        before = hostile.files_outside(place)
        said = tmp_path / "said.txt"
        arguments = (words, environment, str(place / "bait"), str(said))
        process = multiprocessing.get_context("forkserver").Process(
            target=whole_train, args=arguments
        )
        process.start()
        process.join(60)
        assert process.exitcode == 2, said.read_text()
        assert "Traceback" not in said.read_text()
        assert hostile.files_outside(place) == before


@pytest.mark.soak(seconds=7)
def test_the_same_holds_for_python_m_train():
    (case,) = (each for each in all_cases() if each.name == PROCESSES[0])
    with hostile.bait() as place:
        words = [
            sys.executable,
            "-m",
            "train",
            "--config-dir",
            "../conf",
            *hostile.filled(case, place)[0],
        ]
        before = hostile.files_outside(place)
        paths = os.pathsep.join([str(Path(flatout.__file__).parents[1]), str(place / "bait")])
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert hostile.files_outside(place) == before


# What files would send, and to whom.


@pytest.fixture
def server():
    """The address of a server, and a list that gets what each caller sends."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    caller = listening.accept()[0]
                    with caller:
                        heard.append(caller.recv(4096))
                        caller.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", heard
        listening.shutdown(socket.SHUT_RDWR)


def in_part(cases):
    """One case of twelve by default, the others among the soak tests."""
    found = []
    for number, case in enumerate(cases):
        marks = [SOAK] if number % 12 else []
        found.append(pytest.param(case, id=case.name, marks=marks))
    return found


@pytest.mark.parametrize("case", in_part(sending_cases()))
def test_a_file_runs_no_code_sends_nothing_and_writes_nothing_outside(case, server):
    address, heard = server
    words = tuple(word.replace("<server>", address) for word in case.words)
    files = {name: text.replace("<server>", address) for name, text in case.files.items()}
    found = hostile.tried(replace(case, words=words, files=files))
    assert found.is_refused, found.said
    assert not found.is_executed
    assert heard == []
    assert ENVIRONMENT["FLATOUT_HOSTILE"] not in found.said


def test_the_cases_of_files_that_send_are_many_and_different():
    cases = sending_cases()
    assert len({case.name for case in cases}) == len(cases) >= 100


def test_the_server_hears_of_an_endpoint_that_nobody_refuses(server, monkeypatch):
    address, heard = server
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError):
        fetch(
            f"s3://bucket/key?endpoint_override={address}&scheme=http&region=us-east-1",
            "data.source",
        )
    assert b"AKIAVICTIM" in heard[0]


TYPED = {
    "an address": ("data.source='s3://bucket/key?endpoint_override=here'",),
    "a secret": ("+experiment=bloom_bigrams", "data.encoding.secret='${oc.env:FLATOUT_HOSTILE}'"),
    "a secret in a mapping": (
        "+experiment=bloom_bigrams",
        "data.encoding={secret:'${oc.env:FLATOUT_HOSTILE}'}",
    ),
    "a server of MLflow": ("logger=mlflow", "logger.mlflow.tracking_uri=http://server:5000"),
    "a team of W&B": ("logger=wandb", "logger.wandb.entity=mine"),
}


@pytest.mark.parametrize("name", TYPED)
def test_what_files_may_not_say_is_taken_from_the_command_line(name):
    found = hostile.tried(Case(name, TYPED[name], environment=ENVIRONMENT))
    assert not found.is_refused and found.said == ""


def test_a_typed_secret_is_read_by_a_whole_run():
    words = (
        "+experiment=bloom_bigrams",
        "data.encoding.secret='${oc.env:FLATOUT_HOSTILE}'",
        "seed=no_number",
    )
    found = hostile.tried(Case("typed", words, environment=ENVIRONMENT, is_whole=True))
    assert "seed" in found.said and "hydra" not in found.said


def test_a_file_may_refer_to_its_own_settings():
    text = "# @package _global_\nname: mine\ndata: {source: '${name}.csv'}\n"
    found = hostile.tried(Case("own", ("+experiment=mine",), {"experiment/mine.yaml": text}))
    assert not found.is_refused and found.said == ""


def test_transformers_is_told_never_to_ask_whether_to_run_code():
    from transformers import dynamic_module_utils

    from flatout.data.tables.hub import never_ask_to_run_code

    never_ask_to_run_code()
    assert dynamic_module_utils.TIME_OUT_REMOTE_CODE == 0
    with pytest.raises(ValueError, match="trust_remote_code"):
        dynamic_module_utils.resolve_trust_remote_code(None, "somebody/evil", False, True)


# Trust that was typed.


def test_a_class_that_is_not_listed_is_trusted_by_its_name_on_the_command_line(tmp_path):
    target = "lightning.pytorch.callbacks.LambdaCallback"
    words = (f"+callbacks.x._target_={target}",)
    refused = hostile.tried(Case("not listed", words))
    assert f"+allow_targets=[{target}]" in refused.said
    allowed = hostile.tried(Case("listed", (*words, f"allow_targets=[{target}]")))
    assert not allowed.is_refused and allowed.said == ""


@pytest.mark.parametrize("package", ["os", "builtins", "torch"])
def test_trust_in_a_package_lets_no_function_in(package):
    target = {"os": "os.mkdir", "builtins": "builtins.open", "torch": "torch.save"}[package]
    words = (
        f"+callbacks.x={{_target_:{target},_args_:['<canary>']}}",
        f"allow_targets=[{package}]",
    )
    found = hostile.tried(Case("trusted", words))
    assert found.is_refused and not found.is_executed


def test_a_logger_may_write_into_the_folder_of_runs():
    logger = "{_target_:lightning.pytorch.loggers.CSVLogger,save_dir:'${output}/log'}"
    found = hostile.tried(Case("inside", (f"+trainer.logger={logger}",)))
    assert not found.is_refused and found.said == ""


# Checkpoints of others.


def checkpoint(folder: Path, state: object, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """A checkpoint that is whole by its checksums, whatever is in it."""
    folder.mkdir(parents=True)
    save_file(tensors or {"/a": torch.zeros(2)}, folder / TENSORS)
    (folder / STATE).write_text(
        state if isinstance(state, str) else json.dumps(state), encoding="utf-8"
    )
    return sealed(folder)


def sealed(folder: Path) -> Path:
    """With a manifest that fits what is there, checksum and all."""
    files = {
        name: {"bytes": (folder / name).stat().st_size, "xxh3": file_checksum(folder / name)}
        for name in (TENSORS, STATE)
    }
    (folder / MANIFEST).write_bytes(sealed_manifest({"schema": 2, "about": {}, "files": files}))
    return folder


class Payload:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("key", ["_target_", "_partial_", "__reduce__", "~object", "py/object"])
def test_a_checkpoint_that_names_code_is_data(key, tmp_path):
    state = {"callbacks": {"x": {key: "os.mkdir", "_args_": [str(tmp_path / "canary")]}}}
    assert FolderCheckpointIO().load_checkpoint(checkpoint(tmp_path / "step-1", state)) == state
    assert not (tmp_path / "canary").exists()


HOSTILE_STATES = {
    "a tensor that is missing": {"state_dict": {"~tensor": "/nowhere"}},
    "a tensor named by a list": {"state_dict": {"~tensor": ["/a"]}},
    "a tensor by a path": {"state_dict": {"~tensor": "../../x"}},
    "pairs that are none": {"x": {"~pairs": [[1, 2, 3]]}},
    "pairs by a number": {"x": {"~pairs": 7}},
    "a key that is a list": {"x": {"~pairs": [[[], 1]]}},
    "a tuple of a number": {"x": {"~tuple": 7}},
    "no JSON": "{",
    "a list": [1, 2],
    "nothing": "",
    "nested without end": "[" * 100_000 + "]" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE_STATES)
def test_a_checkpoint_with_odd_state_is_refused(name, tmp_path):
    folder = checkpoint(tmp_path / "step-1", HOSTILE_STATES[name])
    with pytest.raises(UserError):
        FolderCheckpointIO().load_checkpoint(folder)


def test_a_pickle_in_place_of_tensors_is_refused_and_not_read(tmp_path):
    folder = checkpoint(tmp_path / "step-1", {})
    (folder / TENSORS).write_bytes(pickle.dumps(Payload(tmp_path / "canary")))
    with pytest.raises(UserError):
        FolderCheckpointIO().load_checkpoint(sealed(folder))


def test_a_pickle_in_place_of_tensors_is_not_unpickled(tmp_path):
    folder = checkpoint(tmp_path / "step-1", {})
    (folder / TENSORS).write_bytes(pickle.dumps(Payload(tmp_path / "canary")))
    with pytest.raises(Exception):  # noqa: B017 - whichever it is, see above
        FolderCheckpointIO().load_checkpoint(sealed(folder))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name", ["../outside.txt", "/etc/hostname", "~/x", "a/../../outside.txt", "x\0y"]
)
def test_a_checkpoint_that_names_files_outside_is_refused(name, tmp_path):
    (tmp_path / "outside.txt").write_text("kept")
    folder = checkpoint(tmp_path / "step-1", {})
    described = json.loads((folder / MANIFEST).read_text())
    del described["checksum"]
    if os.path.lexists(real := os.path.normpath(folder / name.replace("\0", ""))):
        described["files"][name] = {"bytes": 4, "xxh3": file_checksum(Path(real))}
    else:
        described["files"][name] = {"bytes": 4, "xxh3": "0"}
    (folder / MANIFEST).write_bytes(sealed_manifest(described))
    with pytest.raises(UserError):
        FolderCheckpointIO().load_checkpoint(folder)


@pytest.mark.parametrize(
    "manifest", ["[]", "7", '{"files": []}', '{"files": {"state.json": 7}}', '{"files": {}}', "{"]
)
def test_a_checkpoint_with_an_odd_manifest_is_refused(manifest, tmp_path):
    folder = checkpoint(tmp_path / "step-1", {})
    with suppress(ValueError, AttributeError, TypeError):
        manifest = sealed_manifest({"schema": 2, "about": {}, **json.loads(manifest)}).decode()
    (folder / MANIFEST).write_text(manifest)
    with pytest.raises(UserError):
        FolderCheckpointIO().load_checkpoint(folder)


@pytest.mark.parametrize("planted", ["step-9", "best", "last"])
def test_taking_checkpoints_away_takes_a_link_and_not_what_it_leads_to(planted, tmp_path):
    outside = checkpoint(tmp_path / "outside" / "step-1", {})
    folder = tmp_path / "checkpoints"
    checkpoint(folder / "step-2", {})
    (folder / planted).symlink_to(outside)
    for take in (
        lambda: shelve(folder, last=2, best=None),
        lambda: FolderCheckpointIO().remove_checkpoint(folder / planted),
    ):
        try:
            take()
        except (OSError, UserError) as error:
            said = str(error)
            assert "link" in said
    assert sorted(path.name for path in outside.iterdir()) == [MANIFEST, STATE, TENSORS]


def test_a_folder_of_checkpoints_that_is_a_link_is_not_emptied(tmp_path):
    outside = checkpoint(tmp_path / "outside" / "step-1", {})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "outside")
    with suppress(UserError):
        shelve(tmp_path / "run" / "checkpoints", last=2, best=None)
    assert outside.is_dir()


# Model folders of others.


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The model folders of a small network and of a small encoder."""
    place = tmp_path_factory.mktemp("models")
    tiny = [*hostile.TINY, "model.hidden=8", "data.vocabulary.size=100"]
    with own_cache(place):
        for name, words in (
            ("lstm", []),
            ("encoder", ["model=transformer", "model.layers=1", "model.heads=2"]),
        ):
            train.main([*words, *tiny, f"hydra.run.dir={place / name}"])
    return place


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


def put(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(described):
        for key in keys:
            described = described[key]
        described[last] = value

    return change


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
    ("encoder", "encoder.json", put("model_type", "os.system")),
    ("encoder", "encoder.json", put("model_type", None)),
    ("encoder", "encoder.json", put("vocab_size", -3)),
    ("encoder", "encoder.json", put("hidden_size", "8; import os")),
    ("encoder", "encoder.json", "7"),
    ("encoder", "tokenizer.json", put("files", {"../x": "x"})),
    ("encoder", "tokenizer.json", put("files", {"evil.py": "import os"})),
    ("encoder", "tokenizer.json", put("files", {"/etc/x.json": "{}"})),
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
    assert len(said.strip().splitlines()) == 1 and "Traceback" not in said


def test_a_model_folder_that_nobody_changed_is_read(models):
    assert all(
        load_predictor(models / name).predict(["some words"]) for name in ("lstm", "encoder")
    )


# Folders of encoders that come with code.


@pytest.fixture
def encoder_with_code(models, tmp_path):
    """An encoder's folder with a module beside it that leaves a canary: `encoder_with_code(file,
    change)`.
    """
    folder, canary = tmp_path / "encoder", tmp_path / "canary"
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


def own_tokenizer(described):
    described["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    described["tokenizer_class"] = "Evil"


CODE_BESIDE = {
    "of a known family": ("config.json", own_code, "auto_map"),
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
    assert message in said and "Traceback" not in said
    assert not canary.exists()
    exec((folder / "evil.py").read_text())  # had it been run, it would have been seen
    assert canary.exists()


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


# Labels that look like paths, markup or formulas.


def test_labels_that_look_like_paths_or_markup_make_no_files_and_are_shown_as_text(capsys):
    labels = [
        "../../escaped",
        "/escaped",
        "<script>alert(1)</script>",
        "=1+1",
        "a\x1b[2Jb",
        "~",
        "..",
        "C:\\x",
    ]
    with hostile.bait() as place:
        rows = [
            f'"{label}","words {number} {row}"'
            for row in range(12)
            for number, label in enumerate(labels)
        ]
        Path("rows.csv").write_text("label,text\n" + "\n".join(rows) + "\n", encoding="utf-8")
        before = hostile.files_outside(place)
        train.main(["data.source=rows.csv", "data.cache=outputs/cache", *hostile.TINY])
        assert hostile.files_outside(place) == before
        (page,) = Path("outputs").glob("default/*/report.html")
        assert "<script>alert(1)" not in page.read_text(encoding="utf-8")
    said = capsys.readouterr()
    assert "\x1b[2J" not in said.out + said.err


# What the sources say themselves, where the linter has no rule for it.


def calls(tree: ast.AST):
    """Every call, with the name of what is called, as it is written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield (
                ast.unparse(node.func),
                {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg},
            )


def is_trusting(name: str, words: dict[str, str]) -> bool:
    """Whether a call may run code of the file that it opens."""
    if name.endswith(".from_pretrained"):
        return words.get("trust_remote_code") != "False"
    if name == "np.load":
        return words.get("allow_pickle") != "False"
    if name == "torch.load":
        return words.get("weights_only") != "True"
    return "True" in (words.get("trust_remote_code"), words.get("allow_pickle"))


def test_no_source_runs_code_of_a_file_that_it_opens():
    found = [
        f"{path}: {name}"
        for path in SOURCES
        for name, words in calls(ast.parse(path.read_text(encoding="utf-8")))
        if is_trusting(name, words)
    ]
    assert len(SOURCES) > 50 and found == []
    assert is_trusting("torch.load", {}) and is_trusting("np.load", {"allow_pickle": "True"})


def test_every_test_that_the_security_page_names_is_there():
    root = Path(__file__).parents[2]
    page = (root / "SECURITY.md").read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in root.glob("tests/**/*.py"))
    named = re.findall(r"`(test_\w+)`", page)
    assert len(named) > 10
    for name in named:
        assert f"def {name}(" in tests, name


# The network.


class Listening(L.Callback):
    """Notes which sockets of the internet this process holds while it trains."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        found = psutil.Process().net_connections(kind="inet")
        with Path(self.path).open("a", encoding="utf-8") as file:
            file.write(f"{trainer.global_step} {found}\n")


def test_a_run_listens_to_nobody_and_calls_nobody(tmp_path):
    notes = tmp_path / "sockets.txt"
    runs.train(
        runs.Spec(trainer={"max_epochs": 1}).planted(Listening, path=str(notes)), tmp_path / "runs"
    )
    lines = notes.read_text().splitlines()
    assert len(lines) == 10 and {line.split(" ", 1)[1] for line in lines} == {"[]"}
