"""Messages for a user's mistake, and the descriptions of settings that they are made from.

A message has one shape: *key: problem (what is allowed). Fix.* Entry points print it without a
traceback and exit with code 2; an error of any other class is a defect of ours and keeps its
traceback. A field of a Config is `setting(default, sentence, …)` with its range and an example.
`check_settings` compares values with the range, and `python -m flatout settings` prints all of it.
Models import this module and nothing else of ours.
"""

from __future__ import annotations

import difflib
import errno
import inspect
import json
import math
import os
import re
import shutil
import tempfile
import time
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import partial, wraps
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flatout.masking import mask_addresses

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EXIT_CODE = 2
# numbers of errors of a disk rather than of a name
REFUSALS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.ENAMETOOLONG,
)
LARGEST_SEED = 2**63 - 1  # the largest number that arrays hold
Choice = TypeVar("Choice", bound=StrEnum)
Settings = TypeVar("Settings")
_ABOUT = "about"  # the key of a field's metadata under which its description lies
# what other libraries call a setting, and its name in our Configs
_FIELDS_ELSEWHERE = {"learning_rate": "lr", "monitor": "metric"}
_SECONDS_OF_UNIT = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MEGABYTE = 1e6
# What a terminal acts on, and marks of direction, which show a text in another order than it has.
_CODES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class UserError(ValueError):
    """A user's mistake: where, what, what is allowed, how to fix it."""

    def __init__(self, where: str, what: str, *, allowed: str = "", hint: str = "") -> None:
        self.where = where
        self.what = what
        self.allowed = allowed
        self.hint = hint
        text = f"{where}: {what}" if where else what
        if allowed:
            text = f"{text} ({allowed})"
        if hint:
            ending = "" if text.endswith("?") else "."
            text = f"{text.rstrip('.')}{ending} {hint}".rstrip()
        super().__init__(printable(mask_addresses(text)))

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is pickled by its message alone, which its constructor does not take.
        return partial(type(self), **self.parts), ()

    @property
    def parts(self) -> dict[str, str]:
        """Its arguments: another process makes an equal error from them."""
        return {name: getattr(self, name) for name in ("where", "what", "allowed", "hint")}


class OtherRankEnded(UserError):
    """Another rank has ended, by a mistake that it names itself or because it was lost."""


class RunBroke(RuntimeError):
    """A run ended by one of its ranks, or from outside: a short message, exit code 1."""


def write_for_launcher(error: UserError | RunBroke) -> None:
    """Write an error where torchrun, or our own launcher, looks for a rank's last message.

    Does nothing in a process that no launcher has started.
    """
    # torchrun sets this name for each rank that it starts
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra: dict[str, Any] = {"timestamp": str(int(time.time()))}
    if isinstance(error, UserError):
        extra["mistake"] = error.parts
    report = {"message": {"message": str(error), "extraInfo": extra}}
    Path(path).write_text(json.dumps(report), encoding="utf-8")


def printable(text: str) -> str:
    r"""A text on one line: what a terminal would act on is written out, so a line end becomes `\n`.

    A message may quote a file of strangers, and escape codes in it could rewrite the screen.
    """
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def without_codes(text: str) -> str:
    """A text in which codes and marks of direction are written out; line ends and tabs stay."""
    return _CODES.sub(lambda code: code[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """Like `printable`, but line ends and tabs stay."""
    pieces = []
    for character in text:
        pieces.append(character if character in "\n\t" else _escape(character))
    return "".join(pieces)


def first_line(error: BaseException) -> str:
    """An error's message without later lines, such as a worker's traceback; its class if empty."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    return line.rstrip(".")


def is_failure(error: BaseException) -> bool:
    """Whether code of others failed with this error.

    False for Ctrl-C, an exit, a time limit, and for memory that does not suffice.

    Packages in Rust panic on odd files, and a panic is no `Exception`.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return False
    # each such package has a class of this name, and none can be imported
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def class_name(part: object) -> str:
    """The name of a class, without its module; anything else as text."""
    return part.__qualname__ if isinstance(part, type) else str(part)


def nearest(word: str, choices: Iterable[str], *, least: float = 0.5) -> str | None:
    """The choice most like `word`, in any case; None if no likeness reaches `least`.

    The likeness of equal words is 1.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    closest = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=least)
    return by_lower[closest[0]] if closest else None


def did_you_mean(word: str, choices: Collection[str]) -> str:
    """A hint that names the nearest choice; empty if none is near, or if `word` is a choice."""
    if word in choices:
        return ""
    choice = nearest(word, choices)
    return f"Did you mean {choice!r}?" if choice else ""


def as_choice(kind: type[Choice], value: object, where: str) -> Choice:
    """The member of an Enum of texts with this value, so that Python users may write either."""
    # Hydra gives members, a Python user may give texts: both are compared as texts
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
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(text).strip())
    seconds = float(match[1]) * _SECONDS_OF_UNIT[match[2]] if match else 0.0
    if seconds == 0:
        raise UserError(where, f"{str(text)!r} is no duration", allowed="such as 90s, 30m, 2h")
    return seconds


def require(condition: bool, where: str, what: str, *, allowed: str = "", hint: str = "") -> None:
    """Raise `UserError` unless the condition holds; Configs check themselves so when built."""
    if not condition:
        raise UserError(where, what, allowed=allowed, hint=hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """The description of one field of a Config."""

    does: str  # a sentence
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
        """The bounds in words; empty where there are none.

        `least=1` → `1 or more`; `above=0, below=1` → `above 0 and below 1`; `least=1, most=8` →
        `1 to 8`.
        """
        least = _bound_in_words(self.least)
        above = _bound_in_words(self.above)
        most = _bound_in_words(self.most)
        below = _bound_in_words(self.below)
        if most:
            return f"above {above}, at most {most}" if above else f"{least} to {most}"
        if below:
            return f"above {above} and below {below}" if above else f"{least} to below {below}"
        if least:
            return f"{least} or more"
        return f"above {above}" if above else ""

    def holds(self, number: float) -> bool:
        """Whether a finite number, or one of at most 64 bits, lies within the bounds."""
        if isinstance(number, int) and abs(number) > LARGEST_SEED:
            return False
        if self.least is not None and not number >= self.least:
            return False
        if self.above is not None and not number > self.above:
            return False
        if self.most is not None and not number <= self.most:
            return False
        if self.below is not None and not number < self.below:
            return False
        return math.isfinite(number)


def _bound_in_words(bound: float | None) -> str:
    if bound is None:
        return ""
    return "2**63 - 1" if bound == LARGEST_SEED else f"{bound:,}"


def setting(default: object, does: str, **about: Any) -> Any:
    """A field of a Config with its description.

    `default` is a value, or a class or function that makes one; `about` are fields of `About`:

        rows: int = setting(64, "Rows in a batch.", least=1)
    """
    if isinstance(default, StrEnum):
        about.setdefault("choices", type(default))
    metadata: dict[str, Any] = {_ABOUT: About(does=does, **about)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def about_settings(kind: DataclassInstance | type[DataclassInstance]) -> dict[str, About]:
    """The descriptions of a Config's fields, by their names."""
    described = [part for part in fields(kind) if _ABOUT in part.metadata]
    return {part.name: part.metadata[_ABOUT] for part in described}


def check_settings(config: DataclassInstance, prefix: str = "") -> None:
    """Compare a Config's values with its fields: each choice becomes a member of its Enum.

    Numbers must lie in their range, alone, in lists and in mappings. None passes where the type has
    it. What settings have to do with each other is checked by each Config itself. `prefix`: the
    Config's key, for messages.
    """
    types = {part.name: str(part.type) for part in fields(config)}
    for name, about in about_settings(config).items():
        value = getattr(config, name)
        where = f"{prefix}.{name}".lstrip(".")
        # types are texts here, such as "int | None": annotations are not evaluated
        may_be_null = "None" in types[name]
        if value is None and may_be_null:
            continue
        if about.choices is not None:
            setattr(config, name, as_choice(about.choices, value, where))
        elif about.range:
            allowed = about.range + (", or null" if may_be_null else "")
            # `allowed` of a field describes the whole setting, not one entry of a mapping
            if about.allowed and not isinstance(value, Mapping):
                allowed = about.allowed
            for key, shown, number in _list_numbers(where, value):
                is_number = isinstance(number, Real)
                require(
                    is_number and about.holds(number),
                    key,
                    f"{shown}" if is_number else f"{shown!r} is no number",
                    allowed=allowed,
                    hint=about.hint,
                )


def _list_numbers(where: str, value: object) -> list[tuple[str, Any, Any]]:
    """Each number of a setting, with its key, and with the value that a message shows."""
    if isinstance(value, Mapping):
        return [(f"{where}.{name}", number, number) for name, number in value.items()]
    if isinstance(value, list | tuple):
        return [(where, value, number) for number in value]
    return [(where, value, value)]


def settings_of(kind: type[Settings], values: object) -> Settings:
    """A Config from itself, from a mapping of plain values, or from None: its defaults.

    Groups within the mapping may be mappings, too.
    """
    if isinstance(values, kind):
        return values
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise UserError(
            kind.__name__,
            f"{values!r} does not belong here",
            allowed="it, or a mapping of its settings",
        )
    # names first: a mistyped one is reported before the values of others are looked at
    hints = typing.get_type_hints(kind)
    for name in values:
        _require_setting(kind, name, list(hints))
    arguments = {}
    for name, value in values.items():
        is_group = isinstance(value, Mapping) and is_dataclass(hints[name])
        arguments[name] = settings_of(hints[name], value) if is_group else value
    return kind(**arguments)


def _require_setting(kind: type[object], name: str, names: Sequence[str]) -> None:
    """Refuse a name that a Config does not have; `names` are those that it has."""
    if name not in names:
        meant = _FIELDS_ELSEWHERE.get(name)
        hint = f"Did you mean {meant!r}?" if meant in names else did_you_mean(name, names)
        raise UserError(
            f"{kind.__name__}.{name}", "no such setting", hint=hint or f"It has {', '.join(names)}."
        )


def explain_unknown_settings(kind: type[DataclassInstance]) -> None:
    """Let a Config that Python users build name the nearest setting for one that it lacks.

    `TextDataConfig(lable="topic")` would end in a TypeError without a suggestion.
    """
    plain_init = inspect.getattr_static(kind, "__init__")
    if not about_settings(kind) or hasattr(plain_init, "__wrapped__"):
        return

    @wraps(plain_init)
    def init(config: object, *positional: Any, **named: Any) -> None:
        names = [part.name for part in fields(kind)]
        for name in named:
            _require_setting(kind, name, names)
        plain_init(config, *positional, **named)

    type.__setattr__(kind, "__init__", init)


def out_of_space(
    error: OSError, folder: Path, needed: int | None, where: str, hint: str
) -> UserError:
    """The message when a disk refuses a write.

    `needed`: bytes of the whole, if known; `where`: the setting that names the place.
    """
    problems = {
        errno.ENOSPC: f"no space left in {folder}",
        errno.EDQUOT: f"over your quota in {folder}",
        errno.EROFS: f"{folder} is on a disk that can only be read",
        errno.EACCES: f"no permission to write in {folder}",
        errno.EPERM: f"no permission to write in {folder}",
        errno.EIO: f"the disk of {folder} gives errors: it may be failing",
    }
    other_problem = f"cannot write in {folder}: {error.strerror or error}"
    problem = problems.get(error.errno or 0, other_problem)
    # where space is missing, figures say how much
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        figures = [] if needed is None else [f"needs about {_in_megabytes(needed)}"]
        free = disk_free(folder)
        if free is not None:
            figures.append(f"{_in_megabytes(free)} free")
        if figures:
            problem = f"{problem}: {', '.join(figures)}"
    if error.errno == errno.ENAMETOOLONG:
        hint = "Choose shorter names."
    return UserError(where, problem, hint=hint)


def example_columns(count: int, names: Sequence[str] = ("text", "label")) -> str:
    """A value of data.read.columns that fits a file of so many columns, the known ones first."""
    others = [f"column{number}" for number in range(len(names) + 1, count + 1)]
    return f"[{','.join([*names[:count], *others])}]"


def disk_free(where: Path) -> int | None:
    """Bytes that this user may still write on the disk of a folder; None if unknown.

    A folder that does not exist yet lies on the disk of the nearest one above that does.
    """
    for folder in (where, *where.absolute().parents):
        # a folder may be missing, or lie behind a link that is broken
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None


@contextmanager
def explain_full_tmpdir(use: str) -> Iterator[None]:
    """Context manager: a full disk of temporary files becomes a `UserError` that names TMPDIR.

    `use` says what lies there. Other errors stay.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        hint = f"Set TMPDIR to a folder of a disk with more room: {use}."
        place = Path(tempfile.gettempdir())
        raise out_of_space(error, place, None, "TMPDIR", hint) from None


def _in_megabytes(num_bytes: int) -> str:
    """`12_345_678` → `12 MB`, `1_234_567` → `1.2 MB`; some bytes are at least 0.1 MB."""
    if num_bytes == 0:
        return "0 MB"
    megabytes = num_bytes / _MEGABYTE
    if megabytes >= 10:
        return f"{megabytes:,.0f} MB"
    return f"{max(megabytes, 0.1):.1f} MB"
