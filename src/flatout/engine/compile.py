"""torch.compile for training: the layers of a flat encoder, or a whole model.

In a flat encoder the part of a layer after attention is compiled, once for all layers and numbers
of tokens. Attention stays eager. `compile=true` compiles any model. Whether compiling pays is
measured in `perf/compile_choice.py`.

Where steps are captured, batches are brought to at most eight numbers of tokens (`shapes.py`).
Each of these may get a function of its own, which costs a compilation.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from flatout.errors import require
from flatout.models.encoder.layers import FlatLayer
from flatout.models.encoder.network import Transformer

DYNAMIC = "dynamic"
STATIC = "static shapes"
"""Compiled layers have one function for all batches, or one for each number of tokens."""
_USUAL_FUNCTIONS = 8  # that torch keeps of one method


def compile_in_place(
    model: nn.Module, device: torch.device, token_counts: Sequence[int] = ()
) -> None:
    """Let torch compile a model when it is first trained; validation stays eager.

    `token_counts`: see `compile_layers`. Refused if torch cannot compile here.
    """
    why = why_not(device)
    require(not why, "compile", why, hint="Set compile=false, or install one (g++ or clang).")
    if compiles_layers(model):
        compile_layers(model, token_counts)
        return
    plain = model._call_impl
    compiled = torch.compile(plain)

    def call(*inputs: Any, **named: Any) -> Any:
        return (compiled if model.training else plain)(*inputs, **named)

    # `Module.compile()` sets this attribute, too. It is in no `state_dict`.
    model._compiled_call_impl = call


def compiles_layers(model: nn.Module) -> TypeGuard[Transformer]:
    """Whether a model is a flat encoder: its layers are compiled, not the whole model."""
    return isinstance(model, Transformer) and model.is_flat


def is_compiled(model: nn.Module) -> bool:
    """Whether layers of a flat encoder are compiled."""
    return isinstance(model, Transformer) and any(
        layer.compiled is not None for layer in model.flat_layers()
    )


def compile_layers(model: Transformer, token_counts: Sequence[int] = ()) -> None:
    """Compile what follows attention, once for each class of layer.

    `token_counts`: numbers of tokens that get a function each; all others share one. After a
    failure all layers run eagerly, with a warning.
    """
    layers = model.flat_layers()
    kinds = {type(layer) for layer in layers}
    for_any = {kind: torch.compile(kind.finish, dynamic=True, fullgraph=True) for kind in kinds}
    for_one = {kind: torch.compile(kind.finish, dynamic=False, fullgraph=True) for kind in kinds}
    planned = frozenset(token_counts)
    _allow_functions(len(planned))
    errors = importlib.import_module("torch._dynamo.exc")
    failures = (errors.TorchDynamoException, errors.FailOnRecompileLimitHit)

    def run(layer: FlatLayer, *inputs: Any) -> Tensor:
        compiled = for_one if len(inputs[0]) in planned else for_any
        try:
            states: Tensor = compiled[type(layer)](layer, *inputs)
        except failures as error:
            for failed in layers:
                failed.compiled = None
            reason = " ".join(str(error).split())[:200]
            warnings.warn(
                f"compile: torch could not compile a layer ({reason}). Layers run eagerly.",
                stacklevel=2,
            )
            return layer.finish(*inputs)
        return states

    for layer in layers:
        layer.compiled = run


def _allow_functions(num_token_counts: int) -> None:
    """Let torch keep a function for each number of tokens; it keeps eight of a method as it comes.

    A class of layer may have three: ModernBERT's first layer differs from the others, and layers
    may be frozen, the first that is trained, or above it.
    """
    config: Any = importlib.import_module("torch._dynamo.config")
    needed = _USUAL_FUNCTIONS + 3 * num_token_counts
    config.recompile_limit = max(config.recompile_limit, needed)


def why_not(device: torch.device) -> str:
    """Why torch cannot compile here; empty if it can."""
    if device.type != "cpu":
        return ""
    try:
        importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except (AttributeError, ImportError, OSError, RuntimeError):
        # There is no compiler, or this torch searches it in another way.
        return "no C++ compiler is here, and torch compiles with it"
    return ""
