"""The one shortcut through torchmetrics: its imports of pyplot and SciPy wait until they are used.

Lightning imports torchmetrics, and torchmetrics imports pyplot and `scipy.signal` where they are installed. Without
them `import lightning` takes 1.7 s less CPU of 6.9 s (two slow cores). A run seldom plots metrics. torchmetrics wants
`scipy.signal` for one line only, which serves a package of audio metrics (SRMRpy): it gives a window its former name.
Where a name below is gone, everything is imported as usual.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

_HIDDEN = "matplotlib"
_SIGNAL = "scipy.signal"


def import_torchmetrics() -> None:
    """Import torchmetrics without matplotlib and SciPy, and let its plots find matplotlib later."""
    from lightning_utilities.core import imports

    find_version = getattr(imports, "_version", None)
    if find_version is None or {_HIDDEN, "torchmetrics"} & sys.modules.keys():
        return

    def hide_version(distribution_name: str) -> str:
        if distribution_name == _HIDDEN:
            raise PackageNotFoundError(distribution_name)
        return find_version(distribution_name)

    modules: dict[str, Any] = sys.modules
    modules[_HIDDEN] = None  # Python's own way to fail an import
    imports._version = hide_version
    try:
        with _empty_signal():
            importlib.import_module("torchmetrics")
    finally:
        imports._version = find_version
        del modules[_HIDDEN]
    _restore_plots()


@contextmanager
def _empty_signal() -> Iterator[None]:
    """An empty `scipy.signal` stands in; the name that torchmetrics would give a window is there already."""
    if _SIGNAL in sys.modules:
        yield
        return
    sys.modules[_SIGNAL] = stand_in = ModuleType(_SIGNAL)
    vars(stand_in)["hamming"] = None
    try:
        yield
    finally:
        del sys.modules[_SIGNAL]
        if (parent := sys.modules.get("scipy")) is not None:
            vars(parent).pop("signal", None)  # SciPy imports it when it is asked


def _restore_plots() -> None:
    plots = importlib.import_module("torchmetrics.utilities.plot")
    for name, late in (("matplotlib", _Late(_HIDDEN)), ("plt", _Late(f"{_HIDDEN}.pyplot"))):
        setattr(plots, name, late)  # torchmetrics has these names only where it finds matplotlib
    if (found := getattr(plots, "_MATPLOTLIB_AVAILABLE", None)) is not None:
        del found.available  # it looks again when it is asked


class _Late:
    """A module that is imported when it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
