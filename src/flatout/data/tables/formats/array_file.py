"""Arrays on disk: `.npy` of numpy and HDF5, read a block of rows at a time; columns keep their types.

A structured array, or an HDF5 file's data sets of equal length, are named columns. A plain table of numbers is one
column, `bits`, of one value a row for each of its columns. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from flatout.data.tables.formats.file import CUT_SHORT, FileTable
from flatout.errors import UserError

ONLY_COLUMN = "bits"


class NpyTable(FileTable):
    """A `.npy` file."""

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        array = self._mapped()
        for start in range(0, len(array), rows_per_block):
            block = array[start : start + rows_per_block]
            parts = {name: block[name] if array.dtype.names else block for name in columns}
            yield _record_batch(parts)

    def _read_columns(self) -> list[str]:
        array = self._mapped()
        if array.ndim == 0 or len(array) == 0:
            raise self._fail("no rows")
        if array.dtype.names:
            return list(array.dtype.names)
        if array.ndim != 2:
            raise self._fail(f"an array of {array.ndim} dimensions", "Save rows by columns, or a structured array.")
        return [ONLY_COLUMN]

    def _mapped(self) -> np.ndarray:
        try:
            return np.load(self.whole, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise self._fail(f"not a whole .npy file of plain values ({error})", CUT_SHORT) from None


class Hdf5Table(FileTable):
    """Data sets of equal length in an HDF5 file."""

    def _blocks(self, columns: list[str], rows_per_block: int) -> Iterator[pa.RecordBatch]:
        with self._opened() as sets:
            length = len(sets[columns[0]]) if columns else 0
            for start in range(0, length, rows_per_block):
                yield _record_batch({name: sets[name][start : start + rows_per_block] for name in columns})

    def _read_columns(self) -> list[str]:
        with self._opened() as sets:
            lengths = {name: len(values) for name, values in sets.items()}
        if not lengths:
            raise self._fail("no data sets in its root", "Give each column a data set of one or two dimensions.")
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
            hint = "Install it with: pip install 'flatout[hdf5]'"
            raise UserError(self.where, f"{self.path}: reading HDF5 needs h5py", hint=hint) from None
        try:
            with h5py.File(self.whole, "r") as file:
                sets = {name: values for name, values in file.items() if getattr(values, "ndim", 0) in (1, 2)}
                yield sets
        except OSError as error:
            raise self._fail(f"not a whole HDF5 file ({str(error).splitlines()[0]})", CUT_SHORT) from None


def _record_batch(columns: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([_arrow(values) for values in columns.values()], names=list(columns))


def _arrow(values: np.ndarray) -> pa.Array:
    """Numbers as they are, bytes as UTF-8 texts, rows of numbers as lists of fixed length."""
    if values.ndim == 2:
        flat = np.ascontiguousarray(values).reshape(-1)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), values.shape[1])
    if values.dtype.kind in "SO":
        return pa.array([value.decode() if isinstance(value, bytes) else value for value in values.tolist()])
    return pa.array(np.ascontiguousarray(values).tolist() if values.dtype.kind == "U" else np.ascontiguousarray(values))
