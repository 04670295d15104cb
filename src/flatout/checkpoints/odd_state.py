"""Whether an error comes from the state that a checkpoint has brought.

A checkpoint may come from others, and its checksums say nothing of its values. They meet the code
of many packages: Lightning and torch copy them, callbacks and optimizers compute with them later.
Each fails in its own way. So an error is judged by the functions that it went through. Code of your
own is never among them: its errors keep their traceback.
"""

from __future__ import annotations

import sys
import traceback

from flatout.engine.pieces import is_out_of_memory

# functions that set what a checkpoint holds: the module, and how their names begin
_RESTORING = (
    (
        "lightning.pytorch.trainer.connectors.checkpoint_connector",
        ("resume", "restore", "_restore"),
    ),
    ("flatout.checkpoints.position", ("load", "restore")),
)
# modules that compute with it in later steps, and fail themselves where it is odd
_USING = ("torch.optim", "lightning.pytorch.callbacks.early_stopping", "flatout.engine.schedule")
_PACKAGES = {"flatout", "lightning", "lightning_fabric", "lightning_utilities", "numpy", "torch"}


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
        if any(module == of and name.startswith(begins) for of, begins in _RESTORING):
            below = {module.partition(".")[0] for module, _ in functions[place:]}
            return below <= _PACKAGES | sys.stdlib_module_names
    last_module, _ = functions[-1]
    return last_module.startswith(_USING)
