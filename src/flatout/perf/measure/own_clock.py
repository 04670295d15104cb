"""A clock that stands still while other processes have this thread's core.

Linux notes for each thread how long it was ready to run and waited for a core. Without that time, a
thread that computes alone shows nearly the same pace on a busy machine as on a quiet one. A step of
12 ms that took 60 ms beside others still takes 12 ms by this clock. A thread that sleeps, or waits
for a disk, counts as before. What it does not see: threads and workers of the same training that
wait for a core, and the caches that others use.
"""

from __future__ import annotations

import os
import time
import weakref
from contextlib import suppress


class OwnClock:
    """Seconds of the thread that made it, without its waits for a core; reading takes 1 µs.

    Where the system does not note these waits, it is a usual clock.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)

    def waited_s(self) -> float:
        """Seconds so far in which the thread was ready to run, but had no core."""
        if self._file is None:
            return 0.0
        # "computed waited turns": nanoseconds, nanoseconds, and a count
        numbers = os.pread(self._file, 64, 0).split()
        return int(numbers[1]) / 1e9 if len(numbers) > 1 else 0.0

    def __call__(self) -> float:
        return time.perf_counter() - self.waited_s()
