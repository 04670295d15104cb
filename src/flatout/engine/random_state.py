"""Read and restore the state of all random numbers, as plain values and tensors.

A checkpoint keeps it, and a repeated step starts from it again. Whatever measures or tries puts it
back, so that the run trains as if nothing had been measured. Open this file to add a library that
draws numbers.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device, *, with_others: bool = True) -> dict[str, Any]:
    """The state of torch on the CPU and on a device, of Python and of numpy.

    Nothing in a step of flatout draws from Python or numpy. `with_others=False` leaves these out
    and takes 1 µs instead of 34 µs, so it may be called in every step.
    """
    on_card = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    own = {"torch": torch.get_rng_state(), "device": on_card}
    return own | state_of_others() if with_others else own


def state_of_others() -> dict[str, Any]:
    """The state of Python and of numpy, which the user's own code may draw from."""
    # numpy gives the name of its generator, 624 numbers, and where it stands among them. uint32 is
    # no type of a checkpoint, so the numbers become int64.
    kind, key, *rest = np.random.get_state()
    numbers = torch.from_numpy(np.asarray(key).astype(np.int64))
    return {"python": random.getstate(), "numpy": [str(kind), numbers, *rest]}


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Undo `random_state`: the next numbers are those that came next then."""
    torch.set_rng_state(state["torch"])
    # A run may resume on a device of another kind, which keeps the state that it has.
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    if "python" in state:
        random.setstate(state["python"])
        kind, key, *rest = state["numpy"]
        np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))
