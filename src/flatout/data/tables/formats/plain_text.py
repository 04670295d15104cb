"""Plain texts: tagged words, one a line, as CoNLL, CoNLL-U, BIO and their kin have them; and a
folder of texts for each class.

An empty line stands between sentences. A line is a word, any columns between, and its tag, parted
by tabs where the first line has one, else by blanks. Each sentence becomes a row with its words in
`tokens` and its tags in `tags`. Lines that begin with -DOCSTART- part documents; lines that begin
with `#` and do not have a word line's columns are remarks.

CoNLL-U has ten columns: the word's number, the word, its lemma, its part of speech, and six more.
The second is the word and the fourth its tag. Lines of several words (`3-4`) and of words that the
sentence leaves out (`3.1`) are no words. Its first line of a word shows that a file is CoNLL-U.

Texts of a folder lie in `CLASS/NAME`,
one file a text, and are read in the order of their names. Hidden files, and endings of no text, are
left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import xxhash

from flatout.data.tables.formats.file import (
    OTHER_ENCODING,
    FileTable,
    decoding_problem,
    entry_of,
    require_utf8,
    unpacked,
)
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.table import Entries, Table
from flatout.errors import UserError, require

COLUMNS = ["tokens", "tags"]
_DOCUMENT = "-DOCSTART-"
_UNIVERSAL_COLUMNS = 10
_UNIVERSAL_PLACES = (1, 3)  # columns of the word and of its part of speech, from 0
_FIRST_NUMBER = re.compile(r"1(-\d+)?|0\.1")  # what a sentence of CoNLL-U begins with
Sentence = tuple[list[str], list[str], list[int]]  # words, their tags, their lines in the file
_LONGEST_SENTENCE = 100_000  # words; more are a file without empty lines
_LONGEST_TEXT = 1 << 26  # bytes; more are no text that somebody wrote
_ENDINGS = ("", ".txt", ".text")  # of the files of a folder that are texts


class ConllTable(FileTable):
    """A file of tagged sentences."""

    told_by_head = ("columns", "_separator", "_width", "_is_universal")

    def how(self) -> str:
        if self._is_universal:
            return "CoNLL-U: the second column is the word, the fourth its tag"
        if self._width == 1:
            return "words alone"
        return f"{self._width} columns: the first is the word, the last its tag"

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        sentences = self._sentences()
        while found := list(islice(sentences, rows_per_block)):
            words, tags, _ = zip(*found, strict=True)
            parts = {"tokens": words, "tags": tags}
            arrays = [pa.array(parts[name], pa.list_(pa.large_string())) for name in columns]
            yield pa.RecordBatch.from_arrays(arrays, names=columns)

    def word_lines(self) -> Iterator[list[int]]:
        return (lines for _, _, lines in self._sentences())

    def _read_columns(self) -> list[str]:
        self._head()
        self._separator = None
        self._width = 0
        self._is_universal = False
        for _, line in self._lines():
            if line.strip() and not line.startswith((_DOCUMENT, "# ")):
                self._separator = "\t" if "\t" in line else None
                values = line.split(self._separator)
                self._width = len(values)
                is_first = _FIRST_NUMBER.fullmatch(values[0]) is not None
                self._is_universal = is_first and self._width == _UNIVERSAL_COLUMNS
                return COLUMNS[: self._width]
        raise self._fail("no rows")

    def _sentences(self) -> Iterator[Sentence]:
        word_place, tag_place = _UNIVERSAL_PLACES if self._is_universal else (0, -1)
        words = list[str]()
        tags = list[str]()
        lines = list[int]()
        for number, line in chain(self._lines(), [(0, "")]):  # an empty line ends the last sentence
            values = line.split(self._separator)
            if not line.strip() or line.startswith(_DOCUMENT):
                if words:
                    yield words, tags, lines
                words = []
                tags = []
                lines = []
                continue
            if len(values) != self._width:
                if line.startswith("#"):
                    continue
                problem = (
                    f"line {number}: expected {self._width} columns, got {len(values)}:"
                    f" {line[:60]!r}"
                )
                raise self._fail(
                    problem, "Part sentences by an empty line, and give every word its tag."
                )
            if self._is_universal and not values[0].isdecimal():
                continue
            words.append(values[word_place])
            tags.append(values[tag_place].strip())
            lines.append(number)
            if len(words) > _LONGEST_SENTENCE:
                hint = "Part sentences by an empty line."
                raise self._fail(
                    f"line {number}: a sentence of over {_LONGEST_SENTENCE:,} words", hint
                )

    def _lines(self) -> Iterator[tuple[int, str]]:
        try:
            with self._open() as file:
                for number, line in enumerate(file, 1):
                    encoding = "utf-8-sig" if number == 1 else "utf-8"
                    yield number, line.decode(encoding).rstrip("\r\n")
        except UnicodeDecodeError:
            self._require_utf8()


class TextFolder(Table):
    """The texts of a folder: columns `text`, `label` (the folder a file lies in) and `file`."""

    columns: Sequence[str] = ("text", "label", "file")

    def __init__(self, path: Path, where: str, reading: ReadingConfig | None = None) -> None:
        self.path = path
        self.where = where
        self.name = str(path)
        self._encoding = (reading or ReadingConfig()).encoding
        files = [
            file
            for folder in _visible(path)
            if folder.is_dir()
            for file in _visible(folder)
            if file.is_file()
        ]
        self._files = [file for file in files if _is_text(file)]
        self._skipped = len(files) - len(self._files)

    def how(self) -> str:
        classes = len({file.parent for file in self._files})
        skipped = f", {self._skipped:,} files of other endings left alone" if self._skipped else ""
        return f"{len(self._files):,} files in {classes:,} folders{skipped}"

    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for file in self._files:
            digest.update(f"{file.relative_to(self.path)}\0".encode("utf-8", "surrogateescape"))
            digest.update(xxhash.xxh3_128_digest(self._bytes(file)))
        return digest.hexdigest()

    def entries(self) -> Entries | None:
        try:
            return [entry_of(file) for file in self._files]
        except OSError:  # one is gone: reading it says so
            return None

    def locate(self, row: int) -> str:
        return str(self._files[row - 1].relative_to(self.path))

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        step = min(rows_per_block, 4_096)  # texts of whole files are long
        for start in range(0, len(self._files), step):
            files = self._files[start : start + step]
            # Files are opened only where their texts are asked for.
            value_of = {
                "label": lambda file: _readable(file.parent.name),
                "file": lambda file: _readable(str(file.relative_to(self.path))),
                "text": self._text,
            }
            arrays = [pa.array(map(value_of[name], files), pa.large_string()) for name in columns]
            yield pa.RecordBatch.from_arrays(arrays, names=list(columns))

    def _text(self, file: Path) -> str:
        data = self._bytes(file)
        if self._encoding is None:
            require_utf8(file, data, self.where, first_line=1)
            return data.decode("utf-8-sig")
        try:
            return data.decode(self._encoding)
        except UnicodeError as error:
            raise UserError(
                self.where,
                f"{file}: not {self._encoding} ({decoding_problem(error)})",
                hint=OTHER_ENCODING,
            ) from None

    def _bytes(self, file: Path) -> bytes:
        try:
            with unpacked(file, self.where) as opened:
                data = opened.read(_LONGEST_TEXT + 1)
        except OSError as error:
            raise UserError(
                self.where,
                f"cannot read {file}: {error.strerror}",
                hint="Check that you may read it.",
            ) from None
        require(
            len(data) <= _LONGEST_TEXT,
            self.where,
            f"{file}: longer than {_LONGEST_TEXT >> 20} MB",
            hint="One file is one text.",
        )
        # a link may lead to what the kernel shows of this process: its variables, its command
        is_written = not data or file.stat().st_size > 0
        require(is_written, self.where, f"{file}: a file of the kernel", hint="Remove it.")
        return data


def is_text_folder(path: Path) -> bool:
    """Whether a folder holds folders of texts."""
    return any(
        _is_text(file) for folder in _visible(path) if folder.is_dir() for file in _visible(folder)
    )


def _is_text(file: Path) -> bool:
    ending = Path(file.stem if file.suffix.lower() == ".gz" else file.name).suffix.lower()
    return file.is_file() and (ending in _ENDINGS or ending[1:].isdecimal())


def _readable(name: str) -> str:
    """A name with bytes that are no UTF-8 written out: Linux allows any byte in a name."""
    return name.encode("utf-8", "backslashreplace").decode()


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
