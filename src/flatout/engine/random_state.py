"""Read and restore the state of all random numbers, as plain values and tensors.

A checkpoint keeps it, and a repeated step starts from it again. Code that measures or tries a step
restores it afterwards, so the run trains as if nothing had been measured. Open this file to add a
library that draws numbers. What is kept must be plain values and tensors of types that a checkpoint
may hold (`checkpoints/`).
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
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "device": on_card}
    if with_others:
        state |= state_of_others()
    return state


def state_of_others() -> dict[str, Any]:
    """The state of Python and of numpy, which the user's own code may draw from."""
    # numpy gives the name of its generator, 624 numbers, its position among them, and a Gaussian
    # number that it may hold back. uint32 is no type of a checkpoint, so the numbers become int64.
    kind, key, *rest = np.random.get_state()
    numbers = torch.from_numpy(np.asarray(key).astype(np.int64))
    return {"python": random.getstate(), "numpy": [str(kind), numbers, *rest]}


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set what `random_state` returned: the same numbers follow as followed then."""
    torch.set_rng_state(state["torch"])
    # A run may resume on a device of another kind. The state of that device is left alone.
    if state["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)
    if "python" in state:
        random.setstate(state["python"])
        kind, key, *rest = state["numpy"]
        np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))
