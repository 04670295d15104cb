"""A case of the catalogue: files, how they are read, and what must be said of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.data.texts.settings import TextDataConfig
from flatout.errors import settings_of

WORDS = "amber birch cedar delta ember fjord grove heath islet jetty knoll lagoon".split()


def lines(number: int = 60, first: int = 0) -> list[tuple[str, str]]:
    """Rows that nothing is wrong with."""
    return [
        (f"{WORDS[i % 12]} {WORDS[i * 5 % 11]} number {i}", ("land", "water", "wood")[i % 3])
        for i in range(first, first + number)
    ]


def csv_of(rows: list[tuple[str, str]], header: str = "text,label") -> str:
    return "\n".join([header, *(f"{text},{label}" for text, label in rows)]) + "\n"


@dataclass(frozen=True, slots=True)
class Case:
    """A case: what lies in the folder, how it is read, and what must be said."""

    name: str
    says: str
    """Part of the error, or of a remark where the data is accepted."""
    files: Callable[[Path], dict[str, Any]]
    """Writes files into a folder; the settings that read them."""
    is_error: bool = True

    def config(self, folder: Path) -> TextDataConfig:
        return settings_of(TextDataConfig, {**self.files(folder), "cache": str(folder / "cache")})


class CaseList(list[Case]):
    """Cases of one kind, in the order in which they are written down."""

    def add(self, name: str, says: str, *, is_error: bool = True) -> Callable[..., Any]:
        """Write down a case whose files a function writes."""

        def add(files: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
            self.append(Case(name, says, files, is_error))
            return files

        return add

    def add_file(
        self,
        name: str,
        says: str,
        content: str | bytes,
        *,
        file: str = "rows.csv",
        is_error: bool = True,
        **settings: Any,
    ) -> None:
        """Write down a case of one file."""

        def files(folder: Path) -> dict[str, Any]:
            data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
            (folder / file).write_bytes(data)
            return {"train": str(folder / file), **settings}

        self.append(Case(name, says, files, is_error))


GOOD = csv_of(lines())
TEXTS = [text for text, _ in lines()]
