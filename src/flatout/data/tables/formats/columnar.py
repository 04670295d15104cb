"""Formats that keep the types of their columns: Arrow files, parquet, `.npy` of numpy and HDF5,
read a block at a time.

Numbers of classes get their names. A structured array, or an HDF5 file's data sets of equal length,
are named columns. A plain table of numbers is one column, `bits`, of one value a row for each of
its columns. Nothing is unpickled.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flatout.data.tables.formats.file import CUT_SHORT, HEAD_BYTES, FileTable
from flatout.data.tables.table import Table, named_classes
from flatout.errors import UserError, first_line

_MAGIC = b"ARROW1"
# What readers raise on files of others; Python's own where a column's class reads its notes.
_DAMAGED = (
    pa.ArrowInvalid,
    pa.ArrowNotImplementedError,
    pa.ArrowTypeError,
    pa.ArrowSerializationError,
    AttributeError,
    LookupError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
ONLY_COLUMN = "bits"
_MOST_UNWRITTEN = 1 << 30  # bytes of a data set of HDF5, however few are stored
_MOST_RATIO = 1_000  # bytes of a larger one to one that is stored


class ArrowTable(FileTable):
    """An Arrow file of either kind (.arrow and .feather; what `datasets` saves is one), read a
    batch at a time.
    """

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        row = 0
        for batch in self._batches():
            block = named_classes(batch.select(columns), batch.schema)
            require_whole(block, row, self._fail)
            row += block.num_rows
            yield block

    def _read_columns(self) -> list[str]:
        for batch in self._batches():
            if batch.num_rows:
                return list(batch.schema.names)
        raise self._fail("no rows")

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Every batch of the file.

        Bytes are read, not mapped: a damaged file is then an error and no crash.
        """
        try:
            with self.whole.open("rb") as file:
                is_file = file.read(len(_MAGIC)) == _MAGIC
            with pa.OSFile(str(self.whole), "rb") as source:
                reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
                str(reader.schema.names)  # fails where a name is not UTF-8
                yield from (
                    map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
                )
        except UserError:
            raise
        except _DAMAGED as error:
            raise self._fail(f"not a whole Arrow file ({first_line(error)})", CUT_SHORT) from None


class ParquetTable(FileTable):
    """A parquet file, read a row group at a time."""

    def pieces(self, num_rows: int, least: int) -> Iterator[tuple[range, Table]]:
        first = 0
        begin = 0
        with self._parquet() as file:
            sizes = [
                file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)
            ]
        for number, end in enumerate(np.cumsum(sizes).tolist(), 1):
            if end - begin >= least or number == len(sizes):
                yield range(begin, end), RowGroups(self, range(first, number))
                first = number
                begin = end

    def _blocks(
        self, columns: list[str], rows_per_block: int, groups: range | None = None
    ) -> Iterator[pa.RecordBatch]:
        row = 0
        with self._parquet() as file:
            groups = groups or range(file.num_row_groups)
            schema = file.schema_arrow
            promised = sum(file.metadata.row_group(group).num_rows for group in groups)
            for batch in file.iter_batches(rows_per_block, groups, columns):
                block = named_classes(batch.select(columns), schema)
                require_whole(block, row, self._fail)
                row += block.num_rows
                yield block
        if row != promised:
            raise self._fail(f"holds {row:,} rows where its end promises {promised:,}", CUT_SHORT)

    def _read_columns(self) -> list[str]:
        with self._parquet() as file:
            if file.metadata.num_rows:
                return list(file.schema_arrow.names)
        raise self._fail("no rows")

    @contextmanager
    def _parquet(self) -> Iterator[pq.ParquetFile]:
        try:
            with pq.ParquetFile(self.whole, buffer_size=HEAD_BYTES, pre_buffer=False) as file:
                yield file
        except UserError:
            raise
        except _DAMAGED as error:
            raise self._fail(f"not a whole parquet file ({first_line(error)})", CUT_SHORT) from None


class RowGroups(Table):
    """Some row groups of a parquet file, read without the others."""

    def __init__(self, file: ParquetTable, groups: range) -> None:
        self.inner = file
        self.file = file
        self.groups = groups
        self.name = file.name
        self.columns = file.columns

    def fingerprint(self) -> str:
        return f"{self.file.fingerprint()} {self.how()}"

    def how(self) -> str:
        return f"row groups {self.groups.start} to {self.groups.stop}"

    def blocks(
        self, columns: Sequence[str], rows_per_block: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        return self.file._blocks(list(columns), rows_per_block, self.groups)


def require_whole(block: pa.RecordBatch, first_row: int, fail: Callable[[str], UserError]) -> None:
    """Texts in such a file may be anything; what is not UTF-8 would stop a later step."""
    for name, column in zip(block.schema.names, block.columns, strict=True):
        try:
            column.validate(full=True)
        except (pa.ArrowException, ValueError) as error:
            rows = f"rows {first_row + 1:,} to {first_row + block.num_rows:,}"
            raise fail(
                f"{rows}: column {name!r} is damaged or not UTF-8 ({first_line(error)})"
            ) from None


class NpyTable(FileTable):
    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        array = self._mapped()
        for start in range(0, len(array), rows_per_block):
            block = array[start : start + rows_per_block]
            # A structured array has its columns by name; a plain one is a single column.
            if array.dtype.names:
                yield _record_batch({name: block[name] for name in columns}, self._fail)
            else:
                yield _record_batch(dict.fromkeys(columns, block), self._fail)

    def _read_columns(self) -> list[str]:
        array = self._mapped()
        if array.ndim == 0 or len(array) == 0:
            raise self._fail("no rows")
        if array.dtype.names:
            return list(array.dtype.names)
        if array.ndim != 2:
            raise self._fail(
                f"an array of {array.ndim} dimensions",
                "Save rows by columns, or a structured array.",
            )
        return [ONLY_COLUMN]

    def _mapped(self) -> np.ndarray:
        try:
            loaded = np.load(self.whole, mmap_mode="r", allow_pickle=False)
        except (*_DAMAGED, EOFError, zipfile.BadZipFile) as error:
            raise self._fail(
                f"not a whole .npy file of plain values ({first_line(error)})", CUT_SHORT
            ) from None
        if not isinstance(loaded, np.ndarray):
            loaded.close()
            raise self._fail("several arrays in one file", "Save each as a .npy file of its own.")
        return loaded


class Hdf5Table(FileTable):
    """Data sets of equal length in an HDF5 file."""

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        with self._opened() as sets:
            for start in range(0, len(sets[columns[0]]) if columns else 0, rows_per_block):
                yield _record_batch(
                    {name: sets[name][start : start + rows_per_block] for name in columns},
                    self._fail,
                )

    def _read_columns(self) -> list[str]:
        with self._opened() as sets:
            lengths = {name: len(values) for name, values in sets.items()}
        if not lengths:
            raise self._fail(
                "no data sets in its root", "Give each column a data set of one or two dimensions."
            )
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {count:,}" for name, count in lengths.items())
            raise self._fail(f"data sets of unequal length: {listed}")
        if not next(iter(lengths.values())):
            raise self._fail("no rows")
        return list(lengths)

    @contextmanager
    def _opened(self) -> Iterator[Mapping[str, Any]]:
        try:
            import h5py
        except ImportError:
            raise UserError(
                self.where,
                f"{self.path}: reading HDF5 needs h5py",
                hint="Install it with: pip install 'flatout[hdf5]'",
            ) from None
        try:
            with h5py.File(self.whole, "r") as file:
                sets: dict[str, Any] = {}
                for name in file:
                    # It may link to another file, or draw its values from one: any of yours.
                    is_own = isinstance(file.get(name, getlink=True), h5py.HardLink)
                    values = file[name] if is_own else None
                    if isinstance(values, h5py.Dataset):
                        is_own = values.external is None and not values.is_virtual
                    if not is_own:
                        raise self._fail(
                            f"data set {name!r} leads to another place",
                            "Store its values under that name.",
                        )
                    # Groups and scalars are left alone.
                    if isinstance(values, h5py.Dataset) and values.ndim in (1, 2):
                        # rows that were never written take no room, and have no end
                        num_bytes = values.size * values.dtype.itemsize
                        stored = values.id.get_storage_size()
                        if num_bytes > max(_MOST_UNWRITTEN, _MOST_RATIO * stored):
                            raise self._fail(
                                f"data set {name!r} has {num_bytes:,} bytes, and {stored:,} stored"
                            )
                        sets[name] = values
                yield sets
        except UserError:
            raise
        except _DAMAGED as error:
            raise self._fail(f"not a whole HDF5 file ({first_line(error)})", CUT_SHORT) from None


def _record_batch(
    columns: Mapping[str, np.ndarray], fail: Callable[[str], UserError]
) -> pa.RecordBatch:
    arrays = []
    for name, values in columns.items():
        try:
            array = _arrow(values)
            array.validate(full=True)  # texts of numpy may be no Unicode
            arrays.append(array)
        except _DAMAGED as error:
            reason = first_line(error)
            raise fail(
                f"column {name!r} of type {values.dtype} cannot be read ({reason})"
            ) from None
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _arrow(values: np.ndarray) -> pa.Array:
    """Numbers as they are, bytes as UTF-8 texts, rows of numbers as lists of fixed length."""
    if values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(
            pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1]
        )
    # Arrow takes numpy's texts and bytes as Python's alone.
    if values.dtype.kind == "U":
        return pa.array(values.tolist())
    if values.dtype.kind in "SO":
        return pa.array([_as_text(value) for value in values.tolist()])
    return pa.array(np.ascontiguousarray(values))


def _as_text(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value
