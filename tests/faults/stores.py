"""A cache under attack: bits that flip, disks that refuse, builders that are killed or stopped.

Faults are injected in forked children, in Python: the functions through which a store reaches its
disk are counted, and the one whose turn it is fails or ends the process. A write that fails has
written its first half.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from flatout.data.store.cache import VERIFIED, Cache, recipe_key
from flatout.data.store.store import Column, Store, StoreWriter
from flatout.errors import EXIT_CODE, UserError

_KEPT, _BUILT = ({"source": {"train": name}, "max_length": 8} for name in ("kept", "built"))
_REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
_EACH_WITH_TIMES_SET_BACK = 10


def flips_detected(count: int, seed: int, *, folder: Path | None = None) -> tuple[int, int]:
    """Bits flipped anywhere in a store's folder, one at a time; how many were detected, and how
    many there were.

    Detected: the store is not opened. A flip in the note of when it was checked may also do no
    harm: the store is opened and is right to the last value. Each tenth flip comes after the check,
    and the file's times are set back.
    """
    draw = random.Random(seed)
    detected = 0
    with _cache(folder) as stores:
        stores.open_or_build("flips", _BUILT, build)
        store = stores.folder / recipe_key(_BUILT)
        marker = store / VERIFIED
        for number in range(count):
            files = [path for path in store.rglob("*") if path.is_file()]
            path = draw.choices(files, [file.stat().st_size for file in files])[0]
            is_checked = path == marker or number % _EACH_WITH_TIMES_SET_BACK == 0
            if is_checked:
                stores.opened(store.name)
            noted = marker.read_bytes()
            with _flipped(path, draw.randrange(8 * path.stat().st_size)):
                if not is_checked:
                    marker.unlink()
                detected += _is_detected(stores, store.name, may_be_right=path == marker)
            if path != marker:
                marker.write_bytes(noted)
    return detected, count


def write_faults_survived(
    *, each_refusal: bool = True, folder: Path | None = None
) -> tuple[int, int]:
    """A kill, and each refusal of a disk, at every step of a build; how many were survived, and how
    many there were.

    Survived: the other store is as it was, the one that was to be built is not there or right, the
    error is a person's one line, and the next build succeeds and leaves nothing behind. The build
    is the longest there is: a damaged store is taken away first, and what a dead builder has left.
    `each_refusal=False`: the refusals take turns at the steps.
    """
    survived = 0
    tried = 0
    with _cache(folder) as stores:
        stores.open_or_build("faults", _KEPT, build)
        stores.open_or_build("faults", _BUILT, build)
        steps = _num_steps(stores)
        for step in range(1, steps + 1):
            refusals = _REFUSALS if each_refusal else [_REFUSALS[step % len(_REFUSALS)]]
            for fault in (None, *refusals):
                tried += 1
                survived += _is_survived(stores, step, fault)
    return survived, tried


def survives_in_the_middle(name: str, *, folder: Path | None = None) -> bool:
    """Whether a kill, or a full disk, in the middle of a build was survived, as
    `write_faults_survived` has it.
    """
    with _cache(folder) as stores:
        stores.open_or_build("faults", _KEPT, build)
        stores.open_or_build("faults", _BUILT, build)
        return _is_survived(
            stores, _num_steps(stores) // 2, None if name == "kill" else errno.ENOSPC
        )


def seconds_to_replace(*, folder: Path | None = None) -> float:
    """Seconds until another builder begins after one was killed."""
    with _cache(folder) as stores:
        begun = stores.folder.with_name("begun")

        def endless(writer: StoreWriter) -> None:
            begun.touch()
            time.sleep(3600)

        def opened() -> str:
            stores.open_or_build("replaced", _BUILT, endless)
            return ""

        child = _Child(opened)
        while not begun.exists():
            time.sleep(0.01)
        os.kill(child.process, signal.SIGKILL)
        struck = time.monotonic()
        began = []

        def at_once(writer: StoreWriter) -> None:
            began.append(time.monotonic())
            build(writer)

        store, _ = stores.open_or_build("replaced", _BUILT, at_once)
        child.ended()
        assert is_right(store)
        return began[0] - struck


def build(writer: StoreWriter) -> None:
    """A small store with every kind of column."""
    for split, rows in (("train", 40), ("test", 10)):
        columns = {
            "tokens": Column("uint16", ragged=True),
            "bits": Column("uint8", width=4),
            "targets": Column("int32"),
        }
        into = writer.split(split, columns)
        for start in range(0, rows, 10):
            lengths = np.arange(10) % 4
            tokens = np.arange(int(lengths.sum())) + start
            bits = np.arange(40).reshape(10, 4)
            into.append(tokens=(tokens, lengths), bits=bits, targets=np.arange(start, start + 10))
    writer.write_text(
        "tokenizer.json", json.dumps({"words": [f"word {number}" for number in range(20)]})
    )
    writer.facts |= {"classes": ["a", "b"], "lines": ["rows: train 40, test 10"]}


def is_right(store: Store) -> bool:
    """Whether a store holds what `build` writes."""
    return _content(store) == _right_content()


@cache
def _right_content() -> list[Any]:
    with tempfile.TemporaryDirectory() as name:
        writer = StoreWriter(Path(name))
        build(writer)
        writer.close({})
        return _content(Store(Path(name)))


def _content(store: Store) -> list[Any]:
    found: list[Any] = [store.facts, store.read_text("tokenizer.json")]
    for name, split in store.splits.items():
        tokens = split.ragged("tokens")
        arrays = [
            tokens.values,
            tokens.offsets,
            tokens.lengths,
            split.fixed("bits"),
            split.fixed("targets"),
        ]
        found += [name, split.num_rows, *(array.tolist() for array in arrays)]
    return found


@contextmanager
def _cache(beside: Path | None) -> Iterator[Cache]:
    with (
        tempfile.TemporaryDirectory(dir=beside) as name,
        warnings.catch_warnings(),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")  # of damaged stores
        yield Cache(Path(name) / "cache")


@contextmanager
def _flipped(path: Path, bit: int) -> Iterator[None]:
    """One bit of a file is another, at the same times; put right again afterwards."""
    before = path.read_bytes()
    status = path.stat()
    after = bytearray(before)
    after[bit // 8] ^= 1 << bit % 8
    path.write_bytes(after)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    try:
        yield
    finally:
        path.write_bytes(before)


def _is_detected(stores: Cache, key: str, *, may_be_right: bool) -> bool:
    """Whether damage was seen; an error instead of an answer is none, and ends the count."""
    store = stores.opened(key)
    return store is None or (may_be_right and is_right(store))


class _Faults:
    """Counts what goes to the disk, and spoils one step of it; for a forked child, which ends with
    it.
    """

    def __init__(self, step: int, fault: int | None) -> None:
        self.step = step
        self.fault = fault
        self.steps = 0
        self._open = io.open
        for name in ("rename", "mkdir", "unlink", "rmdir", "fsync", "write"):
            setattr(os, name, partial(self._spoilt, getattr(os, name)))
        os.open = partial(self._os_open, os.open)
        io.open = self._opened

    def next(self) -> bool:
        """Whether the step that comes is the one to spoil."""
        self.steps += 1
        return self.steps == self.step

    def strike(self) -> None:
        if self.fault is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError(self.fault, os.strerror(self.fault))

    def _spoilt(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.next():
            self.strike()
        return real(*args, **kwargs)

    def _os_open(
        self, real: Callable[..., int], path: Any, flags: int, *args: Any, **kwargs: Any
    ) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and self.next():
            self.strike()
        return real(path, flags, *args, **kwargs)

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wxa"):
            return self._open(file, mode, *args, **kwargs)
        if self.next():
            self.strike()
        buffered = io.BufferedWriter(_SpoiltFile(file, mode.replace("b", ""), self))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")


class _SpoiltFile(io.FileIO):
    """A file of which one write gets half as far as it should."""

    def __init__(self, file: Any, mode: str, faults: _Faults) -> None:
        super().__init__(file, mode)
        self._faults = faults
        self._is_full = False

    def write(self, data: Any) -> int:
        if self._is_full:
            self._faults.strike()
        if not self._faults.next():
            return cast(int, super().write(data))
        half = cast(int, super().write(bytes(data)[: len(data) // 2]))
        self._is_full = True
        if half == 0 or self._faults.fault is None:
            self._faults.strike()
        return half


def _num_steps(stores: Cache) -> int:
    """Steps of one build in which nothing goes wrong."""
    _make_ready(stores)

    def counted() -> str:
        faults = _Faults(0, None)
        stores.open_or_build("faults", _BUILT, build)
        return str(faults.steps)

    return int(_Child(counted).ended()[1])


def _is_survived(stores: Cache, step: int, fault: int | None) -> bool:
    _make_ready(stores)

    def spoilt() -> str:
        _Faults(step, fault)
        stores.open_or_build("faults", _BUILT, build)
        return ""

    code, told = _Child(spoilt).ended()
    built = stores.opened(recipe_key(_BUILT))
    ends_well = (
        code == -signal.SIGKILL
        if fault is None
        else code == 0 or _is_one_line(code, told, fault, stores.folder)
    )
    is_whole = (built is None and code != 0) or (built is not None and is_right(built))
    kept = stores.opened(recipe_key(_KEPT))
    _damage(stores.folder / recipe_key(_BUILT))
    again, report = stores.open_or_build("faults", _BUILT, build)
    left = [
        path.name
        for path in stores.folder.iterdir()
        if path.name.startswith((".building-", ".removed-"))
    ]
    is_survived = ends_well and is_whole and kept is not None and is_right(kept) and is_right(again)
    if not is_survived or report.hit or left:
        print(f"step {step}, fault {fault}: code {code}, {told!r}, whole {is_whole}, left {left}")
    return is_survived and not report.hit and not left


def _is_one_line(code: int, told: str, fault: int, folder: Path) -> bool:
    """Whether the error is a person's, names the folder, and tells what is free where that is the
    trouble.
    """
    tells_free = fault not in (errno.ENOSPC, errno.EDQUOT) or " MB free" in told
    return (
        code == EXIT_CODE
        and "\n" not in told
        and str(folder) in told
        and "data.cache=" in told
        and tells_free
    )


def _make_ready(stores: Cache) -> None:
    """A damaged store, and what a builder leaves that dies."""
    key = recipe_key(_BUILT)
    _damage(stores.folder / key)
    left = stores.folder / f".building-{key}-0123456789ab"
    left.mkdir()
    (left / "rows.bin").write_bytes(bytes(100))


def _damage(folder: Path) -> None:
    """Change one value of a store, where there is one."""
    path = folder / "train" / "targets.bin"
    if path.exists():
        path.write_bytes(b"\xff" + path.read_bytes()[1:])


class _Child:
    """A forked process: its exit code (that of a mistake as commands have it, minus a signal) and
    its last words.
    """

    def __init__(self, act: Callable[[], str]) -> None:
        self._pipe, pipe, tell = *os.pipe(), os.write
        with warnings.catch_warnings():
            # of threads, that the child does not use
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = os.fork()
        if self.process:
            os.close(pipe)
            return
        code = 1
        told = ""
        try:
            code = 0
            told = act()
        except UserError as mistake:
            code = EXIT_CODE
            told = str(mistake)
        except BaseException:
            told = traceback.format_exc()
        finally:
            tell(pipe, told.encode())
            os._exit(code)

    def ended(self) -> tuple[int, str]:
        with os.fdopen(self._pipe, encoding="utf-8") as pipe:
            told = pipe.read()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1]), told
