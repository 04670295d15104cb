"""Count what is found in the rows of a table, and report it line by line.

Each kind of finding has a row in `findings.toml`: its level, a sentence, and the setting that
changes what is done. `Findings` counts the rows of each kind and remembers the first few.
`remarks` turns them into lines. Rows are never lost in silence: rows read = kept as written + kept
after a repair + dropped. Open this file to change how a finding is worded.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatout.errors import printable

_ROWS_NAMED = 5  # rows of a kind that are named as examples
# How much a finding matters: good to know, worth fixing, or a reason not to train.
Level = StrEnum("Level", "note warning error")


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One kind of finding about rows, as `findings.toml` has it."""

    level: Level
    sentence: str  # goes behind the number of rows: "without a label, dropped"
    hint: str = ""  # the setting that changes what is done


_WRITTEN = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
KINDS = {name: FindingKind(Level(level), *texts) for name, (level, *texts) in _WRITTEN.items()}


@dataclass(slots=True)
class RowFinding:
    """How many rows have a kind of finding, and the first few of them, counted from 1."""

    count: int = 0
    rows: list[int] = field(default_factory=list)
    other: str = ""  # of a leak: the split that has the same text

    def add(self, count: int, rows: Iterable[int]) -> None:
        """Add `count` rows; `rows` are the first few of them, in any order."""
        self.count += count
        self.rows = sorted([*self.rows, *rows])[:_ROWS_NAMED]


@dataclass(slots=True)
class Findings:
    """What was found in the rows of one source, by the name of the kind."""

    source: str
    rows_read: int = 0
    rows_kept: int = 0
    rows_repaired: int = 0  # of the rows kept, those that were changed
    # The key is the name of a kind; of a leak, with the other split behind it: "leak test".
    by_kind: dict[str, RowFinding] = field(default_factory=dict)
    # Where the reader finds a row, from its number counted from 1: "line 12 of b.csv".
    locate: Callable[[int], str] = str

    @property
    def rows_dropped(self) -> int:
        return self.rows_read - self.rows_kept

    def add(self, kind: str, rows: NDArray[np.int64], other: str = "") -> None:
        """Count rows of a kind, given by their numbers from 0 in any order.

        `other` is the split that a leak is shared with.
        """
        if len(rows):
            finding = self.by_kind.setdefault(f"{kind} {other}".strip(), RowFinding(other=other))
            # The smallest few, without sorting what may be millions.
            least = (
                np.partition(rows, _ROWS_NAMED)[:_ROWS_NAMED] if len(rows) > _ROWS_NAMED else rows
            )
            finding.add(len(rows), (least + 1).tolist())

    def take_in(
        self, rows_read: int, findings: Mapping[str, tuple[int, list[int], str]], first: int
    ) -> None:
        """Add the findings of a file, whose rows are those of the source from `first` on.

        `findings` has the fields of a `RowFinding` by its key; its row numbers begin with the file.
        """
        self.rows_read += rows_read
        for key, (count, rows, other) in findings.items():
            finding = self.by_kind.setdefault(key, RowFinding(other=other))
            finding.add(count, (row + first for row in rows))

    def remarks(self) -> list[Remark]:
        """A line for each kind: "2 rows without a label, dropped (rows 3, 8)"."""
        remarks = []
        for key, finding in self.by_kind.items():
            kind = KINDS[key.partition(" ")[0]]
            count = finding.count
            rows = ", ".join(map(self.locate, finding.rows))
            if count > len(finding.rows):
                rows += ", …"
            sentence = kind.sentence.format(other=finding.other)
            what = f"{counted(count, 'row')} {sentence} (row{'' if count == 1 else 's'} {rows})"
            remarks.append(
                Remark(kind.level, self.source, what, kind.hint, count=count, rows=finding.rows)
            )
        return remarks

    def account(self) -> str:
        """How many rows were read, kept, repaired and dropped."""
        as_written = self.rows_kept - self.rows_repaired
        return (
            f"{self.rows_read:,} read = {as_written:,} kept as written +"
            f" {self.rows_repaired:,} repaired + {self.rows_dropped:,} dropped"
        )


def counted(number: int, thing: str) -> str:
    """A number of things, in words: "1 row", "2,000 rows", "3 classes"."""
    if number == 1:
        return f"1 {thing}"
    return f"{number:,} {thing}{'es' if thing.endswith('s') else 's'}"


def name_few(names: Sequence[str], most: int = 3) -> str:
    """The first `most` names, and a sign that there are more: "a, b, c, …"."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


@dataclass(frozen=True, slots=True)
class Remark:
    """One line of a report about data."""

    level: Level
    source: str  # the file, files or split that it is about
    what: str
    hint: str = ""  # the setting that changes it
    count: int | None = None  # rows it is about
    rows: list[int] = field(default_factory=list)  # the first few of them, counted from 1
    stands_for: int = 1  # remarks; one line may say how many more there are

    def line(self) -> str:
        return printable(f"{self.source}: {self.what}" + (f"; {self.hint}" if self.hint else ""))

    def as_dict(self) -> dict[str, Any]:
        """The remark as it stands in `summary.json`."""
        described = asdict(self)
        del described["stands_for"]
        # The hint stands there twice: programs read it by its earlier name.
        return described | {"level": self.level.value, "mend": self.hint}


@dataclass(slots=True)
class CheckReport:
    """What a check found in a source: its remarks, and what each kind of data adds."""

    source: str
    remarks: list[Remark] = field(default_factory=list, kw_only=True)

    def count(self, level: Level) -> int:
        return sum(remark.stands_for for remark in self.remarks if remark.level is level)

    def remarks_as_dict(self) -> dict[str, Any]:
        return {
            "errors": self.count(Level.error),
            "warnings": self.count(Level.warning),
            "remarks": [remark.as_dict() for remark in self.remarks],
        }


def lines_of(remarks: Iterable[Remark]) -> list[str]:
    """A line for each remark; a file is named with its folder once, then by its own name."""
    remarks = list(remarks)
    text = "\n".join(remark.line() for remark in remarks)
    for folder in _folders_to_shorten(remarks):
        # Only at the start of a path: not the "data/" within "more_data/".
        pattern = re.compile(rf"(?<![^\s,:(]){re.escape(folder)}")
        if first := pattern.search(text):
            text = text[: first.end()] + pattern.sub("", text[first.end() :])
    return text.split("\n") if remarks else []


def _folders_to_shorten(remarks: Iterable[Remark]) -> list[str]:
    """Folders of the files that remarks are about, each with its slash.

    A folder that shares a file name with another is left out: "train.csv" would mean two files.
    """
    names = {
        re.sub(r" and \d+ more$", "", name)
        for remark in remarks
        for name in remark.source.split(", ")
    }
    paths = [path for path in map(Path, sorted(names)) if path.name != str(path)]
    counts = Counter(path.name for path in paths)
    ambiguous = {path.parent for path in paths if counts[path.name] > 1}
    return list(
        dict.fromkeys(str(path.parent / "_")[:-1] for path in paths if path.parent not in ambiguous)
    )


def all_remarks(findings: Iterable[Findings]) -> list[Remark]:
    """The remarks of several sources, one source after the other."""
    return [remark for of_source in findings for remark in of_source.remarks()]
