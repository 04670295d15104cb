"""Sums over all ranks; where these are processes of one machine without GPUs, through memory that they share.

Gloo sends everything through sockets, and wakes threads of its own to do so: a few milliseconds a sum, however little
is summed, on cores that have just computed. Here a rank copies its numbers into a slot that all others see, tells each
of them so with one byte, waits for theirs, and adds up all slots in the order of the ranks, so that every rank has the
same sum to the last bit. The bytes go through sockets of the kernel, which order what memory shows on any processor;
and the socket of a rank that has died is closed at once, so that nobody waits for it.

The memory has no name, and the sockets' folder is gone before the first sum: a killed run leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

_SLOT_BYTES = 1 << 22
"""At most so much of each rank is shared at once, twice; what is larger is summed piece by piece."""
_PAGE_BYTES = 1 << 12
_PATIENCE_S = 1800.0
"""How long a rank waits for another that lives, as long as gloo does."""
_FEW = 3
"""Up to so many ranks each adds up all numbers; more share the work, which takes another meeting."""

_GONE = "connection closed by peer"
"""In the words of gloo, which are known to mean that another rank is gone."""


class Exchange:
    """Sums over all ranks, through the process group."""

    def add_up(self, tensor: Tensor) -> None:
        """Put the sum of all ranks' tensors in the place of each. On every rank, in the same order."""
        dist.all_reduce(tensor)

    def serve(self, wrapper: DistributedDataParallel) -> None:
        """Let DDP exchange gradients in this way."""
        return

    def close(self) -> None:
        return


class SharedMemory(Exchange):
    """Sums over ranks of one machine; `peers` are sockets to all others, `memory` is theirs, too."""

    def __init__(self, rank: int, peers: list[socket.socket], memory: mmap.mmap) -> None:
        self.rank, self.world, self.peers = rank, len(peers) + 1, peers
        for peer in peers:
            peer.settimeout(_PATIENCE_S)
        # Two slots a rank, used in turn: who writes into one again has met all others since they have read it.
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(2, self.world, -1)
        self._turn = 0

    def add_up(self, tensor: Tensor) -> None:
        for part in tensor.view(-1).split(self._slots.shape[-1] // tensor.element_size()):
            if self.world <= _FEW:
                _add(self._gathered(part), part)
            else:
                self._add_up_together(part)

    def serve(self, wrapper: DistributedDataParallel) -> None:
        # DDP compares annotations with types, which those of a function in this file are not.
        wrapper.register_comm_hook(self, lambda exchange, bucket: exchange.averaged(bucket))

    def averaged(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The mean of all ranks' gradients, as DDP asks for it."""
        gradients = bucket.buffer()
        self.add_up(gradients)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(gradients.div_(self.world))
        return done

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    def _add_up_together(self, part: Tensor) -> None:
        """Each rank adds up its share of the numbers and tells the others its sums."""
        shares = part.tensor_split(self.world)
        ends = [0]
        for share in shares:
            ends.append(ends[-1] + len(share))
        own = slice(ends[self.rank], ends[self.rank + 1])
        _add([found[own] for found in self._gathered(part)], part[own])
        for share, found in zip(shares, self._gathered(part[own], [len(share) for share in shares]), strict=True):
            share.copy_(found)

    def _gathered(self, own: Tensor, lengths: list[int] | None = None) -> list[Tensor]:
        """The tensors of all ranks in their order; they stay until the call after the next."""
        slots = self._slots[self._turn].view(own.dtype)
        self._turn = 1 - self._turn
        slots[self.rank, : len(own)] = own
        self._meet()
        return [slot[:length] for slot, length in zip(slots, lengths or [len(own)] * self.world, strict=True)]

    def _meet(self) -> None:
        """Tell all others that this rank has come here, and wait until all have."""
        try:
            for peer in self.peers:
                peer.send(b"\0")
            for peer in self.peers:
                if not peer.recv(1):
                    raise ConnectionResetError
        except TimeoutError:
            raise RuntimeError("timed out waiting for another rank") from None
        except OSError:
            raise RuntimeError(_GONE) from None


def _add(parts: list[Tensor], into: Tensor) -> None:
    torch.add(parts[0], parts[1], out=into)
    for part in parts[2:]:
        into += part


def exchange_of_ranks(device: torch.device, most_bytes: int) -> Exchange:
    """The fastest exchange there is for ranks that compute here; none shares more than so many bytes at once."""
    if device.type != "cpu":
        return Exchange()
    slot = min(_SLOT_BYTES, -(-most_bytes // _PAGE_BYTES) * _PAGE_BYTES)
    with ExitStack() as opened:
        return _shared_memory(slot, opened) or Exchange()


def _shared_memory(slot: int, opened: ExitStack) -> SharedMemory | None:
    """Between all ranks, or on none of them where some cannot: on several machines, or without memory to share."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size = 2 * world * slot
    memory = -1
    try:
        listener, address = _listening(world, opened)
        if rank == 0:
            memory = os.memfd_create("flatout")
            opened.callback(os.close, memory)
            os.posix_fallocate(memory, 0, size)
    except (AttributeError, OSError):  # not every system has these
        address = ""
    addresses: list[Any] = [""] * world
    dist.all_gather_object(addresses, address)
    lower = _joined(addresses[:rank], rank) if all(addresses) else None
    if not _on_all(lower is not None) or lower is None:
        for peer in lower or ():
            peer.close()
        return None
    higher: dict[int, socket.socket] = {}
    for _ in range(rank + 1, world):
        peer, _ = listener.accept()
        higher[int.from_bytes(peer.recv(4, socket.MSG_WAITALL))] = peer
    if rank:
        memory = _received(lower[0])
        opened.callback(os.close, memory)
    else:
        for peer in higher.values():
            socket.send_fds(peer, [b"\0"], [memory])
    peers = [*lower, *(higher[other] for other in sorted(higher))]
    return SharedMemory(rank, peers, mmap.mmap(memory, size))


def _listening(world: int, opened: ExitStack) -> tuple[socket.socket, str]:
    """A socket that the ranks after this one find, and its address."""
    listener = opened.enter_context(socket.socket(socket.AF_UNIX))
    address = str(Path(opened.enter_context(tempfile.TemporaryDirectory())) / "ranks")
    listener.bind(address)
    listener.listen(world)
    return listener, address


def _joined(addresses: list[str], rank: int) -> list[socket.socket] | None:
    """Sockets to the ranks before this one; None where one is on another machine, which has no such address."""
    found: list[socket.socket] = []
    try:
        for address in addresses:
            found.append(socket.socket(socket.AF_UNIX))
            found[-1].connect(address)
            found[-1].sendall(rank.to_bytes(4))
    except OSError:
        for peer in found:
            peer.close()
        return None
    return found


def _received(first: socket.socket) -> int:
    """The memory that the first rank hands out."""
    _, received, _, _ = socket.recv_fds(first, 1, 1)
    if not received:
        raise RuntimeError(_GONE)
    return received[0]


def _on_all(ok: bool) -> bool:
    count = torch.tensor(int(ok))
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return bool(count)
