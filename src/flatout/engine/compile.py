"""`compile=true`: the model compiled by torch, in place, so that its weights keep their names.

Only where it is trained: validation and answers come in other sizes, and each would be compiled again.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from flatout.errors import UserError

_ONE_MESSAGE = "no C++ compiler is here, and torch compiles with it"


def compile_in_place(model: nn.Module, device: torch.device) -> None:
    """Let torch compile the model when it is first trained; refused where it could not."""
    if why := why_not(device):
        raise UserError("compile", why, hint="Set compile=false, or install one (g++ or clang).")
    plain = model._call_impl
    compiled = torch.compile(plain)

    def call(*inputs: Any, **named: Any) -> Any:
        return (compiled if model.training else plain)(*inputs, **named)

    model._compiled_call_impl = call  # what Module.compile() sets, and no state holds


def why_not(device: torch.device) -> str:
    """Why torch cannot compile here; empty where it can."""
    if device.type != "cpu":
        return ""
    try:
        importlib.import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except (AttributeError, ImportError, OSError, RuntimeError):  # no compiler, or a torch that looks for it elsewhere
        return _ONE_MESSAGE
    return ""
