"""Write the kept text of `python -m train --help` again: `python -m tests.cli.renew_help`."""

from __future__ import annotations

from flatout.cli.hydra_internals import guard_hydra
from flatout.cli.kept_help import write_help
from flatout.cli.settings import help_text
from flatout.cli.train import register_schemas
from flatout.cli.words import conf_folder


def make_help() -> str:
    """The text, made from the settings as they are now."""
    guard_hydra()
    register_schemas()
    return help_text(["--help"], conf_folder())


if __name__ == "__main__":
    write_help(make_help(), conf_folder())
