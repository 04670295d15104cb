"""`python -m flatout settings [KEY]`: what each setting does, what it may be, its default, and an example.

The text below a field says what it does, its type says what it may be, and the `require` calls of its module name the
range. Examples stand in `setting_examples.py`.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import ModuleType
from typing import Any

import lightning as L
import yaml

from flatout.callbacks.loggers import LOGGERS
from flatout.cli.conf_folder import conf_folder
from flatout.cli.setting_examples import MAY_BE, example_of
from flatout.cli.sweep_settings import LauncherSettings, SweeperSettings, in_short
from flatout.config import COMPONENTS, REPLACED, RunConfig
from flatout.errors import UserError
from flatout.inference.dotted_settings import describe_type

_KEY_WIDTH = 42
_LEAST_WIDTH, _MOST_WIDTH = 80, 140
_MOST_NEAR = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of one option."""

    key: str
    option: str
    """The words that choose it, such as `model=bilstm`; `run` for settings of every run."""
    does: str
    allowed: str
    default: str

    @property
    def example(self) -> str:
        """One way to set it, as typed on the command line."""
        is_switch = self.option == "trainer" and self.default in ("true", "false")
        return example_of(self.option, self.key, "true or false" if is_switch else self.allowed, self.default)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "key",
        metavar="KEY",
        nargs="?",
        default="",
        help="a key, a group such as data, or an option such as model=bilstm",
    )


def run(arguments: argparse.Namespace) -> None:
    key, known = arguments.key, list(all_settings())
    chosen = [each for each in known if each.key == key]
    for each in chosen:
        _print_one(each)
    if not chosen:
        _print_list(find_settings(key, known))


def find_settings(key: str, known: list[Setting]) -> list[Setting]:
    """The settings of a group or an option; all of them for an empty key."""
    group = [each for each in known if not key or each.option == key or each.key.startswith(f"{key}.")]
    if not group:
        near = difflib.get_close_matches(key, {each.key for each in known}, n=_MOST_NEAR, cutoff=0.5)
        hint = f"Did you mean {', '.join(near)}?" if near else "python -m flatout settings lists all."
        raise UserError(f"settings {key}", "no such key", hint=hint)
    return group


def all_settings() -> Iterator[Setting]:
    """Every setting: of each run, of each option of each group, of Lightning's Trainer, of sweeps."""
    groups = {group.partition(".")[0] for group in COMPONENTS} | {"trainer"}
    yield from (each for each in _settings_of(RunConfig, "", "run") if each.key.partition(".")[0] not in groups)
    for group, classes in COMPONENTS.items():
        for name, settings in classes.items():
            yield from _settings_of(settings, f"{group}.", f"{group.partition('.')[0]}={name}")
    for name, settings in LOGGERS.items():
        yield from _settings_of(settings, f"logger.{name}.", f"logger={name}")
    yield from _settings_of_trainer()
    yield from _settings_of(LauncherSettings, "launcher.", "python -m train -m")
    for each in _settings_of(SweeperSettings, "hydra.sweeper.", "python -m flatout sweep"):
        key = in_short(f"{each.key}=").rstrip("=")
        yield Setting(key, each.option, each.does, MAY_BE.get(key, each.allowed), each.default)


def _settings_of(kind: type, prefix: str, option: str) -> Iterator[Setting]:
    """The settings of a class, and of the classes of its fields."""
    hints, does, ranges = typing.get_type_hints(kind), _texts_below_fields(kind), _ranges(kind)
    for field in fields(kind):
        key = f"{prefix}{field.name}"
        if isinstance(hints[field.name], type) and is_dataclass(hints[field.name]):
            yield from _settings_of(hints[field.name], f"{key}.", option)
        elif not field.name.startswith("_"):
            allowed = MAY_BE.get(key) or _join_ranges(describe_type(hints[field.name]), ranges.get(key))
            yield Setting(key, option, does.get(field.name, ""), allowed, _as_word(_default(field)))


def _join_ranges(kind: str, allowed: str | None) -> str:
    """What the type allows and what the checks allow, each part once."""
    parts = [part.strip() for part in kind.split(",")]
    known = {*parts, "or null"} if "null" in parts else set(parts)
    added = [part.strip() for part in (allowed or "").split(",")]
    return ", ".join([*parts, *(part for part in added if part and part not in known)])


def _settings_of_trainer() -> Iterator[Setting]:
    """Arguments of Lightning's Trainer, in Lightning's words."""
    ours = yaml.safe_load((conf_folder() / "trainer" / "default.yaml").read_text(encoding="utf-8"))
    does = dict(re.findall(r"^ {12}(\w+): (.+?)(?=^ {12}\w+:|^ {8}Raises|\Z)", _doc_of_trainer(), re.M | re.S))
    for name, argument in list(inspect.signature(L.Trainer.__init__).parameters.items())[1:]:
        default = _as_word(ours.get(name, argument.default))
        about = " ".join(does.get(name, "").split()).partition(". ")[0]
        elsewhere = f"set {REPLACED[name]} instead" if name in REPLACED else ""
        yield Setting(f"trainer.{name}", "trainer", about, elsewhere or "as in Lightning's Trainer", default)


def _doc_of_trainer() -> str:
    return L.Trainer.__init__.__doc__ or ""


@cache
def _texts_below_fields(kind: type) -> dict[str, str]:
    """The text below each field of a class and of the classes it extends."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if not is_dataclass(each):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            name = field.target if isinstance(field, ast.AnnAssign) else None
            if isinstance(name, ast.Name) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[name.id] = " ".join(str(below.value.value).split())
    return found


def _ranges(kind: type) -> dict[str, str]:
    """Allowed values by key, from the modules of a class and of the classes it extends."""
    modules = [sys.modules[each.__module__] for each in reversed(kind.__mro__) if is_dataclass(each)]
    return {key: allowed for module in modules for key, allowed in _ranges_in(module).items()}


@cache
def _ranges_in(module: ModuleType) -> dict[str, str]:
    """`allowed` of each `require(…, key, …, allowed=…)`; a loop over constants counts once for each of them."""
    tree = ast.parse(inspect.getsource(module))
    scopes: list[tuple[ast.AST, dict[str, object]]] = [(tree, {})]
    scopes += [(loop, values) for loop in ast.walk(tree) if isinstance(loop, ast.For) for values in _turns(loop)]
    found: dict[str, str] = {}
    for scope, values in scopes:
        for call in ast.walk(scope):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "require" and len(call.args) > 1:
                named = [_text(word.value, values) for word in call.keywords if word.arg == "allowed"]
                if named and named[0] and (key := _text(call.args[1], values)):
                    found.setdefault(key, named[0])
    return found


def _turns(loop: ast.For) -> Iterator[dict[str, object]]:
    """The names that a loop over constants sets, turn by turn."""
    for item in loop.iter.elts if isinstance(loop.iter, ast.Tuple) else ():
        pairs = zip(_parts(loop.target), _parts(item), strict=False)
        yield {
            name.id: value.value
            for name, value in pairs
            if isinstance(name, ast.Name) and isinstance(value, ast.Constant)
        }


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _text(node: ast.expr, values: dict[str, object]) -> str:
    """The text of a literal or an f-string; empty where a part is unknown."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.FormattedValue):
        return str(values.get(getattr(node.value, "id", ""), ""))
    parts = [_text(part, values) for part in node.values] if isinstance(node, ast.JoinedStr) else []
    return "".join(parts) if all(parts) else ""


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _as_word(value: Any) -> str:
    """A value as typed on the command line."""
    value = value.value if isinstance(value, Enum) else value
    known = {None: "null", True: "true", False: "false", "": "''"}
    is_known = value is None or isinstance(value, bool | str)
    return known.get(value, str(value)) if is_known else repr(value)


def _print_one(setting: Setting) -> None:
    print(f"{setting.key}  ({setting.option})")
    for name, text in _lines_of(setting):
        print(textwrap.fill(text, _width(), initial_indent=f"  {name:9}", subsequent_indent=" " * 11))


def _lines_of(setting: Setting) -> Iterator[tuple[str, str]]:
    yield "does", setting.does
    yield "allowed", setting.allowed
    yield "default", setting.default
    yield "example", setting.example


def _print_list(settings: list[Setting]) -> None:
    option = None
    for each in settings:
        if each.option != option:
            print(f"{'' if option is None else chr(10)}{each.option}")
            option = each.option
        head = f"  {each.key}={each.default}".ljust(_KEY_WIDTH)
        print(textwrap.fill(each.does, _width(), initial_indent=f"{head} ", subsequent_indent=" " * (_KEY_WIDTH + 1)))


def _width() -> int:
    return min(_MOST_WIDTH, max(_LEAST_WIDTH, shutil.get_terminal_size().columns))
