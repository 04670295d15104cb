"""Comma- or tab-separated values, every value the text that is written.

The fast reader says little of what it cannot read; the piece it gave up on is read once more,
slowly, for row and line.
"""

from __future__ import annotations

import csv
import io
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

from flatout.data.tables.formats.file import LONGEST_ROW, FileTable, as_file, pieces_of
from flatout.data.tables.reading import ReadingConfig
from flatout.errors import UserError, example_columns, require

CANDIDATES = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}
_ROWS_LOOKED_AT = 200  # for the delimiter
# A delimiter that the ending of the name promises stays if it fits so much of the best share.
_NEARLY = 0.9
# pyarrow 26 reads up to 36 blocks ahead: 8 MB each cost 300 MB and gained nothing
_CSV_BLOCK_BYTES = 1 << 21
_MOST_OF_TEXTS = 3  # columns of a file that an example takes for texts
_OPEN_QUOTE = "an open quote at the end"
_END = "\x1eend of file"
"""A row that is added behind the last row of a csv. If it is not read as a row of its own, an open
quote has swallowed it."""


def _rows_of(lines: Iterable[str], delimiter: str, quote: str) -> Any:
    how: dict[str, Any] = {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}
    return csv.reader(lines, delimiter=delimiter, **how)


def find_delimiter(head: str, *, promised: str, quote: str, is_whole: bool) -> str:
    """The delimiter of a file that begins with `head`: by it most rows have as many values as the
    first names.
    """
    # One that the ending promises (a comma in .csv, a tab in .tsv) stays where it fits nearly as
    # well as any other.
    fits = {
        delimiter: _share_that_fits(head, delimiter, quote, is_whole) for delimiter in CANDIDATES
    }
    best = max(fits, key=lambda delimiter: (fits[delimiter], delimiter == promised))
    is_fine = fits[promised] > 0 and fits[promised] >= _NEARLY * fits[best]
    return promised if is_fine or fits[best] == 0 else best


def _share_that_fits(head: str, delimiter: str, quote: str, is_whole: bool) -> float:
    """Share of rows with as many values as the first line names; none where it names one column
    only.
    """
    try:
        rows = _rows_of(io.StringIO(head, newline=""), delimiter, quote)
        widths = [len(row) for row in islice(filter(None, rows), _ROWS_LOOKED_AT)]
    except csv.Error:
        return 0.0
    if not is_whole and len(widths) < _ROWS_LOOKED_AT:
        widths = widths[:-1]  # cut in the middle
    return widths.count(widths[0]) / len(widths) if widths and widths[0] > 1 else 0.0


class CsvTable(FileTable):
    """Comma- or tab-separated values; every value is the text that is written."""

    told_by_head = ("columns", "delimiter", "_notes")

    def __init__(
        self, path: Path, where: str, reading: ReadingConfig | None = None, *, promised: str = ","
    ) -> None:
        self._promised = promised
        self.delimiter = promised
        self._notes = list[str]()
        super().__init__(path, where, reading)

    def how(self) -> str:
        sign = self.delimiter
        is_found_out = self.reading.delimiter is None and sign != self._promised
        delimiter = f"{CANDIDATES.get(sign, repr(sign))} between values" + (
            ", found out" if is_found_out else ""
        )
        return ", ".join([delimiter, *self._notes])

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        """Starts again with larger blocks where a row is longer than two of them."""
        done = 0
        for block_bytes in (_CSV_BLOCK_BYTES, LONGEST_ROW):
            read = 0
            try:
                for block in self._whole_rows(columns, block_bytes):
                    new = block.slice(max(0, done - read))
                    read += block.num_rows
                    done += new.num_rows
                    yield new
                return
            except pa.ArrowException as error:
                if "straddling" not in str(error) or block_bytes == LONGEST_ROW:
                    raise self._explain(str(error)) from None

    def _whole_rows(self, columns: list[str], block_bytes: int) -> Iterator[pa.RecordBatch]:
        """What the reader reads, without the row that was added at the end.

        That row must come out as it went in: else a quote was not closed.
        """
        last: pa.RecordBatch | None = None
        with self._open() as file, self._reader(file, columns, block_bytes) as reader:
            for block in reader:
                if last is not None and block.num_rows:
                    yield last
                last = block if block.num_rows else last
        if last is None or any(column[-1].as_py() != _END for column in last.columns):
            raise pa.ArrowInvalid(_OPEN_QUOTE)
        yield last.slice(0, last.num_rows - 1)

    def _reader(
        self, file: io.BufferedReader, columns: list[str], block_bytes: int
    ) -> pa_csv.CSVStreamingReader:
        delimiter = self.delimiter
        quote = self.reading.quote
        ending = f"\n{delimiter.join([_END] * len(self.columns))}\n".encode()
        ended = as_file(chain(pieces_of(file), [ending]), file)
        types = dict.fromkeys(columns, pa.large_string())
        return pa_csv.open_csv(
            pa.PythonFile(ended, mode="r"),
            pa_csv.ReadOptions(block_size=block_bytes, column_names=self.reading.columns),
            pa_csv.ParseOptions(
                delimiter=delimiter, quote_char=quote or False, newlines_in_values=bool(quote)
            ),
            pa_csv.ConvertOptions(
                column_types=types, include_columns=columns, strings_can_be_null=False
            ),
        )

    def _read_columns(self) -> list[str]:
        head, is_whole = self._head()
        marked = "UTF-8 with a byte order mark" if head.startswith(BOM_UTF8) else "UTF-8"
        self._notes = [self.reading.encoding or marked]
        self._notes += ["CRLF at line ends"] if b"\r\n" in head else []
        self._notes += ["quotes are part of values"] if not self.reading.quote else []
        text = head.decode("utf-8-sig", "replace")
        quote = self.reading.quote
        self.delimiter = self.reading.delimiter or find_delimiter(
            text, promised=self._promised, quote=quote, is_whole=is_whole
        )
        lines = io.StringIO(text, newline="")
        try:
            names: list[str] = next(filter(None, _rows_of(lines, self.delimiter, quote)), [])
        except csv.Error:
            names = []
        if not names or any("\ufffd" in name for name in names):
            self._require_utf8()
        if (columns := self.reading.columns) is not None:
            counts = f"its first row has {len(names)} values, data.read.columns has {len(columns)}"
            require(
                len(columns) == len(names),
                "data.read.columns",
                f"{self.path}: {counts}: {', '.join(columns)}",
                hint="Give one name for each column.",
            )
            return columns
        if not names:
            raise self._fail(
                "the first line is no list of columns", "Its first line must name the columns."
            )
        if is_whole and not lines.read().strip("\r\n"):
            # Of many columns hardly two are a text and its label: they are those of recordings.
            roles = ("text", "label") if len(names) <= _MOST_OF_TEXTS else ()
            hint = (
                "Add rows; or, if that line is a row, name the columns:"
                f" data.read.columns={example_columns(len(names), roles)}."
            )
            if self.where == "encode":  # which reads tables as they are
                hint = "Add rows."
            raise self._fail("no rows below the line that names the columns", hint)
        return names

    def _explain(self, message: str) -> UserError:
        self._require_utf8()
        row, line, values, is_spread = self._misfit()
        if _OPEN_QUOTE in message and values == len(self.columns):
            hint = 'Close it, or double a quote that is part of the text: "".'
            return self._fail(f"row {row}: a quote is opened in line {line} and not closed", hint)
        if values == 0:
            what = f"row {row}: longer than {LONGEST_ROW >> 20} MB from line {line} on"
            return self._fail(what, "Is a quote opened there and not closed?")
        if values == len(self.columns):
            is_long = "straddling" in message
            return self._fail(
                f"a row is longer than {LONGEST_ROW >> 20} MB"
                if is_long
                else message.splitlines()[0]
            )
        hint = f"Quote values that hold {self.delimiter!r} or line ends."
        hint += " Is the quote that opens there closed?" if is_spread else ""
        return self._fail(
            f"row {row}: expected {len(self.columns)} columns, got {values} (line {line})", hint
        )

    def _misfit(self) -> tuple[int, int, int, bool]:
        """The first row that does not fit, as (number, line, values, whether it has several lines).

        0 values: the row does not end.
        """
        line = 1
        next_line = 1
        values = 0
        row = 0 if self.reading.columns else -1  # the line that names the columns is row 0
        limit = csv.field_size_limit(LONGEST_ROW)
        try:
            with self._open() as file:
                rows = _rows_of(
                    (line.decode("utf-8-sig") for line in file), self.delimiter, self.reading.quote
                )
                for cells in rows:
                    if cells:
                        row += 1
                        line = next_line
                        values = len(cells)
                    next_line = rows.line_num + 1
                    if cells and values != len(self.columns):
                        break
        except csv.Error:
            row += 1
            line = next_line
            values = 0
        finally:
            csv.field_size_limit(limit)
        return row, line, values, next_line - line > 1
