"""Cards of which a price can be reckoned, by the words of `--on`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from flatout.errors import did_you_mean, require

CARDS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)


def require_card(card: str) -> None:
    require(
        card in CARDS,
        "--on",
        f"no card {card!r}",
        allowed=", ".join(CARDS),
        hint=did_you_mean(card, CARDS),
    )
