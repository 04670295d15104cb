"""Cards of which a price can be reckoned, by the words of `--on`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from flatout.errors import did_you_mean, require

CARDS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)
# Steps that were measured on cards, beside what the arithmetic says of them.
_CHECKS: list[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("checks.toml").read_text("utf-8")
)["steps"]


def describe_checks(network: str) -> str:
    """How far the arithmetic was off where a network of this name was measured on a card."""
    checks = [check for check in _CHECKS if check["network"] == network]
    if not checks:
        return f"no {network} was measured on a card so far, so nobody knows how far off this is"
    listed = "; ".join(
        f"{check['what']} on an {check['card']}: {check['measured_ms']:g} ms a step, by arithmetic"
        f" {check['arithmetic_ms']:g} ms ({check['date']})"
        for check in checks
    )
    return f"such arithmetic, and what was measured of a {network}: {listed}"


def require_card(card: str) -> None:
    require(
        card in CARDS,
        "--on",
        f"no card {card!r}",
        allowed=", ".join(CARDS),
        hint=did_you_mean(card, CARDS),
    )
