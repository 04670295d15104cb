"""How the first rank notices that another one has died: each holds a connection to it.

    rank 1                              first rank
    connects, sends token and number -> keeps the connection
    is killed                           reads its end

The system closes the connections of a process when it ends, whatever ended it. So no rank sends
signs of life, and one that computes for an hour is not taken for dead. The other ranks need no such
thing: they see the first rank's store go.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import suppress

import torch.distributed as dist

# in the first rank's store: the port that it waits for the others at, and what they send
_PLACE = "attendance"
_TOKEN_BYTES = 16
_RANK_BYTES = 4
# how long a connection may take to be made, or to send its number
_PATIENCE_S = 10.0


class Attendance:
    """The connections of the other ranks, in the first one."""

    def __init__(self, store: dist.Store) -> None:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual)
        self._server.setblocking(False)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._of_rank: dict[int, socket.socket] = {}
        store.set(_PLACE, f"{self._server.getsockname()[1]} {self._token.hex()}")

    def has_lost(self, rank: int) -> bool:
        """Whether the process of a rank has ended; False while it has not connected yet."""
        with suppress(BlockingIOError):  # raised when no one else waits to be let in
            while True:
                self._let_in(self._server.accept()[0])
        if rank not in self._of_rank:
            return False
        try:
            return self._of_rank[rank].recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:  # reset
            return True

    def _let_in(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE_S)
        with suppress(OSError):
            sent = connection.recv(_TOKEN_BYTES + _RANK_BYTES, socket.MSG_WAITALL)
            if secrets.compare_digest(sent[:_TOKEN_BYTES], self._token):
                connection.setblocking(False)
                self._of_rank[int.from_bytes(sent[_TOKEN_BYTES:])] = connection
                return
        connection.close()


def attend(store: dist.Store, rank: int) -> socket.socket | None:
    """In another rank: the connection to hold as long as the process lives.

    None where a firewall is in its way: the first rank then learns late that this one was killed.
    """
    port, token = store.get(_PLACE).decode().split()
    with suppress(OSError):
        address = (os.environ["MASTER_ADDR"], int(port))
        connection = socket.create_connection(address, _PATIENCE_S)
        connection.sendall(bytes.fromhex(token) + rank.to_bytes(_RANK_BYTES))
        return connection
    return None
