"""A folder of plain texts, one folder a class, one file a text.

Files lie in `CLASS/NAME` and are read in the order of their names. Hidden files are left alone; so are files whose
ending says that they are no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import xxhash

from flatout.data.tables.formats.file import OTHER_ENCODING, Gunzipped, require_utf8
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.table import Table
from flatout.errors import UserError

_ENDINGS = ("", ".txt", ".text")
_LONGEST_TEXT = 1 << 26


class TextFolder(Table):
    """The texts of a folder: columns `text`, `label` (the folder a file lies in) and `file`."""

    columns: Sequence[str] = ("text", "label", "file")

    def __init__(self, path: Path, where: str, reading: ReadingConfig | None = None) -> None:
        self.path, self.where = path, where
        self.name = str(path)
        self._encoding = (reading or ReadingConfig()).encoding
        self._files, self._skipped = _text_files(path)

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

    def locate(self, row: int) -> str:
        return str(self._files[row - 1].relative_to(self.path))

    def blocks(self, columns: Sequence[str], rows_per_block: int = 65_536) -> Iterator[pa.RecordBatch]:
        step = min(rows_per_block, 4_096)  # texts of whole files are long
        for start in range(0, len(self._files), step):
            files = self._files[start : start + step]
            made = {
                "label": [file.parent.name for file in files],
                "file": [str(file.relative_to(self.path)) for file in files],
                "text": [self._text(file) for file in files] if "text" in columns else [],
            }
            arrays = [pa.array(made[name], pa.large_string()) for name in columns]
            yield pa.RecordBatch.from_arrays(arrays, names=list(columns))

    def _text(self, file: Path) -> str:
        data = self._bytes(file)
        if self._encoding is None:
            require_utf8(file, data, self.where, first_line=1)
            return data.decode("utf-8-sig")
        try:
            return data.decode(self._encoding)
        except UnicodeError as error:
            what = f"{file}: not {self._encoding} ({getattr(error, 'reason', error)})"
            raise UserError(self.where, what, hint=OTHER_ENCODING) from None

    def _bytes(self, file: Path) -> bytes:
        try:
            with Gunzipped(file, self.where) if file.suffix.lower() == ".gz" else file.open("rb") as opened:
                data = opened.read(_LONGEST_TEXT + 1)
        except OSError as error:
            raise UserError(
                self.where, f"cannot read {file}: {error.strerror}", hint="Check that you may read it."
            ) from None
        if len(data) > _LONGEST_TEXT:
            what = f"{file}: longer than {_LONGEST_TEXT >> 20} MB"
            raise UserError(self.where, what, hint="One file is one text.")
        return data


def is_text_folder(path: Path) -> bool:
    """Whether a folder holds folders of texts."""
    return any(_is_text(file) for folder in _visible(path) if folder.is_dir() for file in _visible(folder))


def _text_files(path: Path) -> tuple[list[Path], int]:
    """The text files of each class, and how many others lie beside them."""
    files = [file for folder in _visible(path) if folder.is_dir() for file in _visible(folder) if file.is_file()]
    texts = [file for file in files if _is_text(file)]
    return texts, len(files) - len(texts)


def _is_text(file: Path) -> bool:
    ending = Path(file.stem if file.suffix.lower() == ".gz" else file.name).suffix.lower()
    return file.is_file() and (ending in _ENDINGS or ending[1:].isdecimal())


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
