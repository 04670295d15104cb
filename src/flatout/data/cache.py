"""The cache: finished stores, each in a folder named after a hash of everything it was made from.

Nothing is stale by definition: another source, tokenizer or setting is another key. One process builds a store, under
a lock, in a temporary folder that is renamed when it is whole; others wait for it and then open it. A store's bytes are
checked against its checksums the first time it is opened after a build or a restart of the machine; one that fails is
taken away with a warning and built again.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import xxhash
from filelock import FileLock

from flatout.data.store import MANIFEST, Store, StoreWriter, damaged_files
from flatout.errors import UserError

Recipe = dict[str, Any]
"""Everything a store's content depends on, as plain JSON values under names a person understands."""

_VERIFIED = "verified"
_BUILDING = ".building-"


@dataclass(frozen=True, slots=True)
class CacheReport:
    """How a store was come by."""

    key: str
    hit: bool
    seconds: float
    reason: str
    """Why it was not there, in words; empty for a hit."""

    def line(self) -> str:
        if self.hit:
            return f"cache: {self.key} opened in {self.seconds * 1000:.0f} ms"
        return f"cache: {self.key} built in {self.seconds:.1f} s ({self.reason})"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One finished store, as `flatout cache list` shows it."""

    key: str
    name: str
    num_bytes: int
    rows: dict[str, int]
    built: str


def default_cache_folder() -> Path:
    """`$FLATOUT_CACHE`, else the usual place for caches of the user."""
    if given := os.environ.get("FLATOUT_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flatout"


def recipe_key(recipe: Recipe) -> str:
    text = json.dumps(recipe, sort_keys=True, ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))[:20]


class Cache:
    """A folder of stores."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder).expanduser() if folder else default_cache_folder()

    def open_or_build(
        self, name: str, recipe: Recipe, build: Callable[[StoreWriter], None]
    ) -> tuple[Store, CacheReport]:
        """The store of `recipe`; `build` fills it when it is not there. `name` says whose data it is."""
        started = time.perf_counter()
        key = recipe_key(recipe)
        if (store := self._open_whole(key)) is not None:
            return store, CacheReport(key, True, time.perf_counter() - started, "")
        self._make_folder()
        with FileLock(self.folder / f"{key}.lock"):
            if (store := self._open_whole(key)) is not None:
                return store, CacheReport(key, True, time.perf_counter() - started, "")
            reason = self._reason_for_miss(key, name, recipe)
            self._build(key, name, recipe, build)
            store = self._open_whole(key)
        if store is None:
            raise UserError(f"cache {self.folder / key}", "the store is damaged just after it was built", mend=_DISK)
        return store, CacheReport(key, False, time.perf_counter() - started, reason)

    def entries(self) -> list[CacheEntry]:
        """Finished stores, newest first."""
        found = [self._entry(path.parent) for path in self.folder.glob(f"[!.]*/{MANIFEST}")]
        return sorted((entry for entry in found if entry), key=lambda entry: entry.built, reverse=True)

    def verify(self) -> dict[str, list[str]]:
        """Damaged files of each store, by key; an empty list for a whole one."""
        return {path.parent.name: damaged_files(path.parent) for path in sorted(self.folder.glob(f"[!.]*/{MANIFEST}"))}

    def clear(self, key: str | None = None) -> int:
        """Remove one store, or all and whatever broken builds left behind; returns how many finished ones went."""
        keys = [entry.key for entry in self.entries()]
        if key is not None and key not in keys:
            raise UserError("cache clear", f"no store {key!r}", allowed=", ".join(keys) or "the cache is empty")
        for gone in [key] if key else keys:
            self._remove(self.folder / gone)
            (self.folder / f"{gone}.lock").unlink(missing_ok=True)
        if key is None:
            self._remove_leftovers(max_age_s=0)
        return 1 if key else len(keys)

    def _open_whole(self, key: str) -> Store | None:
        folder = self.folder / key
        if not (folder / MANIFEST).is_file():
            return None
        boot = str(int(psutil.boot_time()))
        marker = folder / _VERIFIED
        if not marker.is_file() or marker.read_text() != boot:
            if damaged := damaged_files(folder):
                warnings.warn(f"store {folder} is damaged ({', '.join(damaged)}): it is built again", stacklevel=2)
                self._remove(folder)
                return None
            with _ignored_on_read_only():
                marker.write_text(boot)
        return Store(folder)

    def _build(self, key: str, name: str, recipe: Recipe, build: Callable[[StoreWriter], None]) -> None:
        self._remove_leftovers(key=key)
        temporary = self.folder / f"{_BUILDING}{key}-{os.getpid()}"
        temporary.mkdir()
        writer = StoreWriter(temporary)
        try:
            build(writer)
            writer.close({"key": key, "name": name, "recipe": recipe, "built": time.strftime("%Y-%m-%d %H:%M:%S")})
            _flush_to_disk(temporary)
            temporary.rename(self.folder / key)
        except BaseException:
            writer.abandon()
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _reason_for_miss(self, key: str, name: str, recipe: Recipe) -> str:
        """What of the recipe differs from the newest store of the same data, in words."""
        for entry in self.entries():
            if entry.name == name and entry.key != key:
                before = json.loads((self.folder / entry.key / MANIFEST).read_text(encoding="utf-8"))["recipe"]
                return "; ".join(_differences(before, recipe)) or "made by another version"
        return "first time for this data"

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                "data.cache", f"cannot write in {self.folder}: {error.strerror}", mend="Set data.cache=FOLDER."
            ) from None

    def _remove_leftovers(self, key: str = "", max_age_s: float = 86_400) -> None:
        """Take away folders of builders that died: those of `key`, whose lock we hold, and any old ones."""
        for path in self.folder.glob(f"{_BUILDING}*"):
            with _ignored_on_read_only():
                is_ours = bool(key) and path.name.startswith(f"{_BUILDING}{key}-")
                if is_ours or time.time() - path.stat().st_mtime >= max_age_s:
                    shutil.rmtree(path)

    def _remove(self, folder: Path) -> None:
        """Rename first, so that nobody can open what is being removed."""
        doomed = folder.with_name(f"{_BUILDING}{folder.name}-removed-{os.getpid()}")
        folder.rename(doomed)
        shutil.rmtree(doomed)

    def _entry(self, folder: Path) -> CacheEntry | None:
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            num_bytes = sum(file["bytes"] for file in manifest["files"].values())
            rows = {name: split["rows"] for name, split in manifest["splits"].items()}
            return CacheEntry(folder.name, manifest["name"], num_bytes, rows, manifest["built"])
        except (OSError, ValueError, KeyError):
            return None


_DISK = "The disk or its memory may be failing; try another folder with data.cache=FOLDER."


def _differences(before: Recipe, now: Recipe, prefix: str = "") -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{name} ")
        elif isinstance(old, int | float | None) and isinstance(new, int | float | None):
            yield f"{prefix}{name} changed from {old} to {new}"
        else:
            yield f"{prefix}{name} changed"


def _flush_to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def _ignored_on_read_only() -> Iterator[None]:
    """A shared cache may be read-only, or another process may have been quicker: neither matters here."""
    try:
        yield
    except OSError:
        return
