"""Settings as plain values, for files and for comparison."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Settings as mappings, lists and plain values; any other object is named by its type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, Path) else f"<{type(value).__module__}.{type(value).__qualname__}>"
