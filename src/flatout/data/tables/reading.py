"""Settings that say how files are written, for what the files do not show themselves."""

from __future__ import annotations

import codecs
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

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
    decimal: str = setting(
        ".",
        "What stands before the decimals of numbers in a csv of recordings.",
        allowed="a point or a comma",
        example=",",
    )
    dates: str | None = setting(
        None,
        "How a csv of recordings writes times, in the letters of strftime; null: as"
        " 2026-03-28T07:00:00, or as seconds.",
        example="'data.read.dates=%d.%m.%Y %H:%M:%S'",
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
        require(
            self.decimal in (".", ",") and self.decimal != self.delimiter,
            f"{where}.decimal",
            repr(self.decimal),
            allowed="a point or a comma, unless it is the delimiter",
        )
        require(
            self.dates is None or "%" in self.dates,
            f"{where}.dates",
            repr(self.dates),
            allowed="letters of strftime, such as %d.%m.%Y %H:%M:%S",
        )
        is_named = self.columns is None or (
            len(self.columns) > 0 and len(set(self.columns)) == len(self.columns)
        )
        require(is_named, f"{where}.columns", f"{self.columns}", allowed="names that differ")

    def facts(self) -> dict[str, Any]:
        """What a store depends on. Settings that say nothing are left out, so that stores of before
        there were such keep their keys.
        """
        facts = asdict(self)
        if self.decimal == ".":
            del facts["decimal"]
        if self.dates is None:
            del facts["dates"]
        return facts

    def require_texts(self) -> None:
        """Refuse what is only for recordings."""
        for name, is_usual in (("decimal", self.decimal == "."), ("dates", self.dates is None)):
            require(is_usual, f"data.read.{name}", "is for recordings", hint="Leave it out.")

    def _require_one_byte(self, name: str, value: str) -> None:
        # pyarrow's reader of csv files compares single bytes.
        is_fine = len(value) == 1 and value.isascii() and value not in "\r\n\0"
        require(is_fine, f"data.read.{name}", repr(value), allowed="one ASCII character")


def _is_encoding(name: str) -> bool:
    try:
        return codecs.lookup(name)._is_text_encoding
    except (LookupError, ValueError):  # a name with a null character, too
        return False
