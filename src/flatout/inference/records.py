"""Records of a model folder: a dataclass from a mapping of JSON, each value compared with its type.

A model folder may come from others. A value of another type is refused here in one sentence, and so
is a number that arrays cannot hold. Nothing behind it meets a text where a number belongs. Ranges,
and what values have to do with each other, are checked by the predictor that reads them.

    SequenceShape, {"inputs": 3, "targets": "x"}    →    refused: targets does not fit
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar

from flatout.errors import LARGEST_SEED, UserError, require, settings_of

Record = TypeVar("Record")


def read_record(kind: type[Record], values: object, where: str, name: str) -> Record:
    """The record that a mapping of plain values describes.

    `where`: the file, for messages; `name`: the key of the record in it.
    """
    require(isinstance(values, Mapping), f"{where}: {name}", "is no mapping of settings")
    hints = typing.get_type_hints(kind)
    typed = {}
    for key, value in typing.cast(Mapping[str, object], values).items():
        typed[key] = _as_type(value, hints.get(key, object), where, f"{name}.{key}")
    try:
        return settings_of(kind, typed)
    except TypeError:
        raise UserError(f"{where}: {name}", "lacks some of its settings") from None


def _as_type(value: object, kind: object, where: str, name: str) -> Any:
    """A value of JSON as this type has it: a list as a tuple, a name as a member of an Enum."""
    options = typing.get_args(kind)
    is_optional = isinstance(kind, UnionType) or typing.get_origin(kind) is typing.Union
    if is_optional:
        if value is None and NoneType in options:
            return None
        kind = next(option for option in options if option is not NoneType)
        options = typing.get_args(kind)
    if is_dataclass(kind):
        return read_record(typing.cast(type, kind), value, where, name)
    collection = typing.get_origin(kind)
    if collection in (list, tuple):
        require(isinstance(value, list), f"{where}: {name}", "is no list")
        is_pair = collection is tuple and options[-1] is not ...
        items = typing.cast(list[object], value)
        require(not is_pair or len(items) == len(options), f"{where}: {name}", "does not fit")
        return collection(_as_type(item, options[0], where, name) for item in items)
    if isinstance(kind, type) and issubclass(kind, Enum):
        known = [member.value for member in kind]
        require(value in known, f"{where}: {name}", "does not fit", allowed=", ".join(known))
        return kind(value)
    require(_fits(value, kind), f"{where}: {name}", "does not fit")
    return value


def _fits(value: object, kind: object) -> bool:
    """Whether a value has a plain type; a number must be one that arrays hold."""
    if kind is float:
        is_number = type(value) in (int, float) and _is_of_64_bits(value)
        return is_number and math.isfinite(typing.cast(float, value))
    if kind is int:
        return type(value) is int and _is_of_64_bits(value)
    if kind is str:
        return is_name(value)
    plain = typing.get_origin(kind) or kind
    return plain in (object, Any) or (isinstance(plain, type) and isinstance(value, plain))


def is_name(value: object) -> bool:
    """Whether a value is a text that files can hold: JSON may have half a character."""
    return isinstance(value, str) and not any("\ud800" <= part <= "\udfff" for part in value)


def _is_of_64_bits(value: object) -> bool:
    return not isinstance(value, int) or abs(value) <= LARGEST_SEED
