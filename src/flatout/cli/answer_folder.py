"""Answer many files into one folder, each once, by as many processes as share the folder.

Each file of answers gets the modification time of the file it answers. So a later call, or another
process, sees which files are answered, and answers a file again that has changed since. The
manifest `answers.json` holds what all answers of a folder have in common, and at the end their
names and sizes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flatout.data.checks.findings import counted
from flatout.data.tables.formats.file import require_file
from flatout.data.tables.output import FORMATS, explain_disk_errors
from flatout.errors import UserError, require
from flatout.files import load_json, stamp_of, write_atomically
from flatout.run_log import print_note

MANIFEST = "answers.json"
_OTHER_FOLDER = "Name another folder."  # a hint
# Units in which file systems keep times: ext4 1 ns, NTFS 100 ns, …, FAT 2 s.
_UNITS_NS = (1, 100, 1_000, 1_000_000, 10**9, 2 * 10**9)


def answer_files(
    files: list[str],
    folder: Path,
    answer_one: Callable[[str, str], int],
    part: slice,
    asked: dict[str, Any],
) -> int:
    """Answer each file of one part that has no answers yet, or has changed since; return the rows.

    `answer_one(file, out)` writes the answers of one file and returns the number of its rows.
    `asked` is what all answers in the folder have in common: the run, its weights, the options.
    """
    file_of = _name_answers(files, folder)
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _require_same_question(asked, folder, file_of)
    of_part = list(file_of.items())[part]
    waiting = [(out, file) for out, file in of_part if not _is_answered(out, file)]
    if len(waiting) < len(of_part):
        print_note(
            f"{counted(len(of_part) - len(waiting), 'file')} of {len(of_part)} answered before"
        )
    if waiting:  # without sizes: the manifest names all files once the last one is answered
        _write_manifest(folder, {"asked": asked})
    rows = 0
    done = set[Path]()
    for out, file in waiting:
        times = file.stat()
        stamp = stamp_of(file)
        rows += answer_one(str(file), str(out))
        # a file that changed meanwhile is answered again next time: its answers keep their own time
        if stamp_of(file) == stamp:
            os.utime(out, ns=(times.st_atime_ns, times.st_mtime_ns))
            done.add(out)
    # those of this process count as done whatever the clocks of two disks say
    unanswered = (out for out, file in file_of.items() if not _is_answered(out, file))
    missing = [out for out in unanswered if out not in done]
    if missing:
        print_note(
            f"{counted(len(missing), 'file')} of {len(file_of)} not answered yet, by other parts"
        )
    else:
        sizes = {out.name: out.stat().st_size for out in file_of}
        _write_manifest(folder, {"asked": asked, "bytes": sizes})
    return rows


def _name_answers(files: list[str], folder: Path) -> dict[Path, Path]:
    """The file of answers of each file; refuses two of one name, and a folder that is read."""
    file_of = dict[Path, Path]()
    for file in map(Path, files):
        require_file(file, "FILE")
        is_read = folder.resolve() == file.parent.resolve()
        require(not is_read, "--out", f"{folder} holds the files that are read", hint=_OTHER_FOLDER)
        out = folder / (file.name if file.suffix in FORMATS else f"{file.name}.csv")
        require(
            out not in file_of,
            "--out",
            f"two files are called {file.name}",
            hint="Answer each folder by itself.",
        )
        file_of[out] = file
    return file_of


def _is_answered(out: Path, file: Path) -> bool:
    """Whether answers bear the time of their file, as far as the disk keeps it.

    A changed file may have got its old time back (rsync -t, tar). Its ctime shows that: no program
    can set it.
    """
    if not out.exists():
        return False
    asked = file.stat()
    answered = out.stat()
    rounded = (asked.st_mtime_ns // unit * unit for unit in _UNITS_NS)
    return answered.st_mtime_ns in rounded and asked.st_ctime_ns < answered.st_ctime_ns


def _write_manifest(folder: Path, values: dict[str, Any]) -> None:
    write_atomically(folder / MANIFEST, json.dumps(values, indent=1))


def _require_same_question(asked: dict[str, Any], folder: Path, answers: Iterable[Path]) -> None:
    """Refuse a folder that holds other things than answers to `asked`; note it in an empty one."""
    manifest = folder / MANIFEST
    is_taken = any(out.exists() for out in answers)
    # looked for after the answers: another part writes the manifest first, then its answers
    if not manifest.exists():
        require(
            not is_taken,
            "--out",
            f"{folder} holds files that are called as the answers, and no {MANIFEST} of theirs",
            hint=_OTHER_FOLDER,
        )
        _write_manifest(folder, {"asked": asked})
    try:
        before = dict(load_json(manifest)["asked"])
    except (ValueError, KeyError, TypeError):
        raise UserError("--out", f"{manifest} is not of answers", hint=_OTHER_FOLDER) from None
    differing = []
    for name in asked | before:
        there, here = (_describe_option(name, question) for question in (before, asked))
        if there != here:
            differing.append(f"{there} there, {here} here")
    require(
        not differing,
        "--out",
        f"{folder} holds answers to another question: {'; '.join(differing)}",
        hint="Name another folder, or ask as before.",
    )


def _describe_option(name: str, question: dict[str, Any]) -> str:
    return f"{name}={question[name]}" if question.get(name) is not None else f"no {name}"
