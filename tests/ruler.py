"""How airily a tree is written: tokens on a line, packed statements, nested expressions, comments.

`measure_tree("src")` reads each Python file of a folder and adds up its figures; `python -m
tests.house` prints them. `tests/test_ruler.py` holds them below their ceilings. A place that counts
is kept with its file and line, so that a failing test says where to look.

Tokens are Python's own, without comments, docstrings and layout. A line of code holds at least one.
An f-string is one token, as it is for Python 3.11: later releases split it.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LONGEST_LINE = 100
MANY_PARAMETERS = 6
"""From so many parameters on, `self` not counted, a function is wide."""

VAGUE_NAMES = frozenset(("each", "found", "what", "place", "own", "kept", "given", "known"))
"""Names that say nothing. They stay where all their uses lie within three lines."""

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# names that Python 3.11 does not have; none of them is there
_FSTRING_START = getattr(tokenize, "FSTRING_START", None)
_FSTRING_END = getattr(tokenize, "FSTRING_END", None)
_SIMPLE_STATEMENTS = (
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.Return,
    ast.Expr,
    ast.Assert,
    ast.Raise,
)
_NESTING = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp)


@dataclass
class TreeFigures:
    """Counts of a tree, and the places of what should not be there."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add_place(self, figure: str, path: Path, node_line: int) -> None:
        self.counts[figure] += 1
        self.places.setdefault(figure, []).append(f"{path}:{node_line}")

    @property
    def tokens_a_line(self) -> float:
        return self.counts["tokens"] / max(self.counts["code lines"], 1)

    def per_thousand_lines(self, figure: str) -> float:
        return 1000 * self.counts[figure] / max(self.counts["lines"], 1)


def measure_tree(folder: str | Path) -> TreeFigures:
    """The figures of all Python files below a folder."""
    figures = TreeFigures()
    for path in sorted(Path(folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))  # once: a walk takes longer than all counting
        _count_lines(path, text, nodes, figures)
        _count_statements(path, nodes, figures)
        _count_functions(path, nodes, figures)
        _count_vague_names(path, nodes, figures)
    return figures


def repeated_class_names(folder: str | Path) -> dict[str, list[str]]:
    """Names that more than one class of a tree has, with the file and line of each."""
    places: dict[str, list[str]] = {}
    for path in sorted(Path(folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


def _count_lines(path: Path, text: str, nodes: list[ast.AST], figures: TreeFigures) -> None:
    lines = text.splitlines()
    in_docstrings = set(_docstring_lines(nodes))
    code_lines: set[int] = set()
    for token in _tokens_of(text):
        first_line = token.start[0]
        if token.type == tokenize.COMMENT:
            figures.counts["comments"] += lines[first_line - 1].lstrip().startswith("#")
        elif token.type not in _LAYOUT and first_line not in in_docstrings:
            figures.counts["tokens"] += 1
            code_lines.update(range(first_line, token.end[0] + 1))
    figures.counts["lines"] += len(lines)
    figures.counts["code lines"] += len(code_lines)
    for number, line in enumerate(lines, start=1):
        if len(line) > LONGEST_LINE:
            figures.add_place("long lines", path, number)


def _tokens_of(text: str) -> Iterator[tokenize.TokenInfo]:
    """Python's tokens, but each f-string as one of type STRING.

    `f"{a} of {b}"` is one token for Python 3.11 and nine for 3.12, among them the braces.
    """
    depth = 0  # f-strings stand within f-strings
    start = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == _FSTRING_START:
            start = token.start if depth == 0 else start
            depth += 1
        elif token.type == _FSTRING_END:
            depth -= 1
            if depth == 0:
                yield token._replace(type=tokenize.STRING, start=start)
        elif depth == 0:
            yield token


def _docstring_lines(nodes: list[ast.AST]) -> Iterator[int]:
    for node in nodes:
        is_documented = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        if is_documented and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            yield from range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)


def _count_statements(path: Path, nodes: list[ast.AST], figures: TreeFigures) -> None:
    tests = (node.test for node in nodes if isinstance(node, ast.If | ast.While))
    in_tests = {id(inner) for test in tests for inner in ast.walk(test)}
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_packed(node):
            figures.add_place("packed", path, node.lineno)
        if isinstance(node, _SIMPLE_STATEMENTS) and _nesting_depth(node) >= 2:
            figures.add_place("nested", path, node.lineno)
        if isinstance(node, ast.NamedExpr) and id(node) not in in_tests:
            figures.add_place("walrus", path, node.lineno)


def _is_packed(node: ast.Assign) -> bool:
    """Whether a tuple is assigned whose values have nothing to do with each other.

    `a, b = b, a` and `low, high = floor(x), floor(y)` are not packed: a swap, and two values of one
    kind. `count, name = 0, "x"` is, and so is everything from three values on, and a chain `a = b =
    c`.
    """
    if len(node.targets) >= 3:
        return True
    target = node.targets[0]
    value = node.value
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    if len(target.elts) != len(value.elts):
        return False
    read = {ast.dump(element) for element in value.elts}
    written = {ast.dump(element).replace("Store", "Load") for element in target.elts}
    if read & written:
        return False
    kinds = {_kind_of_value(element) for element in value.elts}
    return len(kinds) > 1 or len(target.elts) >= 3


def _kind_of_value(value: ast.expr) -> str:
    if isinstance(value, ast.Call):
        return f"call of {ast.dump(value.func)}"
    if isinstance(value, ast.Constant):
        return f"constant {type(value.value).__name__}"
    return type(value).__name__


def _nesting_depth(node: ast.AST) -> int:
    """How many comprehensions and conditional expressions stand within each other."""
    deepest = max((_nesting_depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return deepest + isinstance(node, _NESTING)


def _count_functions(path: Path, nodes: list[ast.AST], figures: TreeFigures) -> None:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            named = [each for each in parameters if each.arg not in ("self", "cls")]
            if len(named) >= MANY_PARAMETERS:
                figures.add_place("wide functions", path, node.lineno)
            for parameter in parameters:
                annotation = parameter.annotation
                if isinstance(annotation, ast.Name) and annotation.id == "Any":
                    figures.add_place("Any parameters", path, node.lineno)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "getattr" and len(node.args) == 3:
                figures.add_place("getattr with a default", path, node.lineno)
            if node.func.id == "vars":
                figures.add_place("vars", path, node.lineno)


def _count_vague_names(path: Path, nodes: list[ast.AST], figures: TreeFigures) -> None:
    """Count variables and parameters of such a name; the variable of a comprehension is none."""
    begins = set[int]()  # a function within a function is walked twice
    for function in nodes:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines: dict[str, list[int]] = {}
        bound = set[str]()
        of_comprehensions = set[int]()
        for node in ast.walk(function):
            if isinstance(node, ast.comprehension):
                of_comprehensions |= {id(target) for target in ast.walk(node.target)}
            if isinstance(node, ast.arg) and node.arg in VAGUE_NAMES:
                bound.add(node.arg)
                lines.setdefault(node.arg, []).append(node.lineno)
            if isinstance(node, ast.Name) and node.id in VAGUE_NAMES:
                lines.setdefault(node.id, []).append(node.lineno)
                if isinstance(node.ctx, ast.Store) and id(node) not in of_comprehensions:
                    bound.add(node.id)
        for name in sorted(bound):
            first_line = min(lines[name])
            if max(lines[name]) - first_line >= 3 and first_line not in begins:
                begins.add(first_line)
                figures.add_place("vague names", path, first_line)
