"""What stands between the values of a csv, found out from its first rows.

The delimiter is the one by which the most rows have as many values as the first line has names. A file whose ending
promises one (a comma in .csv, a tab in .tsv) keeps it where it fits nearly as well as any other.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

CANDIDATES = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
_ROWS_LOOKED_AT = 200
_NEARLY = 0.9


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the values of a csv are parted and wrapped."""

    delimiter: str
    quote: str

    def rows(self, lines: Iterable[str]) -> Any:
        """Python's csv reader over some lines."""
        if self.quote:
            return csv.reader(lines, delimiter=self.delimiter, quotechar=self.quote)
        return csv.reader(lines, delimiter=self.delimiter, quoting=csv.QUOTE_NONE)

    def delimiter_name(self) -> str:
        return CANDIDATES.get(self.delimiter, repr(self.delimiter))


def find_dialect(head: str, *, promised: str, quote: str, is_whole: bool) -> Dialect:
    """The dialect of a file that begins with `head`."""
    fits = {delimiter: _share_that_fits(head, Dialect(delimiter, quote), is_whole) for delimiter in CANDIDATES}
    best = max(fits, key=lambda delimiter: (fits[delimiter], delimiter == promised))
    is_fine = fits[promised] > 0 and fits[promised] >= _NEARLY * fits[best]
    return Dialect(promised if is_fine or fits[best] == 0 else best, quote)


def _share_that_fits(head: str, dialect: Dialect, is_whole: bool) -> float:
    """Share of rows with as many values as the first line names; none where it names one column only."""
    try:
        rows = dialect.rows(io.StringIO(head, newline=""))
        widths = [len(row) for row in islice(filter(None, rows), _ROWS_LOOKED_AT)]
    except csv.Error:
        return 0.0
    if not is_whole and len(widths) < _ROWS_LOOKED_AT:
        widths = widths[:-1]  # cut in the middle
    if not widths or widths[0] < 2:
        return 0.0
    return widths.count(widths[0]) / len(widths)
