"""The size of a YAML text: a few lines that refer to each other can unfold to a billion values."""

from __future__ import annotations

import yaml

from flatout.errors import UserError

_MOST_CHARACTERS = 1_000_000
_MOST_VALUES = 20_000


def require_modest(text: str, where: str) -> None:
    """Refuse a YAML text that is very long, or that unfolds to very many values."""
    if len(text) > _MOST_CHARACTERS:
        raise UserError(where, f"{len(text):,} characters", allowed=f"at most {_MOST_CHARACTERS:,} of settings")
    if "&" not in text or "*" not in text:
        return  # without references nothing unfolds
    try:
        count = _values(yaml.compose(text, Loader=yaml.SafeLoader), {}, set())
    except yaml.YAMLError:
        return  # the reader reports the error
    if count > _MOST_VALUES:
        allowed = f"at most {_MOST_VALUES:,} values"
        raise UserError(where, "refers to its own parts too often", allowed=allowed)


def _values(node: yaml.Node | None, known: dict[int, int], above: set[int]) -> int:
    """Number of values below a node, each reference counted; a node that holds itself has no end."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) in above:
        return _MOST_VALUES + 1
    if id(node) not in known:
        children = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_values(child, known, above | {id(node)}) for child in children)
    return known[id(node)]
