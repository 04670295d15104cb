"""Hydra 1.3 on Python 3.14.

From 3.14 on, `argparse` reads the help of an option as the option is added. The help of Hydra's
`--shell-completion` is an object that makes its text when it is printed, so each script with
`@hydra.main` ends with *badly formed help string* (facebookresearch/hydra#3121). No release of
Hydra has a way around it yet.
"""

from __future__ import annotations

import argparse
import sys

if sys.version_info >= (3, 14):
    _check_help = argparse.ArgumentParser._check_help

    def _check_text(parser: argparse.ArgumentParser, action: argparse.Action) -> None:
        if isinstance(action.help, str):
            _check_help(parser, action)


def allow_late_help() -> None:
    """Let an option have a help that is no text yet; helps that are texts are checked as before.

    A script with `@hydra.main` calls it before its main function. Below Python 3.14 it does
    nothing.
    """
    if sys.version_info >= (3, 14):
        argparse.ArgumentParser._check_help = _check_text
