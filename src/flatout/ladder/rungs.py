"""A ladder as data: what it trains, and its rungs, each one change to the rung below.

A file of `conf/ladder/` names the usual program at the foot, the settings that all rungs share, and
the rungs. A rung changes one keyword of the usual program (`change`), or is a run of flatout with
some words (`run`). Changes add up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from flatout.errors import UserError, did_you_mean, require
from flatout.files import load_yaml

KINDS = ("text", "bits", "sequence")
STARTUP = "startup"
LEARNING = "learning"
OTHER = "other learning"
# usual programs, as modules of `ladder/usual/`
OF_ENCODERS = "tweets"
OF_BITS = "bloom"
_MEASURES = ("training", STARTUP, LEARNING, OTHER)
# what a ladder's file may hold, and each of its rungs
_KEYS = ("title", "kind", "program", "settings", "start", "rungs", "reading", "in_all")
_KEYS_OF_RUNG = (
    "name",
    "about",
    "promised",
    "factor",
    "measures",
    "needs",
    "setting",
    "change",
    "run",
)
# the settings that a ladder's file may set
_SETTABLE = (
    "compile",
    "tune",
    "data",
    "model",
    "task",
    "optim",
    "trainer",
    "precision",
    "seed",
    "threads",
)
_ONLY_TYPED = ("data.cache", "trainer.model_registry")
# an address, a reference, or a mapping, which could hold any of the keys above
_NAMES_MORE = re.compile(r"\$\{|:[/\\:]|\{[^}]*:|\b(file|local|data|sqlite):", re.IGNORECASE)
_OF_THE_WAY = (
    "precision compile threads tune data.batch_size data.tokens_per_batch data.accumulate"
    " data.effective_batch data.eval_batch_size data.feed data.workers optim.lr optim.scale_lr"
    " optim.base_batch optim.max_lr trainer trainer.devices trainer.strategy trainer.accelerator"
    " model.compute model.gradient_checkpointing"
).split()  # settings that decide how a run computes; all others decide what it learns


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One change, what its guide promised, and the program that is timed."""

    name: str
    about: str = ""  # what changes
    promised: str = ""  # in the guide's words; empty: it promised nothing
    factor: tuple[float, float] | None = None  # the promise as a range of speed-ups
    # training: rows a second. startup: seconds to the first batch. learning: nothing is timed, as
    # its speed is that of the rung below. other learning: rows a second, and its quality beside
    # those of the other rungs, as it learns something else.
    measures: str = "training"
    needs: tuple[str, ...] = ()  # what must be there: a package, or a need that `climb.py` knows
    # the override of a run of ours that does the same; verdicts refer to the rung by it
    setting: str = ""
    keywords: Mapping[str, Any] | None = None  # of the usual program; None: a run of ours
    words: tuple[str, ...] = ()  # of `python -m train`, for a run of ours

    @property
    def is_ours(self) -> bool:
        return self.keywords is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The rungs from a program as usually written to our own run."""

    name: str
    title: str
    kind: str  # of data: text, bits or sequence
    program: str  # the usual program, a module of `ladder/usual/`
    settings: tuple[str, ...] = ()  # words of `python -m train` that all rungs share
    rungs: tuple[Rung, ...]
    # what the usual program reads besides: see there
    reading: Mapping[str, Any] = field(default_factory=dict)
    in_all: str = ""  # what the guide promised in all


def read_ladder(path: Path) -> Ladder:
    return ladder_of(path.stem, load_yaml(path), str(path))


def find_ladder(name: str, folders: Sequence[Path]) -> Path:
    """The file of a ladder in the first folder that has it."""
    for folder in folders:
        if (path := folder / f"{name}.yaml").is_file():
            return path
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise UserError(
        "+ladder", f"no ladder {name!r}", allowed=", ".join(names), hint=did_you_mean(name, names)
    )


def ladder_of(name: str, written: object, where: str) -> Ladder:
    """A ladder from plain values, all of them checked."""
    values = _require_keys(written, _KEYS, ("title", "kind", "program", "rungs"), where)
    kind, rungs = values["kind"], values["rungs"]
    require(kind in KINDS, f"{where}: kind", repr(kind), allowed=", ".join(KINDS))
    require(isinstance(rungs, list) and len(rungs) > 1, f"{where}: rungs", "fewer than two")
    settings = tuple(map(str, values.get("settings") or ()))
    _require_plain_words(settings, f"{where}: settings")
    return Ladder(
        name=name,
        title=str(values["title"]),
        kind=kind,
        program=str(values["program"]),
        settings=settings,
        rungs=tuple(_read_rungs(rungs, dict(values.get("start") or {}), where)),
        reading=dict(values.get("reading") or {}),
        in_all=str(values.get("in_all") or ""),
    )


def _require_plain_words(words: tuple[str, ...], where: str) -> None:
    """Refuse words of a file that let code in, name a server or read the environment.

    Words of a ladder count as typed when its runs are composed, so they are looked at here.
    """
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        plain = value.replace("\\", "")  # Hydra takes backslashes away: `$\{` becomes `${`
        is_value = key.partition(".")[0] in _SETTABLE and key not in _ONLY_TYPED
        require(
            is_value and "_target_" not in word and not _NAMES_MORE.search(plain),
            where,
            f"{word!r}",
            allowed=f"values of {', '.join(_SETTABLE)}, and no addresses or mappings",
        )


def _read_rungs(listed: list[Any], start: dict[str, Any], where: str) -> list[Rung]:
    """The rungs, each with its own change and all changes below it."""
    # A ladder in the file, and what the program of each rung gets:
    #
    #     name: as written                     padding=maximum
    #     change: {padding: batch}             padding=batch
    #     change: {precision: bf16}            padding=batch precision=bf16
    #     run: [precision=bf16]                python -m train precision=bf16
    #     run: [compile=true]                  python -m train precision=bf16 compile=true
    keywords = start
    words = list[str]()
    rungs = list[Rung]()
    for number, values in enumerate(listed):
        at = f"{where}: rungs[{number}]"
        _require_keys(values, _KEYS_OF_RUNG, ("name",), at)
        is_ours = "run" in values
        change = dict(values.get("change") or {})
        require(
            not (is_ours and change), at, "has both run and change", hint="Leave one of them out."
        )
        is_late = bool(rungs) and rungs[-1].is_ours and not is_ours
        require(not is_late, at, "is a usual program above a run of ours", hint="Put it below.")
        is_one = is_ours or len(change) == (1 if rungs else 0)
        require(
            is_one, at, f"changes {len(change)} keywords", allowed="one a rung, none at the foot"
        )
        keywords = {**keywords, **change}
        run_words = tuple(map(str, values.get("run") or ()))
        _require_plain_words(run_words, at)
        words = [*words, *run_words]
        if values.get("measures") != OTHER:
            require_same_learning(values.get("run") or (), at)
        rungs.append(_rung(values, at, None if is_ours else dict(keywords), words))
    require(
        not rungs[0].is_ours,
        f"{where}: rungs[0]",
        "is a run of ours",
        hint="Begin with the usual program.",
    )
    is_last = all(
        later.measures == OTHER for rung, later in pairwise(rungs) if rung.measures == OTHER
    )
    require(is_last, f"{where}: rungs", f"a rung stands above one of {OTHER}", hint="Put it below.")
    require(
        len({rung.name for rung in rungs}) == len(rungs),
        f"{where}: rungs",
        "two have the same name",
    )
    return rungs


def _rung(
    values: Mapping[str, Any], at: str, keywords: dict[str, Any] | None, words: Sequence[str]
) -> Rung:
    factor, measures = values.get("factor"), values.get("measures", "training")
    is_range = factor is None or (
        isinstance(factor, list) and len(factor) == 2 and 0 < factor[0] <= factor[1]
    )
    require(is_range, f"{at}: factor", f"{factor}", allowed="[LEAST, MOST], both above 0")
    require(measures in _MEASURES, f"{at}: measures", repr(measures), allowed=", ".join(_MEASURES))
    return Rung(
        name=str(values["name"]),
        **{key: str(values.get(key) or "") for key in ("about", "promised", "setting")},
        factor=None if factor is None else (float(factor[0]), float(factor[1])),
        measures=measures,
        needs=tuple(map(str, values.get("needs") or ())),
        keywords=keywords,
        words=tuple(words) if keywords is None else (),
    )


def require_same_learning(words: Sequence[str], where: str) -> None:
    """Refuse words of a rung that change what is learned: its speed would compare unlike things."""
    for word in words:
        key = str(word).lstrip("+~").partition("=")[0]
        require(
            key in _OF_THE_WAY,
            where,
            f"{word} changes what is learned between rungs",
            hint="Set it for all rungs: in the ladder's settings, or on the command line.",
        )


def _require_keys(
    values: object, allowed: Sequence[str], needed: Sequence[str], where: str
) -> dict[str, Any]:
    """The mapping with all its keys known and all those needed; else a `UserError`."""
    if not isinstance(values, dict):
        raise UserError(where, f"{values!r} is no mapping")
    for key in values:
        require(
            key in allowed,
            f"{where}: {key}",
            "no such key",
            allowed=", ".join(allowed),
            hint=did_you_mean(str(key), allowed),
        )
    for key in needed:
        require(values.get(key) is not None, f"{where}: {key}", "is missing")
    return values
