"""Where ranks meet and exchange a few values, before the process group exists and to begin it.

The values lie in a key-value store in the first rank's process. srun, Ray and other launchers name
its port, MASTER_PORT. Under torchrun that is the port of a store of torchrun's agents. It outlives
the ranks: when one dies, the agents start all of them again, and the new ranks would read what the
old ones have written. So the first rank opens a store at a free port, and writes into the agents'
store only where it is:

    first rank                    agents' store          rank 1
    opens port 41897, id 5f3a
    writes port and id   ------>  "41897 5f3a"  ------>  reads them
                                                         connects to 41897; is the id there 5f3a?
    waits for joined/1   <-----------------------------  writes joined/1
    continues                                            continues

Rank 1 may read where the store of the old ranks was. It is gone with its process, or has another
id, or has a rank 1 already: then rank 1 looks again.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from flatout.distributed.attendance import Attendance, attend
from flatout.errors import OtherRankEnded, UserError, first_line

# how long ranks wait for each other, as torch does
_TO_MEET = timedelta(minutes=30)
# how long one try to reach the first rank's store may take
_TO_CONNECT = timedelta(seconds=10)
_AGAIN_S = 0.2
# how long the meeting may take before a rank prints what it waits for
_SILENCE_S = 20.0
# how long the first rank waits at the end for ranks that still read from its store
_TO_LEAVE_S = 5.0
# the longest time between two looks for a value
_MOST_PAUSE_S = 0.25
# in the agents' store: port and id of the first rank's store
_PLACE = "flatout/store"
_ID = "id"
_ENDED = "ended"


class SharedValues:
    """Values that ranks exchange. A script may train more than once: each training has its own."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._attendance = Attendance(store) if rank == 0 else None
        # held open, see `attendance.py`
        self._connection = attend(store, rank) if rank else None
        self._training = 0
        self._asked = 0

    def next_key(self, name: str) -> str:
        """The key of the next value; ranks ask in the same order, so it is the same on all."""
        self._asked += 1
        return f"{self._training}/{self._asked}/{name}"

    def write(self, key: str, value: str) -> None:
        self._store.set(f"{key}/{self._rank}", value)

    def read(self, key: str, rank: int, patience: timedelta) -> str:
        """What a rank has written, or writes soon.

        Raises `OtherRankEnded` when that rank, or any other, ends before.
        """
        key = f"{key}/{rank}"
        until = time.monotonic() + patience.total_seconds()
        pause = 0.01
        try:
            while not self._store.check([key]):
                # It may have written the value just before it ended.
                if self._is_lost(rank) and not self._store.check([key]):
                    self._store.set(f"{self._training}/{_ENDED}", f"{rank}")
                self._require_none_ended()
                if time.monotonic() > until:
                    raise self._other_ended(rank)
                time.sleep(pause)
                pause = min(2 * pause, _MOST_PAUSE_S)
            return self._store.get(key).decode()
        except dist.DistError:  # the first rank is gone, and with it the store
            raise self._other_ended(0) from None

    def write_end(self) -> None:
        """Let no other rank wait any more in this training, as this one ends by an error."""
        if dist.is_initialized():
            return  # collective calls of the others fail
        with suppress(dist.DistError):
            self._store.set(f"{self._training}/{_ENDED}", f"{self._rank}")

    def leave_training(self) -> None:
        """Go on to the next training, if there is one.

        The first rank waits a little for the others: its process may end now, and they may not have
        read all values yet.
        """
        if not dist.is_initialized():
            with suppress(dist.DistError):
                self._wait_for_readers()
        self._training += 1
        self._asked = 0

    def _wait_for_readers(self) -> None:
        keys = [f"{self._training}/left/{rank}" for rank in range(self._world)]
        self._store.set(keys[self._rank], "")
        until = time.monotonic() + _TO_LEAVE_S
        for rank, key in enumerate(keys if self._rank == 0 else []):
            while not (self._store.check([key]) or self._is_lost(rank)):
                if time.monotonic() > until:
                    return
                time.sleep(0.01)

    def store_of_group(self) -> dist.Store:
        """Where torch may keep the keys of a new process group."""
        return dist.PrefixStore(self.next_key("group"), self._store)

    def _require_none_ended(self) -> None:
        for key in (_ENDED, f"{self._training}/{_ENDED}"):
            if self._store.check([key]):
                raise self._other_ended(int(self._store.get(key)))

    def _is_lost(self, rank: int) -> bool:
        return self._attendance is not None and self._attendance.has_lost(rank)

    def _other_ended(self, rank: int) -> OtherRankEnded:
        name = "the first rank" if rank == 0 else f"rank {rank}"
        hint = f"Read the message of rank {rank} and fix what it names."
        hint += " Without one the system ended it, mostly for memory."
        return OtherRankEnded(f"rank {self._rank}", f"{name} has ended", hint=hint)


_met: list[SharedValues] = []


def has_met() -> bool:
    """Whether this process has met the other ranks already."""
    return bool(_met)


def meet(rank: int, world: int) -> SharedValues:
    """Meet the other ranks, the first time; later calls return at once."""
    if not _met:
        with _explained_waiting(rank, world):
            _met.append(SharedValues(_open_store(rank, world), rank, world))
    return _met[0]


def _open_store(rank: int, world: int) -> dist.Store:
    store: dist.Store = next(iter(dist.rendezvous("env://")))[0]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    return host_store(store, world) if rank == 0 else find_store(store, rank, world)


def host_store(agents: dist.Store, world: int) -> dist.Store:
    """In the first rank: open a store, write where it is, and wait until all ranks have joined."""
    address = os.environ["MASTER_ADDR"]
    name = uuid.uuid4().hex
    store = dist.TCPStore(address, 0, world, True, _TO_MEET, wait_for_workers=False)
    store.set(_ID, name)
    agents.set(_PLACE, f"{store.port} {name}")
    store.wait([f"joined/{rank}" for rank in range(1, world)], _TO_MEET)
    return store


def find_store(agents: dist.Store, rank: int, world: int) -> dist.Store:
    """In another rank: join the store of the first rank that was started together with this one."""
    process = uuid.uuid4().hex
    until = time.monotonic() + _TO_MEET.total_seconds()
    while time.monotonic() < until:
        port, name = agents.get(_PLACE).decode().split()
        with suppress(OSError, dist.DistError):
            store = _connect(int(port), world)
            if store.get(_ID).decode() == name and _has_joined(store, rank, process):
                store.set_timeout(_TO_MEET)
                return store
        time.sleep(_AGAIN_S)
    raise dist.DistStoreError("the first rank cannot be reached")


def _connect(port: int, world: int) -> dist.TCPStore:
    address = os.environ["MASTER_ADDR"]
    # where nothing listens, torch prints pages before it raises
    socket.create_connection((address, port), _TO_CONNECT.total_seconds()).close()
    return dist.TCPStore(address, port, world, False, _TO_CONNECT, wait_for_workers=False)


def _has_joined(store: dist.Store, rank: int, process: str) -> bool:
    """Take this rank's place in a store for this process, unless an earlier process has it.

    That one is gone, as this process was started in its place. Agents of machines that do not
    restart together (torchrun --node-rank) may not know it: the ranks of that store then end.
    """
    if store.compare_set(f"joined/{rank}", "", process).decode() == process:
        return True
    store.set(_ENDED, f"{rank}")
    return False


@contextmanager
def _explained_waiting(rank: int, world: int) -> Iterator[None]:
    """Print a line where the meeting takes long, and turn torch's errors into a user's."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    words = f"rank {rank} of {world}: waiting for the others at {address}."
    words += " torchrun and srun start them; for a run of one process unset RANK, or SLURM_PROCID."
    reminder = threading.Timer(_SILENCE_S, print, [words], {"file": sys.stderr, "flush": True})
    reminder.daemon = True
    reminder.start()
    try:
        yield
    except dist.DistNetworkError as error:
        problem = "is in use by another program"
        hint = "Set MASTER_PORT to a free port."
        if "EADDRINUSE" not in str(error):
            problem = "cannot be reached"
            hint = "Set MASTER_ADDR to the first machine, and open this port in its firewall."
        raise UserError("MASTER_PORT", f"{address} {problem}", hint=hint) from None
    except (ValueError, dist.DistError) as error:
        raise UserError(
            "ranks", first_line(error), hint="Start the run with torchrun or srun."
        ) from None
    finally:
        reminder.cancel()
