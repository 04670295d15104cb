"""Blocks of rows written as csv, jsonl, parquet or CoNLL: to standard output, or to a file that
appears when it is whole.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from flatout.data.tables.table import are_bytes, is_list, is_text
from flatout.errors import UserError, require, without_codes

# control characters but for tabs and line ends
# A spreadsheet runs what begins with `=`. After another sign it runs a call: SUM(…), cmd|'…'!A0.
_FORMULA = r"(?s)^(?:[=\t\r]|[+\-@].*(?:\|[^|]*![\w$]|[A-Za-z]\())"
FORMATS = (".csv", ".jsonl", ".parquet")
CONLL = ".conll"  # a word and its tag on each line
CONLL_U = ".conllu"  # ten columns, of which the number, the word and its part of speech are written


@contextmanager
def block_writer(
    out: str | None, *, reads: str | None = None, formats: Sequence[str] = FORMATS
) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Write blocks to standard output, or to a file that appears once it is complete.

    `reads`: the file that the blocks come from, which is never written over. `formats`: endings
    that may be written. Blocks of CoNLL have two columns, lists of words and of their tags.
    """
    if out is None:
        with _standard_output() as write:
            yield write
        return
    path = Path(out)
    _require_writable(path, reads, formats)
    is_there = path.exists()
    with _whole_file(path) as write:
        yield write
    if is_there:
        print(f"{path} was there, and is replaced", file=sys.stderr)


def _require_writable(path: Path, reads: str | None, formats: Sequence[str]) -> None:
    """Refuse an ending that is not among the formats, a folder that is missing, and the input."""
    require(
        path.suffix in formats,
        "--out",
        f"cannot write {path.suffix or path.name}",
        allowed=", ".join(formats),
    )
    require(
        path.parent.is_dir(),
        "--out",
        f"no such folder: {path.parent}",
        hint="Make it first, or name another folder.",
    )
    if reads is not None and path.exists() and _is_among(path, Path(reads)):
        raise UserError("--out", f"{path} is a file that is read", hint="Name another file.")


@contextmanager
def _standard_output() -> Iterator[Callable[[pa.RecordBatch], None]]:
    stdout = sys.stdout.buffer
    shown = _CsvFile(cast(BinaryIO, _Screen()) if stdout.isatty() else stdout)
    # each call of `write` runs inside of `explain_disk_errors`
    yield explain_disk_errors(Path("/dev/stdout"))(shown.write)
    with explain_disk_errors(Path("/dev/stdout")):
        shown.close()
        stdout.flush()


@contextmanager
def _whole_file(path: Path) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Write a file beside `path`, which takes its place when all blocks are on the disk."""
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    with explain_disk_errors(path):
        file = beside.open("wb")
    written = _FILES[path.suffix](file)
    try:
        yield explain_disk_errors(path)(written.write)
        with explain_disk_errors(path):
            written.close()
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
    except BaseException:
        # pyarrow ends a file that is open; the first error is the one to show
        with suppress(Exception):
            written.close(is_whole=False)
        raise
    finally:
        # The disk has it by now, or closing would write once more what it has refused.
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def _is_among(path: Path, source: Path) -> bool:
    """Whether `path` is a file that `source` names: a file, one in a folder, or by a pattern."""
    if source.exists():
        return path.samefile(source) or source.resolve() in path.resolve().parents
    return path.absolute().match(str(source.absolute()))


@contextmanager
def explain_disk_errors(path: Path, where: str = "--out") -> Iterator[None]:
    """Inside it an error of the disk becomes a UserError that names the path, and the option."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(
            where,
            f"cannot write {path}: {error.strerror or error}",
            hint="Name a place where there is room, and where you may write.",
        ) from None


class _Screen:
    """Standard output that is a terminal: codes that a text could act by there are written out."""

    def __init__(self) -> None:
        # a block may end inside of a character
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    closed = False

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        sys.stdout.buffer.flush()

    def write(self, data: bytes) -> int:
        text = self._decoder.decode(data)
        shown = without_codes(text)
        sys.stdout.buffer.write(shown.encode())
        return len(data)


class _BlockFile(Protocol):
    """A file of one format that is being written."""

    def write(self, block: pa.RecordBatch) -> None: ...

    def close(self, *, is_whole: bool = True) -> None:
        """Write the end of the file; `is_whole`: whether all blocks were written."""


class _CsvFile:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._has_header = False
        self._formulas = 0

    def write(self, block: pa.RecordBatch) -> None:
        options = pa_csv.WriteOptions(include_header=not self._has_header)
        self._has_header = True
        columns = []
        for column in block.columns:
            safe_column, formulas = _without_formulas(_as_csv(column))
            columns.append(safe_column)
            self._formulas += formulas
        # A spreadsheet would run a column's name, too.
        names = []
        for name in block.schema.names:
            names.append(f"'{name}" if re.match(_FORMULA, name) else name)
        pa_csv.write_csv(pa.RecordBatch.from_arrays(columns, names=names), self._file, options)

    def close(self, *, is_whole: bool = True) -> None:
        if self._formulas and is_whole:
            cells = f"{self._formulas:,} cells that begin with '=', or call something, got a '"
            print(
                f"{cells} before it: a spreadsheet would run them."
                " jsonl and parquet keep them as they are.",
                file=sys.stderr,
            )


class _JsonLinesFile:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, block: pa.RecordBatch) -> None:
        for row in block.to_pylist():
            line = json.dumps(row, ensure_ascii=False, default=str)
            self._file.write(line.encode() + b"\n")

    def close(self, *, is_whole: bool = True) -> None:
        pass


class _ParquetFile:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._writer: pq.ParquetWriter | None = None

    def write(self, block: pa.RecordBatch) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, block.schema)
        self._writer.write_batch(block)

    def close(self, *, is_whole: bool = True) -> None:
        if self._writer is not None:
            self._writer.close()


class _SentencesFile:
    """CoNLL; `has_ten_columns`: CoNLL-U, with a number before each word."""

    def __init__(self, file: BinaryIO, *, has_ten_columns: bool = False) -> None:
        self._file = file
        self._has_ten_columns = has_ten_columns

    def write(self, block: pa.RecordBatch) -> None:
        words, tags = (column.to_pylist() for column in block.columns)
        for sentence in zip(words, tags, strict=True):
            lines = []
            for number, word_and_tag in enumerate(zip(*sentence, strict=True), 1):
                # A tab or a line end inside a word would be read as the end of its column. A word
                # without a tag has `_`, as in CoNLL-U.
                word, tag = (" ".join((text or "_").split()) for text in word_and_tag)
                fields = [word, tag]
                if self._has_ten_columns:
                    fields = [str(number), word, "_", tag, *["_"] * 6]
                lines.append("\t".join(fields))
            self._file.write("\n".join([*lines, "", ""]).encode())

    def close(self, *, is_whole: bool = True) -> None:
        pass


_FILES: dict[str, Callable[[BinaryIO], _BlockFile]] = {
    ".csv": _CsvFile,
    ".jsonl": _JsonLinesFile,
    ".parquet": _ParquetFile,
    CONLL: _SentencesFile,
    CONLL_U: partial(_SentencesFile, has_ten_columns=True),
}


def _without_formulas(column: pa.Array) -> tuple[pa.Array, int]:
    """The column with a ' before each text that is a formula, and how many these are.

    A spreadsheet would run such a text. `@somebody says` and `-5 degrees` stay as they are.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())  # pyarrow searches no views
    if not is_text(column.type):
        return column, 0
    are_formulas = pc.fill_null(pc.match_substring_regex(column, pattern=_FORMULA), False)
    if not (count := pc.sum(are_formulas).as_py() or 0):
        return column, 0
    guarded = pc.replace_substring_regex(column, pattern="^", replacement="'", max_replacements=1)
    return pc.if_else(are_formulas, guarded, column), count


def _join_words(words: list[str | None] | None) -> str | None:
    if words is None:
        return None
    return "|".join(word or "" for word in words)


def _as_csv(column: pa.Array) -> pa.Array:
    """The column as a csv can hold it.

    Lists are joined by `|`, bytes are written in hexadecimal, and other nested values as JSON. All
    other columns stay as they are.
    """
    if are_bytes(column.type):
        return pa.array([each and each.hex() for each in column.to_pylist()], pa.string())
    if is_list(column.type) and not pa.types.is_nested(column.type.value_type):
        # joined in Python: `binary_join` of pyarrow gives null for a list that holds a null
        lists = column.cast(pa.list_(pa.string())).to_pylist()
        return pa.array([_join_words(words) for words in lists])
    if pa.types.is_nested(column.type):
        return pa.array(
            [json.dumps(each, ensure_ascii=False, default=str) for each in column.to_pylist()],
            pa.string(),
        )
    return column
