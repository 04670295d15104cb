"""Parameters of tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def at_once(*names: Any, of: Iterable[Any], seconds: float) -> list[Any]:
    """All of them; those that are not named here are soak tests of so much processor time."""
    mark = pytest.mark.soak(seconds=seconds)
    return [
        each
        if each in names
        else pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=mark)
        for each in of
    ]
