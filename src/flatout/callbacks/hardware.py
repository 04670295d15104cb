"""A look at the hardware each second, in a thread of its own: no step ever waits for a driver or a file of the system.

What is looked at tells numbers by curve name. A flush takes their means since the last one; the summary gets medians
over the whole training. A source that fails is left alone from then on and said once: training goes on without it.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

EVERY_S = 1.0


class Source(Protocol):
    """Something with numbers that change."""

    name: str

    def sample(self) -> dict[str, float]:
        """What there is to tell at the moment, by curve name; what the source cannot tell is left out."""
        ...

    def facts(self) -> dict[str, object]:
        """What it has seen that is no curve."""
        ...


class Watch:
    """Asks its sources in turn from entering to leaving; without any there is no thread."""

    def __init__(self, sources: Sequence[Source], say: Callable[[str], None] = print, every_s: float = EVERY_S) -> None:
        self.sources, self.say, self.every_s = list(sources), say, every_s
        self._answering = list(sources)
        self._all: dict[str, list[float]] = {}
        self._taken: dict[str, int] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._answering:
            self._end.clear()
            self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(self.every_s)  # a driver that hangs is not waited for: the thread is a daemon
            self._thread = None

    def take(self) -> dict[str, float]:
        """Means of what was seen since the last time, by curve name."""
        with self._lock:
            fresh = {name: seen[self._taken.get(name, 0) :] for name, seen in self._all.items()}
            self._taken = {name: len(seen) for name, seen in self._all.items()}
        return {name: statistics.fmean(values) for name, values in fresh.items() if values}

    def summary(self) -> dict[str, dict[str, object]]:
        """Medians of all that was seen, and what else there is to tell, source by source; empty where nothing was."""
        with self._lock:
            seen = {name: statistics.median(values) for name, values in self._all.items()}
        found: dict[str, dict[str, object]] = {}
        for source in self.sources:
            prefix = f"{source.name}/"
            own = {name.removeprefix(prefix): value for name, value in seen.items() if name.startswith(prefix)}
            if own:
                found[source.name] = own | source.facts()
        return found

    def look(self) -> None:
        """Ask every source once."""
        for source in list(self._answering):
            try:
                seen = source.sample()
            except Exception as error:  # drivers raise classes of their own; watching must never end training
                self._answering.remove(source)
                self.say(f"{source.name}: no longer watched ({error}); training goes on")
                continue
            with self._lock:
                for name, value in seen.items():
                    self._all.setdefault(name, []).append(value)

    def _look_on(self) -> None:
        while self._answering and not self._end.wait(self.every_s):
            self.look()
