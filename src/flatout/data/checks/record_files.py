"""A record for each row, with the hashes of its text, in 64 files by the first bits of a hash.

Rows with equal letters and digits have an equal hash, so their records meet in one file. Only one
file at a time is in memory, however many rows there are. Open this file to change what is kept of a
row to compare it with others (`RECORD`), or where records wait. `characters.py` makes the hashes of
texts. `record_splits.py` gives the records of a file their splits, `twins.py` compares them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from flatout.errors import explain_full_tmpdir

RECORD = np.dtype(
    [
        ("alike", "u8"),  # hash of the text's letters and digits: equal for texts that are alike
        ("exact", "u8"),  # hash of the text as it stands
        ("group", "u8"),  # hash of the value of `data.group`
        ("row", "i8"),  # number of the row in its table
        ("code", "i4"),  # number of its label
        ("table", "i1"),  # number of the split that its table was given for
    ],
    align=True,
)
"""What is kept of a row to compare it with others."""
_USE_OF_TMPDIR = f"comparing texts takes {RECORD.itemsize} bytes a row there"
# Bits of the hash `alike` that choose a record's file.
_FILE_BITS = 6
_NUM_FILES = 1 << _FILE_BITS
# A file of records stays in memory up to so many bytes, then goes to the disk.
_MEMORY_BYTES = 1 << 20
_MOST_WAITING = 4  # blocks of records that wait to be written; a fifth makes the reader wait
Records = NDArray[np.void]


class RecordFiles:
    """Records in files by the first bits of their hash. A thread of its own writes them."""

    def __init__(self) -> None:
        # `close` closes them
        self._files = [
            tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115
            for _ in range(_NUM_FILES)
        ]
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[Future[None]] = []

    def close(self) -> None:
        """Remove all files."""
        self._thread.shutdown()
        for file in self._files:
            with suppress(OSError):  # a full disk refuses what is still to be written
                file.close()

    def add(self, records: Records) -> None:
        """Hand records to the thread that writes them, in the order of the calls."""
        while len(self._waiting) >= _MOST_WAITING:
            with explain_full_tmpdir(_USE_OF_TMPDIR):
                self._waiting.pop(0).result()
        self._waiting.append(self._thread.submit(self._write, records))

    def parts(self) -> Iterator[Records]:
        """The records of one file after the other, once all are written."""
        with explain_full_tmpdir(_USE_OF_TMPDIR):
            while self._waiting:
                self._waiting.pop().result()
        for file in self._files:
            with explain_full_tmpdir(_USE_OF_TMPDIR):
                file.seek(0)
                content = file.read()
            yield np.frombuffer(content, RECORD)

    def _write(self, records: Records) -> None:
        file_numbers = (records["alike"] >> np.uint64(64 - _FILE_BITS)).astype(np.uint8)
        records = records.take(np.argsort(file_numbers, kind="stable"))
        ends = np.cumsum(np.bincount(file_numbers, minlength=_NUM_FILES))
        parts = np.split(records, ends[:-1])
        for file, part in zip(self._files, parts, strict=True):
            file.write(part.tobytes())
