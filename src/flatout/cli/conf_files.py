"""Files of settings: where `conf/` is, and how much a file may hold.

A few lines of YAML that refer to each other can unfold to a billion values.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

import flatout
from flatout.errors import UserError, require

_MOST_CHARACTERS = 1_000_000
_MOST_VALUES = 20_000


def conf_folder() -> Path:
    """`$FLATOUT_CONF`, else `conf/` beside the checkout's `src/`, else the copy inside the installed package."""
    given = os.environ.get("FLATOUT_CONF")
    package = Path(flatout.__file__).parent
    places = [Path(given)] if given else [package.parents[1] / "conf", package / "conf"]
    for place in places:
        if (place / "train.yaml").is_file():
            return place.resolve()
    hint = "Set FLATOUT_CONF to a folder with train.yaml, or leave it out."
    raise UserError("FLATOUT_CONF", f"no train.yaml in {', '.join(map(str, places))}", hint=hint)


def conf_words(sources: Iterable[Any]) -> list[str]:
    """`--config-dir` as it was typed, in full, from the places that Hydra composed the settings of."""
    places = [each.path for each in sources if each.provider == "command-line" and each.path]
    return [f"--config-dir={Path(place).absolute()}" for place in places[:1]]


def require_modest(text: str, where: str) -> None:
    """Refuse a YAML text that is very long, or that unfolds to very many values."""
    allowed = f"at most {_MOST_CHARACTERS:,} of settings"
    require(len(text) <= _MOST_CHARACTERS, where, f"{len(text):,} characters", allowed=allowed)
    if "&" not in text or "*" not in text:
        return  # without references nothing unfolds
    try:
        count = _values(yaml.compose(text, Loader=yaml.SafeLoader), {}, set())
    except yaml.YAMLError:
        return  # the reader reports the error
    allowed = f"at most {_MOST_VALUES:,} values"
    require(count <= _MOST_VALUES, where, "refers to its own parts too often", allowed=allowed)


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
