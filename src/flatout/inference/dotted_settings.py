"""Settings from words of a command line, such as `data.clean.leaks=drop`, without Hydra."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeVar

import yaml

from flatout.errors import UserError, did_you_mean

Settings = TypeVar("Settings")
_TYPES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
    Any: "any value",
}


def with_overrides(kind: type[Settings], overrides: Sequence[str], prefix: str, **given: Any) -> Settings:
    """Settings of a class: defaults, then `given`, then words that begin with `prefix`."""
    values: dict[str, Any] = dict(given)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.startswith(f"{prefix}."):
            raise UserError("command line", f"cannot read {override!r}", hint=f"Write {prefix}.KEY=VALUE.")
        _set(values, kind, key.split(".")[1:], key, text)
    return built(kind, values)


def _set(values: dict[str, Any], kind: type, path: list[str], key: str, text: str) -> None:
    hints = typing.get_type_hints(kind)
    name, *rest = path
    if name not in hints:
        known = [field.name for field in fields(kind)]
        hint = did_you_mean(name, known)
        raise UserError(key, "no such key", allowed=", ".join(known), hint=hint)
    if is_dataclass(hints[name]):
        if not rest:
            raise UserError(key, "is a group of settings", hint=f"Name one of them: {key}.NAME=VALUE.")
        _set(values.setdefault(name, {}), hints[name], rest, key, text)
        return
    if len(rest) == 1 and typing.get_origin(hints[name]) is dict:
        values.setdefault(name, {})[rest[0]] = _value(text, key)
        return
    if rest:
        raise UserError(
            key,
            f"{name} is no group of settings",
            hint="The folder was changed, or comes from another version: train again.",
        )
    value = _value(text, key)
    if str in _choices(hints[name]) and text != "null":  # 007 is a text here, not a number
        value = value if isinstance(value, str) else text
    if not _fits(value, hints[name]):
        hint = f"Write {key}=[{text}]." if isinstance(value, str) and list in _choices(hints[name]) else ""
        raise UserError(key, f"{value!r} does not fit", allowed=describe_type(hints[name]), hint=hint)
    values[name] = value


def built(kind: type[Settings], values: dict[str, Any]) -> Settings:
    """Settings of a class from plain values; a mapping becomes a group of settings."""
    hints = typing.get_type_hints(kind)
    nested = {name: value for name, value in values.items() if isinstance(value, dict) and is_dataclass(hints[name])}
    return kind(**{**values, **{name: built(hints[name], value) for name, value in nested.items()}})


def _value(text: str, key: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(key, f"cannot read {text!r}", hint="Quote a value with brackets or colons.") from None


def _fits(value: Any, hint: Any) -> bool:
    choices = _choices(hint)
    if Any in choices or (isinstance(value, float | int) and not isinstance(value, bool) and float in choices):
        return True
    has_words = any(isinstance(each, type) and issubclass(each, StrEnum) for each in choices)
    return (has_words and isinstance(value, str)) or any(type(value) is each for each in choices)


def _choices(hint: Any) -> tuple[Any, ...]:
    """The plain types that fit a type hint."""
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return tuple(typing.get_origin(part) or part for part in parts)


def describe_type(hint: Any) -> str:
    """What a setting of this type may be: names of an Enum's members, or words for plain types."""
    words = []
    for choice in _choices(hint):
        if isinstance(choice, type) and issubclass(choice, StrEnum):
            words += [str(member.value) for member in choice]
        else:
            words.append(_TYPES.get(choice, str(choice)))
    return ", ".join(words)
