"""Nothing that comes from others is executed, and nothing leaves the folder of runs: each attempt
has a canary.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hydra.utils import instantiate

import flatout
import train
from flatout.data.tables.fetched import fetch
from flatout.data.tables.sources import open_table
from flatout.errors import UserError
from flatout.run.trainer import _build_quiet_trainer
from tests.composed import run_train
from tests.hostile import attempts as hostile
from tests.hostile.paths import path_cases
from tests.hostile.payloads import FUNCTIONS
from tests.hostile.sending import ENVIRONMENT, PARTS, sending_cases
from tests.hostile.targets import Case, all_cases, quick_cases


def by_name(cases):
    return [pytest.param(case, id=case.name) for case in cases]


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
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
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
    """One case of twelve by default, and each of `PARTS`, the others among the soak tests."""
    found = []
    for number, case in enumerate(cases):
        marks = [SOAK] if number % 12 and case.name not in PARTS else []
        found.append(pytest.param(case, id=case.name, marks=marks))
    return found


@pytest.mark.parametrize("case", in_part(sending_cases()))
def test_a_file_runs_no_code_sends_nothing_and_writes_nothing_outside(case, server):
    address, heard = server
    words = tuple(word.replace("<server>", address) for word in case.words)
    files = {name: text.replace("<server>", address) for name, text in case.files.items()}
    found = hostile.tried(replace(case, words=words, files=files))
    assert found.is_refused, found.said
    assert "Error in call" not in found.said, "it was called, and refused by what it is"
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
    assert not found.is_refused
    assert found.said == ""


def test_a_typed_secret_is_read_by_a_whole_run():
    words = (
        "+experiment=bloom_bigrams",
        "data.encoding.secret='${oc.env:FLATOUT_HOSTILE}'",
        "seed=no_number",
    )
    found = hostile.tried(Case("typed", words, environment=ENVIRONMENT, is_whole=True))
    assert "seed" in found.said
    assert "hydra" not in found.said


def test_a_file_may_refer_to_its_own_settings():
    text = "# @package _global_\nname: mine\ndata: {source: '${name}.csv'}\n"
    found = hostile.tried(Case("own", ("+experiment=mine",), {"experiment/mine.yaml": text}))
    assert not found.is_refused
    assert found.said == ""


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
    assert not allowed.is_refused
    assert allowed.said == ""


@pytest.mark.parametrize("package", ["os", "builtins", "torch"])
def test_trust_in_a_package_lets_no_function_in(package):
    target = {"os": "os.mkdir", "builtins": "builtins.open", "torch": "torch.save"}[package]
    words = (
        f"+callbacks.x={{_target_:{target},_args_:['<canary>']}}",
        f"allow_targets=[{package}]",
    )
    found = hostile.tried(Case("trusted", words))
    assert found.is_refused
    assert not found.is_executed


def test_a_logger_may_write_into_the_folder_of_runs():
    logger = "{_target_:lightning.pytorch.loggers.CSVLogger,save_dir:'${output}/log'}"
    found = hostile.tried(Case("inside", (f"+trainer.logger={logger}",)))
    assert not found.is_refused
    assert found.said == ""


# Labels that look like paths, markup or formulas.


def test_labels_that_look_like_paths_or_markup_make_no_files_and_are_shown_as_text(capsys):
    labels = [
        "../../escaped",
        "/escaped",
        "<script>alert(1)</script>",
        "=1+1",
        "a\x1b[2Jb",
        "a\u202eb",
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
        written = page.read_text(encoding="utf-8")
        assert "<script>alert(1)" not in written
        assert "\x1b" not in written
        assert r"a\x1b[2Jb" in written
        assert "\u202e" not in written
    said = capsys.readouterr()
    assert "\x1b[2J" not in said.out + said.err


def _external(file, private: Path) -> None:
    file.create_dataset("rows", shape=(10,), dtype="u1", external=[(str(private), 0, 10)])


def _linked(file, private: Path) -> None:
    file["rows"] = h5py.ExternalLink(str(private), "/rows")


def _linked_behind_a_link(file, private: Path) -> None:
    file.create_group("inner")["rows"] = h5py.ExternalLink(str(private), "/rows")
    file["rows"] = h5py.SoftLink("/inner/rows")


def _virtual(file, private: Path) -> None:
    layout = h5py.VirtualLayout(shape=(10,), dtype="u1")
    layout[:] = h5py.VirtualSource(str(private), "rows", shape=(10,))
    file.create_virtual_dataset("rows", layout)


@pytest.mark.parametrize("plant", [_external, _linked, _linked_behind_a_link, _virtual])
def test_a_file_of_numbers_reads_no_other_file(plant, tmp_path):
    private = tmp_path / "private.h5"
    with h5py.File(private, "w") as file:
        file["rows"] = np.arange(10, dtype=np.uint8)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        plant(file, private)
    with pytest.raises(UserError, match="leads to another place"):
        print(open_table(str(tmp_path / "rows.h5"), where="FILE").columns)


def run_evil(text, words, folder, monkeypatch):
    """Train with an experiment of others; the exit code."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "evil.yaml").write_text(f"# @package _global_\n{text}\n")
    return run_train([f"--config-dir={folder}", "+experiment=evil", *words], monkeypatch)


@pytest.mark.parametrize("option", ["", "--help", "--cfg job --resolve", "--cfg all --resolve"])
@pytest.mark.parametrize("key", ["task.class_weights", "hydra.help.header"])
def test_a_refusal_shows_no_secret_that_a_file_refers_to(
    key, option, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("FLATOUT_HOSTILE", "sk-live-topsecret")
    text = "'${oc.env:FLATOUT_HOSTILE}'"
    for part in reversed(key.split(".")):
        text = f"{{{part}: {text}}}"
    assert run_evil(text, option.split(), tmp_path, monkeypatch) == 2
    said = "".join(capsys.readouterr())
    assert key in said
    assert "topsecret" not in said


ODD_SETTINGS_OF_HYDRA = [
    ("launcher", "null", "hydra.launcher"),
    ("callbacks", "{a: 7}", "hydra.callbacks"),
    ("job", "{env_set: '${name}'}", "hydra.job.env_set"),
    ("job", "{env_copy: [NOWHERE]}", "NOWHERE"),
    ("verbose", "null", "hydra.verbose"),
    ("job_logging", "{version: 1, root: {level: LOUD}}", "hydra.job_logging"),
]


@pytest.mark.parametrize(("group", "value", "said"), ODD_SETTINGS_OF_HYDRA)
def test_odd_settings_of_hydra_itself_are_refused(
    group, value, said, tmp_path, monkeypatch, capsys
):
    assert run_evil(f"hydra: {{{group}: {value}}}", ["seed=1"], tmp_path, monkeypatch) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "said", "cause"),
    [
        ({"max_time": {"days": float("inf")}}, "cannot convert float infinity", OverflowError),
        ({"max_time": 3}, "'int' object has no attribute 'total_seconds'", AttributeError),
    ],
)
def test_an_argument_that_fails_inside_of_the_trainer_is_refused_with_its_cause(
    argument, said, cause
):
    with pytest.raises(UserError, match=f"trainer: {said}") as caught:
        _build_quiet_trainer(argument, [])
    assert isinstance(caught.value.__cause__, cause)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "evil.yaml: holds a list"),
        ("hydra: null", "conf: a file cannot"),
        ("hydra: text", "evil.yaml: hydra: does not fit (a mapping)"),
        ("hydra: {searchpath: text}", "evil.yaml: hydra.searchpath: does not fit (a list of"),
        ("hydra: {searchpath: ['pkg://${oc.env:FLATOUT_HOSTILE}']}", "evil.yaml: hydra.searchpath"),
    ],
)
def test_a_whole_file_of_settings_that_is_odd_is_refused(text, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLATOUT_HOSTILE", "sk-live-topsecret")
    (tmp_path / "evil.yaml").write_text(text)
    words = [f"--config-dir={tmp_path}", "--config-name=evil"]
    assert run_train(words, monkeypatch) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "topsecret" not in printed
