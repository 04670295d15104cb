"""`python -m flatout VERB`: everything that is done with data and finished runs.

Training is `python -m train`.
"""

from __future__ import annotations

import argparse
import importlib
import re
import signal
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from flatout.distributed.imports import importing
from flatout.errors import EXIT_CODE, UserError, did_you_mean

_HELP = Path(__file__).with_name("cli") / "help.toml"
VERBS: dict[str, str] = tomllib.loads(_HELP.read_text("utf-8"))["verbs"]
"""Each is `flatout.cli.VERB`, with `add_arguments(parser)` and `run(arguments)`; and what it is
for."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; a user's mistake ends with one message and exit code 2."""
    try:
        with importing():
            command, parsed = _parsed(list(sys.argv[1:] if arguments is None else arguments))
        command.run(parsed)
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        sys.stderr.close()


def _parsed(given: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    closing = "python -m flatout VERB --help prints its arguments."
    parser = Parser(prog="python -m flatout", description=__doc__, epilog=closing)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, about in VERBS.items():
        verbs.add_parser(verb, help=about, description=about)
    first = given[0] if given else ""
    if first not in VERBS and not first.startswith("-"):
        what = f"no verb {first!r}" if first else "no verb is named"
        hint = did_you_mean(first, VERBS)
        hint = hint or "python -m flatout --help explains each."
        raise UserError("python -m flatout", what, allowed=", ".join(VERBS), hint=hint)
    verb = first if first in VERBS else parser.parse_args(given).verb
    # only the verb that is used: --help stays quick
    command = importlib.import_module(f"flatout.cli.{verb}")
    verb_parser = Parser(prog=f"python -m flatout {verb}", description=VERBS[verb])
    command.add_arguments(verb_parser)
    try:
        return command, verb_parser.parse_intermixed_args(given[1:])  # options may stand anywhere
    except TypeError:  # a verb with actions of its own cannot have that
        return command, verb_parser.parse_args(given[1:])


class Parser(argparse.ArgumentParser):
    """argparse's parser whose mistakes are a UserError."""

    def error(self, message: str) -> NoReturn:
        usage = f"Write {' '.join(self.format_usage().removeprefix('usage: ').split())}."
        if found := re.match(r"unrecognized arguments: (\S+)", message):
            word = found[1].partition("=")[0]
            what = "no such option" if word.startswith("-") else "one argument too many"
            raise UserError(
                f"{self.prog}: {word}",
                what,
                hint=did_you_mean(word, self._option_string_actions) or usage,
            )
        if found := re.match(
            r"argument (.+?): invalid choice: '(.*?)' \(choose from (.*)\)$", message
        ):
            name = found[1]
            word = found[2]
            known = found[3].replace("'", "")
            hint = did_you_mean(word, known.split(", "))
            raise UserError(f"{self.prog}: {name}", f"no choice {word!r}", allowed=known, hint=hint)
        raise UserError(self.prog, message, hint=usage)


if __name__ == "__main__":
    main()
