"""Answers of many files in a folder: each file is answered once, whichever process began it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flatout.data.checks.findings import counted
from flatout.data.tables.formats.file import require_file
from flatout.data.tables.output import FORMATS, told
from flatout.errors import UserError, require
from flatout.files import stamp_of, write_atomically

MANIFEST = "answers.json"
# in which disks keep times
_UNITS_NS = (1, 100, 1_000, 1_000_000, 10**9, 2 * 10**9)


def answer_files(
    files: list[str],
    folder: Path,
    answer_one: Callable[[str, str], int],
    part: slice,
    asked: dict[str, Any],
) -> int:
    """Answer each file of a part that has no answers as it is now into a file of its name; the
    number of rows.
    """
    # `asked`: what all answers in a folder have in common. With the last of them the folder's
    # manifest names them all. Answers bear the time of what they answer, so that a file that was
    # changed is answered again. A file that was changed and got its time back (rsync -t, tar) shows
    # it by its ctime, which nobody can set.

    def is_answered(out: Path) -> bool:
        if out in done:  # whatever the clocks of two disks say
            return True
        if not out.exists():
            return False
        asked = Path(named[out]).stat()
        answered = out.stat()
        has_its_time = any(
            answered.st_mtime_ns == asked.st_mtime_ns // unit * unit for unit in _UNITS_NS
        )
        return has_its_time and asked.st_ctime_ns < answered.st_ctime_ns

    done = set[Path]()
    named = dict[Path, str]()
    what = f"{folder} holds the files that are read"
    for file in map(Path, files):
        require_file(file, "FILE")
        require(
            folder.resolve() != file.parent.resolve(), "--out", what, hint="Name another folder."
        )
        out = folder / (file.name if file.suffix in FORMATS else f"{file.name}.csv")
        require(
            out not in named,
            "--out",
            f"two files are called {file.name}",
            hint="Answer each folder by itself.",
        )
        named[out] = str(file)
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _hold_to(asked, folder, named)
    own = list(named.items())[part]
    waiting = [(file, out) for out, file in own if not is_answered(out)]
    rows = 0
    if len(waiting) < len(own):
        print(
            f"{counted(len(own) - len(waiting), 'file')} of {len(own)} answered before",
            file=sys.stderr,
        )
    if waiting:  # a list of all files comes with the last one
        write_atomically(folder / MANIFEST, json.dumps({"asked": asked}, indent=1))
    for given, out in waiting:
        times = Path(given).stat()
        stamp = stamp_of(Path(given))
        rows += answer_one(given, str(out))
        # else it was changed meanwhile, and its answers bear no time of it
        if stamp_of(Path(given)) == stamp:
            os.utime(out, ns=(times.st_atime_ns, times.st_mtime_ns))
            done.add(out)
    if missing := [out for out in named if not is_answered(out)]:
        print(
            f"{counted(len(missing), 'file')} of {len(named)} not answered yet, by other parts",
            file=sys.stderr,
        )
    else:
        sizes = {out.name: out.stat().st_size for out in named}
        write_atomically(folder / MANIFEST, json.dumps({"asked": asked, "bytes": sizes}, indent=1))
    return rows


def _hold_to(asked: dict[str, Any], folder: Path, answers: Iterable[Path]) -> None:
    """Refuse a folder that holds something else than answers to what is asked; note this in one
    that holds none.
    """
    manifest = folder / MANIFEST
    is_taken = any(out.exists() for out in answers)
    if not manifest.exists():  # asked second: another part has answers after it wrote the manifest
        require(
            not is_taken,
            "--out",
            f"{folder} holds files that are called as the answers, and no {MANIFEST} of theirs",
            hint="Name another folder.",
        )
        write_atomically(manifest, json.dumps({"asked": asked}, indent=1))
    try:
        found = dict(json.loads(manifest.read_text(encoding="utf-8"))["asked"])
    except (ValueError, KeyError, TypeError):
        raise UserError(
            "--out", f"{manifest} is not of answers", hint="Name another folder."
        ) from None
    others = [
        f"{name}={found.get(name)}" for name in asked | found if found.get(name) != asked.get(name)
    ]
    require(
        not others,
        "--out",
        f"the answers in {folder} have {', '.join(others)}",
        hint="Name another folder, or ask as before.",
    )
