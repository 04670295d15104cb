"""Weights of which each rank holds a slice give the answers and the gradients of whole ones, family
by family.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from flatout.distributed.collectives import is_share, share_of, whole
from flatout.distributed.processes import warm_start
from flatout.engine.clipping import clip_gradients, gradient_is_finite, gradient_norm
from flatout.engine.fsdp import slice_weights
from flatout.engine.optimizer import OptimConfig
from flatout.models.encoder.lora import LoraConfig
from tests.models.encoder_cases import FLAT, PADDED, batch_of, built, gradients

RANKS = 2
LENGTHS = ([2, 3, 9, 21, 21, 22, 40], [1, 7, 165])
VARIANTS: dict[str, dict[str, Any]] = {
    **{family: {"family": family} for family in [*FLAT, *PADDED]},
    "tags": {"family": "bert", "kind": "tags"},
    "small matrices": {"family": "bert", "lora": LoraConfig(rank=2)},
    "frozen layers": {"family": "bert", "freeze_layers": 2},
    "activations computed anew": {"family": "bert", "gradient_checkpointing": True},
}


def as_rank(rank: int, folder: str) -> None:
    """All that ranks find out together; starting them costs more than any of it."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*barrier.*device under current context.*")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    torch.set_num_threads(1)
    found = {name: against_whole(rank, settings) for name, settings in VARIANTS.items()}
    found["in bf16"] = against_whole(rank, {"family": "bert"}, in_bf16=True)
    found["memory"] = memory_after_a_step()
    found["lengths of gradients"] = lengths_of_gradients(rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def against_whole(rank: int, settings: dict[str, Any], *, in_bf16: bool = False) -> dict[str, Any]:
    """Largest differences of outputs and mean gradients, relative to the largest number of each."""
    sliced = built(**settings)
    plain = copy.deepcopy(sliced)
    slice_weights(sliced, init_device_mesh("cpu", (RANKS,)))
    with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
        of_ranks = [gradients(plain, plain(batch_of(lengths))) for lengths in LENGTHS]
        batch = batch_of(LENGTHS[rank])
        expected = plain(batch)
        outputs = sliced(batch)
        own = gradients(sliced, outputs)
    wanted = {name: (of_ranks[0][name] + of_ranks[1][name]) / RANKS for name in of_ranks[0]}
    return {
        "outputs": difference(outputs, expected),
        "gradients": max(
            difference(whole(own[name]), gradient) for name, gradient in wanted.items()
        ),
        "same weights have gradients": own.keys() == wanted.keys(),
        "share": sum(map(local_bytes, sliced.parameters()))
        / sum(map(local_bytes, plain.parameters())),
        "all are shared": all(map(is_share, sliced.parameters())),
    }


def local_bytes(weight: Tensor) -> int:
    return int((weight.to_local() if is_share(weight) else weight).nbytes)


def difference(found: Tensor, expected: Tensor) -> float:
    found = found.detach()
    expected = expected.detach()
    return float(
        (found.float() - expected.float()).abs().max()
        / expected.float().abs().max().clamp_min(1e-3)
    )


def memory_after_a_step() -> float:
    """Bytes of all tensors there are, beside those of the weights, gradients and AdamW of a model
    that is whole.
    """
    gc.collect()
    before = bytes_of_tensors()
    model = built("bert")
    whole_bytes = sum(weight.nbytes for weight in model.parameters())
    slice_weights(model, init_device_mesh("cpu", (RANKS,)))
    optimizer = OptimConfig().build(model)
    for _ in range(2):
        model(batch_of([3, 5, 9])).sum().backward()
        optimizer.step()
    return (bytes_of_tensors() - before) / (4 * whole_bytes)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_share(tensor) else tensor


def bytes_of_tensors() -> int:
    tensors: list[Any] = [
        each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter, DTensor)
    ]
    storages = [local_part(each).untyped_storage() for each in tensors]
    bytes_of_storage = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(bytes_of_storage.values())


def lengths_of_gradients(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,))
    full = torch.arange(15, dtype=torch.float32).view(5, 3)
    plain = nn.Parameter(torch.zeros(5, 3))
    shared = nn.Parameter(share_of(plain.detach(), like_sliced(plain, mesh)))
    plain.grad = full.clone()
    shared.grad = share_of(full, shared)
    assert torch.equal(whole(shared.grad), full)
    lengths = [float(gradient_norm([weight])) for weight in (plain, shared)]
    clipped = [float(clip_gradients([weight], 1.0)) for weight in (plain, shared)]
    same = torch.equal(plain.grad, whole(shared.grad))
    if rank == 1:  # the other rank's slice is sound
        shared.grad.to_local()[-1] = float("nan")
    return {
        "lengths": lengths,
        "clipped": clipped,
        "same": same,
        "finite": gradient_is_finite([shared]),
    }


def like_sliced(plain: Tensor, mesh: DeviceMesh) -> Tensor:
    return distribute_tensor(plain.detach(), mesh, [Shard(0)])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    warm_start()
    mp.start_processes(as_rank, (str(folder),), nprocs=RANKS, start_method="forkserver")
    yield [torch.load(Path(folder, f"{rank}.pt")) for rank in range(RANKS)]


@pytest.mark.parametrize("variant", [*VARIANTS, "in bf16"])
def test_slices_give_the_outputs_and_gradients_of_whole_weights(
    variant: str, found: list[dict[str, Any]]
) -> None:
    for of_rank in found:
        kept = of_rank[variant]
        assert kept["outputs"] < 1e-5
        assert kept["gradients"] < 1e-5
        assert kept["same weights have gradients"]
        assert kept["all are shared"]
    assert sum(of_rank[variant]["share"] for of_rank in found) == pytest.approx(1.0)
    assert max(of_rank[variant]["share"] for of_rank in found) < 0.55


def test_after_a_step_no_rank_holds_more_than_its_slices(found: list[dict[str, Any]]) -> None:
    assert all(0.45 < of_rank["memory"] < 0.55 for of_rank in found)


def test_ranks_agree_on_the_length_of_a_gradient_and_on_whether_it_is_finite(
    found: list[dict[str, Any]],
) -> None:
    for of_rank in found:
        kept = of_rank["lengths of gradients"]
        assert kept["lengths"][0] == pytest.approx(kept["lengths"][1], rel=1e-6)
        assert kept["clipped"][0] == pytest.approx(kept["clipped"][1], rel=1e-6)
        assert kept["same"]
        assert kept["finite"] is False


def test_what_is_no_slice_passes_as_it_is() -> None:
    tensor = torch.arange(3)
    assert whole(tensor) is tensor
    assert share_of(tensor, tensor) is tensor
    assert not is_share(tensor)
