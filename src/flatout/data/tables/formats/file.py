"""What every table in a file shares: fingerprint, errors with file and place, gzip, and UTF-8.

A format subclasses FileTable: it reads the names of columns off the head of a file, and its rows in
blocks. The head is read once and noted in the cache. Open this file to change how files are opened,
unpacked or decoded; each format has its own file beside it.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import shutil
import tempfile
import weakref
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from flatout.data.store.store import file_checksum
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.table import Entries, Table, changed
from flatout.errors import UserError, did_you_mean, explain_full_tmpdir, require
from flatout.files import has_time_moved, stamp_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

HEAD_BYTES = 1 << 20
LONGEST_ROW = 1 << 24  # bytes; a longer row is rather a quote that was not closed
_FEW_LINES = 40  # enough lines to find columns and delimiter
ONE_WAY = "Write all values of a column in one way."
CUT_SHORT = "It was cut short or damaged: copy it, or write it, again."
OTHER_ENCODING = "Leave data.read.encoding out for UTF-8, or name the file's own, such as cp1252."
"""Hints: for a column of mixed types, for a file whose end is missing, for one not in the encoding
that was named."""
# Text unpacks to ten times its size, now and then to fifty; bombs unpack to a thousand times.
_RATIO_CAP = 200
_RATIO_FROM = 1 << 28  # bytes; smaller files may have any ratio
_SIZE_CAP = 1 << 38  # bytes
Notes = dict[str, list[Any]]  # by a file's name its entry and what is noted of it
# Another number makes every noted head be read again: change it with how heads are read.
_HEADS_AS = 1
# what heads tell: as noted before, and now (see `prints`)
HEADS: ContextVar[tuple[Notes, Notes]] = ContextVar("heads")
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def entry_of(path: Path) -> list[str | int]:
    """A file's name and what changes in its entry when the file does."""
    return [str(path.absolute()), *stamp_of(path)]


class FileTable(Table):
    """A table in one file."""

    told_by_head: ClassVar[tuple[str, ...]] = ("columns",)  # attributes that the head decides

    def __init__(self, path: Path, where: str, reading: ReadingConfig | None = None) -> None:
        self.path = path
        self.where = where
        self.reading = reading or ReadingConfig()
        self.decimal = self.reading.decimal
        self.dates = self.reading.dates
        self.name = str(path)
        self._copy: IO[bytes] | None = None
        self._opened_as = entry_of(self.path)
        self.columns: Sequence[str] = []
        self._look_at_head()

    def _look_at_head(self) -> None:
        """Take what the head decides from the notes, or read it and note it.

        It is not noted if a change right now could leave the file's times as they are.
        """
        noted, new_notes = HEADS.get(({}, {}))
        key = f"{self.path.absolute()} {type(self).__name__} {self.reading} {_HEADS_AS}"
        entry, attributes = noted.get(key, (None, {}))
        # A note of another version of flatout may lack a name that this one needs.
        if entry == self._opened_as and set(attributes) == set(self.told_by_head):
            new_notes[key] = noted[key]
            for name, value in attributes.items():
                setattr(self, name, value)
            return
        self.columns = self._read_columns()
        if has_time_moved(int(self._opened_as[3])):
            attributes = {name: getattr(self, name) for name in self.told_by_head}
            new_notes[key] = [self._opened_as, attributes]

    def fingerprint(self) -> str:
        """Of every byte; see `prints` for when it is asked."""
        checksum = file_checksum(self.path)
        if (stamp := entry_of(self.path)) != self._opened_as:
            # What is known of its head, and a copy, may be of what it was before.
            self._opened_as = stamp
            if self._copy is not None:
                self._copy.close()
            self._copy = None
            before = self.columns
            self.columns = self._read_columns()
            if self.columns != before:
                raise changed(self.name)
        return checksum

    def entries(self) -> Entries | None:
        stamp = entry_of(self.path)
        return [stamp] if stamp == self._opened_as else None

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        times = Counter(self.columns)
        if twice := sorted({name for name in columns if times[name] > 1}):
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
        """The path of the plain file, for readers that need one.

        Of a gzipped file it is an unpacked copy, which is removed with the table.
        """
        if self.path.suffix.lower() != ".gz":
            return self.path
        if self._copy is None:
            use = f"{self.path.name} is unpacked there"
            with explain_full_tmpdir(use), unpacked(self.path, self.where) as content:
                copy = tempfile.NamedTemporaryFile()  # noqa: SIM115 (removed with the table)
                weakref.finalize(self, copy.close)
                shutil.copyfileobj(content, copy, HEAD_BYTES)
                copy.flush()
            self._copy = copy
        return Path(self._copy.name)

    def _open(self) -> io.BufferedReader:
        """The file's content: unpacked, and as UTF-8."""
        file = unpacked(self.path, self.where)
        if self.reading.encoding is None:
            return file
        return as_file(_recoded(file, self.reading.encoding, self.path, self.where), file)

    def _head(self) -> tuple[bytes, bool]:
        """The first lines, at most a megabyte, and whether these are all; UTF-16 is refused."""
        with self._open() as file:
            head = b""
            for size in (HEAD_BYTES >> 6, HEAD_BYTES >> 4, HEAD_BYTES):
                if head.count(b"\n") < _FEW_LINES:
                    head += file.read(size - len(head))
            is_whole = not file.read(1)
        if head.startswith(_UTF16_MARKS):
            raise self._fail("written in UTF-16", _encoding_mend(self.path, head, self.where))
        return head, is_whole

    def _require_utf8(self) -> None:
        """Read the whole file for the line that is not UTF-8; only done when something
        has failed.
        """
        number = 1
        begins_a_line = True
        with self._open() as file:
            for piece in iter(partial(file.readline, LONGEST_ROW), b""):
                ends_a_line = piece.endswith(b"\n")
                # Longer lines come in pieces, which may part a letter. They are refused elsewhere.
                if begins_a_line and (ends_a_line or len(piece) < LONGEST_ROW):
                    require_utf8(self.path, piece, self.where, first_line=number)
                begins_a_line = ends_a_line
                number += ends_a_line

    def _fail(self, what: str, hint: str = "") -> UserError:
        return UserError(self.where, f"{self.path}: {what}", hint=hint)


def unpacked(path: Path, where: str) -> io.BufferedReader:
    """Open a file; a gzipped one is unpacked while it is read.

    One that is cut short, broken or a bomb ends with a clear error.
    """
    if path.suffix.lower() != ".gz":
        return path.open("rb")
    file = gzip.open(path, "rb")  # noqa: SIM115 (closed by the stream)
    return as_file(_gunzipped(file, path, where), file)


class _Stream(io.RawIOBase):
    """A stream of pieces that are made from a file while they are read."""

    def __init__(self, pieces: Iterator[bytes], file: io.BufferedIOBase) -> None:
        self._pieces = pieces
        self._file = file
        self._waiting = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if not self._waiting:
            self._waiting = memoryview(next(self._pieces, b""))
        target = memoryview(buffer)
        count = min(len(target), len(self._waiting))
        target[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def as_file(pieces: Iterator[bytes], file: io.BufferedIOBase) -> io.BufferedReader:
    """Pieces, none of them empty, as one file. Closing it closes `file`, which they are made of."""
    return io.BufferedReader(_Stream(pieces, file), HEAD_BYTES)


def pieces_of(file: io.BufferedIOBase) -> Iterator[bytes]:
    """The bytes of a file, a megabyte at a time."""
    while piece := file.read(HEAD_BYTES):
        yield piece


def _gunzipped(file: gzip.GzipFile, path: Path, where: str) -> Iterator[bytes]:
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


def _recoded(file: io.BufferedReader, encoding: str, path: Path, where: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    for data in chain(pieces_of(file), [b""]):
        try:
            text = decoder.decode(data, final=not data)
            recoded = text.encode()
        except UnicodeError as error:
            reason = decoding_problem(error)
            raise UserError(
                where,
                f"{path}: not {encoding} from about line {line} on ({reason})",
                hint=OTHER_ENCODING,
            ) from None
        line += text.count("\n")
        if recoded:
            yield recoded


def decoding_problem(error: UnicodeError) -> str:
    """Why bytes are not of an encoding; the whole message would quote the bytes."""
    return (
        error.reason if isinstance(error, UnicodeDecodeError | UnicodeEncodeError) else str(error)
    )


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
    """A hint with the encoding that a file may have: a guess, which the user has to confirm."""
    guess = "utf-16" if data.startswith(_UTF16_MARKS) else "cp1252"
    convert = f"iconv -f {guess} -t utf-8 {path.name} > utf8{path.suffix}"
    if where.startswith("data.") or where == "FILE":  # `FILE` of a command that has --read
        doubt = "" if guess == "utf-16" else " if it is Western European, else name its encoding"
        return f"Set data.read.encoding={guess}{doubt}. Among files in UTF-8 convert it: {convert}"
    return f"Convert it, for example: {convert}"


def require_file(file: Path, where: str) -> None:
    require(
        "\0" not in str(file), where, f"{str(file)!r} can be no file's name", hint="Name a file."
    )
    try:
        many = "; predict takes all of them with --out FOLDER/" if where == "FILE" else ""
        require(
            not file.is_dir(),
            where,
            f"{file} is a folder",
            allowed="one file",
            hint=f"Name a file in it{many}.",
        )
        if not file.exists():
            _require_sound_links(file, where)
            beside = list(file.parent.iterdir()) if file.parent.is_dir() else []
            near = did_you_mean(file.name, [path.name for path in beside])
            folder = f"Names are looked up in {Path.cwd()}."
            hint = near or f"{folder} Correct the name, or give the whole path."
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
    """Name the link on the way to a file that leads nowhere."""
    paths = (file, *file.parents)
    link = next((path for path in paths if path.is_symlink() and not path.exists()), None)
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
