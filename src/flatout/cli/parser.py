"""The parser of `python -m flatout`: a mistake on the command line is one message, with the nearest right word."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from flatout.errors import UserError, did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse's parser whose mistakes are a UserError."""

    def error(self, message: str) -> NoReturn:
        known = self._unknown_option(message) or self._unknown_choice(message)
        raise known or UserError(self.prog, message, hint=self._usage())

    def _unknown_option(self, message: str) -> UserError | None:
        found = re.match(r"unrecognized arguments: (\S+)", message)
        if found is None:
            return None
        word, known = found[1].partition("=")[0], list(self._option_string_actions)
        what = "no such option" if word.startswith("-") else "one argument too many"
        return UserError(f"{self.prog}: {word}", what, hint=did_you_mean(word, known) or self._usage())

    def _unknown_choice(self, message: str) -> UserError | None:
        found = re.match(r"argument (.+?): invalid choice: '(.*?)' \(choose from (.*)\)$", message)
        if found is None:
            return None
        name, word, known = found[1], found[2], found[3].replace("'", "")
        hint = did_you_mean(word, known.split(", "))
        return UserError(f"{self.prog}: {name}", f"no choice {word!r}", allowed=known, hint=hint)

    def _usage(self) -> str:
        """How the command is written, in one line."""
        return f"Write {' '.join(self.format_usage().removeprefix('usage: ').split())}."
