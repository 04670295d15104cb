"""Tables of any size, read in blocks and strictly as written.

A csv's values stay texts: `NA` is no missing value, `007` and `00101` keep their zeros, one missing label does not
turn the others into floats. JSON and parquet keep their own types; a text that looks like a date stays a text. What
cannot be read is told with file and row, never by a reader's own error: when the fast reader gives up, the piece it
gave up on is read once more, slowly, to find the place.

Memory is flat: tens of MB, whatever the size of the file. A JSON array of objects is read an object at a time,
about ten times slower than JSON lines; write lines or parquet where there are millions of rows.
"""

from __future__ import annotations

import bisect
import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq
import xxhash

from flatout.errors import UserError, did_you_mean

_PIECE = 1 << 24
_HEAD_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 23
_CSV_BLOCK_BYTES = 1 << 20  # pyarrow 26 reads up to 36 blocks ahead: 8 MB each cost 300 MB and gained nothing
_LONGEST_ROW = 1 << 24
_COLUMNS_NAMED = 20
_ROWS_LOOKED_AT = 1_000
_OPEN_QUOTE = "an open quote at the end"
_ONE_WAY = "Write all values of a column in one way."
_JSON_FORMS = "Write one object a line, or one array of objects."
_BETWEEN = re.compile(r"\s*(?:,\s*)?")
_END = "\x1eend of file"
"""A row of ours after the last row of a csv: where it does not come out again, an open quote has swallowed it."""
DELIMITERS = {".csv": ",", ".tsv": "\t"}
FORMATS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")


class Table(Protocol):
    """Named columns of rows, read in blocks."""

    name: str
    columns: Sequence[str]

    def fingerprint(self) -> str:
        """Changes with the content and with nothing else."""
        ...

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        """The rows of some columns, in order."""
        ...


def open_table(path: str | Path, *, where: str) -> Table:
    """The table in a file; `where` is the setting that named it."""
    file = Path(path).expanduser()
    _require_file(file, where)
    suffixes = [suffix.lower() for suffix in file.suffixes]
    is_gzipped = bool(suffixes) and suffixes[-1] == ".gz"
    kind = suffixes[-2 if is_gzipped and len(suffixes) > 1 else -1] if suffixes else ""
    if kind in DELIMITERS:
        return CsvTable(file, where, DELIMITERS[kind])
    if kind in (".json", ".jsonl"):
        return JsonTable(file, where)
    if kind == ".parquet" and not is_gzipped:
        return ParquetTable(file, where)
    allowed = f"{', '.join(FORMATS)}, each but the last also as .gz"
    raise UserError(where, f"{file} is no format we read", allowed=allowed)


def table_of(rows: Any, *, where: str = "data.train") -> Table:
    """A table that is in memory already: a mapping of columns, or a pandas, pyarrow or datasets table."""
    try:
        found = _arrow_table(rows)
        if found is not None:
            found.validate(full=True)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:  # lone surrogates are a ValueError
        reason = str(error).splitlines()[0]
        raise UserError(where, f"cannot make a table of these columns: {reason}", mend=_ONE_WAY) from None
    if found is None:
        allowed = "a path, a mapping of columns, a pandas, pyarrow or datasets table"
        raise UserError(where, f"cannot read rows from a {type(rows).__name__}", allowed=allowed)
    if found.num_rows == 0:
        raise UserError(where, "the table in memory has no rows")
    return MemoryTable(found)


def _arrow_table(rows: Any) -> pa.Table | None:
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, Mapping):
        return pa.table({name: pa.array(list(values)) for name, values in rows.items()})
    if hasattr(rows, "with_format") and hasattr(rows, "data"):  # datasets
        return rows.with_format("arrow")[:]
    if hasattr(rows, "iloc") and hasattr(rows, "columns"):  # pandas
        return pa.Table.from_pandas(rows, preserve_index=False)
    if hasattr(rows, "__arrow_c_stream__"):  # polars and others
        return pa.table(rows)
    return None


def require_columns(table: Table, wanted: Mapping[str, str]) -> None:
    """Check that the columns named by some settings exist, once each; all that are missing in one message."""
    keys: dict[str, str] = {}
    for key, name in wanted.items():
        if list(table.columns).count(name) > 1:
            raise UserError(key, f"{table.name} has column {name} more than once", mend="Rename one of them.")
        if name in keys and name in table.columns:
            raise UserError(key, f"{name!r} is the column of {keys[name]} already", allowed=_listed(table.columns))
        keys[name] = key
    missing = {key: name for key, name in wanted.items() if name not in table.columns}
    if not missing:
        return
    names = ", ".join(f"{name!r}" for name in missing.values())
    mends = " ".join(filter(None, (did_you_mean(name, table.columns) for name in missing.values())))
    what = f"no column {names} in {table.name}"
    raise UserError(" and ".join(missing), what, allowed=_listed(table.columns), mend=mends)


def _listed(columns: Sequence[str]) -> str:
    more = ", …" if len(columns) > _COLUMNS_NAMED else ""
    return f"columns: {', '.join(columns[:_COLUMNS_NAMED])}{more}"


class MemoryTable:
    """A table in memory."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows.replace_schema_metadata(None)
        self.name = "table in memory"
        self.columns: Sequence[str] = list(rows.column_names)

    def fingerprint(self) -> str:
        """Of the Arrow stream in blocks of one size, so that it does not matter how the table is chunked."""
        digest = xxhash.xxh3_128()
        with pa.ipc.new_stream(_Digesting(digest), self.rows.schema) as stream:
            for block in _blocks_of(self.rows, 65_536):
                stream.write_batch(block)
        return digest.hexdigest()

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        return _blocks_of(self.rows.select(list(columns)), rows_per_block)


def _blocks_of(rows: pa.Table, rows_per_block: int) -> Iterator[pa.RecordBatch]:
    """Copies a block at a time, never the table."""
    for start in range(0, rows.num_rows, rows_per_block):
        yield from rows.slice(start, rows_per_block).combine_chunks().to_batches()


class _FileTable:
    """A table in a file."""

    def __init__(self, path: Path, where: str) -> None:
        self.path, self.where = path, where
        self.name = str(path)
        self.columns: Sequence[str] = self._read_columns()

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        with self.path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        return digest.hexdigest()

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        if twice := sorted({name for name in columns if list(self.columns).count(name) > 1}):
            mend = "Rename one of them."
            raise UserError(self.where, f"{self.path} has column {', '.join(twice)} more than once", mend=mend)
        for block in self._blocks(list(columns), rows_per_block):
            for start in range(0, block.num_rows, rows_per_block):
                yield block.slice(start, rows_per_block)

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        raise NotImplementedError  # each format has its own

    def _read_columns(self) -> list[str]:
        raise NotImplementedError  # each format has its own

    def _open(self) -> BinaryIO:
        if self.path.suffix.lower() == ".gz":
            return _Gunzipped(self.path, self.where)  # type: ignore[return-value]
        return self.path.open("rb")

    def _require_utf8(self) -> None:
        """Read the whole file for the line that is not UTF-8; only done when something has failed."""
        with self._open() as file:
            for number, line in enumerate(file, 1):
                require_utf8(self.path, line, self.where, first_line=number)

    def _fail(self, what: str, mend: str = "") -> UserError:
        return UserError(self.where, f"{self.path}: {what}", mend=mend)


class CsvTable(_FileTable):
    """Comma- or tab-separated values; every value is the text that is written."""

    def __init__(self, path: Path, where: str, delimiter: str) -> None:
        self.delimiter = delimiter
        super().__init__(path, where)

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        """Begins anew with larger blocks where a row is longer than two of them."""
        block_bytes, done = _CSV_BLOCK_BYTES, 0
        while True:
            read = 0
            try:
                for block in self._whole_rows(columns, block_bytes):
                    new = block.slice(max(0, done - read))
                    read += block.num_rows
                    done += new.num_rows
                    yield new
                return
            except pa.ArrowException as error:
                if "straddling" not in str(error) or block_bytes == _LONGEST_ROW:
                    raise self._explain(str(error)) from None
            block_bytes = _LONGEST_ROW

    def _whole_rows(self, columns: list[str], block_bytes: int) -> Iterator[pa.RecordBatch]:
        """What the reader reads, less the row of ours at the end, which must come out as it went in."""
        last: pa.RecordBatch | None = None
        with self._open() as file, self._reader(file, columns, block_bytes) as reader:
            for block in reader:
                if last is not None and block.num_rows:
                    yield last
                last = block if block.num_rows else last
        if last is None or any(column[-1].as_py() != _END for column in last.columns):
            raise pa.ArrowInvalid(_OPEN_QUOTE)
        yield last.slice(0, last.num_rows - 1)

    def _reader(self, file: BinaryIO, columns: list[str], block_bytes: int) -> pa_csv.CSVStreamingReader:
        ending = self.delimiter.join([_END] * len(self.columns))
        return pa_csv.open_csv(
            pa.PythonFile(_Ended(file, f"\n{ending}\n".encode()), mode="r"),
            read_options=pa_csv.ReadOptions(block_size=block_bytes, use_threads=True),
            parse_options=pa_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(columns, pa.string()),
                include_columns=columns,
                strings_can_be_null=False,
                quoted_strings_can_be_null=False,
            ),
        )

    def _read_columns(self) -> list[str]:
        with self._open() as file:
            head = file.read(_HEAD_BYTES)
        text = io.StringIO(head.decode("utf-8-sig", "replace"), newline="")
        try:
            names = next(filter(None, csv.reader(text, delimiter=self.delimiter)), [])
        except csv.Error:
            names = []
        if not names or any("\ufffd" in name for name in names):
            self._require_utf8()
        if not names:
            raise self._fail("the first line is no list of columns", "Its first line must name the columns.")
        if len(head) < _HEAD_BYTES and not text.read().strip("\r\n"):
            raise self._fail("no rows below the line that names the columns")
        return names

    def _explain(self, message: str) -> UserError:
        """What the fast reader could not read, with the place."""
        self._require_utf8()
        row, line, values, is_spread = self._misfit()
        if _OPEN_QUOTE in message and values == len(self.columns):
            mend = 'Close it, or double a quote that is part of the text: "".'
            return self._fail(f"row {row}: a quote is opened in line {line} and not closed", mend)
        if values == 0:
            what = f"row {row}: longer than {_LONGEST_ROW >> 20} MB from line {line} on"
            return self._fail(what, "Is a quote opened there and not closed?")
        if values == len(self.columns):
            is_long = "straddling" in message
            return self._fail(f"a row is longer than {_LONGEST_ROW >> 20} MB" if is_long else message.splitlines()[0])
        mend = f"Quote values that hold {self.delimiter!r} or line ends."
        mend += " Is the quote that opens there closed?" if is_spread else ""
        return self._fail(f"row {row}: expected {len(self.columns)} columns, got {values} (line {line})", mend)

    def _misfit(self) -> tuple[int, int, int, bool]:
        """Row, line and number of values of the first row that does not fit, and whether it goes over several lines.

        The last row of all when every row fits, and no values when the row has no end.
        """
        row, line, next_line, values = -1, 1, 1, 0  # the line that names the columns is row 0
        limit = csv.field_size_limit(_LONGEST_ROW)
        try:
            with self._open() as file:
                rows = csv.reader(chain((_text(file.readline()),), map(_text, file)), delimiter=self.delimiter)
                for found in rows:
                    if found:
                        row, line, values = row + 1, next_line, len(found)
                    next_line = rows.line_num + 1
                    if found and values != len(self.columns):
                        break
        except csv.Error:
            row, line, values = row + 1, next_line, 0
        finally:
            csv.field_size_limit(limit)
        return row, line, values, next_line - line > 1


class JsonTable(_FileTable):
    """One JSON object a line, or one array of objects. The first rows settle the type of each column."""

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        types: dict[str, pa.DataType] = {}
        if self._is_array():
            rows, first = self._array(), 1
            while block := list(islice(rows, rows_per_block)):
                yield self._block(block, columns, types, first)
                first += len(block)
            return
        row = line = 1
        for piece in self._pieces():
            found = self._parsed(piece, columns, types)
            if found is None:
                found = self._block(list(self._objects(piece, line)), columns, types, row)
            yield found
            row, line = row + found.num_rows, line + piece.count(b"\n")

    def _pieces(self) -> Iterator[bytes]:
        """The file in pieces of whole lines; the first, which is read slowly, is small."""
        with self._open() as file:
            piece = file.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
            while piece:
                yield piece + file.readline()
                piece = file.read(_BLOCK_BYTES)

    def _parsed(self, piece: bytes, columns: list[str], types: dict[str, pa.DataType]) -> pa.RecordBatch | None:
        """Read by Arrow; None before types are settled (Arrow would make dates of texts) and when it cannot."""
        if not types:
            return None
        schema = pa.schema([(name, types.get(name, pa.string())) for name in columns])
        options = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        try:
            found = pa_json.read_json(pa.BufferReader(piece), parse_options=options)
        except pa.ArrowException:
            return None
        blocks = found.select(columns).combine_chunks().to_batches()
        return blocks[0] if len(blocks) == 1 else None

    def _block(
        self, rows: list[dict[str, Any]], columns: list[str], types: dict[str, pa.DataType], first_row: int
    ) -> pa.RecordBatch:
        arrays = [self._column([row.get(name) for row in rows], name, types, first_row) for name in columns]
        return pa.RecordBatch.from_arrays(arrays, names=columns)

    def _column(self, values: list[Any], name: str, types: dict[str, pa.DataType], first_row: int) -> pa.Array:
        expected = types.get(name)
        if not _fits(values, expected):
            # The shortest beginning that does not fit ends with the value that is wrong.
            wrong = bisect.bisect_left(range(len(values)), True, key=lambda i: not _fits(values[: i + 1], expected))
            before = expected or pa.array(values[:wrong]).type
            told = "" if pa.types.is_null(before) else f", rows before have {before}"
            raise self._fail(f"row {first_row + wrong}: {name} is {_short(values[wrong])}{told}", _ONE_WAY)
        array = pa.array(values, type=expected)
        if pa.types.is_null(array.type):
            return array.cast(pa.string())
        if pa.types.is_list(array.type) and pa.types.is_null(array.type.value_type):
            return array.cast(pa.list_(pa.string()))
        types.setdefault(name, array.type)
        return array

    def _is_array(self) -> bool:
        with self._open() as file:
            return file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["

    def _objects(self, piece: bytes, first_line: int) -> Iterator[dict[str, Any]]:
        """The objects of some lines."""
        for number, line in enumerate(piece.split(b"\n"), first_line):
            require_utf8(self.path, line, self.where, first_line=number)
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise self._fail(f"line {number}: not valid JSON ({_reason(error)})", _JSON_FORMS) from None
            if not isinstance(found, dict):
                raise self._fail(f"line {number}: a {type(found).__name__} where an object is needed", _JSON_FORMS)
            yield found

    def _array(self) -> Iterator[dict[str, Any]]:
        """The objects of an array, one after the other, from a window that moves over the file."""
        with self._open() as file:
            texts = self._texts(file)
            window, place, row = next(texts, "").lstrip()[1:], 0, 0
            while True:
                place = _skip_between(window, place)
                try:
                    found, end = _DECODER.raw_decode(window, place)
                except (json.JSONDecodeError, RecursionError) as error:
                    if window[place : place + 1] == "]":
                        break
                    window, place = window[place:], 0
                    if len(window) > _LONGEST_ROW or not (more := next(texts, "")):
                        raise self._fail(f"row {row + 1}: not valid JSON ({_reason(error)})", _JSON_FORMS) from None
                    window += more
                    continue
                row, place = row + 1, end
                if not isinstance(found, dict):
                    raise self._fail(f"row {row}: a {type(found).__name__} where an object is needed", _JSON_FORMS)
                yield found
            if window[place + 1 :].strip() or any(text.strip() for text in texts):
                raise self._fail(f"row {row}: the array ends here, but the file goes on", _JSON_FORMS)

    def _texts(self, file: BinaryIO) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        try:
            while piece := file.read(_HEAD_BYTES):
                yield decoder.decode(piece)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            self._require_utf8()

    def _read_columns(self) -> list[str]:
        """Every name of the first rows: a row may leave out what it has no value for."""
        if self._is_array():
            first_rows = list(islice(self._array(), _ROWS_LOOKED_AT))
        else:
            pieces = (list(self._objects(piece, 1)) for piece in self._pieces())
            first_rows = next(filter(None, pieces), [])
        if not first_rows:
            raise self._fail("no rows")
        return list(dict.fromkeys(chain.from_iterable(first_rows)))


_DECODER = json.JSONDecoder()


def _skip_between(window: str, place: int) -> int:
    found = _BETWEEN.match(window, place)
    return found.end() if found else place


def _fits(values: list[Any], kind: pa.DataType | None) -> bool:
    try:
        pa.array(values, type=kind)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return False
    return True


def _short(value: Any) -> str:
    """A value and its type, as they can be printed: lone surrogates, which no terminal takes, are written out."""
    text = repr(value).encode("utf-8", "backslashreplace").decode()
    kind = pa.array([value]).type if _fits([value], None) else "no value we can hold"
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({kind})"


def _reason(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"


def _text(line: bytes) -> str:
    return line.decode("utf-8-sig")


class ParquetTable(_FileTable):
    """A parquet file; columns keep their types."""

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        row = 0
        try:
            with self._parquet() as file:
                for block in file.iter_batches(rows_per_block, columns=columns):
                    self._require_whole(block, row)
                    row += block.num_rows
                    yield block.select(columns)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from None

    def _require_whole(self, block: pa.RecordBatch, first_row: int) -> None:
        """Texts in a parquet file may be anything; what is not UTF-8 would stop a later step."""
        for name, column in zip(block.schema.names, block.columns, strict=True):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                rows = f"rows {first_row + 1:,} to {first_row + block.num_rows:,}"
                raise self._fail(f"{rows}: column {name!r} is damaged or not UTF-8 ({_first_line(error)})") from None

    def _read_columns(self) -> list[str]:
        try:
            with self._parquet() as file:
                num_rows, names = file.metadata.num_rows, list(file.schema_arrow.names)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(error) from None
        if num_rows == 0:
            raise self._fail("no rows")
        return names

    def _parquet(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path, buffer_size=_HEAD_BYTES, pre_buffer=False)

    def _damaged(self, error: Exception) -> UserError:
        return self._fail(f"not a whole parquet file ({_first_line(error)})", "Was it cut short?")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


class _Ended(io.RawIOBase):
    """A file with something added after its end."""

    def __init__(self, file: BinaryIO, ending: bytes) -> None:
        self._file, self._ending = file, ending

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if data := self._file.read(size):
            return data
        data, self._ending = self._ending, b""
        return data


class _Gunzipped(io.RawIOBase):
    """A gzipped file's content; a file that is cut short or broken is a clear error."""

    def __init__(self, path: Path, where: str) -> None:
        self.path, self.where = path, where
        self._file = gzip.open(path, "rb")  # noqa: SIM115 (closed by close)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._guarded(lambda: self._file.read(size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._guarded(lambda: self._file.readline(size if size is not None else -1))

    def __next__(self) -> bytes:
        if line := self.readline():
            return line
        raise StopIteration

    def close(self) -> None:
        self._file.close()
        super().close()

    def _guarded(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                self.where, f"{self.path}: not a whole gzip file ({error})", mend="Was it cut short?"
            ) from None


class _Digesting(io.RawIOBase):
    """A file that keeps nothing but a checksum of what is written."""

    def __init__(self, digest: Any) -> None:
        self._digest = digest

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return len(memoryview(data))


def require_utf8(path: Path, data: bytes, where: str, first_line: int) -> None:
    """Name the line and the byte where a file stops being UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        what = f"{path} line {line}: byte 0x{data[error.start]:02x} is not UTF-8"
        mend = f"Convert it, for example: iconv -f latin1 -t utf-8 {path.name} > utf8{path.suffix}"
        raise UserError(where, what, mend=mend) from None


def _require_file(file: Path, where: str) -> None:
    try:
        if file.is_dir():
            raise UserError(where, f"{file} is a folder", allowed="one file", mend="Name a file in it.")
        if not file.exists():
            raise UserError(where, f"no such file: {file}", mend=did_you_mean(file.name, _neighbours(file.parent)))
        if not file.is_file():
            raise UserError(where, f"{file} is a pipe or a device", allowed="a file, which can be read twice")
        with file.open("rb") as opened:
            is_empty = not opened.read(1)
    except OSError as error:
        raise UserError(where, f"cannot read {file}: {error.strerror}") from None
    if is_empty:
        raise UserError(where, f"{file} is empty")


def _neighbours(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []
