"""Errors of composing the settings, as one sentence with the nearest right word.

Reads the words and attributes of the errors of Hydra and OmegaConf, without importing either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path

from flatout.cli.unknown_keys import as_typed, find_key, find_moved, takes_list, unknown_key
from flatout.errors import RunBroke, UserError, did_you_mean


@dataclass(frozen=True, slots=True)
class ComposeError:
    """The parts of an error that name the mistake."""

    kind: str
    message: str
    key: str
    value: str
    missing: str
    options: list[str]
    beside: list[str]
    """Keys of the node that lacks the key."""
    override: str
    mistake: UserError | None

    @classmethod
    def of(cls, error: BaseException) -> ComposeError:
        chain = list(_causes(error))
        inner = chain[-1]
        found = {name: getattr(inner, name, None) for name in ("full_key", "value", "missing_cfg_file", "options")}
        override = getattr(inner, "override", None) or _first(
            r"override '?([^'\n]+?)'?(?:\.? No match.*|\.?)$", str(error)
        )
        return cls(
            kind=type(inner).__name__,
            message="\n".join(str(link) for link in chain),
            key=str(found["full_key"] or "") or _first(r"full_key: (\S+)", str(inner)),
            value=str(found["value"]),
            missing=str(found["missing_cfg_file"] or ""),
            options=list(found["options"] or []),
            beside=_keys_beside(error),
            override=override,
            mistake=next((link for link in chain if isinstance(link, UserError)), None),
        )


def explain(error: ComposeError) -> UserError | None:
    """The user's mistake behind an error; None for a defect of ours."""
    if error.mistake is not None:
        return error.mistake
    if error.kind in ("MissingConfigException",):
        return _missing_option(error)
    if error.kind in ("OverrideParseException", "LexerNoViableAltException"):
        return _unreadable(error)
    if error.kind in ("ValidationError", "UnsupportedValueType", "ReadonlyConfigError"):
        return _wrong_value(error)
    if error.kind == "MissingMandatoryValue":
        return UserError(error.key, "has no value", hint=f"Give it one: {error.key}=VALUE.")
    if several := _first(r"^Ambiguous value for argument '(.+)'$|^Sweep parameters '(.+)' requires", error.message):
        return _several_values(several)
    if error.kind in ("ConfigAttributeError", "ConfigKeyError", "ConfigCompositionException"):
        return _unknown_key(error)
    if error.kind in ("ScannerError", "ParserError", "ConstructorError", "ComposerError", "ReaderError"):
        return UserError("conf", error.message.replace("\n", " "), hint="The file is not valid YAML.")
    if error.kind == "RecursionError":
        return UserError("conf", "is nested too deeply", hint="Write the settings with fewer levels.")
    if error.kind == "AttributeError" and "full_key: hydra." in error.message:
        return UserError(error.key, "does not fit", hint="python -m flatout settings lists what each key may be.")
    if error.kind.startswith("Interpolation") or error.kind in ("UnsupportedInterpolationType", "GrammarParseError"):
        return UserError(error.key or "conf", error.message.splitlines()[0], hint="Write the value itself.")
    return None


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into a UserError; let any other error pass."""
    try:
        yield
    except RunBroke:
        raise
    except Exception as error:  # errors of Hydra, YAML, the parser and user classes share no class
        mistake = explain(ComposeError.of(error))
        if mistake is None:
            raise
        raise mistake from None


def _missing_option(error: ComposeError) -> UserError:
    group, _, option = error.missing.rpartition("/")
    hint = did_you_mean(option, error.options)
    if group == "experiment":
        hint = f"{hint} To name a run, set name={option}.".lstrip()
    return UserError(group, f"no option {option!r}", allowed=", ".join(error.options) or "no options", hint=hint)


def _unreadable(error: ComposeError) -> UserError:
    hint = "Write key=value; quote a value with blanks or brackets: 'key=\"a b\"'."
    is_word = re.fullmatch(r"[\w.]+", error.override)
    if is_word and (key := find_key(error.override)):
        hint = f"Write {key}=VALUE."
    elif "=" not in error.override and Path(error.override).exists():
        hint = f"To train on that file, write data.source={error.override}."
    return UserError("command line", f"cannot read {error.override!r}", hint=hint)


def _wrong_value(error: ComposeError) -> UserError:
    message = error.message.rsplit("\nValue", 1)[-1]
    wanted = _first(r"converted to (\w+)", error.message) or _first(r"expected one of \[(.*?)\]", error.message)
    names = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "a text"}
    allowed = names.get(wanted, wanted)
    value = error.value if error.value != "None" else _first(r"[Vv]alue '([^']*)'", message)
    hint = did_you_mean(value, allowed.split(", ")) if "," in allowed else ""
    if "is not Optional" in error.message:
        return UserError(as_typed(error.key), "null does not fit", hint="Give it a value, or leave it out.")
    if "is not a ListConfig" in message:
        allowed, hint = "a list", f"Write {as_typed(error.key)}=[{value}]."
    return UserError(as_typed(error.key), f"{value!r} does not fit", allowed=allowed, hint=hint)


def _several_values(word: str) -> UserError:
    """The mistake of several values for one run."""
    key, _, values = word.lstrip("+").partition("=")
    as_list = f"write '{key}=[{values}]' for one run with all of them"
    if key == "logger":
        hint = f"{as_list.capitalize()}."
    else:
        hint = f"Add -m for a run with each{f', or {as_list}' if takes_list(key) else ''}."
    return UserError(key, f"several values ({values}) for one run", hint=hint)


def _unknown_key(error: ComposeError) -> UserError:
    file = _first(r"In '([^']+)'", error.message)
    words = _first(r"To append to your config use \+(\S+)", error.message) or error.override
    words = words or _first(r"Could not delete from config\. '(.+?)' does not exist", error.message)
    typed, _, value = words.lstrip("+~").partition("=")
    key = typed or error.key
    if plain := _first(r"Either remove \+ prefix: '(.+)'$", error.message):
        return UserError(plain.partition("=")[0], "is there already", hint=f"Leave out the plus sign: {plain}.")
    if (moved := find_moved(key, value)) is not None:
        return moved
    key = error.key or typed
    whole = typed if typed.startswith(f"{key}.") else key  # Hydra names the first part that is not there
    return unknown_key(key, error.beside, typed=whole, file=file)


def _keys_beside(error: BaseException) -> list[str]:
    """Keys of the node that lacks a key, from OmegaConf's error."""
    for link in _links(error, lambda link: link.__cause__ or link.__context__):
        settings = getattr(link, "object_type", None)
        if isinstance(settings, type) and is_dataclass(settings):
            return [field.name for field in fields(settings) if not field.name.startswith("_")]
    return []


def _causes(error: BaseException) -> Iterator[BaseException]:
    return _links(error, lambda link: link.__cause__)


def _links(error: BaseException, follow: Callable[[BaseException], BaseException | None]) -> Iterator[BaseException]:
    """The error and what it follows from, each once: an error that is raised again may be a cause of itself."""
    link: BaseException | None = error
    seen = set[int]()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = follow(link)


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return next(filter(None, found.groups()), "") if found else ""
