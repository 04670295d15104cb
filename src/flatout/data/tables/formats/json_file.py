"""JSON lines, or one array of objects; types are those that are written.

A JSON array is read an object at a time, about ten times slower than JSON lines; for millions of
rows write lines.
"""

from __future__ import annotations

import bisect
import codecs
import io
import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import pyarrow.json as pa_json

from flatout.data.tables.formats.file import (
    HEAD_BYTES,
    LONGEST_ROW,
    ONE_WAY,
    FileTable,
    pieces_of,
    require_utf8,
)

_BLOCK_BYTES = 1 << 23  # read at once; Arrow reads pieces of a few MB at full speed
_ROWS_LOOKED_AT = 1_000  # rows whose names become the columns; later names are left out
_LONGEST_VALUE = 60  # characters of a value in an error
_JSON_FORMS = "Write one object a line, or one array of objects."
_DECODER = json.JSONDecoder()
_BETWEEN = re.compile(r"\s*(?:,\s*)?")
Types = dict[str, pa.DataType]


class JsonTable(FileTable):
    """One JSON object a line, or one array of objects.

    The first rows settle the type of each column.
    """

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        types: Types = {}
        if self._is_array():
            rows = self._array()
            first = 1
            while block := list(islice(rows, rows_per_block)):
                yield self._block(block, columns, types, first)
                first += len(block)
            return
        row = 1
        line = 1
        for piece in self._pieces():
            batch = self._parsed(piece, columns, types)
            if batch is None:
                batch = self._block(list(self._objects(piece, line)), columns, types, row)
            yield batch
            row += batch.num_rows
            line += piece.count(b"\n")

    def _pieces(self) -> Iterator[bytes]:
        """The file in pieces of whole lines; the first, which is read slowly, is small."""
        with self._open() as file:
            piece = file.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
            while piece:
                yield piece + file.readline()
                piece = file.read(_BLOCK_BYTES)

    def _parsed(self, piece: bytes, columns: list[str], types: Types) -> pa.RecordBatch | None:
        """A piece read by Arrow; None before types are settled, and where Arrow fails.

        Without types Arrow would make dates of texts that look so.
        """
        if not types:
            return None
        schema = pa.schema([(name, types.get(name, pa.string())) for name in columns])
        options = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        try:
            table = pa_json.read_json(pa.BufferReader(piece), parse_options=options)
            table.validate(full=True)  # any bytes were taken for texts
        except pa.ArrowException:
            return None
        blocks = table.select(columns).combine_chunks().to_batches()
        return blocks[0] if len(blocks) == 1 else None

    def _block(
        self, rows: list[Any], columns: list[str], types: Types, first_row: int
    ) -> pa.RecordBatch:
        arrays = []
        for name in columns:
            values = [row.get(name) for row in rows]
            arrays.append(self._column(values, name, types, first_row))
        return pa.RecordBatch.from_arrays(arrays, names=columns)

    def _column(self, values: list[Any], name: str, types: Types, first_row: int) -> pa.Array:
        expected = types.get(name)
        if not _fits(values, expected):
            # The shortest beginning that does not fit ends with the value that is wrong.
            wrong = bisect.bisect_left(
                range(len(values)), True, key=lambda i: not _fits(values[: i + 1], expected)
            )
            before = expected or pa.array(values[:wrong]).type
            others = "" if pa.types.is_null(before) else f", rows before have {before}"
            is_half = isinstance(values[wrong], str) and not _fits([values[wrong]], None)
            hint = "Remove the half character, an escape from \\ud800 to \\udfff."
            what = f"row {first_row + wrong}: {name} is {_short(values[wrong])}{others}"
            raise self._fail(what, hint if is_half else ONE_WAY)
        array = pa.array(values, type=expected)
        if pa.types.is_null(array.type):
            return array.cast(pa.string())
        if pa.types.is_list(array.type) and pa.types.is_null(array.type.value_type):
            return array.cast(pa.list_(pa.string()))
        types.setdefault(name, array.type)
        return array

    def _is_array(self) -> bool:
        return self._head()[0].removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["

    def _objects(self, piece: bytes, first_line: int) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(piece.split(b"\n"), first_line):
            require_utf8(self.path, line, self.where, first_line=number)
            if not line.strip():
                continue
            try:
                # given bytes, it would guess UTF-16 and UTF-32 too
                value = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise self._fail(
                    f"line {number}: not valid JSON ({_reason(error)})", _JSON_FORMS
                ) from None
            if not isinstance(value, dict):
                raise self._fail(
                    f"line {number}: a {type(value).__name__} where an object is needed",
                    _JSON_FORMS,
                )
            yield value

    def _array(self) -> Iterator[dict[str, Any]]:
        """The objects of an array, one after the other, from a window that moves over the file."""
        with self._open() as file:
            texts = self._texts(file)
            # An object that does not end in the window is decoded again when more was read.
            window = next(texts, "").lstrip()[1:]
            position = 0
            row = 0
            while True:
                between = _BETWEEN.match(window, position)
                position = between.end() if between else position
                try:
                    value, end = _DECODER.raw_decode(window, position)
                except (ValueError, RecursionError) as error:
                    if window[position : position + 1] == "]":
                        break
                    window = window[position:]
                    position = 0
                    if len(window) > LONGEST_ROW or not (more := next(texts, "")):
                        raise self._fail(
                            f"row {row + 1}: not valid JSON ({_reason(error)})", _JSON_FORMS
                        ) from None
                    window += more
                    continue
                row += 1
                position = end
                if not isinstance(value, dict):
                    raise self._fail(
                        f"row {row}: a {type(value).__name__} where an object is needed",
                        _JSON_FORMS,
                    )
                yield value
            if window[position + 1 :].strip() or any(text.strip() for text in texts):
                raise self._fail(
                    f"row {row}: the array ends here, but the file continues", _JSON_FORMS
                )

    def _texts(self, file: io.BufferedReader) -> Iterator[str]:
        try:
            yield from codecs.iterdecode(pieces_of(file), "utf-8-sig")
        except UnicodeDecodeError:
            self._require_utf8()

    def _read_columns(self) -> list[str]:
        """Every name of the first rows: a row may leave out what it has no value for."""
        if self._is_array():
            first_rows = list(islice(self._array(), _ROWS_LOOKED_AT))
        else:
            rows_of_pieces = (list(self._objects(piece, 1)) for piece in self._pieces())
            first_rows = next(filter(None, rows_of_pieces), [])
        if not first_rows:
            raise self._fail("no rows")
        return list(dict.fromkeys(chain.from_iterable(first_rows)))


def _fits(values: list[Any], kind: pa.DataType | None) -> bool:
    try:
        pa.array(values, type=kind)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return False
    return True


def _short(value: object) -> str:
    """A value and its type for an error; half characters, which no terminal prints, are escaped."""
    text = repr(value).encode("utf-8", "backslashreplace").decode()
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]}…"
    kind = pa.array([value]).type if _fits([value], None) else "no text that can be stored"
    return f"{text} ({kind})"


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else "a number of endless digits"
