"""Messages for a user's mistake: each says how to fix it; and the settings, each described once,
that they speak of.

They have one shape: where (a key, a file, a row), what is wrong (with the value), what is allowed,
how to fix it. Entry points print it without a traceback and exit with code 2; an error of any other
class is a defect of ours and keeps its traceback. A field of a Config is `setting(default,
sentence, …)` with its range and an example. `check_settings` holds values to it, and `python -m
flatout settings` prints it. Models import this module and nothing else of ours.
"""

from __future__ import annotations

import difflib
import errno
import json
import math
import os
import re
import shutil
import time
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

from flatout.masking import mask_addresses

EXIT_CODE = 2
LARGEST_SEED = 2**63 - 1
Choice = TypeVar("Choice", bound=StrEnum)
Settings = TypeVar("Settings")
_ABOUT = "about"


class UserError(ValueError):
    """A user's mistake: where, what, what is allowed, how to fix it."""

    def __init__(self, where: str, what: str, *, allowed: str = "", hint: str = "") -> None:
        self.where = where
        self.what = what
        self.allowed = allowed
        self.hint = hint
        text = (f"{where}: {what}" if where else what) + (f" ({allowed})" if allowed else "")
        ending = "" if text.endswith("?") else "."
        text = f"{text.rstrip('.')}{ending} {hint}".rstrip() if hint else text
        super().__init__(printable(mask_addresses(text)))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.parts), ()

    @property
    def parts(self) -> dict[str, str]:
        """What it is made of: another process makes the same of it."""
        return {name: getattr(self, name) for name in ("where", "what", "allowed", "hint")}


class OtherRankEnded(UserError):
    """Another rank has ended, by a mistake that it names itself or because it was lost."""


class RunBroke(RuntimeError):
    """Something outside, or one of its ranks, ended a run: a short message, exit code 1."""


def write_for_launcher(error: UserError | RunBroke) -> None:
    """Write an error where torchrun, or our own launch, looks for a rank's last words; without one
    nothing is done.
    """
    extra: dict[str, Any] = {"timestamp": str(int(time.time()))}
    if isinstance(error, UserError):
        extra["mistake"] = error.parts
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(path).write_text(
            json.dumps({"message": {"message": str(error), "extraInfo": extra}}), encoding="utf-8"
        )


def printable(text: str) -> str:
    """A text on one line: what a terminal would act on (line ends, escape codes, half characters)
    is written out.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """A text whose line ends and tabs stay; whatever else a terminal would act on is
    written out.
    """
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def first_line(error: BaseException) -> str:
    """What went wrong, without the lines after it, such as a worker's traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def nearest(word: str, choices: Iterable[str], *, least: float = 0.5) -> str | None:
    """The choice most like `word`, or None when none is like it; likeness is 1 for the
    same word.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=least)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """A closing sentence that names the nearest choice; empty when there is none, and for a word
    that is one.
    """
    near = None if word in choices else nearest(word, choices)
    return f"Did you mean {near!r}?" if near else ""


def as_choice(kind: type[Choice], value: object, where: str) -> Choice:
    """A member of an Enum of texts from its name, so that Python users may write either."""
    names = [str(member.value) for member in kind]
    if str(value) not in names:
        raise UserError(
            where, repr(value), allowed=", ".join(names), hint=did_you_mean(str(value), names)
        )
    return kind(str(value))


def as_seconds(text: str | None, where: str) -> float | None:
    """A duration such as 90s, 30m or 2h in seconds; None where there is no limit."""
    if text is None:
        return None
    if (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(text).strip())) is None or float(
        found[1]
    ) == 0:
        raise UserError(where, f"{str(text)!r} is no duration", allowed="such as 90s, 30m, 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def require(condition: bool, where: str, what: str, *, allowed: str = "", hint: str = "") -> None:
    """Check one setting; used by the Config classes in `__post_init__`."""
    if not condition:
        raise UserError(where, what, allowed=allowed, hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What the fields of Configs say of themselves."""

    does: str
    example: str = ""  # a value, or whole words of a command line where other settings belong to it
    allowed: str = ""  # what the setting may be, where its type and its range do not say it
    hint: str = ""
    choices: type[StrEnum] | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    @property
    def range(self) -> str:
        """The bounds in words; empty where there are none."""
        least, above, most, below = map(_in_words, (self.least, self.above, self.most, self.below))
        if most:
            return f"above {above}, at most {most}" if above else f"{least} to {most}"
        if below:
            return f"above {above} and below {below}" if above else f"{least} to below {below}"
        return f"{least} or more" if least else above and f"above {above}"

    def holds(self, number: float) -> bool:
        """Whether a finite number lies within the bounds."""
        is_high = (self.least is None or number >= self.least) and (
            self.above is None or number > self.above
        )
        is_low = (self.most is None or number <= self.most) and (
            self.below is None or number < self.below
        )
        return is_high and is_low and math.isfinite(number)


def _in_words(bound: float | None) -> str:
    return "" if bound is None else "2**63 - 1" if bound == LARGEST_SEED else f"{bound:,}"


def setting(default: Any, does: str, **about: Any) -> Any:
    """A field of a Config with all that is known of it (`about`: of `About`); `default`: a value,
    or what makes one.
    """
    if isinstance(default, StrEnum):
        about.setdefault("choices", type(default))
    metadata: dict[str, Any] = {_ABOUT: About(does=does, **about)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def about_settings(kind: Any) -> dict[str, About]:
    """What the fields of a Config say, by their names."""
    return {each.name: each.metadata[_ABOUT] for each in fields(kind) if _ABOUT in each.metadata}


def check_settings(config: Any, prefix: str = "") -> None:
    """Hold a Config to its fields: choices become members of their Enum, numbers are in range, in
    lists and maps.
    """
    # A null is taken where the type has it; what several settings have to do with each other is
    # checked elsewhere.
    types = {each.name: str(each.type) for each in fields(config)}
    for name, about in about_settings(config).items():
        value = getattr(config, name)
        where = f"{prefix}.{name}".lstrip(".")
        may_be_null = "None" in types[name]
        if value is None and may_be_null:
            continue
        if about.choices is not None:
            setattr(config, name, as_choice(about.choices, value, where))
        elif about.range:
            range_of_one = f"{about.range}{', or null' if may_be_null else ''}"
            allowed = range_of_one if isinstance(value, Mapping) else about.allowed or range_of_one
            for place, shown, number in _numbers(where, value):
                is_number = isinstance(number, Real)
                words = f"{shown}" if is_number else f"{shown!r} is no number"
                require(
                    is_number and about.holds(number),
                    place,
                    words,
                    allowed=allowed,
                    hint=about.hint,
                )


def settings_of(kind: type[Settings], given: Any) -> Settings:
    """A Config from itself, or from a mapping of plain values, those of its groups included; None:
    its defaults.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        require(
            isinstance(given, kind),
            kind.__name__,
            f"{given!r} does not belong here",
            allowed="it, or a mapping of its settings",
        )
        return given
    hints = typing.get_type_hints(kind)
    for name in given:
        require(
            name in hints,
            f"{kind.__name__}.{name}",
            "no such setting",
            hint=did_you_mean(name, hints),
        )
    groups = {
        name: value
        for name, value in given.items()
        if isinstance(value, Mapping) and is_dataclass(hints[name])
    }
    return kind(
        **{**given, **{name: settings_of(hints[name], value) for name, value in groups.items()}}
    )


def _numbers(where: str, value: Any) -> list[tuple[str, Any, float]]:
    """Each number of a setting: where it stands, what of the setting a message shows, and the
    number.
    """
    if isinstance(value, Mapping):
        return [(f"{where}.{name}", number, number) for name, number in value.items()]
    return [
        (where, value, number) for number in (value if isinstance(value, list | tuple) else [value])
    ]


def out_of_space(
    error: OSError, place: Path, needed: int | None, where: str, hint: str
) -> UserError:
    """The message when a disk refuses a write; `needed`: bytes of the whole, if known; `where`: the
    place's setting.
    """
    words = {
        errno.ENOSPC: f"no space left in {place}",
        errno.EDQUOT: f"over your quota in {place}",
        errno.EROFS: f"{place} is on a disk that can only be read",
        errno.EACCES: f"no permission to write in {place}",
        errno.EPERM: f"no permission to write in {place}",
        errno.EIO: f"the disk of {place} gives errors: it may be failing",
    }
    what = words.get(error.errno or 0, f"cannot write in {place}: {error.strerror or error}")
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return UserError(where, what, hint=hint)
    known = [] if needed is None else [f"needs about {_megabytes(needed)}"]
    if (free := disk_free(place)) is not None:
        known.append(f"{_megabytes(free)} free")
    return UserError(where, f"{what}: {', '.join(known)}" if known else what, hint=hint)


def example_columns(count: int, known: Sequence[str] = ("text", "label")) -> str:
    """A value of data.read.columns that fits a file of so many columns, the known ones first."""
    others = [f"column{number}" for number in range(len(known) + 1, count + 1)]
    return f"[{','.join([*known[:count], *others])}]"


def disk_free(place: Path) -> int | None:
    """Bytes that this user may still write on the disk of a folder, or of the nearest one above
    that exists.
    """
    for folder in (place, *place.absolute().parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None


def _megabytes(num_bytes: int) -> str:
    megabytes = num_bytes / 1e6
    return (
        f"{megabytes:,.0f} MB"
        if megabytes >= 10
        else f"{megabytes:.1f} MB"
        if megabytes >= 0.1
        else "0.1 MB"
    )
