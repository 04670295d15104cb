"""What the wheel and the source archive hold: all that they need, and nothing else.

hatchling lists the files that it would pack; nothing is built. `.ci/run` builds both.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
KINDS_OF_FILES = {".py", ".toml", ".json", ".txt", ".md", ".yaml", ".yml", ".jinja", ".mplstyle"}
"""Sources, words, templates of pages, the style of charts, and the project that is copied."""
AT_THE_TOP = {
    "AGENTS.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "hatch_build.py",
    "mkdocs.yml",
}
"""Beside `pyproject.toml`, which every source archive has."""


def packed(builder: type[WheelBuilder] | type[SdistBuilder]) -> set[str]:
    found = builder(str(ROOT)).recurse_included_files()
    return {each.distribution_path for each in found}


def files_below(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if "__pycache__" not in path.parts}


def test_the_wheel_has_every_source_file_and_nothing_else():
    files = packed(WheelBuilder)
    assert files == files_below(ROOT / "src")
    assert {Path(name).suffix for name in files} <= KINDS_OF_FILES
    tops = {name.partition("/")[0] for name in files}
    assert tops == {"flatout", "hydra_plugins", "train.py"}
    assert "flatout/template/.github/workflows/test.yml" in files
    # `hatch_build.py` adds the settings, which lie beside the sources
    assert 'build_data["force_include"]["conf"] = "flatout/conf"' in (
        ROOT / "hatch_build.py"
    ).read_text(encoding="utf-8")


def test_the_source_archive_has_what_a_checkout_has_and_no_results():
    files = packed(SdistBuilder)
    folders = {name.partition("/")[0] for name in files if "/" in name}
    assert folders == {"src", "conf", "tests", "docs", "examples", "benchmarks"}
    assert {name for name in files if "/" not in name} == AT_THE_TOP
    assert {f"conf/{name}" for name in files_below(ROOT / "conf")} <= files
    left = [name for name in files if re.search(r"\.pyc$|(^|/)(outputs|site|dist)/", name)]
    assert left == []


def test_a_release_is_built_checked_and_published_without_a_password():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    assert "twine check --strict" in commands
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write", "attestations": "write"}
    assert publish["environment"]["name"] == "pypi"
    assert "secrets." not in str(workflow)
    # no action of anybody but GitHub and the index itself
    assert all(re.match(r"(actions|pypa)/", step["uses"]) for step in steps if "uses" in step)


def test_what_a_part_alone_needs_is_an_extra_of_a_name_that_a_message_gives():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    named = set()
    for path in (ROOT / "src" / "flatout").rglob("*.py"):
        named |= set(re.findall(r"flatout\[(\w+)\]", path.read_text(encoding="utf-8")))
    assert named <= set(extras)


def imported_at_once(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Packages that a module imports when it is imported; not those for the type checker."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).partition(".")[0]
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            yield from () if is_for_types else imported_at_once(node.body)


def test_what_an_extra_installs_is_imported_where_it_is_used_and_not_before():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    served = [name for extra in set(extras) - {"dev", "docs"} for name in extras[extra]]
    packages = {re.split(r"[\[<>=]", name)[0] for name in served} | {"mlflow"}
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        imported = set(imported_at_once(ast.parse(path.read_text(encoding="utf-8")).body))
        found |= {
            (path.relative_to(ROOT / "src/flatout").as_posix(), name)
            for name in imported & packages
        }
    assert found == {
        # programs of a ladder, which run in processes of their own
        ("ladder/usual/battery.py", "pandas"),
        ("ladder/usual/bloom.py", "pandas"),
        # there is no Trainer of transformers without it
        ("perf/verdict/transformers_races.py", "accelerate"),
    }
