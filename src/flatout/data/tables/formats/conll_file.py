"""Tagged words, one a line, with an empty line between sentences: CoNLL, BIO and their kin.

A line is a word, any columns between, and its tag, parted by tabs where the first line has one, else by blanks. Each
sentence becomes a row with its words in `tokens` and its tags in `tags`. Lines that begin with -DOCSTART- part
documents; lines that begin with `#` and do not have a word line's columns are remarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pyarrow as pa

from flatout.data.tables.formats.file import HEAD_BYTES, FileTable, require_no_utf16
from flatout.errors import UserError

COLUMNS = ["tokens", "tags"]
_DOCUMENT = "-DOCSTART-"
_LONGEST_SENTENCE = 100_000
Sentence = tuple[list[str], list[str]]


class ConllTable(FileTable):
    """A file of tagged sentences."""

    def how(self) -> str:
        return f"{self._width} columns: the first is the word, the last its tag"

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        sentences = self._sentences()
        while found := list(islice(sentences, rows_per_block)):
            parts = dict(zip(COLUMNS, zip(*found, strict=True), strict=True))
            arrays = [pa.array(parts[name], pa.list_(pa.large_string())) for name in columns]
            yield pa.RecordBatch.from_arrays(arrays, names=columns)

    def _read_columns(self) -> list[str]:
        with self._open() as file:
            require_no_utf16(self.path, file.read(HEAD_BYTES), self.where)
        self._separator, self._width = None, 0
        for number, line in self._lines():
            if not self._is_word(line):
                continue
            self._separator = "\t" if "\t" in line else None
            self._width = len(line.split(self._separator))
            if self._width < 2:
                hint = "Each line needs a word and its tag, with a blank or a tab between."
                raise self._fail(f"line {number}: one column, {line[:40]!r}", hint)
            return list(COLUMNS)
        raise self._fail("no rows")

    def _sentences(self) -> Iterator[Sentence]:
        """Words and tags of each sentence."""
        words: list[str] = []
        tags: list[str] = []
        for number, line in self._lines():
            values = line.split(self._separator)
            if not line.strip() or line.startswith(_DOCUMENT):
                if words:
                    yield words, tags
                words, tags = [], []
                continue
            if len(values) != self._width:
                if line.startswith("#"):
                    continue
                raise self._misfit(number, line, len(values))
            words.append(values[0])
            tags.append(values[-1].strip())
            if len(words) > _LONGEST_SENTENCE:
                hint = "Part sentences by an empty line."
                raise self._fail(f"line {number}: a sentence of over {_LONGEST_SENTENCE:,} words", hint)
        if words:
            yield words, tags

    def _misfit(self, number: int, line: str, width: int) -> UserError:
        what = f"line {number}: expected {self._width} columns, got {width}: {line[:60]!r}"
        return self._fail(what, "Part sentences by an empty line, and give every word its tag.")

    def _lines(self) -> Iterator[tuple[int, str]]:
        try:
            with self._open() as file:
                for number, line in enumerate(file, 1):
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            self._require_utf8()

    @staticmethod
    def _is_word(line: str) -> bool:
        return bool(line.strip()) and not line.startswith((_DOCUMENT, "# "))
