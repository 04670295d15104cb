"""The cache: finished stores, each in a folder named after a hash of everything it was made from.

Nothing is stale by definition: another source, tokenizer or setting is another key, and a source is
known by its bytes (see `tables/prints`). One process builds a store, holding a lock (see `lock`),
in a temporary folder that is renamed when it is complete. Others wait for it and then open it. The
next builder removes what one that died has left.

A store's bytes are compared with its checksums before they are mapped. All of them are, the first
time it is opened after a build or a restart of the machine. They are compared again whenever the
size, the times or the number of a file has changed (a change shows there even if the time is set
back). That costs a `stat` for each file. A store that fails is removed with a warning and built
again. What no check sees: a disk that gives other bytes later.

A finished store is on the disk before it gets its name (see `files`). A disk that runs full or
fails may report it only then. What it did not keep would be read as zeros once the memory is freed.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import xxhash

from flatout.data.store.lock import BUILDING, lock, name_building, remove_locks
from flatout.data.store.store import (
    MANIFEST,
    MANIFEST_SUM,
    SHARDS,
    DamagedStore,
    Store,
    StoreWriter,
    WriteFailed,
    damaged_files,
    read_manifest,
    written,
)
from flatout.errors import UserError, first_line, out_of_space, require
from flatout.files import load_json, stamp_of, sync_folder, sync_tree, wait_for_new_mtime

# everything a store's content depends on, as plain JSON values under readable names
Recipe = dict[str, Any]
Build = Callable[[StoreWriter], None]
VERIFIED = "verified"
"""The file in a store's folder that says when its bytes were checked, and what its files looked
like then."""
_SURVEYS = ".surveys"  # the folder of what single files show
FETCHED = ".fetched"  # the folder of copies of sources that lie elsewhere
_REMOVED = ".removed-"
_KEY = re.compile("[0-9a-f]{20}")
_TRIES = 3  # builds of a store that is damaged each time; then the disk must be broken
_MOST_BOOTS = 32  # machines that are noted to have checked a store
# device, number and time of a folder
Identity = tuple[int, int, int]
_ELSEWHERE = "Set data.cache=FOLDER."
_DISK = "The disk or its memory may be failing; try another folder with data.cache=FOLDER."


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Whether a store was opened or built, and why."""

    key: str
    hit: bool
    seconds: float
    reason: str  # why it had to be built, in words; empty for a hit

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
    manifest: dict[str, Any]


def default_cache_folder() -> Path:
    """`$FLATOUT_CACHE`, else the usual place for caches of the user."""
    if given := os.environ.get("FLATOUT_CACHE"):
        return _expand(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "flatout"


def _expand(folder: Path | str) -> Path:
    """A folder with the user's home for a `~`; a UserError where that user is unknown."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise UserError(
            "data.cache", f"{folder}: {first_line(error)}", hint="Write the whole path."
        ) from None


def recipe_key(recipe: Recipe) -> str:
    text = json.dumps(recipe, sort_keys=True, ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))[:20]


class Cache:
    """A folder of stores."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = _expand(folder) if folder else default_cache_folder()

    def open_or_build(self, name: str, recipe: Recipe, build: Build) -> tuple[Store, CacheReport]:
        """The store of `recipe`; `build` fills it when the cache has none.

        `name`: of the source, by which older stores of the same data are found.
        """
        started = time.perf_counter()
        key = recipe_key(recipe)
        reasons: list[str] = []

        def make_room(is_locked: bool, damaged: Identity | None) -> None:
            reasons.append(self._reason_for_miss(key, name, recipe))
            if damaged is not None:
                self._remove_damaged(key, damaged)
            self.remove_leftovers(key if is_locked else None)

        about = {"key": key, "name": name, "recipe": recipe}
        store = self._open_or_build(key, about, build, make_room)
        reason = "".join(reasons[:1])
        return store, CacheReport(key, not reasons, time.perf_counter() - started, reason)

    def open_or_build_key(self, key: str, name: str, build: Build) -> Store:
        """The store of a key without a recipe, such as a unit; `build` fills it when the cache has
        none.
        """

        def make_room(is_locked: bool, damaged: Identity | None) -> None:
            if damaged is not None:
                with written():
                    self._remove(self.folder / key, damaged)

        return self._open_or_build(key, {"key": key, "name": name, "recipe": {}}, build, make_room)

    def _open_or_build(
        self,
        key: str,
        about: dict[str, Any],
        build: Build,
        make_room: Callable[[bool, Identity | None], None],
    ) -> Store:
        """`make_room` is called before each build: whether its lock is held, and the damaged store
        that has the name.
        """
        tries = 0
        while (store := self.opened(key)) is None:
            with self._explain_failures(), self._locked(key) as is_locked:
                damaged = _identity(self.folder / key)
                if self.opened(key) is not None:
                    continue  # another process was quicker
                require(
                    tries < _TRIES,
                    f"cache {self.folder / key}",
                    "the store is damaged just after it was built",
                    hint=_DISK,
                )
                tries += 1
                make_room(is_locked, damaged)
                self._build(key, build, about)
        return store

    def of_units(self) -> Cache:
        """The stores of units, which are the shards of others (see `encoded_units`)."""
        return Cache(self.folder / SHARDS)

    def of_surveys(self) -> Cache:
        """The stores of what single files show (see `checks/seen`)."""
        return Cache(self.folder / _SURVEYS)

    def remove_unused(self, days: int) -> None:
        """Remove stores that were made more than so many days ago, and what dead builders left."""
        self.remove_leftovers()
        old = [
            folder.name
            for folder in self._folders()
            if time.time() - folder.stat().st_mtime > days * 86_400
        ]
        self.remove(old)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove stores that are no longer needed, and the locks that they were built under."""
        with suppress(OSError):
            for key in keys:
                shutil.rmtree(self.folder / key, ignore_errors=True)
            remove_locks(self.folder)

    def opened(self, key: str) -> Store | None:
        """The store of a key, its bytes checked; None where there is none, or a damaged one."""
        folder = self.folder / key
        try:
            manifest = read_manifest(folder)
            stamps = {
                name: stamp_of(folder / name)
                for name in (MANIFEST, MANIFEST_SUM, *manifest["files"])
            }
            boots = _boots(folder, stamps)
            if boot_id() not in boots:
                _verify(folder, stamps, boots)
            return Store(folder, manifest)
        except PermissionError:
            raise self._closed_to_us(folder) from None
        except (DamagedStore, OSError):
            return None

    def entries(self) -> list[CacheEntry]:
        """Finished stores, newest first."""
        entries = []
        for folder in self._folders():
            with suppress(DamagedStore, OSError, KeyError):
                manifest = read_manifest(folder)
                num_bytes = sum(file["bytes"] for file in manifest["files"].values())
                rows = {name: split["rows"] for name, split in manifest["splits"].items()}
                entries.append(
                    CacheEntry(
                        folder.name, manifest["name"], num_bytes, rows, manifest["built"], manifest
                    )
                )
        return sorted(entries, key=lambda entry: entry.built, reverse=True)

    def verify(self) -> dict[str, list[str]]:
        """Damaged files of each store, by key; an empty list for a whole one."""
        try:
            return {folder.name: damaged_files(folder) for folder in self._folders()}
        except PermissionError as error:
            raise self._closed_to_us(Path(error.filename or self.folder)) from None

    def clear(self, key: str | None = None) -> int:
        """Remove one store, or all and whatever dead builders left behind; returns how many
        finished ones went.
        """
        keys = [folder.name for folder in self._folders()]
        if key is not None and key not in keys:
            raise UserError(
                "cache clear", f"no store {key!r}", allowed=", ".join(keys) or "the cache is empty"
            )
        shards = shards_of(entry for entry in self.entries() if entry.key == key)
        with self._explain_failures(), written():
            for gone in [key] if key else keys:
                self._remove(self.folder / gone)
        self.of_units().remove(shards - shards_of(self.entries()))
        if key is None:
            for name in (SHARDS, _SURVEYS, FETCHED):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            self.remove_leftovers()
            with suppress(OSError):
                remove_locks(self.folder)
        return 1 if key else len(keys)

    def _closed_to_us(self, place: Path) -> UserError:
        return UserError("data.cache", f"no permission to read {place}", hint=_ELSEWHERE)

    def _folders(self) -> list[Path]:
        return sorted(
            path for path in self.folder.glob("*") if _KEY.fullmatch(path.name) and path.is_dir()
        )

    @contextmanager
    def _locked(self, key: str) -> Iterator[bool]:
        with ExitStack() as stack:
            with written():
                self.folder.mkdir(parents=True, exist_ok=True)
                is_locked = stack.enter_context(lock(self.folder, key))
            yield is_locked

    def _build(self, key: str, build: Build, about: dict[str, Any]) -> None:
        """Fill a temporary folder, then give it the store's name, unless another has it by now."""
        temporary = self.folder / name_building(key)
        writer = StoreWriter(temporary)
        try:
            with written():
                temporary.mkdir()
            build(writer)
            writer.close(about | {"built": time.strftime("%Y-%m-%d %H:%M:%S")})
            with written():
                sync_tree(temporary)
                if _renamed(temporary, self.folder / key):
                    sync_folder(self.folder)
        except WriteFailed as failed:
            failed.needed = writer.expected_bytes()
            if failed.error.errno == errno.ENOENT and not temporary.exists():
                return  # another process removed it, on a file system without locks: build again
            raise
        finally:
            writer.abandon()
            shutil.rmtree(temporary, ignore_errors=True)

    def _reason_for_miss(self, key: str, name: str, recipe: Recipe) -> str:
        """What of the recipe differs from the newest store of the same data, in words."""
        for entry in self.entries():
            if entry.name == name and entry.key != key:
                return (
                    "; ".join(differences(entry.manifest["recipe"], recipe))
                    or "made by another version"
                )
        return "first time for this data"

    @contextmanager
    def _explain_failures(self) -> Iterator[None]:
        """Within it, a disk that refuses to be written to is an error with a hint."""
        try:
            yield
        except WriteFailed as failed:
            hint = _ELSEWHERE
            if failed.error.errno in (errno.ENOSPC, errno.EDQUOT):
                hint = "Make room (python -m flatout cache clear), or set data.cache=FOLDER."
            raise out_of_space(
                failed.error, self.folder, failed.needed, "data.cache", hint
            ) from None

    def remove_leftovers(self, own_key: str | None = None) -> None:
        """Remove what dead builders left, of any key.

        `own_key`: the key whose lock this process holds.
        """
        with suppress(OSError):
            for path in self.folder.glob(f"{BUILDING}*"):
                key = path.name.removeprefix(BUILDING).partition("-")[0]
                with (
                    nullcontext(True)
                    if key == own_key
                    else lock(self.folder, key, waits=False) as is_free
                ):
                    if is_free:
                        shutil.rmtree(path, ignore_errors=True)
            for path in self.folder.glob(f"{_REMOVED}*"):
                shutil.rmtree(path, ignore_errors=True)

    def _remove_damaged(self, key: str, there: Identity) -> None:
        folder = self.folder / key
        damaged = damaged_files(folder)
        what = ", ".join(damaged) or "it cannot be opened"
        warnings.warn(f"store {folder} is damaged ({what}): it is built again", stacklevel=6)
        self.of_units().remove(Path(name).parts[2] for name in damaged if name.startswith(".."))
        with written():
            self._remove(folder, there)

    def _remove(self, folder: Path, there: Identity | None = None) -> None:
        """Rename first, so that no process can open what is being removed; and only the one that
        was looked at.
        """
        doomed = self.folder / f"{_REMOVED}{folder.name}-{secrets.token_hex(4)}"
        with suppress(FileNotFoundError):
            folder.rename(doomed)
            if there is not None and _identity(doomed) != there:
                # This process was stopped after it looked, and another has built the store since.
                _renamed(doomed, folder)
            # `cache clear` reports what stays; a builder continues.
            shutil.rmtree(doomed, ignore_errors=there is not None)


@lru_cache
def boot_id() -> str:
    """Names this machine since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{platform.node()}-{psutil.boot_time():.0f}"


def _boots(folder: Path, stamps: dict[str, list[int]]) -> list[str]:
    """Machines, each since it was started, that have checked every byte of the files as they are
    now.
    """
    try:
        marker = load_json(folder / VERIFIED)
        return list(marker["boots"]) if marker["files"] == stamps else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _verify(folder: Path, stamps: dict[str, list[int]], boots: list[str]) -> None:
    """Compare every byte with its checksum, and note that this was done; `boots` are those of other
    machines.
    """
    wait_for_new_mtime(max(ctime for _, _, ctime, _ in stamps.values()))
    if damaged := damaged_files(folder):
        raise DamagedStore(", ".join(damaged))
    marker = json.dumps({"boots": [boot_id(), *boots][:_MOST_BOOTS], "files": stamps})
    # a shared cache may be read-only: its stores are checked by every process
    with suppress(OSError):
        if (folder / VERIFIED).is_symlink():
            (folder / VERIFIED).unlink()
        (folder / VERIFIED).write_text(marker, encoding="utf-8")


def _identity(folder: Path) -> Identity | None:
    """Tells a store's folder from another that has its name later, and maybe its number."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _renamed(folder: Path, target: Path) -> bool:
    """Give a folder its name; False where another has it already, which stays unchanged."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def shards_of(entries: Iterable[CacheEntry]) -> set[str]:
    """The keys of the shards of some stores."""
    names = (Path(name) for entry in entries for name in entry.manifest["files"])
    return {name.parts[2] for name in names if name.parts[0] == ".."}


def differences(before: Recipe, now: Recipe, prefix: str = "") -> Iterator[str]:
    """What changed between two recipes, each value in some words."""
    for name in sorted(before.keys() | now.keys()):
        old = before.get(name)
        new = now.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{name} ")
        elif isinstance(old, int | float | None) and isinstance(new, int | float | None):
            yield f"{prefix}{name} changed from {old} to {new}"
        else:
            yield f"{prefix}{name} changed"
