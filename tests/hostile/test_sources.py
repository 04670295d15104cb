"""What the sources may not say where the linter has no rule for it, and what a run listens to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import lightning as L
import psutil

import flatout
from tests.faults import runs

SOURCES = sorted(Path(flatout.__file__).parents[1].glob("**/*.py"))


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
    assert len(SOURCES) > 50
    assert found == []
    assert is_trusting("torch.load", {})
    assert is_trusting("np.load", {"allow_pickle": "True"})


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
    assert len(lines) == 10
    assert {line.split(" ", 1)[1] for line in lines} == {"[]"}
