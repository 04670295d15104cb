"""Rows of texts that readers like to change, and their table as csv."""

from __future__ import annotations

import csv
import io

ODD = [
    "NA",
    "null",
    "None",
    "",
    "007",
    "00101",
    "1.0",
    "nan",
    'say "hi"',
    "two\nlines",
    "a,b",
    "é ☃",
]


def as_csv(rows: list[dict[str, str]], delimiter: str = ",", newline: str = "\n") -> str:
    text = io.StringIO()
    writer = csv.DictWriter(
        text, rows[0], delimiter=delimiter, lineterminator=newline, quoting=csv.QUOTE_ALL
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


ROWS = [{"text": text, "label": str(i)} for i, text in enumerate(ODD)]
