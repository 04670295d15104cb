"""What was found in a table: each thing counted, with its first rows, what was done, and the
setting that changes it.

Rows are never lost in silence: read = kept as written + kept after a repair + dropped.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.errors import printable

_ROWS_NAMED = 5
Level = StrEnum("Level", "note warning error")
"""How much a finding matters: good to know, worth fixing, or a reason not to train."""


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One sort of finding about rows."""

    level: Level
    sentence: str  # what is so of the rows, after their number, and what was done
    hint: str = ""  # the setting that changes what is done


_WRITTEN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
# of findings about rows
KINDS = {name: FindingKind(Level(level), *texts) for name, (level, *texts) in _WRITTEN.items()}


@dataclass(slots=True)
class RowFinding:
    """How often something was found, and the first rows that have it, counted from 1."""

    count: int = 0
    rows: list[int] = field(default_factory=list)
    other: str = ""  # the split that the rows share something with


@dataclass(slots=True)
class Findings:
    """What was found in the rows of one source."""

    source: str
    rows_read: int = 0
    rows_kept: int = 0
    rows_repaired: int = 0  # of the rows kept, those that were changed
    found: dict[str, RowFinding] = field(default_factory=dict)
    locate: Callable[[int], str] = str

    @property
    def rows_dropped(self) -> int:
        return self.rows_read - self.rows_kept

    def add(self, name: str, rows: NDArray[np.int64], other: str = "") -> None:
        """Count rows, given by their numbers from 0 in any order; the first few are remembered."""
        if len(rows):
            finding = self.found.setdefault(f"{name} {other}".strip(), RowFinding(other=other))
            finding.count += len(rows)
            few = np.partition(rows, _ROWS_NAMED)[:_ROWS_NAMED] if len(rows) > _ROWS_NAMED else rows
            finding.rows = sorted([*finding.rows, *(few + 1).tolist()])[:_ROWS_NAMED]

    def take_in(
        self, rows_read: int, found: Mapping[str, tuple[int, list[int], str]], first: int
    ) -> None:
        """Add what was found in some rows from `first` on: of each sort how many, the first few,
        the other split.
        """
        self.rows_read += rows_read
        for name, (count, rows, other) in found.items():
            finding = self.found.setdefault(name, RowFinding(other=other))
            finding.count += count
            finding.rows = sorted([*finding.rows, *(row + first for row in rows)])[:_ROWS_NAMED]

    def remarks(self) -> list[Remark]:
        remarks = []
        for name, finding in self.found.items():
            # behind a blank stands the name of a split
            kind = KINDS[name.partition(" ")[0]]
            count = finding.count
            rows = ", ".join(map(self.locate, finding.rows)) + (
                ", …" if count > len(finding.rows) else ""
            )
            sentence = kind.sentence.format(other=finding.other)
            what = f"{counted(count, 'row')} {sentence} (row{'' if count == 1 else 's'} {rows})"
            remarks.append(
                Remark(kind.level, self.source, what, kind.hint, count=count, rows=finding.rows)
            )
        return remarks

    def account(self) -> str:
        """What became of all rows."""
        as_written = self.rows_kept - self.rows_repaired
        parts = (
            f"{as_written:,} kept as written + {self.rows_repaired:,} repaired +"
            f" {self.rows_dropped:,} dropped"
        )
        return f"{self.rows_read:,} read = {parts}"


def counted(number: int, thing: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {thing}{'' if number == 1 else 'es' if thing.endswith('s') else 's'}"


@dataclass(frozen=True, slots=True)
class Remark:
    """One line of a report about data."""

    level: Level
    source: str
    what: str
    hint: str = ""  # the setting that changes it
    count: int | None = None
    rows: list[int] = field(default_factory=list)

    def line(self) -> str:
        return printable(f"{self.source}: {self.what}" + (f"; {self.hint}" if self.hint else ""))

    def as_dict(self) -> dict[str, Any]:
        plain = {
            "level": self.level.value,
            "source": self.source,
            "what": self.what,
            "hint": self.hint,
        }
        # "mend" is the name of the hint in summaries of before.
        return plain | {"mend": self.hint, "count": self.count, "rows": self.rows}


def lines_of(remarks: Iterable[Remark]) -> list[str]:
    """A line for each remark; a file is named with its folder once, then by its own name."""
    remarks = list(remarks)
    text = "\n".join(remark.line() for remark in remarks)
    for folder in _folders_named(remarks):
        sign = re.compile(rf"(?<![^\s,:(]){re.escape(folder)}")
        if first := sign.search(text):
            text = text[: first.end()] + sign.sub("", text[first.end() :])
    return text.split("\n") if remarks else []


def _folders_named(remarks: Iterable[Remark]) -> list[str]:
    """Folders of the files that remarks are about, each with its slash; none whose files another
    folder has too.
    """
    names = {
        re.sub(r" and \d+ more$", "", name)
        for remark in remarks
        for name in remark.source.split(", ")
    }
    paths = [path for path in map(Path, sorted(names)) if path.name != str(path)]
    counts = Counter(path.name for path in paths)
    twice = {path.parent for path in paths if counts[path.name] > 1}
    return list(
        dict.fromkeys(str(path.parent / "_")[:-1] for path in paths if path.parent not in twice)
    )


def all_remarks(findings: Iterable[Findings]) -> list[Remark]:
    return [remark for one in findings for remark in one.remarks()]
