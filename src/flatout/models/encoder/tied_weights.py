"""Weights with two names, such as word embeddings that a head of masked words reads too.

Torch writes such a weight twice into a state, once for each name. Here a state holds it once, under
the name of the embedding, and loading gives its value to all names. The exported model of
transformers has both names.

    names of one weight   ["cls.decoder.weight", "bert.embeddings.word_embeddings.weight"]
    in the state          "bert.embeddings.word_embeddings.weight"
    first_names           {"cls.decoder.weight": "bert.embeddings.word_embeddings.weight"}
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

State = dict[str, Tensor]
FirstNames = dict[str, str]


def keep_tied_once(model: nn.Module) -> FirstNames:
    """Let the model's state hold each weight once, and loading fill in its other names.

    Returns, for each name that the state leaves out, the name by which it holds that weight.
    """
    first_names = _find_first_names(model)
    if first_names:
        model.register_state_dict_post_hook(partial(_drop_other_names, first_names))
        model.register_load_state_dict_pre_hook(partial(_fill_in_other_names, first_names))
    return first_names


def _find_first_names(model: nn.Module) -> FirstNames:
    """For each other name of a weight the one that stays: an embedding's, else the first."""
    names_of_weight: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names_of_weight.setdefault(id(weight), []).append(name)
    tables = set[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            tables.add(f"{name}.weight")
    first_names: FirstNames = {}
    for names in names_of_weight.values():
        first_name = next((name for name in names if name in tables), names[0])
        for name in names:
            if name != first_name:
                first_names[name] = first_name
    return first_names


def _drop_other_names(
    first_names: FirstNames, model: nn.Module, state: State, prefix: str, *_: object
) -> None:
    for name in first_names:
        state.pop(prefix + name, None)


def _fill_in_other_names(
    first_names: FirstNames, model: nn.Module, state: State, prefix: str, *_: object
) -> None:
    for name, first_name in first_names.items():
        # A running mean of the weights calls a weight by its first name, which may be this one.
        if prefix + name in state:
            state[prefix + first_name] = state[prefix + name]
        elif prefix + first_name in state:
            state[prefix + name] = state[prefix + first_name]
