"""Parameters of tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def at_once(*names: Any, of: Iterable[Any], seconds: float) -> list[Any]:
    """All of them; those that are not named here are soak tests of so much processor time."""
    mark = pytest.mark.soak(seconds=seconds)
    found = []
    for each in of:
        if each in names:
            found.append(each)
        else:
            values = each if isinstance(each, tuple) else (each,)
            found.append(pytest.param(*values, marks=mark))
    return found
