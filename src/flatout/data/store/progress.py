"""How far a long preparation is: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Shows rows done while a store is built."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} rows"),
            TimeElapsedColumn(),
        )
        self._bars = RichProgress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def task(self, name: str, total: int | None = None) -> Callable[[int], None]:
        """A named stage; call what is returned with each number of rows done."""
        bar = self._bars.add_task(name, total=total)
        return lambda rows: self._bars.advance(bar, rows)
