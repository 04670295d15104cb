"""The store: encoded rows as flat files that are opened by mapping them into memory.

A store is one folder: `manifest.json`, small named texts (the tokenizer, the class names), and a
folder of columns for each split. A column is either fixed (one value, or one run of `width` values,
a row) or ragged (values one row after the other, with offsets and lengths). Opening reads the
manifest alone, so it takes milliseconds at any size; rows are written in blocks, so building needs
memory for one block only. Every file's checksum stands in the manifest, and the manifest's own in
`manifest.sum`, so no bit of a store can change unnoticed. The sizes and types in a manifest must
also agree with each other, so that even one with a right checksum cannot mislead a reader.

The values of a ragged column may lie in other stores, its shards. They are mapped one after the
other into one range of memory, so that readers see one array, and nothing is copied.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from flatout.data.ragged import row_begins, row_bounds

SCHEMA = 2
GROUPS = "groups"  # the column whose numbers are equal for rows of one `data.group`
MANIFEST = "manifest.json"
MANIFEST_SUM = "manifest.sum"
SHARDS = ".units"  # the folder beside a store that has its shards
_SHARD_FILE = re.compile(rf"\.\./{re.escape(SHARDS)}/[0-9a-f]{{20}}/\w+/\w+\.bin")
_DTYPES = ("uint8", "uint16", "int32", "int64", "float32")
_PAGE = 1 << 16  # bytes; pages of any machine fit into it
# Flags that Python has no names for: of memory that need not be there, as a store may be larger,
# and at a given place.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0x40
_FIXED = 0x10
Array = NDArray[Any]
_map_file = ctypes.CDLL(None, use_errno=True).mmap  # Python's own cannot say where
_map_file.restype = ctypes.c_void_p
_map_file.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


@dataclass(frozen=True, slots=True)
class Column:
    """How one column lies on disk."""

    dtype: str  # numpy's name of the type of a value
    ragged: bool = False  # any number of values a row, instead of `width`
    width: int = 0  # values a row of a fixed column; 0 for a plain value


class DamagedStore(Exception):
    """A store whose manifest is not the one that was written, or says what cannot be."""


class WriteFailed(Exception):
    """The disk refused what a store's writer wrote; `error` tells how.

    Not an OSError: sources raise these too.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error
        self.needed: int | None = None  # bytes of the whole store, where they are known


@contextmanager
def written() -> Iterator[None]:
    """Within it, an OSError becomes a WriteFailed: use it around all that writes to a store."""
    try:
        yield
    except OSError as error:
        raise WriteFailed(error) from error


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of unequal length: row i is `lengths[i]` values from `offsets[i]` on; after a shard
    there may be a gap.
    """

    values: Array
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int32]

    @classmethod
    def of(cls, values: Array, lengths: NDArray[np.int32]) -> Ragged:
        """Rows that follow each other, by how many values each has."""
        return cls(values, row_bounds(lengths), lengths)


class StoreSplit:
    """One split of an open store: its columns, mapped into memory."""

    def __init__(self, name: str, num_rows: int, columns: dict[str, Array | Ragged]) -> None:
        self.name = name
        self.num_rows = num_rows
        self._columns = columns

    @property
    def columns(self) -> dict[str, Array | Ragged]:
        return self._columns

    def ragged(self, name: str) -> Ragged:
        column = self.columns[name]
        assert isinstance(column, Ragged), f"{name} is a fixed column"
        return column

    def fixed(self, name: str) -> Array:
        column = self.columns[name]
        assert not isinstance(column, Ragged), f"{name} is a ragged column"
        return column

    def lengths(self, name: str) -> NDArray[np.integer]:
        """Values of each row: a ragged column's own, a fixed column's width."""
        column = self.columns[name]
        if isinstance(column, Ragged):
            return column.lengths
        return np.broadcast_to(column.shape[1], len(column))

    @property
    def arrays(self) -> list[Array]:
        arrays: list[Array] = []
        for column in self.columns.values():
            if isinstance(column, Ragged):
                arrays += [column.values, column.offsets, column.lengths]
            else:
                arrays.append(column)
        return arrays

    @property
    def num_bytes(self) -> int:
        """Bytes that a copy of every column takes."""
        return sum(array.nbytes for array in self.arrays)

    def read_single_pages(self) -> None:
        """Let the system read no pages ahead: for random rows of more data than memory holds."""
        for array in self.arrays:
            mapped = array
            while isinstance(mapped, np.ndarray) and mapped.base is not None:
                mapped = mapped.base
            if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
                mapped.madvise(mmap.MADV_RANDOM)


class Store:
    """A finished store.

    Its arrays may be written to in memory (copy on write); the files never change.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder) if manifest is None else manifest
        self.facts: dict[str, Any] = self.manifest["facts"]
        self.splits = {
            name: self._open_split(name, split) for name, split in self.manifest["splits"].items()
        }

    def read_text(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def _open_split(self, name: str, described: dict[str, Any]) -> StoreSplit:
        rows = described["rows"]
        specs = {column: Column(**spec) for column, spec in described["columns"].items()}
        columns = {
            column: self._open_column(f"{name}/{column}", spec, rows)
            for column, spec in specs.items()
        }
        return StoreSplit(name, rows, columns)

    def _open_column(self, name: str, column: Column, num_rows: int) -> Array | Ragged:
        values = self._map(_files_of(self.manifest, name), column.dtype)
        if column.ragged:
            offsets = self._map([(f"{name}.offsets.bin", 0)], "int64")
            return Ragged(values, offsets, self._map([(f"{name}.lengths.bin", 0)], "int32"))
        return values.reshape(num_rows, column.width) if column.width else values

    def _map(self, files: Sequence[tuple[str, int]], dtype: str) -> Array:
        """One array over several files, each mapped from its byte on.

        No file stays open, however many there are. What is written to the array stays in memory.
        """
        sizes = [self.manifest["files"][name]["bytes"] for name, _ in files]
        if not any(sizes):
            return np.empty(0, dtype)
        num_bytes = files[-1][1] + sizes[-1]
        area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(area))
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        for (name, first), size in zip(files, sizes, strict=True):
            with (self.folder / name).open("rb") as file:
                flags, place = mmap.MAP_PRIVATE | _NORESERVE | _FIXED, begin + first
                if _map_file(place, size, rights, flags, file.fileno(), 0) != place:
                    raise OSError(
                        ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(self.folder / name)
                    )
        # The mapping is the base of the array, as `read_single_pages` asks, and as it is not of
        # numpy's `frombuffer`.
        return np.ndarray(num_bytes // np.dtype(dtype).itemsize, dtype, buffer=area)


def read_manifest(folder: Path) -> dict[str, Any]:
    """A store's manifest, if it is byte for byte the one that was written and agrees
    with itself.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        if xxhash.xxh3_128_hexdigest(content).encode() != (folder / MANIFEST_SUM).read_bytes():
            raise DamagedStore(f"{MANIFEST} differs from {MANIFEST_SUM}")
        manifest = json.loads(content)
        _require_sound(manifest)
    except PermissionError:
        raise  # not damaged: another user's
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedStore(f"{MANIFEST}: {error}") from None
    return manifest


def _require_sound(manifest: dict[str, Any]) -> None:
    """Refuse names outside of the folder, and columns whose size does not fit rows and type."""
    files = manifest["files"]
    for name, file in files.items():
        path = PurePosixPath(name)
        is_inside = not path.is_absolute() and ".." not in path.parts
        if not (is_inside or _SHARD_FILE.fullmatch(name)) or not _is_count(file["bytes"]):
            raise ValueError(f"no such file can be: {name}")
    for name, split in manifest["splits"].items():
        rows = split["rows"]
        columns = {f"{name}/{column}": Column(**spec) for column, spec in split["columns"].items()}
        if not _is_count(rows) or not all(
            _is_sound(path, column, rows, manifest) for path, column in columns.items()
        ):
            raise ValueError(f"the sizes of {name} do not fit its {rows} rows")


def _is_sound(path: str, column: Column, rows: int, manifest: dict[str, Any]) -> bool:
    size = np.dtype(column.dtype).itemsize
    files = manifest["files"]
    if column.dtype not in _DTYPES or not _is_count(column.width):
        return False
    if not column.ragged:
        return files[f"{path}.bin"]["bytes"] == rows * size * max(1, column.width)
    end = 0
    for name, first in _files_of(manifest, path):
        if not _is_count(first) or first < end or first % _PAGE or files[name]["bytes"] % size:
            return False
        end = first + files[name]["bytes"]
    return (
        files[f"{path}.offsets.bin"]["bytes"] == 8 * (rows + 1)
        and files[f"{path}.lengths.bin"]["bytes"] == 4 * rows
    )


def _files_of(manifest: dict[str, Any], path: str) -> list[tuple[str, int]]:
    """The files of a column's values, each with the byte of the column at which it begins."""
    return manifest.get("shards", {}).get(path, [(f"{path}.bin", 0)])


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def damaged_files(folder: Path) -> list[str]:
    """Files of a store that are missing or differ from the manifest's checksums; empty when the
    store is whole.
    """
    try:
        files = read_manifest(folder)["files"]
    except DamagedStore:
        return [MANIFEST]
    return [name for name, file in files.items() if not _is_whole(folder / name, file)]


def _is_whole(path: Path, file: dict[str, Any]) -> bool:
    try:
        return path.stat().st_size == file["bytes"] and file_checksum(path) == file["xxh3"]
    except PermissionError:
        raise
    except (OSError, KeyError):
        return False


def file_checksum(path: Path) -> str:
    """xxh3 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


class _FileWriter:
    def __init__(self, path: Path, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        with written():
            self._file: BinaryIO = path.open("xb")
        self._digest = xxhash.xxh3_128()
        self._bytes = 0

    def append(self, values: Array) -> None:
        data = np.ascontiguousarray(values, dtype=self.dtype).tobytes()
        with written():
            self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def close(self) -> dict[str, Any]:
        with written():
            self._file.close()
        return {"bytes": self._bytes, "xxh3": self._digest.hexdigest()}


class SplitWriter:
    """Writes the rows of one split, block by block."""

    def __init__(
        self, folder: Path, name: str, columns: dict[str, Column], sharded: str | None = None
    ) -> None:
        """`sharded`: the column whose values lie in other stores, its shards; None: no column's."""
        with written():
            (folder / name).mkdir()
        self.name = name
        self.columns = columns
        self.sharded = sharded
        # files of shards, each with the byte of the column at which it begins
        self.shards: list[tuple[str, int]] = []
        self.shard_files: dict[str, Any] = {}
        # counted even if the disk refused them, for the error of a full disk
        self.num_rows = 0
        self.num_bytes = 0
        self._files: dict[str, _FileWriter] = {}
        self._totals = dict.fromkeys(columns, 0)
        self._begun = dict.fromkeys(columns, 0)  # values of a row that is not whole yet
        try:
            for column, spec in columns.items():
                if column != sharded:
                    self._open(folder, f"{name}/{column}.bin", spec.dtype)
                if spec.ragged:
                    self._open(folder, f"{name}/{column}.offsets.bin", "int64")
                    self._open(folder, f"{name}/{column}.lengths.bin", "int32")
        except WriteFailed:
            self.abandon()
            raise

    def extend(self, name: str, values: Array) -> None:
        """Add values of a ragged row that `append` completes: a row may be larger than memory."""
        assert self.columns[name].ragged
        self._write({f"{self.name}/{name}.bin": values})
        self._begun[name] += len(values)

    def append(self, **blocks: Array | tuple[Array, Array]) -> None:
        """Add rows: an array for a fixed column, `(values, lengths)` for a ragged one."""
        assert blocks.keys() == self.columns.keys()
        counts = set[int]()
        parts: dict[str, Array] = {}
        for name, block in blocks.items():
            path = f"{self.name}/{name}"
            values, lengths = block if isinstance(block, tuple) else (block, None)
            counts.add(len(values if lengths is None else lengths))
            if name != self.sharded:
                parts[f"{path}.bin"] = values
            if lengths is not None:
                # Lengths [2, 1] behind 5 values that are written already → offsets [5, 7].
                count = len(values) + self._begun[name]
                assert count == lengths.sum()
                begins = row_begins(lengths) + self._totals[name]
                parts |= {f"{path}.offsets.bin": begins, f"{path}.lengths.bin": lengths}
                self._totals[name] += count
                self._begun[name] = 0
        assert len(counts) == 1, f"columns of unequal length: {counts}"
        self.num_rows += counts.pop()
        self._write(parts)

    def append_shard(self, shard: Store, **others: Array | tuple[Array, Array]) -> None:
        """Add all rows of a shard's split; the values of the sharded column stay in the shard."""
        assert self.sharded is not None
        path = f"{self.name}/{self.sharded}"
        tokens = shard.splits[self.name].ragged(self.sharded)
        name = f"../{SHARDS}/{shard.folder.name}/{path}.bin"
        size = tokens.values.itemsize
        if len(tokens.values):
            # A file is mapped to whole pages, so after a shard there may be a gap in the array.
            first = -(-self._totals[self.sharded] * size // _PAGE) * _PAGE
            self.shards.append((name, first))
            self.shard_files[name] = shard.manifest["files"][f"{path}.bin"]
            self._totals[self.sharded] = first // size
        self.append(**{self.sharded: (tokens.values, tokens.lengths)}, **others)

    def close(self) -> dict[str, Any]:
        """Close the files. Returns their entries for the manifest, and those of shards."""
        for name, total in self._totals.items():
            if self.columns[name].ragged:
                self._files[f"{self.name}/{name}.offsets.bin"].append(np.array([total]))
        return {name: file.close() for name, file in self._files.items()} | self.shard_files

    def abandon(self) -> None:
        """Close every file, whatever the disk says."""
        for file in self._files.values():
            with suppress(WriteFailed):
                file.close()

    def _write(self, parts: dict[str, Array]) -> None:
        self.num_bytes += sum(
            np.size(values) * self._files[path].dtype.itemsize for path, values in parts.items()
        )
        for path, values in parts.items():
            self._files[path].append(values)

    def _open(self, folder: Path, name: str, dtype: str) -> _FileWriter:
        self._files[name] = _FileWriter(folder / name, dtype)
        return self._files[name]


class StoreWriter:
    """Writes a store into a folder that no other process opens yet; `close` writes the manifest,
    last of all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self.expected_rows: int | None = None
        """Rows of all splits, where they are known before: the error of a full disk then says what
        is needed."""
        self._splits: list[SplitWriter] = []
        self._texts: dict[str, dict[str, Any]] = {}

    def split(
        self, name: str, columns: dict[str, Column], sharded: str | None = None
    ) -> SplitWriter:
        self._splits.append(SplitWriter(self.folder, name, columns, sharded))
        return self._splits[-1]

    def write_text(self, name: str, text: str) -> None:
        self._texts[name] = self._write(name, text.encode())

    def expected_bytes(self) -> int | None:
        """Bytes of the whole store, estimated from the rows so far; None while it is unknown."""
        rows = sum(split.num_rows for split in self._splits)
        if not rows or self.expected_rows is None:
            return None
        return (
            sum(split.num_bytes for split in self._splits) * max(self.expected_rows, rows) // rows
        )

    def abandon(self) -> None:
        """Close every file of a store that will not be finished."""
        for split in self._splits:
            split.abandon()

    def close(self, about: dict[str, Any]) -> None:
        """Finish every file and write the manifest with `about` (key, recipe and the
        like) in it.
        """
        files = dict(self._texts)
        splits = {}
        shards = {
            f"{split.name}/{split.sharded}": split.shards for split in self._splits if split.sharded
        }
        for split in self._splits:
            files |= split.close()
            columns = {name: asdict(column) for name, column in split.columns.items()}
            splits[split.name] = {"rows": split.num_rows, "columns": columns}
        about |= {"shards": shards} if shards else {}
        manifest = {
            "schema": SCHEMA,
            **about,
            "facts": self.facts,
            "splits": splits,
            "files": files,
        }
        text = json.dumps(manifest, indent=1, ensure_ascii=False)
        # a file's name may hold bytes that are no UTF-8: JSON has a form for them
        last = self._write(MANIFEST, text.encode("utf-8", "backslashreplace"))
        self._write(MANIFEST_SUM, last["xxh3"].encode())

    def _write(self, name: str, content: bytes) -> dict[str, Any]:
        with written(), (self.folder / name).open("xb") as file:
            file.write(content)
        return {"bytes": len(content), "xxh3": xxhash.xxh3_128_hexdigest(content)}


def smallest_token_type(vocabulary_size: int) -> str:
    """Two bytes a token where every id fits, else four."""
    return "uint16" if vocabulary_size <= 1 << 16 else "int32"
