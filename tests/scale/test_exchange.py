"""Sums through shared memory are those of the process group, the same on every rank; nobody waits for the dead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatout.distributed.exchange import Exchange, SharedMemory, exchange_of_ranks
from flatout.distributed.processes import warm_start
from flatout.distributed.ranks import others_watched

CPU = torch.device("cpu")
SMALL = 4096
"""Bytes that ranks share at once: larger tensors go through in pieces."""
SIZES = (0, 1, 2, 5, 1023, 1024, 1025, 5000)
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is Linux's")
TYPES = (torch.float32, torch.bfloat16, torch.int32)


def on_ranks(world: int, folder: Path, task: Callable[[int], Any]) -> list[Any]:
    """What each of so many processes finds; None for one that was killed."""
    warm_start()
    context = multiprocessing.get_context("forkserver")
    ends = [context.Pipe(duplex=False) for _ in range(world)]
    processes = []
    for rank, (_, end) in enumerate(ends):
        processes.append(context.Process(target=one_rank, args=(rank, world, folder, task, end)))
        processes[-1].start()
        end.close()
    found = [word_of(receiver) for receiver, _ in ends]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode in (0, -signal.SIGKILL)
    return found


def word_of(receiver: Any) -> Any:
    assert receiver.poll(90), "a rank hangs"
    try:
        return receiver.recv()
    except EOFError:
        return None


def one_rank(rank: int, world: int, folder: Path, task: Callable[[int], Any], end: Any) -> None:
    torch.set_num_threads(1)
    tempfile.tempdir = str(folder / "temporary")
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world)
    end.send(task(rank))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where ranks meet; the folder for what is temporary has a short name, which addresses of sockets need."""
    (tmp_path / "temporary").mkdir()
    return tmp_path


def numbers(size: int, kind: torch.dtype, rank: int) -> Tensor:
    torch.manual_seed(100 * rank + size)
    return (torch.randn(size, dtype=torch.float64) * 20).abs().to(kind)


def sums(rank: int) -> bool:
    """Of every size and type, twice, against the process group's and those of the first rank."""
    exchange = exchange_of_ranks(CPU, SMALL)
    assert isinstance(exchange, SharedMemory)
    for size in SIZES * 2:
        for kind in TYPES:
            ours, plain = numbers(size, kind, rank), numbers(size, kind, rank)
            exchange.add_up(ours)
            dist.all_reduce(plain)
            of_first = ours.clone()
            dist.broadcast(of_first, 0)
            assert torch.equal(ours, of_first)
            if exchange.world == 2 or not kind.is_floating_point:
                assert torch.equal(ours, plain)
            else:
                torch.testing.assert_close(ours, plain)
    table = numbers(300, torch.float32, rank).view(100, 3)
    both = table.clone()
    exchange.add_up(table)
    dist.all_reduce(both)
    torch.testing.assert_close(table, both)
    memory = [line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if "flatout" in line]
    assert len([line for line in memory if line.endswith("/memfd:flatout (deleted)")]) == 1  # has no name to be left
    exchange.close()
    return True


@pytest.mark.parametrize("world", [2, 3, 5])
def test_sums_are_those_of_the_process_group_and_the_same_on_every_rank(world, place):
    assert on_ranks(world, place, sums) == [True] * world
    assert list((place / "temporary").iterdir()) == []


def gradients(rank: int, exchange: Exchange) -> list[Tensor]:
    """Of three steps of a little model, as DDP hands them out."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(7, 50), nn.Tanh(), nn.Linear(50, 3)), gradient_as_bucket_view=True
    )
    exchange.serve(model)
    found = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(5, 7)).square().mean().backward()
        found += [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        model.zero_grad()
    return found


def ddp_with_either(rank: int) -> bool:
    ours, plain = gradients(rank, exchange_of_ranks(CPU, 1 << 20)), gradients(rank, Exchange())
    assert len(ours) == len(plain) == 12
    return all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def test_ddp_hands_out_the_same_gradients(place):
    assert on_ranks(2, place, ddp_with_either) == [True, True]


def killed_while_adding_up(rank: int) -> tuple[str, float]:
    exchange = exchange_of_ranks(CPU, SMALL)
    exchange.add_up(torch.ones(5))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return words_of(lambda: exchange.add_up(torch.ones(5)))


def killed_in_a_step(rank: int) -> tuple[str, float]:
    exchange = exchange_of_ranks(CPU, SMALL)
    model = DistributedDataParallel(nn.Linear(7, 3))
    exchange.serve(model)
    model(torch.randn(5, 7)).mean().backward()
    loss = model(torch.randn(5, 7)).mean()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return words_of(loss.backward)


def words_of(step: Callable[[], object]) -> tuple[str, float]:
    """What is said of a step in which another rank is missing, and after how long."""
    began = time.monotonic()
    try:
        with others_watched():
            step()
    except Exception as error:
        words = str(error)
    else:
        words = "nothing"
    seconds = time.monotonic() - began
    dist.destroy_process_group()
    return words, seconds


@pytest.mark.xdist_group("timing")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("task", [killed_while_adding_up, killed_in_a_step])
def test_a_rank_that_is_killed_is_missed_at_once_and_nothing_is_left(task, world, place):
    first, second, *others = on_ranks(world, place, task)
    assert second is None
    for rank, (words, seconds) in zip((0, 2), (first, *others), strict=False):
        assert words.startswith(f"rank {rank} of {world}: another rank is gone")
        assert seconds < 5
    assert list((place / "temporary").iterdir()) == []


def without_memory(rank: int) -> float:
    if rank == 0:
        del os.memfd_create
    return through_the_group()


def on_several_machines(rank: int) -> float:
    with unreachable() if rank == 1 else nullcontext():
        return through_the_group()


@contextmanager
def unreachable() -> Iterator[None]:
    """Another machine has no such address."""

    class Elsewhere(socket.socket):
        def connect(self, address: Any) -> None:
            raise FileNotFoundError(address) if self.family == socket.AF_UNIX else OSError(address)

    here, socket.socket = socket.socket, Elsewhere  # type: ignore[misc]
    try:
        yield
    finally:
        socket.socket = here  # type: ignore[misc]


def through_the_group() -> float:
    exchange = exchange_of_ranks(CPU, SMALL)
    assert type(exchange) is Exchange
    tensor = torch.full((3,), dist.get_rank() + 1.0)
    exchange.add_up(tensor)
    return tensor.tolist()[0]


@pytest.mark.parametrize("task", [without_memory, on_several_machines])
def test_where_one_rank_cannot_share_memory_all_go_through_the_process_group(task, place):
    assert on_ranks(3, place, task) == [6.0, 6.0, 6.0]
    assert list((place / "temporary").iterdir()) == []
