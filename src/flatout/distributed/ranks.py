"""Rank and world size, read from the environment of torchrun, SLURM, Ray or our own launch.

A rank trains its share of every step on its own device. Before the process group exists, the first
rank decides a few things, such as the run folder. The others read them from a key-value store:
`meeting.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from flatout.distributed.meeting import has_met, meet
from flatout.errors import OtherRankEnded, RunBroke, UserError, require

# How long ranks wait for a value of the first rank, which may build a store of data before. Its
# death is noticed at once.
_PATIENCE_FOR_FIRST = timedelta(hours=24)
# How long ranks wait for one that should be as far as they are.
_PATIENCE = timedelta(minutes=30)
_SAME_NUMBER = (
    "Start the same number on each machine: torchrun --nproc-per-node=N, srun --ntasks-per-node=N."
)
# NVIDIA, AMD, Linux on Windows
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
_GONE = (
    r"(?i)closed by peer|reset by peer|broken pipe|remote process exited|connection refused|timed"
    r" out waiting"
)


def why_no_gpu() -> tuple[str, str]:
    """Why torch finds no GPU, where it finds none, and what helps; nothing helps where the machine
    has none.
    """
    if not any(Path(place).exists() for place in _DRIVERS):
        return "this machine has no GPU", ""
    if torch.version.cuda is None and torch.version.hip is None:
        problem = f"this machine has a GPU, but torch {torch.__version__} is built without CUDA"
        return (
            problem,
            f"Run pip install --force-reinstall torch=={torch.__version__.partition('+')[0]}.",
        )
    problem = f"this machine has a GPU, but torch {torch.__version__} finds none"
    return problem, "Look at the driver with nvidia-smi, and at CUDA_VISIBLE_DEVICES."


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process, the number of ranks, and both on this machine alone."""

    rank: int = 0  # from 0, among all ranks
    world: int = 1
    local: int = 0  # from 0, among the ranks of this machine
    local_world: int = 1

    def __post_init__(self) -> None:
        ok = 0 <= self.rank < self.world and 0 <= self.local < self.local_world <= self.world
        require(
            ok,
            "RANK",
            f"rank {self.rank} of {self.world}, {self.local} of {self.local_world} on its machine",
            hint="Leave these variables to the launcher: torchrun, srun, or trainer.devices=N.",
        )
        require(
            self.world % self.local_world == 0,
            "LOCAL_WORLD_SIZE",
            f"{self.local_world} of {self.world} ranks on this machine",
            hint=_SAME_NUMBER,
        )

    @classmethod
    def here(cls) -> Ranks:
        """Read the variables of torchrun or SLURM; one rank where neither has set them."""
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            world = _number("WORLD_SIZE")
            alone = 1 if world == 1 else None
            return cls(
                _number("RANK"), world, _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", alone)
            )
        return (
            cls._of_slurm() if "SLURM_PROCID" in os.environ and SLURMEnvironment.detect() else cls()
        )

    @classmethod
    def _of_slurm(cls) -> Ranks:
        """Read srun's variables, and set those of torchrun: torch and Lightning read only them."""
        try:
            environment = SLURMEnvironment()
        except RuntimeError as error:
            raise UserError(
                "SLURM",
                str(error),
                hint=(
                    "Submit the batch file of docs/many_devices.md, with your numbers of nodes and"
                    " tasks."
                ),
            ) from None
        world = environment.world_size()
        nodes = _number("SLURM_NNODES", 1)
        ranks = cls(
            environment.global_rank(), world, environment.local_rank(), max(1, world // nodes)
        )
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        os.environ |= {
            name: str(number) for name, number in zip(names, astuple(ranks), strict=True)
        }
        os.environ |= {
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
        }
        return ranks

    @property
    def is_first(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0

    @property
    def are_several(self) -> bool:
        return self.world > 1

    def device(self, accelerator: str, number: int = 0) -> torch.device:
        """The device that Lightning will choose; `number` is the GPU to take where there is one
        rank.
        """
        if accelerator not in ("auto", "gpu", "cuda") or not torch.cuda.is_available():
            return torch.device("cpu")
        if not self.are_several:
            return torch.device("cuda", number)
        return torch.device("cuda", 0 if self._sees_only_its_device() else self.local)

    @contextmanager
    def train_together(self) -> Iterator[None]:
        """One training, from the first value that ranks exchange to the last.

        When it ends by an error on one rank, before the process group begins, it ends on all.
        """
        if not self.are_several:
            yield
            return
        try:
            yield
        except BaseException as error:
            # a rank that has not met the others cannot tell them
            if has_met() and not isinstance(error, OtherRankEnded):
                meet(self.rank, self.world).write_end()
            raise
        finally:
            if has_met():
                meet(self.rank, self.world).leave_training()

    def agreed(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns on the first rank, plain values, on every rank.

        Within `train_together`: an error of `make` then ends all ranks.
        """
        return self._exchanged(name, make, range(1), _PATIENCE_FOR_FIRST)[0]

    def gathered(
        self, name: str, make: Callable[[], Any], takes: timedelta = timedelta()
    ) -> list[Any]:
        """The plain values that `make` returns on each rank, in order, on every rank.

        Within `train_together`, as `agreed`. `takes`: how long `make` may take.
        """
        return self._exchanged(name, make, range(self.world), takes + _PATIENCE)

    def _exchanged(
        self, name: str, make: Callable[[], Any], givers: range, patience: timedelta
    ) -> list[Any]:
        if not self.are_several:
            return [make()]
        values = meet(self.rank, self.world)
        key = values.next_key(name)
        if self.rank in givers:
            values.write(key, json.dumps(make()))
        return [json.loads(values.read(key, rank, patience)) for rank in givers]

    def join(self, device: torch.device) -> None:
        """Begin the process group, when all ranks are ready."""
        if not self.are_several or dist.is_initialized():
            return
        # torch would wait for a rank that has ended
        self.gathered("ready", lambda: True)
        store = meet(self.rank, self.world).store_of_group()
        backend, on = ("gloo", None) if device.type == "cpu" else ("nccl", device)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world, device_id=on
        )

    def lightning_settings(self, device: torch.device) -> dict[str, object]:
        """Arguments of Lightning's Trainer, which must not start processes itself."""
        if not self.are_several:
            devices = 1 if device.index is None else [device.index]
            return {"accelerator": device.type, "devices": devices, "num_nodes": 1}
        on_machine = 1 if self._sees_only_its_device() else self.local_world
        return {
            "accelerator": device.type,
            "devices": on_machine,
            "num_nodes": self.world // on_machine,
        }

    def environment(self) -> ClusterEnvironment:
        """The plugin by which Lightning learns its rank."""
        return _Started(self, self._sees_only_its_device())

    def _sees_only_its_device(self) -> bool:
        return self.local_world > 1 and torch.cuda.is_available() and torch.cuda.device_count() == 1


class _Started(TorchElasticEnvironment):
    """Processes that any launcher has started, under the variables that torchrun sets."""

    def __init__(self, ranks: Ranks, is_node: bool) -> None:
        super().__init__()
        self.ranks, self.is_node = ranks, is_node

    def local_rank(self) -> int:
        return 0 if self.is_node else self.ranks.local

    def node_rank(self) -> int:
        # A rank that sees one device only looks like a machine to Lightning, which counts devices
        # by machine.
        return self.ranks.rank // (1 if self.is_node else self.ranks.local_world)


def cores_here() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@contextmanager
def others_watched() -> Iterator[None]:
    """Turn the error of a collective call whose other rank is gone into one sentence."""
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized() or not re.search(_GONE, str(error)):
            raise
        words = (
            "another rank is gone, and this one cannot continue without it. Read its message;"
            " without one, the"
        )
        words += " system ended it, mostly for memory. resume=auto continues"
        raise RunBroke(f"rank {dist.get_rank()} of {dist.get_world_size()}: {words}.") from None


def end_group() -> None:
    """Leave the process group: later errors of one rank then end no other."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _number(name: str, otherwise: int | None = None) -> int:
    text = os.environ.get(name, otherwise)
    if text is None:
        raise UserError(
            name,
            "is not set, but RANK and WORLD_SIZE are",
            hint="Start the run with torchrun, or set it.",
        )
    try:
        return int(text)
    except ValueError:
        raise UserError(
            name,
            repr(text),
            allowed="a whole number",
            hint="Leave it to the launcher: torchrun, srun, or trainer.devices=N.",
        ) from None
