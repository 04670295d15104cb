"""Tables of any size, read in blocks and strictly as written.

A csv's values stay texts: `NA` is no missing value, `007` and `00101` keep their zeros, one missing label does not
turn the others into floats. What cannot be read is told with file and row, never by a reader's own error.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import xxhash

from flatout.errors import UserError, did_you_mean

_PIECE = 1 << 24
_BLOCK_BYTES = 1 << 23
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


def table_of(rows: Any) -> Table:
    """A table that is in memory already: a mapping of columns, or a pandas, pyarrow or datasets table."""
    if isinstance(rows, pa.Table):
        return MemoryTable(rows)
    if isinstance(rows, Mapping):
        return MemoryTable(pa.table({name: pa.array(list(values)) for name, values in rows.items()}))
    if hasattr(rows, "with_format") and hasattr(rows, "data"):
        return MemoryTable(rows.with_format("arrow")[:])
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        return MemoryTable(pa.Table.from_pandas(rows, preserve_index=False))
    allowed = "a path, a mapping of columns, a pandas, pyarrow or datasets table"
    raise UserError("data.train", f"cannot read rows from a {type(rows).__name__}", allowed=allowed)


def require_columns(table: Table, wanted: Mapping[str, str]) -> None:
    """Check that the columns named by some settings exist; all that are missing in one message."""
    missing = {key: name for key, name in wanted.items() if name not in table.columns}
    if not missing:
        return
    names = ", ".join(f"{name!r}" for name in missing.values())
    mends = " ".join(filter(None, (did_you_mean(name, table.columns) for name in missing.values())))
    what = f"no column {names} in {table.name}"
    raise UserError(" and ".join(missing), what, allowed=f"columns: {', '.join(table.columns)}", mend=mends)


class MemoryTable:
    """A table in memory."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows
        self.name = "table in memory"
        self.columns = list(rows.column_names)

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        sink = _Digesting(digest)
        with pa.ipc.new_stream(sink, self.rows.schema) as stream:
            stream.write_table(self.rows.combine_chunks())
        return digest.hexdigest()

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        return iter(self.rows.select(list(columns)).combine_chunks().to_batches(rows_per_block))


class _FileTable:
    """A table in a file."""

    def __init__(self, path: Path, where: str) -> None:
        self.path, self.where = path, where
        self.name = str(path)
        self.columns: list[str] = self._read_columns()
        twice = sorted({name for name in self.columns if self.columns.count(name) > 1})
        if twice:
            raise UserError(where, f"{path} has column {', '.join(twice)} more than once", mend="Rename one of them.")

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        with self.path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        return digest.hexdigest()

    def _read_columns(self) -> list[str]:
        raise NotImplementedError  # each format has its own

    def _open(self) -> BinaryIO:
        if self.path.suffix.lower() == ".gz":
            return _Gunzipped(self.path, self.where)  # type: ignore[return-value]
        return self.path.open("rb")

    def _fail(self, what: str, mend: str = "") -> UserError:
        return UserError(self.where, f"{self.path}: {what}", mend=mend)


class CsvTable(_FileTable):
    """Comma- or tab-separated values; every value is the text that is written."""

    def __init__(self, path: Path, where: str, delimiter: str) -> None:
        self.delimiter = delimiter
        super().__init__(path, where)

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        try:
            with self._reader(list(columns)) as reader:
                yield from (block for block in reader if block.num_rows)
        except pa.ArrowInvalid as error:
            raise self._explain(str(error)) from None

    def _reader(self, columns: list[str] | None = None) -> pa_csv.CSVStreamingReader:
        names = columns if columns is not None else []
        return pa_csv.open_csv(
            pa.PythonFile(self._open()),
            read_options=pa_csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=True),
            parse_options=pa_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            convert_options=pa_csv.ConvertOptions(
                column_types={name: pa.string() for name in names},
                include_columns=names,
                strings_can_be_null=False,
                quoted_strings_can_be_null=False,
            ),
        )

    def _read_columns(self) -> list[str]:
        with self._open() as file:
            head = file.readline(1 << 20)
        require_utf8(self.path, head, self.where, first_line=1)
        try:
            options = pa_csv.ParseOptions(delimiter=self.delimiter)
            read_options = pa_csv.ReadOptions(use_threads=False)
            return pa_csv.read_csv(io.BytesIO(head), read_options, options).column_names
        except pa.ArrowInvalid:
            raise self._fail("the first line is no list of columns", "Its first line must name the columns.") from None

    def _explain(self, message: str) -> UserError:
        for number, line in enumerate(self._lines(), 1):
            require_utf8(self.path, line, self.where, first_line=number)
        if "got" in message and "Row #" in message:
            row = int(message.partition("Row #")[2].partition(":")[0])
            counts = message.partition(": ")[2].partition(":")[2].strip().partition(":")[0]
            mend = f"Quote values that hold {self.delimiter!r} or line ends; the delimiter is {self.delimiter!r}."
            return self._fail(f"row {row - 1}: {counts.lower() or 'wrong number of values'}", mend)
        return self._fail(message.splitlines()[0], "Is a quote left open?")

    def _lines(self) -> Iterator[bytes]:
        with self._open() as file:
            yield from file


class JsonTable(_FileTable):
    """One JSON object a line, or one array of objects."""

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        rows: list[dict[str, Any]] = []
        types: dict[str, pa.DataType] = {}
        first = 1
        for row in self._objects():
            rows.append(row)
            if len(rows) == rows_per_block:
                yield self._block(rows, columns, types, first)
                first += len(rows)
                rows = []
        if rows:
            yield self._block(rows, columns, types, first)

    def _block(
        self, rows: list[dict[str, Any]], columns: Sequence[str], types: dict[str, pa.DataType], first: int
    ) -> pa.RecordBatch:
        arrays = [self._column([row.get(name) for row in rows], name, types, first) for name in columns]
        return pa.RecordBatch.from_arrays(arrays, names=list(columns))

    def _column(self, values: list[Any], name: str, types: dict[str, pa.DataType], first: int) -> pa.Array:
        try:
            array = pa.array(values, type=types.get(name))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            raise self._mixed(values, name, types.get(name), first) from None
        if not pa.types.is_null(array.type):
            types.setdefault(name, array.type)
        return array

    def _mixed(self, values: list[Any], name: str, expected: pa.DataType | None, first: int) -> UserError:
        """Name the first row whose value is of another type than those before it."""
        kind = None if expected is None else expected
        for offset, value in enumerate(values):
            if value is None:
                continue
            own = pa.array([value]).type
            kind = own if kind is None else kind
            if own != kind:
                what = f"row {first + offset}: {name} is {value!r} ({own}), rows before have {kind}"
                return self._fail(what, "Write all values of a column in one way.")
        return self._fail(f"column {name} mixes types", "Write all values of a column in one way.")

    def _objects(self) -> Iterator[dict[str, Any]]:
        with self._open() as file:
            start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if start == b"[":
            yield from self._array()
            return
        with self._open() as file:
            for number, line in enumerate(file, 1):
                require_utf8(self.path, line, self.where, first_line=number)
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield self._object(text, number)

    def _object(self, text: str, number: int) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise self._fail(f"line {number}: not valid JSON ({error.msg}, column {error.colno})") from None
        if not isinstance(found, dict):
            raise self._fail(f"line {number}: a {type(found).__name__} where an object is needed")
        return found

    def _array(self) -> Iterator[dict[str, Any]]:
        with self._open() as file:
            data = file.read()
        require_utf8(self.path, data, self.where, first_line=1)
        try:
            found = json.loads(data.decode("utf-8-sig"))
        except json.JSONDecodeError as error:
            raise self._fail(f"line {error.lineno}: not valid JSON ({error.msg})") from None
        for number, row in enumerate(found, 1):
            if not isinstance(row, dict):
                raise self._fail(f"row {number}: a {type(row).__name__} where an object is needed")
            yield row

    def _read_columns(self) -> list[str]:
        first = next(self._objects(), None)
        if first is None:
            raise self._fail("no rows")
        return list(first)


class ParquetTable(_FileTable):
    """A parquet file; columns keep their types."""

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        return self._reading(lambda file: file.iter_batches(rows_per_block, columns=list(columns)))

    def _reading(self, read: Callable[[pq.ParquetFile], Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        try:
            with pq.ParquetFile(self.path) as file:
                yield from (block for block in read(file) if block.num_rows)
        except (pa.ArrowInvalid, OSError) as error:
            raise self._damaged(error) from None

    def _read_columns(self) -> list[str]:
        try:
            with pq.ParquetFile(self.path) as file:
                return list(file.schema_arrow.names)
        except (pa.ArrowInvalid, OSError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> UserError:
        return self._fail(f"not a whole parquet file ({str(error).splitlines()[0]})", "Was it cut short?")


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
    if file.is_dir():
        raise UserError(where, f"{file} is a folder", allowed="one file", mend="Name a file in it.")
    if not file.exists():
        folder = file.parent
        neighbours = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        raise UserError(where, f"no such file: {file}", mend=did_you_mean(file.name, neighbours))
    try:
        with file.open("rb") as opened:
            is_empty = not opened.read(1)
    except OSError as error:
        raise UserError(where, f"cannot read {file}: {error.strerror}") from None
    if is_empty:
        raise UserError(where, f"{file} is empty")
