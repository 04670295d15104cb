"""The fenced blocks of README and docs: what language they are in, and the commands inside."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>.+?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(
    r"(PYTHONPATH=\. )?(python -m|python"
    r" examples/|torchrun|pip|tensorboard|cat|pytest|mkdocs|flatout|flatout-train)\b"
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    reason: str
    """Why it does not run; empty where it does. A comment above the block says so: `<!-- not run:
    WHY -->`."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_of_commands(self) -> bool:
        return self.language == "sh" or (self.language == "" and bool(_COMMAND.match(self.text)))

    def commands(self) -> list[str]:
        """The command lines, those that go over several lines joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks() -> list[Block]:
    """Every block of every page, in their order."""
    return [block for page in PAGES for block in _blocks_of(page)]


def _blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        mark = found["mark"] or ""
        reason = mark.removeprefix("not run: ") if mark.startswith("not run: ") else ""
        line = text[: found.start("text")].count("\n") + 1
        yield Block(page.name, line, found["language"], found["text"], reason)


def all_commands() -> dict[str, str]:
    """Each command that is to run, and the first place where it stands."""
    found: dict[str, str] = {}
    for block in blocks():
        if block.is_of_commands and not block.reason:
            for line in block.commands():
                for command in line.split(" && "):
                    found.setdefault(command.split(" | ")[-1], block.place)
    return found


def words_of_train(command: str) -> list[str] | None:
    """The words behind `-m train`, by python or by torchrun; None for other commands."""
    words = shlex.split(command.removeprefix("PYTHONPATH=. "), comments=True)
    if words[:3] == ["python", "-m", "train"]:
        return words[3:]
    if words[0] == "torchrun":
        return words[words.index("train") + 1 :]
    return None


def words_of_flatout(command: str) -> list[str] | None:
    """The words behind `python -m flatout`; None for other commands."""
    words = shlex.split(command, comments=True)
    return words[3:] if words[:3] == ["python", "-m", "flatout"] else None
