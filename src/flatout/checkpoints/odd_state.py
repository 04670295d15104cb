"""Whether a checkpoint has odd values, or an error comes from the state that it has brought.

A checkpoint may come from others, and its checksums say nothing of its values. They meet the code
of many packages: Lightning and torch copy them, callbacks and optimizers compute with them later.
Each fails in its own way. So an error is judged by the functions that it went through. Code of your
own is never among them: its errors keep their traceback.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor
from torch.optim import Optimizer

from flatout.engine.clipping import is_fused
from flatout.engine.pieces import is_out_of_memory
from flatout.errors import require

# functions that set what a checkpoint holds: how their module ends, and how their names begin
_RESTORING = (
    ("trainer.connectors.checkpoint_connector", ("resume", "restore", "_restore")),
    ("flatout.checkpoints.position", ("load", "restore")),
)
# modules that compute with it in later steps, and fail themselves where it is odd
_USING = ("torch.optim", "lightning.pytorch.callbacks.early_stopping", "flatout.engine.schedule")
# what Lightning's ModelCheckpoint keeps of files that it has written, and later removes
_WRITTEN = ("best_model_path", "kth_best_model_path", "last_model_path")
_LIKE_WEIGHTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
_PACKAGES = {
    "flatout",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "numpy",
    "packaging",
    "pytorch_lightning",
    "torch",
}


def is_of_checkpoint(error: Exception) -> bool:
    """Whether an error of a resumed training is one of its checkpoint."""
    if is_out_of_memory(error):
        return False
    functions = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        functions.append((str(frame.f_globals.get("__name__")), frame.f_code.co_name))
    if not functions:
        return False
    for place, (module, name) in enumerate(functions):
        if any(module.endswith(of) and name.startswith(begins) for of, begins in _RESTORING):
            below = {module.partition(".")[0] for module, _ in functions[place:]}
            return below <= _PACKAGES | sys.stdlib_module_names
    last_module, last_name = functions[-1]
    # an optimizer that is made refuses what the user's own code gives it
    return last_module.startswith(_USING) and last_name != "__init__"


def require_fitting_states(optimizers: Iterable[Optimizer]) -> None:
    """Refuse what an optimizer keeps of a weight where it has another shape than the weight.

    Fused optimizers would read and write memory behind it, as they compare no shapes.
    """
    for optimizer in filter(is_fused, optimizers):
        for weight, state in optimizer.state.items():
            if not isinstance(weight, Tensor):
                continue
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                has_its_shape = name not in _LIKE_WEIGHTS or value.shape == weight.shape
                is_one = name != "step" or value.numel() == 1
                require(
                    has_its_shape and is_one,
                    "checkpoint",
                    f"the optimizer's {name} of a weight of {list(weight.shape)} does not fit",
                    hint="It was changed, or is of another run: resume another checkpoint.",
                )


def require_own_paths(state: object, folder: str | Path | None, key: str) -> None:
    """Refuse paths in a state of Lightning's ModelCheckpoint that lead out of its folder.

    Lightning removes what they name. `folder`: where the callback writes now. Paths of a run that
    was moved lie in its old folder, and Lightning leaves those alone.
    """
    if not isinstance(state, Mapping):
        return  # Lightning fails there, and says so
    best = state.get("best_k_models")
    paths = [state.get(name) for name in _WRITTEN]
    paths += list(best) if isinstance(best, Mapping) else []
    for path in paths:
        require(
            not path or (isinstance(path, str) and not _leads_out(path, str(folder or ""))),
            "checkpoint",
            f"the state of {key} names {path!r}, outside of its folder",
            hint="It was changed, or is of another run: resume another checkpoint.",
        )


def _leads_out(path: str, folder: str) -> bool:
    """Whether what a path names could be removed in another folder than this one."""
    if ".." in Path(path).parts:
        return True
    if "://" in path or "::" in path or path.startswith("data:"):
        # an address, as the folder may be one
        return not (folder and path.startswith(f"{folder.rstrip('/')}/"))
    own = Path(folder).absolute()
    is_below = own in Path(path).absolute().parents
    return is_below and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(own))


def is_like(saved: object, usual: object) -> bool:
    """Whether a saved state has numbers, lists and mappings where the usual state has them.

    {"rows": 3, "parts_s": {}} is like {"rows": 0, "parts_s": {}}, and {"rows": [3]} is not. What
    an empty mapping may hold are numbers, and mappings.
    """
    if isinstance(usual, dict):
        if not isinstance(saved, dict):
            return False
        if not usual:
            return all(isinstance(value, dict) or _is_number(value) for value in saved.values())
        has_all = all(key in saved for key in usual if _is_number(usual[key]))
        return has_all and all(is_like(value, usual.get(key)) for key, value in saved.items())
    if isinstance(usual, list):
        return isinstance(saved, list)
    return _is_number(saved) or not _is_number(usual)


def _is_number(value: object) -> bool:
    # a rate may be a tensor
    return isinstance(value, bool | int | float) or (isinstance(value, Tensor) and not value.ndim)
