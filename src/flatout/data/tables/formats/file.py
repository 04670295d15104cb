"""What every table in a file shares: its fingerprint, its errors with file and place, gzip, and
UTF-8.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import shutil
import tempfile
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from flatout.data.store.store import file_checksum
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.table import Entries, Table, changed
from flatout.errors import UserError, did_you_mean, require
from flatout.files import has_time_moved, stamp_of

HEAD_BYTES = 1 << 20
LONGEST_ROW = 1 << 24
_FEW_LINES = 40  # so many lines say all that is asked of a head
ONE_WAY = "Write all values of a column in one way."
CUT_SHORT = "It was cut short or damaged: copy it, or write it, again."
OTHER_ENCODING = "Leave data.read.encoding out for UTF-8, or name the file's own, such as cp1252."
"""Hints: for a column of mixed types, for a file whose end is missing, for one not in the encoding
that was named."""
_RATIO_CAP = 200
_RATIO_FROM = 1 << 28
_SIZE_CAP = 1 << 38
"""Honest text unpacks to ten times its size, now and then to fifty; bombs to a thousand."""
Notes = dict[str, list[Any]]  # of files, by their names, their entries and what is noted of them
# Another number makes every noted head be read again: change it with how heads are read.
_HEADS_AS = 1
# what heads tell: as noted before, and now (see `prints`)
HEADS: ContextVar[tuple[Notes, Notes]] = ContextVar("heads")
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def entry_of(path: Path) -> list[str | int]:
    """A file's name and what changes in its entry when the file does."""
    return [str(path.absolute()), *stamp_of(path)]


class FileTable(Table):
    told_by_head: ClassVar[tuple[str, ...]] = ("columns",)  # what is known by it

    def __init__(self, path: Path, where: str, reading: ReadingConfig | None = None) -> None:
        self.path = path
        self.where = where
        self.reading = reading or ReadingConfig()
        self.name = str(path)
        self._copy: Any = None
        self._opened_as = entry_of(self.path)
        self.columns: Sequence[str] = []
        self._look_at_head()

    def _look_at_head(self) -> None:
        """Take what the head tells from the notes, or read it; of a file that may change unseen it
        is not noted.
        """
        noted, found = HEADS.get(({}, {}))
        key = f"{self.path.absolute()} {type(self).__name__} {self.reading} {_HEADS_AS}"
        entry, told = noted.get(key, (None, {}))
        # A note of another version of flatout may lack a name that this one needs.
        if entry == self._opened_as and set(told) == set(self.told_by_head):
            found[key] = noted[key]
            vars(self).update(told)
            return
        self.columns = self._read_columns()
        if has_time_moved(int(self._opened_as[3])):
            found[key] = [self._opened_as, {name: vars(self)[name] for name in self.told_by_head}]

    def fingerprint(self) -> str:
        """Of every byte; see `prints` for when it is asked."""
        checksum = file_checksum(self.path)
        if (stamp := entry_of(self.path)) != self._opened_as:
            # What is known of its head, and a copy, may be of what it was before.
            self._opened_as = stamp
            self._copy = None
            before, self.columns = self.columns, self._read_columns()
            if self.columns != before:
                raise changed(self.name)
        return checksum

    def entries(self) -> Entries | None:
        stamp = entry_of(self.path)
        return [stamp] if stamp == self._opened_as else None

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        if twice := sorted({name for name in columns if list(self.columns).count(name) > 1}):
            raise UserError(
                self.where,
                f"{self.path} has column {', '.join(twice)} more than once",
                hint="Rename one of them.",
            )
        for block in self._blocks(list(columns), rows_per_block):
            for start in range(0, block.num_rows, rows_per_block):
                yield block.slice(start, rows_per_block)

    @abstractmethod
    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        """The rows of some columns, in blocks that may be larger than asked for."""

    @abstractmethod
    def _read_columns(self) -> list[str]:
        """Names of the columns, from the file's head."""

    @property
    def whole(self) -> Path:
        """The file, for readers that need all of it at hand: of a gzipped one, a copy that goes
        with the table.
        """
        if self.path.suffix.lower() != ".gz":
            return self.path
        if self._copy is None:
            self._copy = tempfile.NamedTemporaryFile()  # noqa: SIM115 (removed with the table)
            with unpacked(self.path, self.where) as content:
                shutil.copyfileobj(content, self._copy, HEAD_BYTES)
            self._copy.flush()
        return Path(self._copy.name)

    def _open(self) -> io.BufferedReader:
        """The file's content: unpacked, and as UTF-8."""
        file = unpacked(self.path, self.where)
        if self.reading.encoding is None:
            return file
        return as_file(_recoded(file, self.reading.encoding, self.path, self.where), file)

    def _head(self) -> tuple[bytes, bool]:
        """The first lines, of long ones a megabyte, and whether they are all there are; UTF-16 is
        refused.
        """
        with self._open() as file:
            head = b""
            for size in (HEAD_BYTES >> 6, HEAD_BYTES >> 4, HEAD_BYTES):
                head += file.read(size - len(head)) if head.count(b"\n") < _FEW_LINES else b""
            is_whole = not file.read(1)
        if head.startswith(_UTF16_MARKS):
            raise self._fail("written in UTF-16", _encoding_mend(self.path, head, self.where))
        return head, is_whole

    def _require_utf8(self) -> None:
        """Read the whole file for the line that is not UTF-8; only done when something
        has failed.
        """
        with self._open() as file:
            for number, line in enumerate(file, 1):
                require_utf8(self.path, line, self.where, first_line=number)

    def _fail(self, what: str, hint: str = "") -> UserError:
        return UserError(self.where, f"{self.path}: {what}", hint=hint)


def unpacked(path: Path, where: str) -> io.BufferedReader:
    """A file's content, of a gzipped one too; one that is cut short, broken or a bomb is a clear
    error.
    """
    if path.suffix.lower() != ".gz":
        return path.open("rb")
    file = gzip.open(path, "rb")  # noqa: SIM115 (closed by the stream)
    return as_file(_gunzipped(file, path, where), file)


class _Stream(io.RawIOBase):
    """Bytes that are made while they are read of a file, for a buffered reader around it."""

    def __init__(self, pieces: Iterator[bytes], file: Any) -> None:
        self._pieces = pieces
        self._file = file
        self._waiting = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._waiting:
            self._waiting = memoryview(next(self._pieces, b""))
        count = min(len(buffer), len(self._waiting))
        buffer[:count], self._waiting = self._waiting[:count], self._waiting[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def as_file(pieces: Iterator[bytes], file: Any) -> io.BufferedReader:
    """Pieces, none of them empty, as one file; closing it closes the file that they are made of."""
    return io.BufferedReader(_Stream(pieces, file), HEAD_BYTES)


def pieces_of(file: Any) -> Iterator[bytes]:
    while piece := file.read(HEAD_BYTES):
        yield piece


def _gunzipped(file: Any, path: Path, where: str) -> Iterator[bytes]:
    packed = path.stat().st_size
    size = 0
    try:
        for piece in pieces_of(file):
            size += len(piece)
            if (size > _RATIO_FROM and size > _RATIO_CAP * packed) or size > _SIZE_CAP:
                raise UserError(
                    where,
                    f"{path}: {packed:,} bytes unpack to more than {size:,}",
                    allowed=f"at most {_RATIO_CAP} times as much, {_SIZE_CAP >> 30} GB",
                    hint="If that is meant, unpack it with gunzip and name the plain file.",
                )
            yield piece
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        if "Not a gzipped file" in str(error):
            raise UserError(
                where,
                f"{path} ends in .gz and is no gzip file",
                hint="Remove .gz from its name, or pack it with gzip.",
            ) from None
        raise UserError(where, f"{path}: not a whole gzip file ({error})", hint=CUT_SHORT) from None


def _recoded(file: Any, encoding: str, path: Path, where: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    for data in chain(pieces_of(file), [b""]):
        try:
            text = decoder.decode(data, final=not data)
            recoded = text.encode()
        except UnicodeError as error:
            raise UserError(
                where,
                (
                    f"{path}: not {encoding} from about line {line} on"
                    f" ({getattr(error, 'reason', error)})"
                ),
                hint=OTHER_ENCODING,
            ) from None
        line += text.count("\n")
        if recoded:
            yield recoded


def require_utf8(path: Path, data: bytes, where: str, first_line: int) -> None:
    """Name the line and the byte where a file stops being UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise UserError(
            where,
            f"{path} line {line}: byte 0x{data[error.start]:02x} is not UTF-8",
            hint=_encoding_mend(path, data, where),
        ) from None


def _encoding_mend(path: Path, data: bytes, where: str) -> str:
    """What the file may be written in: a guess, called one, that the person has to confirm."""
    guess = "utf-16" if data.startswith(_UTF16_MARKS) else "cp1252"
    convert = f"iconv -f {guess} -t utf-8 {path.name} > utf8{path.suffix}"
    if where.startswith("data."):
        doubt = "" if guess == "utf-16" else " if it is Western European, else name its encoding"
        return f"Set data.read.encoding={guess}{doubt}. Among files in UTF-8 convert it: {convert}"
    return f"Convert it, for example: {convert}"


def require_file(file: Path, where: str) -> None:
    require(
        "\0" not in str(file), where, f"{str(file)!r} can be no file's name", hint="Name a file."
    )
    try:
        require(
            not file.is_dir(),
            where,
            f"{file} is a folder",
            allowed="one file",
            hint=(
                "Name a file in"
                f" it{'; predict takes all of them with --out FOLDER/' if where == 'FILE' else ''}."
            ),
        )
        if not file.exists():
            _require_sound_links(file, where)
            beside = [path.name for path in file.parent.iterdir()] if file.parent.is_dir() else []
            near = did_you_mean(file.name, beside)
            hint = (
                near
                or f"Names are looked up in {Path.cwd()}. Correct the name, or give the whole path."
            )
            raise UserError(where, f"no such file: {file}", hint=hint)
        require(
            file.is_file(),
            where,
            f"{file} is a pipe or a device",
            allowed="a file, which can be read twice",
        )
        file.open("rb").close()
        is_empty = not file.stat().st_size
    except OSError as error:
        raise UserError(
            where, f"cannot read {file}: {error.strerror}", hint="Check that you may read it."
        ) from None
    require(not is_empty, where, f"{file} is empty", hint="Name a file with rows.")


def _require_sound_links(file: Path, where: str) -> None:
    link = next(
        (each for each in (file, *file.parents) if each.is_symlink() and not each.exists()), None
    )
    if link is None:
        return
    end = os.path.realpath(link)
    is_circle = Path(end).is_symlink()  # the way ends at a link only where it goes in a circle
    require(
        not is_circle, where, f"{link} is a link that leads to itself", hint="Name the file itself."
    )
    raise UserError(
        where, f"{link} is a link to {end}, which is not there", hint="Name a file that is there."
    )
