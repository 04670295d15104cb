"""Where the parts of a run report messages and automatic decisions: a printer, and the run's
`log.txt`.
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
    """What was chosen, why, and what that was read off."""

    value: Value
    why: str
    evidence: str


def print_line(text: str) -> None:
    """Print, without what a terminal would act on: lines name labels and groups of the data.

    Where the reader of a pipe has left, such as `head`, what follows is dropped and the run
    continues.
    """
    try:
        print(mask_addresses(printable_lines(text)), flush=True)
    except BrokenPipeError:
        # Python flushes once more as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class RunLog:
    """Where a part reports; this one prints, for parts in a plain Trainer, and a run folder keeps
    what it is given.
    """

    def say(self, text: str) -> None:
        print_line(text)

    def decision(self, name: str, value: object, why: str, evidence: str) -> None:
        """Report one automatic choice, its reason, and what the reason rests on."""
        self.say(decision_line(name, value, why, evidence))


def decision_line(name: str, value: object, why: str, evidence: str) -> str:
    return f"{name}: {value} ({why}; {evidence})"


class LogFile:
    """Prints lines and keeps them, warnings too, with the time of day; without a file
    it is silent.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None if path is None else path.open("a", encoding="utf-8")
        self._caught = warnings.catch_warnings()
        self._has_failed = False

    def __enter__(self) -> LogFile:
        self._caught.__enter__()
        if self._file is None:
            warnings.simplefilter("ignore")  # the first rank warns of the same
            return self
        shown = warnings.showwarning

        def keep(
            message: Any,
            category: Any,
            filename: str,
            lineno: int,
            file: Any = None,
            line: Any = None,
        ) -> None:
            self.keep(f"warning: {message}")
            shown(message, category, filename, lineno, file, line)

        warnings.showwarning = keep
        return self

    def __exit__(self, *error: Any) -> None:
        self._caught.__exit__(*error)
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
        try:
            lines = mask_addresses(text).splitlines()
            self._file.writelines(f"{stamp} {printable_lines(line)}\n" for line in lines)
            self._file.flush()
        except OSError as error:  # a full disk; the run is worth more than its log
            if not self._has_failed:
                self._has_failed = True
                print(f"log.txt ends here: {error}", file=sys.stderr)
