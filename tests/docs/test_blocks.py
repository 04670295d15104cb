"""Every command and every script of README and docs works as it stands.

Commands are composed, or parsed with their own parsers, in one process. Scripts run on tiny tables.
One chain of commands runs whole; `tests/soak/test_docs.py` runs the others whole. A block that
cannot run says why above it.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import logging
import re
import shlex
import shutil
import subprocess
import tomllib
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from flatout.__main__ import VERBS
from flatout.cli.words import replace_groups_by_classes
from tests.composed import compose_run, only_folder, run_train
from tests.docs.blocks import ROOT, Block, all_commands, blocks, words_of_flatout, words_of_train
from tests.run_files import read_csv
from tests.verbs import verb

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
LIGHTNINGS_HINTS = (
    "ignore:.*does not have many workers.*",
    "ignore:.*TensorBoard support.*",
    "ignore:.*number of training batches.*",
    "ignore:You defined a `validation_step`",
    "ignore:.*exists and is not empty.*",
    "ignore:.*is not supported by the model summary.*",
)
ALL = blocks()
COMMANDS = all_commands()
LANGUAGES = {"", "sh", "text", "python", "bash", "yaml", "toml"}
ELSEWHERE = {
    ("sequences.md", "InferenceSession"): "tests/soak/test_docs.py",
    ("sequences.md", "SequenceData"): "tests/soak/test_docs.py",
    ("many_devices.md", "ray.train"): "tests/soak/test_ray.py",
}
"""Scripts by their page and a word in them, and the test that runs them."""
PROGRAMS = ("tensorboard", "pytest", "mkdocs")
TINY = [
    "data.sample.rows=200",
    "data.sample.eval_rows=40",
    "trainer.max_epochs=1",
    "monitor.progress=false",
]
SMALL = ["data.batch_size=8", "trainer.max_epochs=2", "model.hidden=16", "monitor.progress=false"]
"""A run of the first commands; enough steps for a verdict."""


def test_no_block_is_in_an_unknown_language():
    assert [block.place for block in ALL if block.language not in LANGUAGES] == []


def test_a_block_that_does_not_run_says_why():
    assert [block.place for block in ALL if block.reason and len(block.reason.split()) < 3] == []


def test_an_output_is_not_taken_for_commands():
    first = re.compile(r"(python3?|pip|torchrun|flatout) ")
    assert [
        block.place for block in ALL if block.language == "text" and first.match(block.text)
    ] == []


@pytest.mark.soak(seconds=12)
@pytest.mark.parametrize("part", range(4))
def test_every_command_of_train_composes(part, tmp_path, monkeypatch):
    put_package_of_own_parts(tmp_path, monkeypatch)
    found = {each: words for each in COMMANDS if (words := words_of_train(each)) is not None}
    broken = []
    for command in sorted(found)[part::4]:
        try:
            compose(command, found[command])
        except AssertionError as error:
            broken.append(str(error))
    assert not broken, "\n".join(broken)


def test_every_verb_reads_its_arguments():
    for command in COMMANDS:
        words = words_of_flatout(command)
        if words:
            parse(command, words)


def test_every_other_command_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for command, place in COMMANDS.items():
        if words_of_train(command) is not None or words_of_flatout(command) is not None:
            continue
        words = shlex.split(command, comments=True)
        if words[0] == "pip":
            assert set(re.findall(r"\[(\w+)\]", command)) <= set(extras), place
            assert "-c" not in words or (ROOT / words[words.index("-c") + 1]).is_file(), place
        elif words[0] == "python":
            script = (
                Path(words[1]) if words[1] != "-m" else Path(words[2].replace(".", "/") + ".py")
            )
            assert (ROOT / script).is_file(), f"{place}: {command}"
        else:
            assert words[0] in PROGRAMS, f"{place}: {command}"


def test_settings_of_clusters_are_read():
    for block in ALL:
        if block.language == "yaml":
            assert yaml.safe_load(block.text), block.place
        if block.language == "toml":
            assert tomllib.loads(block.text), block.place
        if block.language == "bash":
            assert subprocess.run(["bash", "-n"], input=block.text.encode()).returncode == 0, (
                block.place
            )


def test_scripts_that_run_elsewhere_are_named_there():
    for (page, _), test in ELSEWHERE.items():
        assert page.removesuffix(".md") in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.filterwarnings(*LIGHTNINGS_HINTS)
@pytest.mark.parametrize(
    "page", sorted({block.page for block in ALL if block.language == "python"})
)
def test_every_script_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tables(tmp_path)
    names: dict[str, Any] = {"__name__": "__page__"}
    for block in scripts_of(page):
        if block.text not in _ran:
            put_what_a_script_needs(block, tmp_path, names)
            # a page is a program of this project
            exec(compile(block.text, block.place, "exec", dont_inherit=True), names)
        _ran.add(block.text)


_ran: set[str] = set()
"""Scripts that stand on several pages run once."""


def test_the_first_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_tables(tmp_path)
    said = iter_commands(
        "python -m flatout check news.csv",
        "python -m train data.source=news.csv",
        "python -m flatout predict RUN rows.csv --out answers.csv",
        "python -m flatout evaluate RUN labelled.csv",
        "python -m flatout doctor RUN",
        "python -m flatout cache list",
        "python -m flatout settings data.batch_size",
    )
    for command in said:
        run_command(command, monkeypatch)
    assert len(read_csv(tmp_path / "answers.csv")) == 20
    printed = capsys.readouterr().out
    assert "written to answers.csv: 20 rows" in printed
    assert "example  data.batch_size=64" in printed


def iter_commands(*commands: str) -> list[str]:
    """Commands of the pages; one that no page has is a mistake of this test."""
    assert [command for command in commands if command not in COMMANDS] == []
    return list(commands)


def run_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command in this process, small; RUN is the only run so far."""
    words = words_of_train(command)
    if words is not None:
        assert run_train([*words, *SMALL], monkeypatch) == 0, command
        return
    run = only_folder(Path("outputs/default")) if "RUN" in command else ""
    places = {"RUN": str(run)}
    words = [places.get(word, word) for word in words_of_flatout(command) or []]
    assert verb(*words) == 0, command


def compose(command: str, words: list[str]) -> None:
    """Compose a run's settings; of a list of values the first is taken, as in the first trial."""
    options = ("-m", "--help")
    given = [
        each
        for each in words
        if each not in options and not each.startswith(("launcher.", "--config-dir"))
    ]
    try:
        compose_run([first_of(word) for word in replace_groups_by_classes(given)])
    except Exception as error:  # whatever is raised, the page is wrong
        raise AssertionError(f"{COMMANDS.get(command)}: {command}: {error}") from None


def first_of(word: str) -> str:
    """A word with one value: the first of a sweep."""
    (override,) = OverridesParser.create().parse_overrides([word])
    if not override.is_sweep_override():
        return word
    if "interval(" in word:
        bound = re.search(r"interval\(([^,]+),", word)
        assert bound is not None
        return f"{word.partition('=')[0]}={bound[1]}"
    return f"{word.partition('=')[0]}={next(override.sweep_string_iterator())}"


def parse(command: str, words: list[str]) -> None:
    """Parse a verb's arguments; the settings among them are composed."""
    if words == ["--help"]:
        return
    if words[0] == "VERB":
        words = ["check", *words[1:]]
    if words[:2] == ["doctor", "run"] and len(words) > 2:  # a verb of two words
        words = ["doctor_run", *words[2:]]
    assert words[0] in {*VERBS, "doctor_run"}, command
    module = importlib.import_module(f"flatout.cli.{words[0]}")
    parser = ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    with contextlib.redirect_stderr(io.StringIO()) as complaint:
        try:
            parsed = parser.parse_intermixed_args(words[1:])
        except TypeError:  # a verb with actions of its own
            parsed = parser.parse_args(words[1:])
        except SystemExit:
            raise AssertionError(
                f"{COMMANDS.get(command)}: {command}: {complaint.getvalue()}"
            ) from None
    settings = [word for word in getattr(parsed, "words", None) or [] if "=" in word]
    of_sweeps = (
        "trials=",
        "for=",
        "trial_for=",
        "parallel=",
        "confirm=",
        "sampler=",
        "pruner=",
        "metric=",
    )
    if words[0] in ("tune", "probe", "sweep") and "resume" not in words:
        compose(
            command, [word for word in settings if not word.startswith((*of_sweeps, "+sweep="))]
        )


def scripts_of(page: str) -> list[Block]:
    """The scripts of a page that run here."""
    words_run_elsewhere = [word for where, word in ELSEWHERE if where == page]
    found = []
    for block in ALL:
        is_script = block.page == page and block.language == "python" and not block.reason
        if is_script and not any(word in block.text for word in words_run_elsewhere):
            found.append(block)
    return found


def put_what_a_script_needs(block: Block, folder: Path, names: dict[str, Any]) -> None:
    """What a reader of the page has by then: a run, a model and data, a summary."""
    if '"RUN"' in block.text:
        shutil.copytree(train_tiny_run(folder), folder / "RUN", dirs_exist_ok=True)
    if '"FOLDER/' in block.text:
        assert verb("export", train_tiny_run(folder), "--onnx", "--out", folder / "FOLDER") == 0
    if "summary.json" in block.text:
        train_tiny_run(folder)
    if block.page == "callbacks.md":
        from flatout import BiLSTMConfig
        from flatout.data import TextData
        from flatout.tasks import Classifier

        names["data"] = TextData(source="news.csv", text="title", label="topic", batch_size=8)
        names["model"] = Classifier(BiLSTMConfig(embedding=8, hidden=8))


def train_tiny_run(folder: Path) -> Path:
    """A finished run on the tiny table, below `outputs/`."""
    from flatout import BiLSTMConfig, MonitorConfig, TextDataConfig, fit

    runs = folder / "outputs" / "default"
    if not runs.is_dir():
        small = BiLSTMConfig(embedding=8, hidden=8, ngrams="off")  # ONNX holds no linear model
        fit(
            TextDataConfig(source="news.csv"),
            small,
            epochs=1,
            monitor=MonitorConfig(verdict=False, progress=False),
        )
    return only_folder(runs)


def write_tables(folder: Path) -> None:
    """The tables that the pages name, with a few rows each."""
    words = {
        "sport": "goal match team",
        "politics": "vote law party",
        "science": "cell atom star",
    }
    rows = [
        {"title": f"{each} {number} {topic_words.split()[number % 3]}", "topic": topic}
        for number in range(40)
        for topic, topic_words in words.items()
        for each in ("the", "a")
    ]
    for name, count in (
        ("news.csv", 240),
        ("labelled.csv", 30),
        ("rows.csv", 20),
    ):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["title", "topic"])
            writer.writeheader()
            writer.writerows(rows[:count])


def put_package_of_own_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of docs/own_parts.md and docs/own_loss.md, which commands name as `mypkg`."""
    (script,) = [
        block.text
        for block in ALL
        if block.page == "own_parts.md" and "class MyModule" in block.text
    ]
    (script_of_losses,) = [
        block.text for block in ALL if block.page == "own_loss.md" and "class Focal" in block.text
    ]
    more = f"\n\n{script_of_losses}"
    more += (
        "\n\nclass OfTexts(MyModule):\n    pass\n\n\nclass MyLogger(L.pytorch.loggers.CSVLogger):\n"
        "    pass\n"
    )
    for name in ("mypkg", "my_package"):
        (folder / f"{name}.py").write_text(
            script + more + "\n\nclass Mine(L.Callback):\n    pass\n", encoding="utf-8"
        )
        monkeypatch.delitem(importlib.import_module("sys").modules, name, raising=False)
    monkeypatch.syspath_prepend(folder)
