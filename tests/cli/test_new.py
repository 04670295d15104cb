"""`python -m flatout new`: the project that it makes trains, passes its own test, and is the
user's.
"""

from __future__ import annotations

import ast
import os
import re
import resource
import runpy
import shlex
import signal
import sys
from pathlib import Path

import pytest

from flatout.cli.new import TEMPLATE, make_project
from tests.run_files import read_csv
from tests.started import wait_for
from tests.verbs import verb
from tests.warm import Command, begin_function

QUICK = ["trainer.max_epochs=1", "data.rows=200", "trainer.enable_progress_bar=false"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    assert verb("new", tmp_path / "birds") == 0
    monkeypatch.chdir(tmp_path / "birds")
    return tmp_path / "birds"


def run_lines(*lines: str) -> None:
    """What lines that begin with `python` do, one after the other in this process."""
    for line in lines:
        run_line(line)


def run_line(line: str) -> None:
    words = shlex.split(line)[1:]
    sys.path.insert(0, str(Path.cwd()))
    if words[:2] == ["-m", "pytest"]:
        raise SystemExit(pytest.main(["-p", "no:cacheprovider", *words[2:]]))
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")


def begin_line(line: str) -> Command:
    return begin_function(run_lines, line)


def ended(command: Command) -> str:
    said, _ = command.communicate(timeout=90)
    assert command.returncode == 0, said
    return said


def test_a_new_project_trains_and_a_second_command_continues_in_its_folder(project):
    line = shlex.join(["python", "train.py", *QUICK, "hydra.run.dir=outputs/first"])
    longer = line.replace("max_epochs=1", "max_epochs=2")
    said = ended(begin_function(run_lines, line, longer))
    assert said.count("test/accuracy") == 2
    assert "outputs/first/checkpoints/step-4" in said
    assert (project / "outputs/first/checkpoints/last").resolve().name == "step-8"


@pytest.mark.soak(seconds=15)
def test_the_commands_of_its_readme_train_it_and_run_its_test(project):
    block = re.search(r"```sh\n(.+?)```", (project / "README.md").read_text(), re.DOTALL)
    assert block is not None
    first, second = block[1].splitlines()
    assert "verdict: " in ended(begin_line(first))
    assert "1 passed" in ended(begin_line(second))
    (run,) = (project / "outputs" / "waves").iterdir()
    assert (run / "checkpoints" / "best" / "tensors.safetensors").is_file()


@pytest.mark.soak(seconds=15)
def test_its_trials_are_processes_of_ours_and_go_on_by_the_same_words(project):
    words = [*QUICK[1:], "trainer.max_epochs=1,100000", "hydra.sweep.dir=outputs/many"]
    line = shlex.join(["python", f"{project}/train.py", "-m", *words])
    first = begin_line(line)
    last = project / "outputs/many/1/checkpoints/last"
    wait_for(last, first)
    os.killpg(first.pid, signal.SIGTERM)
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 143
    assert f"to resume: python {project}/train.py -m data.rows=200" in said
    rows = read_csv(project / "outputs/many/sweep.csv")
    assert [row["status"] for row in rows] == ["complete", "stopped"]
    assert float(rows[0]["val/accuracy"]) > 0.2
    before = last.resolve().name
    again = begin_line(line)
    again.wait_for_words("had finished before")
    wait_for(last.parent / f"step-{int(before[5:]) + 4}", again)
    os.killpg(again.pid, signal.SIGTERM)
    again.communicate(timeout=60)


@pytest.mark.soak(seconds=6)
def test_a_trial_that_fails_ends_the_command_with_its_error_and_no_traceback(project):
    words = [*QUICK, "model.width=8,-1", "hydra.sweep.dir=outputs/many"]
    script = f"{project}/train.py"
    command = begin_line(shlex.join(["python", script, "-m", *words]))
    said, _ = command.communicate(timeout=60)
    assert command.returncode == 1
    assert "1 of 2 trials failed" in said
    assert "Traceback" not in said
    other = begin_line(shlex.join(["python", script, "-m", "model.width=9", words[-1]]))
    said, _ = other.communicate(timeout=60)
    assert other.returncode == 2
    assert "holds trials of other words" in said


def test_a_project_is_small_and_names_four_parts_of_flatout_at_most():
    files = [file for file in TEMPLATE.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    about = {"README.md", "test.yml"}
    assert len([file for file in files if file.name not in about]) == 10
    assert lines <= 300
    names = set()
    for file in TEMPLATE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flatout"):
                names |= {alias.name for alias in node.names}
    assert names == {"ExactCheckpoint", "Verdict", "allow_late_help"}
    assert len((TEMPLATE / "train.py").read_text().splitlines()) <= 36


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("full", "new: the folder full is not empty. Name another, or empty this one."),
        ("full/file", "new: full/file is a file. Name a folder."),
        ("7up", "new: '7up' is no name of a project (letters, digits, - and _). Choose another."),
        ("full/file/deep", "new: cannot make full/file/deep: File exists. Name a folder that"),
    ],
)
def test_what_cannot_be_a_project_is_refused_and_nothing_is_written(
    name, says, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("full").mkdir()
    Path("full/file").write_text("mine")
    assert verb("new", name) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "file"]


def test_the_page_for_other_templates_shows_the_script_of_a_project():
    page = (TEMPLATE.parents[2] / "docs/from_lightning_hydra_template.md").read_text()
    assert (TEMPLATE / "train.py").read_text() in page


def test_a_project_takes_an_empty_folder_and_its_name(tmp_path):
    (tmp_path / "my-waves").mkdir()
    make_project(tmp_path / "my-waves")
    written = (tmp_path / "my-waves" / "pyproject.toml").read_text()
    assert 'name = "my-waves"' in written
    assert (tmp_path / "my-waves" / ".github" / "workflows" / "test.yml").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["my-waves"]


def test_a_project_that_the_disk_refuses_is_one_sentence(tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        assert verb("new", tmp_path / "birds") == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    place = tmp_path / "birds"
    assert f"new: cannot make {place}: File too large. Name a folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
