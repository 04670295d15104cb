"""Settings that say how files are written, for what the files do not show themselves."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from enum import StrEnum

from flatout.errors import check_settings, require, setting

_ENCODINGS = "Name one that Python knows, for example cp1252, latin-1, utf-16, shift_jis."
Format = StrEnum("Format", "csv tsv json jsonl parquet arrow conll npy hdf5")  # kinds of files


@dataclass(kw_only=True, slots=True)
class ReadingConfig:
    """How files are written; what is null is detected and reported."""

    format: Format | None = setting(
        None, "Kind of file; null: by the name's ending.", choices=Format, example="csv"
    )
    encoding: str | None = setting(
        None, "Encoding of csv, json and text files; null: UTF-8.", example="latin-1"
    )
    delimiter: str | None = setting(
        None, "Of a csv; null: by the first rows.", example="\"data.read.delimiter=';'\""
    )
    quote: str = setting(
        '"',
        "What may stand around values of a csv; empty: quotes are a part of them.",
        example="''",
    )
    columns: list[str] | None = setting(
        None,
        "Names of the columns of a csv whose first line is a row already; null: the first line"
        " names them.",
        allowed="a list of names that differ, or null",
        example="[text,label]",
    )

    def __post_init__(self) -> None:
        where = "data.read"
        check_settings(self, where)
        if self.encoding is not None:
            require(
                _is_encoding(self.encoding),
                f"{where}.encoding",
                f"no encoding {self.encoding!r}",
                hint=_ENCODINGS,
            )
        if self.delimiter is not None:
            self.delimiter = self.delimiter.replace("\\t", "\t")
            self._require_one_byte("delimiter", self.delimiter)
        if self.quote:
            self._require_one_byte("quote", self.quote)
        require(
            self.quote != self.delimiter,
            f"{where}.quote",
            f"{self.quote!r} is the delimiter too",
            hint="Set data.read.quote='' if values are not quoted.",
        )
        is_named = self.columns is None or (
            len(self.columns) > 0 and len(set(self.columns)) == len(self.columns)
        )
        require(is_named, f"{where}.columns", f"{self.columns}", allowed="names that differ")

    def _require_one_byte(self, name: str, value: str) -> None:
        # pyarrow's reader of csv files compares single bytes.
        is_fine = len(value) == 1 and value.isascii() and value not in "\r\n\0"
        require(is_fine, f"data.read.{name}", repr(value), allowed="one ASCII character")


def _is_encoding(name: str) -> bool:
    try:
        return codecs.lookup(name)._is_text_encoding
    except LookupError:
        return False
