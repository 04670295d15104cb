"""`python -m flatout VERB`: everything that is done with data and finished runs.

Training is `python -m train`, or `python -m flatout train` where a `train.py` of yours is nearer.
"""

from __future__ import annotations

import argparse
import importlib
import io
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
# Each verb, and what it is for; `flatout.cli.VERB` has `add_arguments(parser)` and `run(arguments)`
VERBS: dict[str, str] = tomllib.loads(_HELP.read_text("utf-8"))["verbs"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; a user's mistake ends with one message and exit code 2."""
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        if words[:1] == ["train"]:
            importlib.import_module("flatout.cli.train").main(words[1:])
            return
        if isinstance(sys.stdout, io.TextIOWrapper):
            # names of files may have bytes that are no UTF-8
            sys.stdout.reconfigure(errors="backslashreplace")
        with importing():
            command, parsed = _parse(words)
        command.run(parsed)
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        sys.stderr.close()


def _parse(words: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The module of the verb that is the first word, and its parsed arguments."""
    closing = "python -m flatout VERB --help prints its arguments."
    parser = Parser(prog="python -m flatout", description=__doc__, epilog=closing)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, about in VERBS.items():
        verbs.add_parser(verb, help=about, description=about)
    first = words[0] if words else ""
    if first not in VERBS and not first.startswith("-"):
        raise UserError(
            "python -m flatout",
            f"no verb {first!r}" if first else "no verb is named",
            allowed=", ".join(VERBS),
            hint=_hint_for(first),
        )
    verb = first if first in VERBS else parser.parse_args(words).verb
    about = VERBS[verb]
    # `doctor run SCRIPT WORDS` is a verb of two words. `doctor run` asks for a run folder `run`.
    if words[:2] == ["doctor", "run"] and len(words) > 2:
        verb = "doctor_run"
        words = words[1:]
    # only the verb that is used: --help stays quick
    command = importlib.import_module(f"flatout.cli.{verb}")
    verb_parser = Parser(prog=f"python -m flatout {verb.replace('_', ' ')}", description=about)
    command.add_arguments(verb_parser)
    verb_parser.words = words[1:]
    try:
        return command, verb_parser.parse_intermixed_args(words[1:])  # options may stand anywhere
    except TypeError:  # a verb with actions of its own cannot have that
        return command, verb_parser.parse_args(words[1:])


def _hint_for(word: str) -> str:
    """What to type instead of a word that is no verb."""
    return did_you_mean(word, VERBS) or "python -m flatout --help explains each."


class Parser(argparse.ArgumentParser):
    """argparse's parser whose mistakes are a UserError."""

    words: Sequence[str] = ()  # that are parsed

    def error(self, message: str) -> NoReturn:
        """Raise a UserError that names the word; argparse calls this with a sentence of its own."""
        usage = f"Write {' '.join(self.format_usage().removeprefix('usage: ').split())}."
        if match := re.match(r"unrecognized arguments: (\S+)", message):
            word = match[1].partition("=")[0]
            problem = "no such option" if word.startswith("-") else "one argument too many"
            hint = self._setting_instead(match[1])
            hint = hint or did_you_mean(word, self._option_string_actions) or usage
            raise UserError(f"{self.prog}: {word}", problem, hint=hint)
        if match := re.match(
            r"argument (.+?): invalid choice: '(.*?)' \(choose from (.*)\)$", message
        ):
            name, word, quoted_choices = match.groups()
            choices = quoted_choices.replace("'", "")
            raise UserError(
                f"{self.prog}: {name}",
                f"no choice {word!r}",
                allowed=choices,
                hint=did_you_mean(word, choices.split(", ")),
            )
        if match := re.match(r"argument (.+?): expected one argument", message):
            problem = "its value is missing, or begins with '-'"
            raise UserError(f"{self.prog}: {match[1]}", problem, hint=f"Write {match[1]}=VALUE.")
        raise UserError(self.prog, message, hint=usage)

    def _setting_instead(self, option: str) -> str:
        """The setting that an option names, where the verb takes settings; else empty."""
        takes_settings = any(action.metavar in ("WORD", "SOURCE") for action in self._actions)
        if not takes_settings or not option.startswith("--"):
            return ""
        # imports torch: for a mistake alone
        composing = importlib.import_module("flatout.cli.composing")
        meant = composing.setting_meant(option, self.words)
        name = option[2:].partition("=")[0].replace("-", "_")
        key = meant.partition("=")[0] if meant else ""
        is_key = name in (key, *key.split(".")) or name in composing.WORDS_ELSEWHERE
        if not is_key:
            return ""  # a word that is only like a setting may be like an option, too
        return f"Settings are key=value. Did you mean {meant}?"


if __name__ == "__main__":
    main()
