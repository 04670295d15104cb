"""Compiling by torch: the layers of a flat encoder where that pays, or a whole model where it is
asked for.

`compile=auto` compiles what follows attention in a layer, once for all layers and any number of
tokens; attention stays eager. It is chosen where the gain that was measured, over the steps of the
run, is more than what compiling takes.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from flatout.engine.passes import CatchOutOfMemory, give_back_memory
from flatout.engine.precision import Precision, arithmetic, product_type
from flatout.errors import require
from flatout.models.encoder.layers import FlatLayer
from flatout.models.encoder.network import Transformer
from flatout.run_log import Choice

_USUAL_COMPILE_S = 25.0  # what compiling takes at least; measured with 2 cores
_MOST_SAVED = 0.5  # fraction of the time after attention that compiling saves at most
_ROUNDS = 5


def compile_in_place(model: nn.Module, device: torch.device) -> None:
    """Let torch compile a model when it is first trained; refused where it could not."""
    why = why_not(device)
    require(not why, "compile", why, hint="Set compile=false, or install one (g++ or clang).")
    if compiles_layers(model):
        compile_layers(model)
        return
    plain = model._call_impl
    compiled = torch.compile(plain)

    def call(*inputs: Any, **named: Any) -> Any:
        return (compiled if model.training else plain)(*inputs, **named)

    model._compiled_call_impl = call  # what Module.compile() sets, and no state holds


def compiles_layers(model: nn.Module) -> TypeGuard[Transformer]:
    """Whether a model is a flat encoder, whose layers are compiled rather than the whole of it."""
    return isinstance(model, Transformer) and model.is_flat


def is_compiled(model: nn.Module) -> bool:
    """Whether layers of a flat encoder are compiled."""
    return isinstance(model, Transformer) and any(
        layer.compiled is not None for layer in model.flat_layers()
    )


def compile_layers(model: Transformer) -> None:
    """Compile what follows attention, once for each kind of layer; after a failure they run
    eagerly.
    """
    layers = model.flat_layers()
    kinds = {type(layer) for layer in layers}
    compiled = {kind: torch.compile(kind.finish, dynamic=True, fullgraph=True) for kind in kinds}
    failures = importlib.import_module("torch._dynamo.exc").TorchDynamoException

    def run(layer: FlatLayer, *inputs: Any) -> Tensor:
        try:
            found: Tensor = compiled[type(layer)](layer, *inputs)
        except failures as error:
            for each in layers:
                each.compiled = None
            reason = " ".join(str(error).split())[:200]
            warnings.warn(
                f"compile: torch could not compile a layer ({reason}). Layers run eagerly.",
                stacklevel=2,
            )
            return layer.finish(*inputs)
        return found

    for layer in layers:
        layer.compiled = run


def choose_compile(
    model: Transformer, device: torch.device, precision: Precision, *, tokens: int, passes: int
) -> Choice[bool]:
    """Compile the layers of a flat encoder if that pays over so many forward passes of so many
    tokens each.
    """
    if why := why_not(device):
        return Choice(False, why, "compile=auto")
    choice = Choice(False, "a trial did not fit into the memory", f"a layer with {tokens:,} tokens")
    with CatchOutOfMemory() as caught:
        choice = _measured(model, device, precision, tokens=tokens, passes=passes)
    if caught.message:
        give_back_memory()
    if not choice.value:
        for layer in model.flat_layers():
            layer.compiled = None
    return choice


def _measured(
    model: Transformer, device: torch.device, precision: Precision, tokens: int, passes: int
) -> Choice[bool]:
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        arithmetic(precision, device),
    ):
        trial = _Trial(model, device, precision, tokens)
        eager_s = trial.time(trial.layer.finish)
        total_s = passes * model.described.num_hidden_layers
        if (most_s := eager_s * total_s * _MOST_SAVED) < _USUAL_COMPILE_S:
            evidence = f"{most_s:.1f} s saved at most, {_USUAL_COMPILE_S:.0f} s to compile"
            return Choice(False, "the run is too short for it", evidence)
        compile_layers(model)
        compiled = model.flat_layers()[0].compiled
        assert compiled is not None
        finish = partial(compiled, trial.layer)
        began = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trial.run(finish)
        compile_s = time.perf_counter() - began
        if model.flat_layers()[0].compiled is None:
            return Choice(False, "torch could not compile a layer", str(caught[-1].message))
        compiled_s = trial.time(finish)
    saved_s = (eager_s - compiled_s) * total_s
    evidence = (
        f"a layer without attention takes {1e3 * eager_s:.1f} ms, compiled"
        f" {1e3 * compiled_s:.1f} ms:"
    )
    evidence += f" saves {saved_s:.0f} s, compiling took {compile_s:.0f} s"
    if saved_s > compile_s:
        return Choice(True, "it pays for its time", evidence)
    return Choice(False, "it would not pay for its time", evidence)


class _Trial:
    """What follows attention in one layer, forwards and backwards on random numbers; no gradient is
    left behind.
    """

    def __init__(
        self, model: Transformer, device: torch.device, precision: Precision, tokens: int
    ) -> None:
        self.layer = copy.deepcopy(model.flat_layers()[0]).to(device).train()
        self.device = device
        hidden = model.described.hidden_size
        own = torch.randn(tokens, hidden, device=device, requires_grad=True)
        read = torch.randn(
            tokens, hidden, device=device, dtype=product_type(precision), requires_grad=True
        )
        self.states = (own, read)
        self.wanted = [
            own,
            read,
            *(weight for weight in self.layer.parameters() if weight.requires_grad),
        ]

    def run(self, finish: Callable[..., Tensor]) -> None:
        found = finish(*self.states, *self.layer.prepare(self.states[0]))
        torch.autograd.grad(found.sum(), self.wanted, allow_unused=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, finish: Callable[..., Tensor]) -> float:
        self.run(finish)
        seconds = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            self.run(finish)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)


def why_not(device: torch.device) -> str:
    """Why torch cannot compile here; empty where it can."""
    if device.type != "cpu":
        return ""
    try:
        importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except (AttributeError, ImportError, OSError, RuntimeError):
        # no compiler, or a torch that looks for it elsewhere
        return "no C++ compiler is here, and torch compiles with it"
    return ""
