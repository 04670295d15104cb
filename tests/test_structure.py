"""The package's structure, read off its import statements: few loose modules, no cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("structure")  # one process reads the package once
PACKAGE = Path(__file__).parents[1] / "src" / "flatout"
MOST_LOOSE_MODULES = 7
LONGEST_CHAIN = 12
READ_THE_SETTINGS = ("flatout.run.", "flatout.cli.")
"""The packages whose modules read `RunConfig`; what lies below gets what it needs."""
AT_THE_EDGE = {"flatout", "flatout.config"}
"""Where `RunConfig` is defined and offered; the command line composes it."""

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
        names = []
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            names.append(submodule if submodule in modules() else str(node.module))
    else:
        return
    yield from (name for name in names if name in modules())


def when_imported(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: none of functions, none for a type
    checker.
    """
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if is_for_types or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield child
        yield from when_imported(child)


@cache
def imports(*, everywhere: bool) -> Graph:
    """Which modules each module imports: `everywhere` in its file, or just when it is imported
    itself.
    """
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
        found = next(
            filter(None, (visit(other, [*above, name]) for other in sorted(graph[name]))), []
        )
        finished.add(name)
        return found

    return next(filter(None, (visit(name, []) for name in sorted(graph))), [])


def test_few_modules_lie_loose_in_the_package():
    loose = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(loose) <= MOST_LOOSE_MODULES, loose


def test_no_modules_import_each_other_in_a_circle():
    assert find_cycle(imports(everywhere=True)) == []


def of_folders() -> Graph:
    """Which folders of the package read from which; modules that lie loose are none."""
    found: dict[str, set[str]] = {path.name: set() for path in PACKAGE.iterdir() if path.is_dir()}
    for name, read in imports(everywhere=True).items():
        folders = {other.split(".")[1] for other in [name, *read] if "." in other}
        if (own := name.partition(".")[2].partition(".")[0]) in found:
            found[own] |= (folders & set(found)) - {own}
    return {folder: frozenset(read) for folder, read in found.items()}


def test_no_folders_import_each_other_in_a_circle():
    assert find_cycle(of_folders()) == []
    assert "data" in of_folders()["models"]


def chain_below(name: str) -> list[str]:
    """The longest chain of imports that begins with a module."""
    graph = imports(everywhere=False)

    @cache
    def below(name: str) -> list[str]:
        return [name, *max((below(other) for other in graph[name]), key=len, default=[])]

    return below(name)


def test_no_chain_of_imports_is_longer_than_twelve_modules():
    longest = max((chain_below(name) for name in modules()), key=len)
    assert len(longest) <= LONGEST_CHAIN, " -> ".join(longest)


HANDED_ON = ("RunConfig", "RunContext", "Settings", "OurParts", "OwnParts", "Run", "Training")
"""Records that a stage of a run gets from earlier ones."""


def chain_root(node: ast.AST) -> str:
    """`run.parts.task` begins with `run`; empty where an expression is no chain of a name."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def given_records(function: ast.FunctionDef, owner: str) -> set[str]:
    """Names of the parameters that hold such a record; `owner`: the class of a method."""
    names = {"self"} if owner in ("OurRunParts", "OwnRunParts") else set()
    for argument in [*function.args.args, *function.args.kwonlyargs]:
        if argument.annotation is not None and ast.unparse(argument.annotation) in HANDED_ON:
            names.add(argument.arg)
    return names


def changes_of_records(tree: ast.AST) -> Iterator[str]:
    """Assignments into a record that a function is given, or into a part that it takes of one."""
    for parent in ast.walk(tree):
        for function in ast.iter_child_nodes(parent):
            if not isinstance(function, ast.FunctionDef):
                continue
            records = given_records(
                function, parent.name if isinstance(parent, ast.ClassDef) else ""
            )
            for node in ast.walk(function):
                if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                    continue
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    is_whole = isinstance(target, ast.Name)
                    if not is_whole and chain_root(target) in records:
                        yield f"{function.name}: {ast.unparse(target)}"
                    # `task = ours.task` is a part of the record
                    if is_whole and node.value is not None and chain_root(node.value) in records:
                        records.add(chain_root(target))


def test_no_stage_of_a_run_changes_what_an_earlier_one_made():
    changes = []
    for path in (PACKAGE / "run").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        changes += [f"{path.name}: {change}" for change in changes_of_records(tree)]
    assert changes == []
    planted = "def stage(run: Run, rate: float):\n    task = run.parts.task\n    task.optim = rate"
    assert list(changes_of_records(ast.parse(planted))) == ["stage: task.optim"]


def test_what_stages_hand_on_is_frozen():
    from flatout.run import context

    for name in ("RunContext", "Settings", "OurParts", "Run", "Training", "RunAnswers"):
        assert vars(context)[name].__dataclass_params__.frozen, name


def has_name(path: Path, name: str) -> bool:
    """Whether a module uses a name, other than in a text or a comment."""
    text = path.read_text(encoding="utf-8")
    if name not in text:  # parsing takes much longer
        return False
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(ast.parse(text)))


def test_nothing_below_the_run_reads_its_settings():
    readers = {name for name, path in modules().items() if has_name(path, "RunConfig")}
    assert "flatout.run.length" in readers
    others = readers - AT_THE_EDGE
    assert [name for name in sorted(others) if not name.startswith(READ_THE_SETTINGS)] == []


def test_five_modules_beside_the_table_of_kinds_ask_which_settings_or_task_they_were_given():
    from tests.house import asked_for_a_kind  # it reads this module

    asking = {place.partition(":")[0].removeprefix("flatout.") for place in asked_for_a_kind()}
    assert asking <= {
        "checkpoints.exact",
        "config",
        "perf.scale_batch",
        "run.launch",
        "tasks.networks",
    }


def test_a_cycle_is_found_and_a_diamond_is_none():
    graph = {
        "a": frozenset("bc"),
        "b": frozenset("d"),
        "c": frozenset("d"),
        "d": frozenset(),
    }
    assert find_cycle(graph) == []
    assert find_cycle({**graph, "d": frozenset("a")}) == ["a", "b", "d", "a"]
