"""Messages and automatic decisions of a run: printed, and kept in its `log.txt`.

Each part of a run gets a `RunLog`, and need not know where its lines go. In a plain Trainer they
are printed; a run folder (`run/run_folder.py`) keeps decisions in the summary, too. `LogFile` is
the file. Open this file to change how a line looks.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from flatout.errors import printable_lines
from flatout.masking import mask_addresses

Say = Callable[[str], None]  # prints a line, or passes it on
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Choice(Generic[Value]):
    """A value that flatout chose, the reason, and what the reason rests on."""

    value: Value
    why: str
    evidence: str


def print_line(text: str) -> None:
    """Print a line, with escape codes written out and secrets masked: it may quote the data.

    If the reader of a pipe ends early, as `head` does, the rest is dropped and the run continues.
    """
    _print_harmlessly(text, sys.stdout)


def print_note(text: str) -> None:
    """Like `print_line`, but to standard error: it stands beside what a command answers."""
    _print_harmlessly(text, sys.stderr)


def _print_harmlessly(text: str, stream: TextIO) -> None:
    try:
        print(mask_addresses(printable_lines(text)), file=stream, flush=True)
    except BrokenPipeError:
        # Python flushes once more as it ends, which would print a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class RunLog:
    """Where a part reports: this one prints, a run folder keeps what it is given."""

    def say(self, text: str) -> None:
        print_line(text)

    def decision(self, name: str, value: object, why: str, evidence: str) -> None:
        """Report one automatic choice, its reason, and what the reason rests on."""
        self.say(decision_line(name, value, why, evidence))


def decision_line(name: str, value: object, why: str, evidence: str) -> str:
    return f"{name}: {value} ({why}; {evidence})"


class LogFile:
    """A context manager that prints lines and keeps them in a file, each with the time of day.

    Python's warnings are kept, too. Without a path it neither prints nor writes.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None if path is None else path.open("a", encoding="utf-8")
        self._filters = warnings.catch_warnings()
        self._has_failed = False

    def __enter__(self) -> LogFile:
        self._filters.__enter__()
        # the first rank has the file, and warns of the same
        if self._file is None:
            warnings.simplefilter("ignore")
            return self
        # What Python would print is printed as ever, and kept.
        show = warnings.showwarning

        def keep_and_show(message: Warning | str, *details: Any, **options: Any) -> None:
            self.keep(f"warning: {message}")
            show(message, *details, **options)

        warnings.showwarning = keep_and_show
        return self

    def __exit__(self, *error: Any) -> None:
        self._filters.__exit__(*error)
        if self._file is not None:
            self._file.close()

    def say(self, line: str) -> None:
        if self._file is not None:
            print_line(line)
            self.keep(line)

    def keep(self, text: str) -> None:
        if self._file is None:
            return
        stamp = time.strftime("%H:%M:%S")
        # Line by line, and written at once: a run that is killed leaves its last words.
        try:
            lines = mask_addresses(text).splitlines()
            self._file.writelines(f"{stamp} {printable_lines(line)}\n" for line in lines)
            self._file.flush()
        except OSError as error:
            # a full disk; the run is worth more than its log
            if not self._has_failed:
                self._has_failed = True
                print(f"log.txt ends here: {error}", file=sys.stderr)
