"""What disks do: processes that die in the middle of a save, full disks, bits that flip, files that
are cut short.

Faults at single system calls are made by strace, which every Linux has a package of: it ends the
traced process at its n-th call that writes, names or syncs something, or lets that call fail.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from flatout.checkpoints.folder import (
    ABOUT,
    MAKE_ROOM,
    MANIFEST,
    STATE,
    TENSORS,
    FolderCheckpointIO,
    require_whole,
)
from flatout.checkpoints.kept import CHECKPOINTS, find_checkpoint, shelve
from flatout.distributed.processes import end_with_parent, warm_start
from flatout.errors import UserError
from tests.faults.runs import exit_code, side_by_side, start

CALLS = (
    *("openat", "write", "pwrite64", "writev", "ftruncate", "fsync", "mkdir"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "symlink"),
)
"""System calls that change a disk."""
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EIO")


def has_strace() -> bool:
    return shutil.which("strace") is not None


def checkpoint(step: int, size: int = 2_000) -> dict:
    """A small checkpoint, another for each step."""
    numbers = torch.Generator().manual_seed(step)
    return {
        "state_dict": {"weight": torch.randn(size, generator=numbers), "count": torch.tensor(step)},
        "global_step": step,
        ABOUT: {"position": {"step": step}},
    }


def save(folder: Path, step: int) -> None:
    """A checkpoint as a run makes it, with its links."""
    FolderCheckpointIO().save_checkpoint(checkpoint(step), folder / CHECKPOINTS / f"step-{step}")
    shelve(folder / CHECKPOINTS, last=step, best=None)


def is_of(path: Path, step: int) -> bool:
    """Whether a checkpoint holds exactly what was saved."""
    found = FolderCheckpointIO().load_checkpoint(path)
    return torch.equal(found["state_dict"]["weight"], checkpoint(step)["state_dict"]["weight"])


def killed_in_a_save(place: Path) -> list[list[str]]:
    """kill -9 at each system call of a save: what was there stays, and a new save is whole or not
    there.
    """
    return _at_every_call(place, "signal=SIGKILL", _nothing_lost)


def errors_in_a_save(place: Path) -> list[list[str]]:
    """A full, used-up, read-only or broken disk at each system call: what was there is intact, and
    it is told.
    """
    found: list[list[str]] = []
    for name in ERRORS:
        found += _at_every_call(place / name, f"error={name}", _nothing_lost_and_told)
    return found


def _at_every_call(
    place: Path, fault: str, judge: Callable[[Path, str], list[str]]
) -> list[list[str]]:
    """What is wrong after a save that met a fault at its n-th call, for each kind of call and each
    n there is.

    Each is tried twice: with a checkpoint beside the first, and with the first made anew.
    """

    def kind(item: tuple[str, int]) -> list[list[str]]:
        call, step = item
        found: list[list[str]] = []
        for number in range(1, 40):
            folder = place / f"{call}-{step}-{number}"
            was_met, said = _save_under(folder, step, f"{call}:{fault}:when={number}")
            if not was_met:
                return found
            found.append(
                [f"{fault} at {call} {number}, step {step}: {each}" for each in judge(folder, said)]
            )
        return found

    return [
        each for kinds in side_by_side(kind, itertools.product(CALLS, (1, 2))) for each in kinds
    ]


def _save_under(folder: Path, step: int, injection: str) -> tuple[bool, str]:
    """Save a checkpoint with a fault where one of step 1 is; whether the fault was met, and what
    the process said.
    """
    save(folder, 1)
    warm_start()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_saver, args=(folder, step, theirs))
    start(process)
    theirs.close()
    assert ours.recv() == "ready"
    log = folder / "strace.txt"
    call = injection.partition(":")[0]
    tracer = subprocess.Popen(
        [
            "strace",
            "-f",
            "-qq",
            "-p",
            str(process.pid),
            "-o",
            str(log),
            "-e",
            f"trace={call}",
            "-e",
            f"inject={injection}",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_until_traced(process.pid or 0, tracer)
    ours.send("go")
    said = ""
    said = os.read(ours.fileno(), 1 << 16).decode()
    ours.close()
    exit_code(process, 60)
    tracer.communicate()
    traced = log.read_text(encoding="utf-8")
    return "(INJECTED)" in traced or "SIGKILL" in traced, said


def _wait_until_traced(pid: int, tracer: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if tracer.poll() is not None:
            assert tracer.stderr is not None
            raise RuntimeError(f"strace: {tracer.stderr.read()}")
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        if "TracerPid:\t0" not in status:
            return
        time.sleep(0.002)
    raise RuntimeError("strace did not begin")


def _saver(folder: Path, step: int, pipe: Connection) -> None:
    """Save when asked; say what went wrong, by a call that no fault is planted in."""
    end_with_parent()
    torch.set_num_threads(1)
    pipe.send("ready")
    pipe.recv()
    said = "saved"
    try:
        save(folder, step)
    except UserError as error:
        said = str(error)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    socket.socket(fileno=os.dup(pipe.fileno())).send(said.encode())


def _nothing_lost(folder: Path, said: str) -> list[str]:
    """The newest whole checkpoint is one of the two, exactly; saving again works."""
    problems = []
    start, _ = find_checkpoint(folder / CHECKPOINTS)
    if start is None or not is_of(start.checkpoint, start.step):
        return ["no whole checkpoint is left"]
    try:
        if not is_of(folder / CHECKPOINTS / "step-1", 1):
            problems.append("the checkpoint before is another")
        save(folder, 2)
        if not is_of(folder / CHECKPOINTS / "step-2", 2):
            problems.append("saved again, it is another")
    except UserError as error:
        problems.append(str(error))
    return problems


def _nothing_lost_and_told(folder: Path, said: str) -> list[str]:
    problems = _nothing_lost(folder, said)
    is_told = said == "saved" or (said.startswith("checkpoint: ") and MAKE_ROOM in said)
    return problems if is_told else [*problems, f"was told as {said!r}"]


def damaged_newest(place: Path, count: int) -> list[list[str]]:
    """A newest checkpoint that is damaged in many ways is named and passed over; the one before is
    taken.
    """

    def case(number: int) -> list[str]:
        folder = place / f"damaged-{number}"
        for step in (3, 6, 9):
            save(folder, step)
        numbers = random.Random(number)
        name, damage = list(DAMAGES.items())[number % len(DAMAGES)]
        newest = folder / CHECKPOINTS / "step-9"
        damage(newest, numbers)
        start, lines = find_checkpoint(folder / CHECKPOINTS)
        problems = []
        if start is None or start.step != 6 or not is_of(start.checkpoint, 6):
            problems.append(f"{name}: the one before is not taken")
        if newest.exists() and not any(str(newest) in line for line in lines):
            problems.append(f"{name}: not told")
        return problems

    return [case(number) for number in range(count)]


def _cut(name: str) -> Callable[[Path, random.Random], None]:
    def damage(path: Path, numbers: random.Random) -> None:
        file = path / name
        os.truncate(file, numbers.randrange(file.stat().st_size))

    return damage


def _flip(name: str) -> Callable[[Path, random.Random], None]:
    return lambda path, numbers: flip_a_bit(path / name, numbers)


def flip_a_bit(file: Path, numbers: random.Random) -> None:
    data = bytearray(file.read_bytes())
    place = numbers.randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    file.write_bytes(bytes(data))


def _rewrite_manifest(path: Path, numbers: random.Random) -> None:
    """As somebody would who wants other tensors to pass."""
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"] = {}
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _remove(name: str) -> Callable[[Path, random.Random], None]:
    return lambda path, numbers: (path / name).unlink()


def _empty(name: str) -> Callable[[Path, random.Random], None]:
    return lambda path, numbers: os.truncate(path / name, 0)


def _clear(path: Path, numbers: random.Random) -> None:
    for file in path.iterdir():
        file.unlink()


def _swap(path: Path, numbers: random.Random) -> None:
    shutil.copy(path.parent / "step-6" / TENSORS, path / TENSORS)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    **{f"{name} cut short": _cut(name) for name in (TENSORS, STATE, MANIFEST)},
    **{f"{name} with a wrong bit": _flip(name) for name in (TENSORS, STATE, MANIFEST)},
    **{f"{name} gone": _remove(name) for name in (TENSORS, STATE, MANIFEST)},
    **{f"{name} empty": _empty(name) for name in (TENSORS, STATE, MANIFEST)},
    "tensors of another": _swap,
    "manifest rewritten": _rewrite_manifest,
    "an empty folder": _clear,
    "gone, and a link left": lambda path, numbers: shutil.rmtree(path),
}


def flipped_bits(place: Path, count: int) -> Iterator[list[str]]:
    """One wrong bit anywhere in a checkpoint: it is refused, and nothing crashes."""
    save(place, 1)
    path = place / CHECKPOINTS / "step-1"
    files = {name: (path / name).read_bytes() for name in (TENSORS, STATE, MANIFEST)}
    numbers = random.Random(3)
    for number in range(count):
        name = list(files)[number % len(files)]
        flip_a_bit(path / name, numbers)
        try:
            require_whole(path)
            yield [f"{name}: a wrong bit passed"]
        except UserError:
            yield []
        (path / name).write_bytes(files[name])


def in_memory() -> Path | None:
    """A folder where a sync costs nothing; None for the usual temporary folder."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else None


@contextmanager
def folder_on(place: str, usual: Path) -> Iterator[Path]:
    """A folder on the usual temporary disk, or on another one; skips the test where there is no
    other.
    """
    if place == "this disk":
        yield usual
        return
    other = in_memory()
    if other is None or other.stat().st_dev == usual.stat().st_dev:
        pytest.skip("there is no second disk")
    with tempfile.TemporaryDirectory(dir=other) as folder:
        yield Path(folder)
