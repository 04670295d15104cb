"""`python -m flatout new NAME`: a small project of the user's own, made from `flatout/template/`.

The template is a project that runs where it lies; a new one is its copy under another name. Open
this file to change how it is copied.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path

import flatout
from flatout.errors import UserError, require

TEMPLATE = Path(flatout.__file__).parent / "template"
_NAME_THERE = "my_project"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="NAME", help="the folder to make; its name is the project's"
    )


def run(arguments: argparse.Namespace) -> None:
    folder = Path(arguments.folder)
    make_project(folder)
    print(f"{folder}: a module and its data, settings, a test and CI, all yours to change")
    print(f"cd {folder}", "python train.py", "python -m pytest", sep="\n")


def make_project(folder: Path) -> None:
    """Copy the template into a folder that is new or empty; a failure leaves nothing behind."""
    name = folder.absolute().name
    require(
        bool(re.fullmatch(r"[A-Za-z](\w|-)*", name, re.ASCII)),
        "new",
        f"{name!r} is no name of a project",
        allowed="letters, digits, - and _",
        hint="Choose another.",
    )
    try:
        require(not folder.is_file(), "new", f"{folder} is a file", hint="Name a folder.")
        is_free = not folder.is_dir() or not any(folder.iterdir())
        require(
            is_free,
            "new",
            f"the folder {folder} is not empty",
            hint="Name another, or empty this one.",
        )
        folder.parent.mkdir(parents=True, exist_ok=True)
        # It is complete when it gets its name: an empty folder is replaced.
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as beside:
            project = Path(beside, name)
            shutil.copytree(
                TEMPLATE, project, ignore=shutil.ignore_patterns("__pycache__", ".*_cache")
            )
            for file in ("README.md", "pyproject.toml"):
                text = (project / file).read_text(encoding="utf-8")
                (project / file).write_text(text.replace(_NAME_THERE, name), encoding="utf-8")
            project.rename(folder)
    except OSError as error:
        reason = error.strerror or error
        if isinstance(error, shutil.Error):
            # A list of files, each with its source, its target and the reason as a text:
            # "[Errno 28] No space left on device: 'FROM' -> 'TO'".
            reason = re.sub(r"^\[Errno \d+\] |: ['\"].*", "", error.args[0][0][-1])
        raise UserError(
            "new", f"cannot make {folder}: {reason}", hint="Name a folder that you can write to."
        ) from None
