"""The kinds of runs, and which one some data asks for."""

from __future__ import annotations

from typing import Any

from flatout.bits.data import BitsDataConfig
from flatout.kinds.bits import BitsKind
from flatout.kinds.kind import Kind
from flatout.kinds.text import TextKind


def kind_of(config: Any, data: Any) -> Kind:
    """The kind of run that trains on prepared data."""
    return BitsKind(config, data) if isinstance(config, BitsDataConfig) else TextKind(config, data)
