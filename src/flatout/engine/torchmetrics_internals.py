"""The one shortcut through torchmetrics: its import of pyplot waits until a metric is plotted.

Lightning imports torchmetrics, and torchmetrics imports pyplot where matplotlib is installed. It saves 0.8 s of the
5.5 s of CPU that `import lightning` takes (two slow cores), for plots that a run seldom draws. Where a name below is
gone, everything is imported as usual.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError
from typing import Any

_HIDDEN = "matplotlib"


def defer_pyplot() -> None:
    """Import torchmetrics without matplotlib, and let its plots find matplotlib later."""
    from lightning_utilities.core import imports

    find_version = getattr(imports, "_version", None)
    if find_version is None or {_HIDDEN, "torchmetrics"} & sys.modules.keys():
        return

    def hide_version(distribution_name: str) -> str:
        if distribution_name == _HIDDEN:
            raise PackageNotFoundError(distribution_name)
        return find_version(distribution_name)

    sys.modules[_HIDDEN] = None  # type: ignore[assignment]  # Python's own way to fail an import; no type knows it
    imports._version = hide_version
    try:
        importlib.import_module("torchmetrics")
    finally:
        imports._version = find_version
        del sys.modules[_HIDDEN]
    _restore_plots()


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
