"""What every kind of data does on the way from its source to its store.

    recipe  all that the store depends on; its hash finds a store that was built before
    open    the store of the recipe, or:
    write   the passes over the source; each pass is a class in a file of its own
    facts   what the store keeps about itself: lines that a run prints, and counts

Each room of a kind has a `preparation` with one subclass. Open this file to change what all kinds
do when a store is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from flatout.data.store.cache import Cache, CacheReport, Recipe
from flatout.data.store.progress import Progress
from flatout.data.store.store import Store, StoreWriter


class Preparation(ABC):
    """From a source to its store."""

    name: str
    """The source in words; older stores of the same source are found by it."""
    cache_folder: str | None
    """Where stores lie, as `data.cache` names it; None: in the cache of this machine."""

    @abstractmethod
    def recipe(self) -> Recipe:
        """All that the store depends on: its hash is the key of the store."""

    @abstractmethod
    def write(self, writer: StoreWriter, progress: Progress) -> dict[str, Any]:
        """Pass over the source, write the store, and return its facts."""

    @abstractmethod
    def require_unchanged(self) -> None:
        """Refuse a source that has changed since its fingerprints were taken."""

    def open_store(self) -> tuple[Store, CacheReport]:
        """The store of the recipe; it is built first where the cache has none."""
        return Cache(self.cache_folder).open_or_build(self.name, self.recipe(), self._build)

    def _build(self, writer: StoreWriter) -> None:
        with Progress() as progress:
            facts = self.write(writer, progress)
        self.require_unchanged()
        writer.facts |= facts
