"""What tests replace in the package is still there: also where a test runs in few slices of soak.

A constant that moves to another module leaves its tests behind. The default suite says so at once;
the test itself, marked as soak, may not run for many commits.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent


def imported_objects(tree: ast.AST) -> dict[str, object]:
    """What a test module imports from the package, by the name it has there."""
    objects = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("flatout"):
            continue
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")
            objects[alias.asname or alias.name] = getattr(module, alias.name)
    return objects


def replaced_names(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, object and attribute of each `monkeypatch.setattr(object, "attribute", …)`.

    Also where the attributes are the keys of a dictionary that is walked:
    `for name, value in {"attribute": 1}.items()`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            for key in keys_walked(node):
                for call in ast.walk(node):
                    if target := replaced_object(call):
                        yield node.lineno, target, key
        elif target := replaced_object(node):
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield node.lineno, target, name.value


def keys_walked(loop: ast.For) -> list[str]:
    """The keys of the dictionary that stands in the head of a loop; none for other loops."""
    head = loop.iter
    if not isinstance(head, ast.Call) or not isinstance(head.func, ast.Attribute):
        return []
    if not isinstance(head.func.value, ast.Dict):
        return []
    return [key.value for key in head.func.value.keys if isinstance(key, ast.Constant)]


def replaced_object(node: ast.AST) -> str:
    """The object whose attribute a call of `setattr` replaces, as `module.Class`; else empty."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    if node.func.attr != "setattr":
        return ""
    is_named = all(
        isinstance(part, ast.Name | ast.Attribute | ast.Load) for part in ast.walk(node.args[0])
    )
    return ast.unparse(node.args[0]) if is_named else ""


def missing_names(source: str) -> tuple[int, list[str]]:
    """How many names of the package a test module replaces, and those that are not there."""
    tree = ast.parse(source)
    objects = imported_objects(tree)
    count = 0
    missing = []
    for line, target, name in replaced_names(tree):
        first, *parts = target.split(".")
        if first not in objects:
            continue
        count += 1
        found = objects[first]
        for part in [*parts, name]:
            if not hasattr(found, part):
                missing.append(f"line {line}: {target}.{name}")
                break
            found = getattr(found, part)
    return count, missing


def test_each_name_of_the_package_that_a_test_replaces_is_there():
    total = 0
    stale = {}
    for path in sorted(TESTS.rglob("*.py")):
        count, missing = missing_names(path.read_text(encoding="utf-8"))
        total += count
        if missing:
            stale[str(path.relative_to(TESTS))] = missing
    assert not stale
    assert total > 100


def test_a_name_that_moved_away_is_found():
    source = """
from flatout.perf.verdict import own_tries, own_ways

def test_one(monkeypatch):
    monkeypatch.setattr(own_ways, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(own_ways.Evidence, "no_such_name", 0.0)
    for name, value in {"LEAST_GAIN": 1}.items():
        monkeypatch.setattr(own_tries, name, value)
"""
    count, missing = missing_names(source)
    assert count == 3
    assert sorted(missing) == [
        "line 6: own_ways.Evidence.no_such_name",
        "line 7: own_tries.LEAST_GAIN",
    ]
