"""Who builds a store: a lease that a living builder keeps renewing, and that others take over when it falls silent.

A lease is a small file, `.lease-KEY-N`, that only one process can create. Its holder keeps a lock on it, which the
kernel gives back the moment the process dies, and writes a new number into it twice a second from a thread of its own,
which stops when the process is stopped. Whoever waits takes over by creating number N + 1: at once where the lock is
free, else after four seconds in which nothing changed. Both are looked at with the waiter's own clock, so clocks that
differ do not matter. Between machines, and where a file system has no locks, the numbers alone decide.

A builder that is only slow is taken over when its thread could not run or write for so long. That costs time and
nothing else: each builds in a folder of its own, and the first to finish is kept.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import psutil

from flatout.files import fcntl

BEAT_S, SILENCE_S = 0.5, 4.0
"""A living builder renews its lease so often; one that has not for so long is taken over."""
_LOOK_S = 0.1
_TELL_AFTER_S = 1.0
_PREFIX = ".lease-"
_ABANDONED_S = 3600.0
"""A lease of another machine, or from before a restart, that is older is nobody's: longer than any pause of a machine
that goes on afterwards. Its holder would find its folder gone and begin again."""


@lru_cache
def boot_id() -> str:
    """Names this machine since it was started; processes that share it share locks too."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{platform.node()}-{psutil.boot_time():.0f}"


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, as its file says."""

    boot: str = ""
    """Empty: not known yet, the file is just being made."""
    machine: str = ""
    process: int = 0
    token: str = ""

    @classmethod
    def of(cls, line: bytes) -> Holder:
        try:
            return cls(**json.loads(line))
        except (ValueError, TypeError):
            return cls()

    def __str__(self) -> str:
        return f"process {self.process} on {self.machine}" if self.boot else "another process"


class Lease:
    """A lease that this process holds; renewed while it is entered, given up at the end."""

    def __init__(self, path: Path, file: int, token: str) -> None:
        self.path, self.token = path, token
        self._file, self._beats = file, 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    @classmethod
    def take(cls, folder: Path, key: str, number: int = 0) -> Lease | None:
        """The lease, or None where another process was quicker."""
        path, token = folder / f"{_PREFIX}{key}-{number}", secrets.token_hex(6)
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except FileExistsError:
            return None
        try:
            if fcntl is not None:
                _locked(file, fcntl.LOCK_EX)
            holder = {"boot": boot_id(), "machine": platform.node(), "process": os.getpid(), "token": token}
            os.write(file, f"{json.dumps(holder)}\n{0:012d}\n".encode())
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(file)
            raise
        return cls(path, file, token)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        with suppress(OSError):  # taken away already, or on a disk that went: others find it silent
            if os.path.samestat(os.fstat(self._file), self.path.stat()):
                self.path.unlink()
        self._thread.join(SILENCE_S)
        if not self._thread.is_alive():  # else it hangs with its disk, and the number must not become another file's
            os.close(self._file)

    def stamp(self) -> float:
        """When it was last renewed, by the clock of its disk."""
        return os.fstat(self._file).st_mtime

    def _renew(self) -> None:
        place = os.fstat(self._file).st_size - 13
        while not self._is_over.wait(BEAT_S):
            self._beats += 1
            try:
                os.lseek(self._file, place, os.SEEK_SET)
                os.write(self._file, f"{self._beats:012d}".encode())
            except OSError:
                continue  # the next one may succeed


def take_turn(folder: Path, key: str) -> Lease | None:
    """The lease on building `key`; None after another process was waited for, whose store may be there now."""
    if (number := _newest(folder, key)) is None:
        return Lease.take(folder, key)
    watch = _Watch(folder / f"{_PREFIX}{key}-{number}")
    waited = 0.0
    while True:
        if (state := watch.look()) is None:
            return None
        if state:
            if waited >= _TELL_AFTER_S:
                _tell(f"cache: {watch.holder} {state}: building the store here instead")
            return Lease.take(folder, key, number + 1)
        time.sleep(_LOOK_S)
        before, waited = waited, waited + _LOOK_S
        if before < _TELL_AFTER_S <= waited:
            _tell(f"cache: waiting for {watch.holder}, which is building this store")


class _Watch:
    """Looks at one lease now and then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holder = Holder()
        self._seen: tuple[bytes, int] | None = None
        self._since = self._looked = time.monotonic()

    def look(self) -> str | None:
        """What became of its holder, in words; empty while it lives, None when the lease is given up."""
        now = time.monotonic()
        if now - self._looked > SILENCE_S / 2:
            self._since = now  # this process itself was stopped: what it did not look at was not silent
        self._looked = now
        try:
            with self.path.open("rb") as file:
                content, stamp = file.read(4096), os.fstat(file.fileno()).st_mtime_ns
                self.holder = Holder.of(content.partition(b"\n")[0])
                if self._is_free(file.fileno()):
                    return "has died"
        except FileNotFoundError:
            return None
        except OSError:
            content, stamp = b"", 0  # a network disk that does not answer: silence
        if (content, stamp) != self._seen:
            self._seen, self._since = (content, stamp), now
        return f"has been silent for {SILENCE_S:.0f} s" if now - self._since >= SILENCE_S else ""

    def _is_free(self, file: int) -> bool:
        """Whether the lock was given back; only where the kernel that would know is this one."""
        is_known = fcntl is not None and self.holder.boot == boot_id()
        return is_known and _locked(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _locked(file: int, how: int) -> bool:
    """Lock an open file; False where it is held, or where the file system has no locks and silence has to tell."""
    try:
        fcntl.flock(file, how)
    except OSError:
        return False
    return True


def _newest(folder: Path, key: str) -> int | None:
    numbers = [path.name.rpartition("-")[2] for path in folder.glob(f"{_PREFIX}{key}-*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=None)


def living_tokens(folder: Path, own: Lease | None) -> set[str]:
    """Tokens of the builders that may be at work here; leases of those that cannot be are taken away."""
    now = time.time() if own is None else own.stamp()
    found = set()
    for path in folder.glob(f"{_PREFIX}*"):
        if own is not None and path == own.path:
            found.add(own.token)
        elif token := _token_of_living(path, now):
            found.add(token)
    return found


def _token_of_living(path: Path, now: float) -> str:
    """The token of a lease that may still be held; one that is not is removed."""
    try:
        with path.open("r+b" if os.access(path, os.W_OK) else "rb", buffering=0) as file:
            holder = Holder.of(file.readline(4096))
            status = os.fstat(file.fileno())
            age_s = now - status.st_mtime
            is_dead = age_s > _ABANDONED_S
            # One that died between making the file and filling it has not said which machine it was on.
            if fcntl is not None and (holder.boot == boot_id() or (not holder.boot and age_s > SILENCE_S)):
                is_dead = _locked(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The name may belong to another lease by now; while this one is locked nobody gives its name away.
            if is_dead and os.path.samestat(status, path.stat()):
                path.unlink()
            return "" if is_dead else holder.token
    except OSError:
        return ""  # gone meanwhile; or another user's, whose folder is closed to us too


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
