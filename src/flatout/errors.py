"""A person's mistake, said so that it can be mended at once.

Every error a person can cause has one shape: where it is (a key, a file, a row), what is wrong (with the value),
what is allowed or nearest, and how to mend it. Entry points print it without a traceback and exit with code 2;
an error of any other class is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

EXIT_CODE = 2
Choice = TypeVar("Choice", bound=StrEnum)


class UserError(ValueError):
    """A mistake of the person at the keyboard: where, what, what is allowed, how to mend it."""

    def __init__(self, where: str, what: str, *, allowed: str = "", mend: str = "") -> None:
        self.where, self.what, self.allowed, self.mend = where, what, allowed, mend
        super().__init__(self.message())

    def message(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.allowed:
            text += f" ({self.allowed})"
        return printable(f"{text.rstrip('.')}. {self.mend}".rstrip() if self.mend else text)


class RunBroke(RuntimeError):
    """A run was ended from outside, or by a rank of it: said in a few lines, exit code 1."""


def printable(text: str) -> str:
    """A text on one line: what a terminal would act on (line ends, escape codes, half characters) is written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, or None when nothing is near enough to be meant."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A closing sentence that names the nearest choice; empty when there is none."""
    near = nearest(word, choices)
    return f"Did you mean {near!r}?" if near else ""


def as_choice(kind: type[Choice], value: object, where: str) -> Choice:
    """A member of an Enum of texts from its name, so that Python users may write either."""
    names = [str(member.value) for member in kind]
    if str(value) not in names:
        raise UserError(where, repr(value), allowed=", ".join(names), mend=did_you_mean(str(value), names))
    return kind(str(value))


def require(condition: bool, where: str, what: str, *, allowed: str = "", mend: str = "") -> None:
    """Check one setting; used by the Config classes in `__post_init__`."""
    if not condition:
        raise UserError(where, what, allowed=allowed, mend=mend)
