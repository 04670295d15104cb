"""How far a long preparation is: a bar on a terminal, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress(RichProgress):
    """Shows rows done while a store is built."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        name, rows = TextColumn("{task.description}"), TextColumn("{task.completed:,.0f} rows")
        columns = (name, BarColumn(), rows, TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)

    def task(self, name: str, total: int | None = None) -> Callable[[int], None]:
        """A named stage; call what is returned with each number of rows done."""
        bar = self.add_task(name, total=total)
        return lambda rows: self.advance(bar, rows)
