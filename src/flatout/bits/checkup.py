"""`flatout check` for bit strings: what a run would find in a table of people.

The store is built as for a run, in a folder that is deleted afterwards. So the lines and mistakes
are those of a run.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.bits.preparation import BitsPreparation
from flatout.bits.settings import BitsDataConfig
from flatout.data.checks.findings import CheckReport, Level, Remark
from flatout.errors import UserError

_WARNING = "warning "


@dataclass(slots=True)
class BitCheckup(CheckReport):
    """What a check found in records and their encodings."""

    rows: dict[str, int] = field(default_factory=dict)  # records of each split
    text_columns: list[str] = field(default_factory=list)  # the plain text
    bits_column: str | None = None  # None where a run would encode the records itself
    uid_column: str | None = None
    is_set: bool = False  # whether an encoding is a set of numbers

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "rows": self.rows,
            "columns": {
                "text": self.text_columns,
                "bits": self.bits_column,
                "uid": self.uid_column,
            },
            **self.remarks_as_dict(),
        }

    def lines(self) -> list[str]:
        """Lines that name the columns which a run would read as encodings and as names."""
        if not self.rows:
            return []
        bits = self.bits_column or "none: a run encodes the plain text as data.encoding says"
        named = self.uid_column or "none"
        return ["", f"column of the encodings: {bits}; column that names each record: {named}", ""]

    def command(self, key: str, source: str, settings: Sequence[str]) -> str:
        experiment = "twostep_bigrams" if self.is_set else "bloom_bigrams"
        start = f"python -m train +experiment={experiment} data.{key}={shlex.quote(source)}"
        return f"{start} {shlex.join(settings)}".rstrip()


def check_bits(config: BitsDataConfig) -> BitCheckup:
    """Read all records as a run does; the first mistake that would end a run is a remark."""
    checkup = BitCheckup(str(config.source or "the built-in people"))
    try:
        with tempfile.TemporaryDirectory() as folder:
            preparation = BitsPreparation(replace(config, cache=folder))
            info = preparation.open()
            checkup.rows = info.summary()["rows"]
            checkup.text_columns = info.text_columns
            checkup.bits_column = preparation.source.bits
            checkup.uid_column = preparation.source.uid
            checkup.is_set = info.is_set
            checkup.remarks = [_remark(line) for line in info.facts["lines"]]
    except UserError as error:
        what = str(error).removeprefix(f"{error.where}: ")
        checkup.remarks.append(Remark(Level.error, error.where, what))
    return checkup


def _remark(line: str) -> Remark:
    level = Level.warning if line.startswith(_WARNING) else Level.note
    source, _, what = line.removeprefix(_WARNING).partition(": ")
    return Remark(level, source, what)
