"""`python -m flatout sweep …`: search a space of settings; `sweep resume FOLDER` continues one that
stopped.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from flatout.cli.train import main
from flatout.cli.typed import lets_code_in, must_be_typed_again
from flatout.cli.words import (
    HELP,
    SHORT,
    conf_options,
    expand_sweep_word,
    key_of,
    quoted,
    translate_word,
    with_secrets_typed,
)
from flatout.distributed.processes import warm_start
from flatout.errors import UserError, nearest, require
from flatout.masking import is_masked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", metavar="WORD", nargs="*", help="+experiment=NAME +sweep=NAME and any key=value")
    add(
        "--config-dir",
        metavar="FOLDER",
        help="settings of yours, its sweep/ and experiment/ among them",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = HELP["sweep"]


def run(arguments: argparse.Namespace) -> None:
    words = list(arguments.words)
    conf = conf_options(arguments.config_dir)
    if words[:1] == ["resume"]:
        words = _prepare_resume(words[1:], conf)
    elif words and "=" not in words[0] and nearest(words[0], ["resume"]):
        raise UserError(
            f"sweep {words[0]}", "no such word", hint="Did you mean sweep resume FOLDER?"
        )
    main(["-m", *conf, "hydra/sweeper=flatout", *map(expand_sweep_word, words)])


def _prepare_resume(typed: list[str], conf: list[str]) -> list[str]:
    """Go to the folder where the sweep was started, and return the words that resume it."""
    from flatout.cli.hydra_folders import require_files_of_its_own
    from flatout.sweep.searched import read_asked

    require(
        bool(typed) and "=" not in typed[0],
        "sweep resume",
        "no folder is named",
        hint="Name its folder: python -m flatout sweep resume FOLDER.",
    )
    folder = Path(typed[0]).absolute()
    more = typed[1:]
    asked = read_asked(folder)
    require_files_of_its_own(folder)
    # The folder may come from others: you type again each word that lets foreign code in. A word
    # whose secret is masked cannot be repeated to the letter: `with_secrets_typed` asks for it.
    plain_words = [word for word in asked["typed"] if not is_masked(word)]
    repeated = (word for word in plain_words if _trusts(word) or must_be_typed_again(word))
    missing = [word for word in repeated if word not in more]
    # Its file may name any folder of the disk, and loggers of its trials could write there.
    for word in plain_words:
        if key_of(word) == "output" and word not in more and not _is_near(word, folder):
            missing.append(word)
    if asked["conf"] is not None and not conf:
        missing += ["--config-dir", asked["conf"]]
    require(
        not missing,
        "sweep resume",
        f"{folder} was begun with {' '.join(missing)}",
        hint=(
            f"If that is meant, type it again: python -m flatout sweep resume {folder}"
            f" {shlex.join(missing)}"
        ),
    )
    # Paths in its words begin there, and libraries read their own settings and modules there: a
    # folder that others name is no place to go to unasked.
    place = Path(asked["place"])
    require(
        place.samefile(Path.cwd()),
        "sweep resume",
        f"{folder} was begun in {place}",
        hint=f"If you know it, go there first: cd {shlex.quote(str(place))}",
    )
    warm_start()
    if any(_trusts(word) for word in more):
        sys.path.insert(0, str(place))  # as `python -m` did when it was begun
    again = [f"hydra.sweep.dir={quoted(str(folder))}", "hydra.sweeper.resume=true"]
    begun_by = with_secrets_typed(asked["typed"], more, "sweep resume")
    return [*begun_by, *again, *(word for word in more if word not in begun_by)]


def _is_near(word: str, sweep: Path) -> bool:
    """Whether the word for `output` names the folder of this sweep, or one below this place."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    # As Hydra reads it: a text may stand in quotes, and blanks around it are none of the value.
    try:
        value = OverridesParser.create().parse_override(word).value()
    except HydraException:
        return False  # `output=[`: no folder at all
    if not isinstance(value, str):
        return False  # a list of them, `choice(…)`
    output = Path(os.path.normpath(Path.cwd() / value))
    return output == sweep.parents[1] or output.is_relative_to(Path.cwd())


def _trusts(word: str) -> bool:
    """Whether a word lets code of others in, or is Hydra's own and not of a sweep.

    `allow_targets=[mine]` and `hydra.job.chdir=true` do, `trials=20` and `seed=1` do not.
    """
    translated = translate_word(word)
    is_ours = key_of(translated) in (*SHORT.values(), "hydra.sweep.dir", "hydra.mode")
    is_usual = translated.lstrip("+") in ("hydra/sweeper=flatout", "hydra/launcher=flatout")
    return lets_code_in(word) and not (is_ours or is_usual)
