"""The package's structure, read off its import statements: few loose modules, no cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "flatout"
MOST_LOOSE_MODULES = 6
CYCLES_WITH_A_REASON = {
    ("flatout.engine.passes", "flatout.engine.fast_loop"): "names the type of its owner",
    ("flatout.sweep.board", "flatout.sweep.trials"): "names the type of what it shows",
}
"""Imports that close a cycle, each only for a type checker."""

Graph = Mapping[str, frozenset[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Each module of the package, and its file."""
    return {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imported(node: ast.AST) -> Iterator[str]:
    """The modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in modules() else str(node.module) for name in names]
    else:
        return
    yield from (name for name in names if name in modules())


def when_imported(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: none of functions, none for a type checker."""
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if is_for_types or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield child
        yield from when_imported(child)


@cache
def imports(*, everywhere: bool) -> Graph:
    """Which modules each module imports: `everywhere` in its file, or just when it is imported itself."""
    graph = {}
    for name, path in modules().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = ast.walk(tree) if everywhere else when_imported(tree)
        graph[name] = frozenset(other for node in nodes for other in imported(node)) - {name}
    return graph


def find_cycle(graph: Graph) -> list[str]:
    """A cycle of imports; empty where there is none."""
    finished: set[str] = set()

    def visit(name: str, above: list[str]) -> list[str]:
        if name in above:
            return [*above[above.index(name) :], name]
        if name in finished:
            return []
        found = next(filter(None, (visit(other, [*above, name]) for other in sorted(graph[name]))), [])
        finished.add(name)
        return found

    return next(filter(None, (visit(name, []) for name in sorted(graph))), [])


def test_few_modules_lie_loose_in_the_package():
    loose = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(loose) <= MOST_LOOSE_MODULES, loose


def test_no_modules_import_each_other_in_a_circle():
    graph = imports(everywhere=True)
    without = {
        name: frozenset(other for other in others if (name, other) not in CYCLES_WITH_A_REASON)
        for name, others in graph.items()
    }
    assert find_cycle(without) == []


def test_imports_that_may_close_a_cycle_still_exist():
    graph = imports(everywhere=True)
    assert [(name, other) for name, other in CYCLES_WITH_A_REASON if other not in graph.get(name, ())] == []


def test_a_cycle_is_found_and_a_diamond_is_none():
    graph = {"a": frozenset("bc"), "b": frozenset("d"), "c": frozenset("d"), "d": frozenset()}
    assert find_cycle(graph) == []
    assert find_cycle({**graph, "d": frozenset("a")}) == ["a", "b", "d", "a"]
