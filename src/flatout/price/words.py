"""Durations and costs in words: `4.1 min (3.6–4.8)`, `0.31 EUR`."""

from __future__ import annotations

_UNITS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0}


def _unit_of(seconds: float) -> str:
    """The largest unit of which there are two or more."""
    return next((unit for unit, size in _UNITS.items() if seconds >= 2 * size), "s")


def describe_seconds(seconds: float) -> str:
    """`246` → `4.1 min`."""
    unit = _unit_of(seconds)
    return f"{seconds / _UNITS[unit]:,.1f} {unit}"


def describe_span(value_s: float, low_s: float, high_s: float) -> str:
    """`4.1 min (3.6–4.8)`: a time and its bounds in one unit."""
    size = _UNITS[_unit_of(value_s)]
    return f"{describe_seconds(value_s)} ({low_s / size:,.1f}–{high_s / size:,.1f})"


def describe_correction(value_s: float, raw_s: float) -> str:
    """`; 3.9 min without what earlier runs correct`; empty where both times read alike."""
    raw = describe_seconds(raw_s)
    return "" if raw == describe_seconds(value_s) else f"; {raw} without what earlier runs correct"


def describe_money(money: float, currency: str) -> str:
    """`0.31 EUR`; small sums with two digits that count."""
    digits = ",.2f" if money >= 0.1 else ".2g"
    return f"{money:{digits}} {currency}"
