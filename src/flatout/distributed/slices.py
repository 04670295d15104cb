"""Tensors of which each rank holds a slice: the whole of one, and the slice of a whole one.

Other values pass through unchanged, so code that clips, averages or saves need not know the kind.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_share(tensor: Tensor) -> bool:
    """Whether other ranks hold the rest of it. Asked by a method of theirs: to import their class takes seconds."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; all ranks must ask at once."""
    gathered: Any = tensor
    return gathered.full_tensor() if is_share(tensor) else tensor


def share_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's slice of a tensor that every rank has, cut as `like` is."""
    if not is_share(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    cut: Any = like
    return distribute_tensor(tensor.to(like.device), cut.device_mesh, cut.placements, src_data_rank=None)


def shares_of(state: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """A `state_dict` of whole tensors as `module` can load it."""
    own = module.state_dict()
    return {name: share_of(tensor, own[name]) if name in own else tensor for name, tensor in state.items()}
