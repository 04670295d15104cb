"""Figures of the house: `python -m tests.house` prints how large the package is and how straight, a
line for each.

They are read off the source. What a figure has to be is tested in `test_structure.py`, where it has
to be something.
"""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections.abc import Iterator

from tests.ruler import measure_tree, repeated_class_names
from tests.test_structure import PACKAGE, chain_below, find_cycle, imports, modules, of_folders

TABLE = "flatout.run.kinds"
"""The table of kinds: the one module that may ask of which kind something is."""
HARD = (
    *("engine/fast_loop", "engine/step", "checkpoints/exact", "checkpoints/position"),
    *("data/batches/plan", "models/encoder/rectangles"),
)
SMALL = 60


def trees() -> Iterator[tuple[str, ast.Module]]:
    for name, path in sorted(modules().items()):
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def asked_for_a_kind() -> list[str]:
    """Where code outside of the table asks for the class of a Config or of a task."""
    found = []
    for name, tree in trees():
        for node in ast.walk(tree):
            if (
                name != TABLE
                and isinstance(node, ast.Call)
                and last_name(node.func) == "isinstance"
            ):
                kinds = [
                    last_name(each) for each in ast.walk(node.args[1]) if isinstance(each, ast.expr)
                ]
                if any(
                    kind.endswith(("Config", "Task")) and kind != "DictConfig" for kind in kinds
                ):
                    found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    return found


def private_names() -> tuple[list[str], list[str]]:
    """Private attributes that no module of the package defines, so those of libraries: all, and
    those put in place.
    """
    own = set[str]()
    used = dict[str, str]()
    replaced = set[str]()
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                used.setdefault(node.attr, f"{name}:{node.lineno}")
                if isinstance(node.ctx, ast.Store):
                    (own if last_name(node.value) == "self" else replaced).add(node.attr)
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and is_private(node.value)
            ):
                used.setdefault(node.value, f"{name}:{node.lineno}")
            if isinstance(node, ast.Call) and last_name(node.func) in ("setattr", "replaced"):
                replaced |= {
                    str(each.value) for each in node.args if isinstance(each, ast.Constant)
                }
    found = [
        f"{place} {attribute}" for attribute, place in sorted(used.items()) if attribute not in own
    ]
    return found, [each for each in found if each.split()[-1] in replaced]


def is_private(name: str) -> bool:
    return name.isidentifier() and name.startswith("_") and not name.startswith("__")


def small_with_one_importer() -> list[str]:
    graph = imports(everywhere=True)
    importers: dict[str, list[str]] = {name: [] for name in graph}
    for other, read in graph.items():
        for name in read:
            importers[name].append(other)
    lines = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()
    }
    small = [name for name in graph if lines[name] < SMALL and len(importers[name]) == 1]
    return [f"{name}, {lines[name]} lines, by {importers[name][0]}" for name in sorted(small)]


def comments_a_hundred(path: str) -> float:
    text = (PACKAGE / f"{path}.py").read_text(encoding="utf-8")
    comments = sum(
        each.type == tokenize.COMMENT
        for each in tokenize.generate_tokens(io.StringIO(text).readline)
    )
    return 100 * comments / len(text.splitlines())


def lengths_of_functions() -> list[int]:
    """Lines of each function behind its docstring."""
    found = []
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                found.append((body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0)
    return sorted(found)


def main() -> None:
    files = list(PACKAGE.parent.rglob("*.py"))
    lengths = lengths_of_functions()
    used, replaced = private_names()
    sizes = (
        f"{statistics.median(lengths):.0f} / {lengths[int(0.95 * len(lengths))]} / {lengths[-1]}"
    )
    rows = {
        "lines of src / files": (
            f"{sum(len(file.read_text('utf-8').splitlines()) for file in files):,} / {len(files)}"
        ),
        "circles among modules / among folders": (
            f"{len(find_cycle(imports(everywhere=True)))} / {len(find_cycle(of_folders()))}"
        ),
        "longest chain of imports": len(max((chain_below(name) for name in modules()), key=len)),
        "functions, lines: median / p95 / longest": sizes,
        "comments a hundred lines": ", ".join(
            f"{path} {comments_a_hundred(path):.1f}" for path in HARD
        ),
        f"modules under {SMALL} lines with one importer": small_with_one_importer(),
        "isinstance of a Config or a task outside of the table": asked_for_a_kind(),
        "private names of libraries": len(used),
        "of these put in another's place": replaced,
    }
    for folder in ("src", "tests"):
        figures = measure_tree(folder)
        rows[f"tokens of {folder}"] = f"{figures.counts['tokens']:,}"
        rows[f"tokens a line of code, {folder}"] = f"{figures.tokens_a_line:.2f}"
        rows[f"comments of 1,000 lines, {folder}"] = f"{figures.per_thousand_lines('comments'):.1f}"
        for figure, places in sorted(figures.places.items()):
            rows[f"{figure}, {folder}"] = len(places)
    rows["classes that share a name"] = len(repeated_class_names("src"))
    for what, value in rows.items():
        places = value if isinstance(value, list) else []
        print(f"{what}: {len(places) if isinstance(value, list) else value}")
        for place in places:
            print(f"    {place}")


if __name__ == "__main__":
    main()
