"""What must never lead out of a run's folder: names in settings and in files of others, and links
planted in folders.

`<outside>` stands for a folder beside the one of all runs; nothing may appear, change or vanish
there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from flatout.errors import UserError
from tests.hostile.targets import Case

BAD_NAMES = (
    "../x",
    "../../outside/x",
    "..",
    "a/../../x",
    "<outside>/x",
    "~/x",
    "~",
    "x\0y",
    "C:\\x",
    "..\\x",
    "\\\\host\\x",
    "x\n../y",
    "x\x1b[2J",
)


@dataclass(frozen=True, slots=True)
class Planted:
    """One attempt by what lies in a folder: told a place to prepare and to be careless in, it may
    refuse.
    """

    name: str
    attempt: Callable[[Path], None]


def path_cases(full: bool) -> list[Case | Planted]:
    """Every case, or a part in which each key and each kind of bad name is there."""
    cases = list(_in_settings(BAD_NAMES))
    of_each_key = {case.name.partition(" ")[0]: case for case in cases}
    return [*(cases if full else [*cases[:12:2], *of_each_key.values()]), *_planted()]


def _in_settings(names: tuple[str, ...]) -> Iterator[Case]:
    for name in names:
        yield _file(f"name {name!r}", f"name: {json.dumps(name)}\n", is_whole=True)
    for name in names[:7]:
        text = json.dumps(name)
        yield _file(
            f"sweep.subdir {name!r}", f"hydra: {{mode: MULTIRUN, sweep: {{subdir: {text}}}}}\n"
        )
        yield _file(f"output_subdir {name!r}", f"hydra: {{output_subdir: {text}}}\n", is_whole=True)
        yield _file(f"run.dir {name!r}", f"hydra: {{run: {{dir: {text}}}}}\n", is_whole=True)
    for name in names[:4]:
        text = json.dumps(name)
        yield _file(f"sweep.dir {name!r}", f"hydra: {{mode: MULTIRUN, sweep: {{dir: {text}}}}}\n")
        defaults = "defaults: [override /hydra/job_logging: default]\n"
        yield _file(f"job.name {name!r}", f"{defaults}hydra: {{job: {{name: {text}}}}}\n")
        yield _file(
            f"checkpoint.metric {name!r}", f"checkpoint: {{metric: {text}}}\n", is_whole=True
        )
        yield _file(f"a callback's name {name!r}", f"callbacks: {{{text}: 1}}\n")
        yield _file(f"default_root_dir {name!r}", f"trainer: {{default_root_dir: {text}}}\n")
    loggers = {
        "CSVLogger": ("name", "version"),
        "TensorBoardLogger": ("name", "version", "sub_dir", "filename_suffix"),
    }
    for kind, keys in loggers.items():
        for key in keys:
            for name in (names[0], names[4], names[5]):
                settings = {
                    "_target_": f"lightning.pytorch.loggers.{kind}",
                    "save_dir": "${output}/log",
                    key: name,
                }
                yield _file(
                    f"{kind}.{key} {name!r}", yaml.safe_dump({"trainer": {"logger": settings}})
                )
        for name in names[:6]:
            settings = {"_target_": f"lightning.pytorch.loggers.{kind}", "save_dir": name}
            yield _file(
                f"{kind}.save_dir {name!r}", yaml.safe_dump({"trainer": {"logger": settings}})
            )
    for key in ("filename", "dirpath"):
        for name in (names[0], names[4], names[5]):
            settings = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", key: name}
            yield _file(
                f"ModelCheckpoint.{key} {name!r}", yaml.safe_dump({"callbacks": {"x": settings}})
            )
    for word in (
        "+sweep=../../outside/x",
        "+experiment=../../outside/x",
        "model=../../outside/x",
        "+sweep=/etc/passwd",
    ):
        yield Case(word, (word,), is_whole=True)


def _file(name: str, text: str, *, is_whole: bool = False) -> Case:
    head = "# @package _global_\n"
    return Case(
        name, ("+experiment=evil",), {"experiment/evil.yaml": head + text}, is_whole=is_whole
    )


def _planted() -> Iterator[Planted]:
    for name, attempt in (
        ("a store that is a link", _clear_a_link),
        ("one store that is a link", _clear_one_link),
        ("a leftover that is a link", _clear_a_leftover_link),
        ("a store by a name with '..'", _clear_by_a_bad_name),
        ("a mark that is a link", _mark_by_a_link),
        ("a lock that is a link", _lock_by_a_link),
        ("a column that is a link", _column_by_a_link),
        ("a sweep that was begun elsewhere", _resume_elsewhere),
        ("a sweep that trusts", _resume_trusting),
        ("a trial's folder that is a link", _trial_by_a_link),
        ("an export to a link", _export_over_a_link),
    ):
        yield Planted(name, attempt)
    for bad in ("../x", "../../outside/kept.txt", "/etc/passwd", "~/x", "a/../../x", "x\0y"):
        yield Planted(f"a store's manifest that names {bad!r}", _manifest_naming(bad))
        yield Planted(f"a store's split named {bad!r}", _split_named(bad))
        yield Planted(f"a tokenizer's file named {bad!r}", _tokenizer_naming(bad))


def _store(place: Path) -> tuple[Path, str]:
    """A cache with a whole store in it, and the store's key."""
    import numpy as np

    from flatout.data.store.cache import Cache
    from flatout.data.store.store import Column, StoreWriter

    def build(writer: StoreWriter) -> None:
        split = writer.split("train", {"targets": Column("int32")})
        split.append(targets=np.arange(3, dtype=np.int32))

    cache = Cache(place / "work" / "outputs" / "cache")
    return cache.folder, cache.open_or_build("some", {"a": 1}, build)[1].key


def _opened_again(cache: Path) -> None:
    """Open the store as the next run would, or build it anew."""
    _store(cache.parents[2])


def _linked(place: Path) -> tuple[Path, str]:
    """A cache in which the store is a link to one that lies outside."""
    cache, key = _store(place)
    shutil.rmtree(cache / key)
    (cache / key).symlink_to(place / "outside" / "store")
    return cache, key


def _clear_a_link(place: Path) -> None:
    from flatout.data.store.cache import Cache

    Cache(_linked(place)[0]).clear()


def _clear_one_link(place: Path) -> None:
    from flatout.data.store.cache import Cache

    cache, key = _linked(place)
    Cache(cache).clear(key)


def _clear_a_leftover_link(place: Path) -> None:
    from flatout.data.store.cache import Cache

    cache, _ = _store(place)
    (cache / ".building-dead").symlink_to(place / "outside")
    Cache(cache).clear()


def _clear_by_a_bad_name(place: Path) -> None:
    from flatout.data.store.cache import Cache

    Cache(_store(place)[0]).clear("../../../outside")


def _mark_by_a_link(place: Path) -> None:
    cache, key = _store(place)
    (cache / key / "verified").unlink()
    (cache / key / "verified").symlink_to(place / "outside" / "kept.txt")
    _opened_again(cache)


def _lock_by_a_link(place: Path) -> None:
    cache, key = _store(place)
    shutil.rmtree(cache / key)
    (cache / f"{key}.lock").unlink(missing_ok=True)
    (cache / f"{key}.lock").symlink_to(place / "outside" / "kept.txt")
    _opened_again(cache)


def _column_by_a_link(place: Path) -> None:
    cache, key = _store(place)
    column = cache / key / "train" / "targets.bin"
    column.replace(place / "work" / "outputs" / "moved.bin")
    column.symlink_to(place / "work" / "outputs" / "moved.bin")
    (cache / key / "verified").unlink()
    _opened_again(cache)


def _manifest_naming(bad: str) -> Callable[[Path], None]:
    def attempt(place: Path) -> None:
        cache, key = _store(place)
        manifest = cache / key / "manifest.json"
        described = json.loads(manifest.read_text(encoding="utf-8"))
        described["files"][bad] = {"bytes": 5, "xxh3": "0" * 32}
        manifest.write_text(json.dumps(described), encoding="utf-8")
        (cache / key / "verified").unlink()
        _opened_again(cache)

    return attempt


def _split_named(bad: str) -> Callable[[Path], None]:
    def attempt(place: Path) -> None:
        cache, key = _store(place)
        manifest = cache / key / "manifest.json"
        described = json.loads(manifest.read_text(encoding="utf-8"))
        described["splits"][bad] = described["splits"]["train"]
        described["files"][f"{bad}/targets.bin"] = {"bytes": 12, "xxh3": "0" * 32}
        manifest.write_text(json.dumps(described), encoding="utf-8")
        _opened_again(cache)

    return attempt


def _tokenizer_naming(bad: str) -> Callable[[Path], None]:
    def attempt(place: Path) -> None:
        from tokenizers import Tokenizer, models

        from flatout.data.tokens.subwords import Subwords

        frame = {
            "opening": [],
            "closing": [],
            "parting": [],
            "padding": 0,
            "separator": None,
        }
        held = {
            "kind": "subwords",
            "frame": frame,
            "tokenizer": Tokenizer(models.BPE()).to_str(),
            "files": {bad: "x"},
        }
        Subwords.from_json(json.dumps(held)).save(place / "work" / "outputs")

    return attempt


def _begun(here: Path, **asked: object) -> Path:
    folder = here / "work" / "outputs" / "sweep"
    folder.mkdir(parents=True)
    known = {
        "schema": 1,
        "typed": [],
        "fixed": [],
        "search": {},
        "space": {},
        "place": str(here / "bait"),
    }
    (folder / "sweep.json").write_text(json.dumps(known | asked), encoding="utf-8")
    return folder


def _resume(folder: Path) -> None:
    import argparse

    from flatout.cli import sweep

    sweep.run(argparse.Namespace(words=["resume", str(folder)], config_dir=None))


def _resume_elsewhere(place: Path) -> None:
    _resume(_begun(place, place=str(place / "nowhere")))


def _resume_trusting(place: Path) -> None:
    words = ["+allow_targets=[evil]", "+callbacks.x._target_=evil.Evil", "seed=choice(0,1)"]
    _resume(_begun(place, typed=words))


def _trial_by_a_link(place: Path) -> None:
    from flatout.sweep.trials import new_trial_folder

    folder = place / "work" / "outputs" / "0"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(place / "outside")
    new_trial_folder(folder, is_again=True)
    (folder / "summary.json").write_text("{}", encoding="utf-8")


def _export_over_a_link(place: Path) -> None:
    from flatout.cli.export import _complete_folder

    link = place / "work" / "outputs" / "export"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(place / "outside")
    with _complete_folder(link) as beside:
        (beside / "x").write_text("x", encoding="utf-8")


def carelessly(planted: Planted, place: Path) -> None:
    """Make an attempt; a refusal is welcome and not needed, so long as nothing outside
    was touched.
    """
    with suppress(UserError):
        planted.attempt(place)
    assert os.path.lexists(place / "outside" / "kept.txt")
