"""What every table in a file shares: its fingerprint, its errors with file and place, gzip, and UTF-8."""

from __future__ import annotations

import gzip
import io
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
import xxhash

from flatout.errors import UserError, did_you_mean

_PIECE = 1 << 24
HEAD_BYTES = 1 << 20
LONGEST_ROW = 1 << 24
ONE_WAY = "Write all values of a column in one way."
"""How a column of mixed types is mended."""


class FileTable(ABC):
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

    @abstractmethod
    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        """The rows of some columns, in blocks that may be larger than asked for."""

    @abstractmethod
    def _read_columns(self) -> list[str]:
        """Names of the columns, from the file's head."""

    def _open(self) -> BinaryIO:
        if self.path.suffix.lower() == ".gz":
            return cast(BinaryIO, _Gunzipped(self.path, self.where))  # it has what readers call: read, readline, lines
        return self.path.open("rb")

    def _require_utf8(self) -> None:
        """Read the whole file for the line that is not UTF-8; only done when something has failed."""
        with self._open() as file:
            for number, line in enumerate(file, 1):
                require_utf8(self.path, line, self.where, first_line=number)

    def _fail(self, what: str, mend: str = "") -> UserError:
        return UserError(self.where, f"{self.path}: {what}", mend=mend)


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


def require_utf8(path: Path, data: bytes, where: str, first_line: int) -> None:
    """Name the line and the byte where a file stops being UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        what = f"{path} line {line}: byte 0x{data[error.start]:02x} is not UTF-8"
        mend = f"Convert it, for example: iconv -f latin1 -t utf-8 {path.name} > utf8{path.suffix}"
        raise UserError(where, what, mend=mend) from None


def require_file(file: Path, where: str) -> None:
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
