"""Weights with two names, such as word embeddings that a head of masked words reads too.

Such a weight is one parameter. A state holds it once, under the name of the embedding. The exported
model of transformers has both names.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def keep_tied_once(model: nn.Module) -> None:
    """Leave other names of a weight out of the model's state, and give all of them its value when
    it is loaded.
    """
    if aliases := _aliases(model):
        vars(model)["aliases"] = aliases
        model.register_state_dict_post_hook(_leave_out)
        model.register_load_state_dict_pre_hook(_put_in)


def _aliases(model: nn.Module) -> dict[str, str]:
    """For each other name of a weight the one that is kept: an embedding's, else the first."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    tables = {
        f"{name}.weight" for name, each in model.named_modules() if isinstance(each, nn.Embedding)
    }
    found: dict[str, str] = {}
    for group in names.values():
        kept = next((name for name in group if name in tables), group[0])
        found |= {name: kept for name in group if name != kept}
    return found


def _leave_out(model: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name in model.aliases:
        state.pop(prefix + name, None)


def _put_in(model: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, kept in model.aliases.items():
        if prefix + name in state:  # a running mean of the weights goes by their first name
            state[prefix + kept] = state[prefix + name]
        elif prefix + kept in state:
            state[prefix + name] = state[prefix + kept]
