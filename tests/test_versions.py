"""Every file that names releases names the same ones: `pyproject.toml` has them, others repeat it.

`requires-python = ">=3.11,<3.15"` is "Python 3.11 to 3.14" on a page, and four rows of a workflow.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
PYTHONS = [
    f"3.{minor}" for minor in range(30) if f"3.{minor}" in SpecifierSet(PROJECT["requires-python"])
]
TAKEN = re.findall(
    r"^\| ([\w-]+)(?:, [^|]+)? \| ([\d.]+)(?: to ([\d.]+)|, from ([\d.]+) on) \| ([\d.]+)",
    (ROOT / "docs/versions.md").read_text(encoding="utf-8").split("## What is taken")[1],
    re.MULTILINE,
)
"""Package, first release, last one or the earliest of the first, and what it was tested with."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def toml_of(name: str) -> dict:
    return tomllib.loads(text_of(name))


@pytest.mark.parametrize(
    "page", ["README.md", "AGENTS.md", "SECURITY.md", "docs/start.md", "docs/versions.md"]
)
def test_a_page_names_the_pythons_that_pip_takes(page):
    named = re.findall(r"(?:Python|Python \|) (3\.\d+) to (3\.\d+)", text_of(page))
    assert named
    assert set(named) == {(PYTHONS[0], PYTHONS[-1])}


def test_the_index_and_the_tools_know_the_same_pythons():
    classifier = "Programming Language :: Python :: "
    named = [name.removeprefix(classifier) for name in PROJECT["classifiers"] if classifier in name]
    assert named == PYTHONS
    assert PYPROJECT["tool"]["mypy"]["python_version"] == PYTHONS[0]
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + PYTHONS[0].replace(".", "")
    lock = SpecifierSet(
        re.search(r'^requires-python = "(.+)"', text_of("uv.lock"), re.MULTILINE)[1]
    )
    assert lock == SpecifierSet(PROJECT["requires-python"])


def test_a_release_is_tried_on_every_python_and_a_new_project_takes_the_first():
    release = yaml.safe_load(text_of(".github/workflows/release.yml"))
    assert release["jobs"]["try"]["strategy"]["matrix"]["python"] == PYTHONS
    template = "src/flatout/template"
    for folder in (template, "examples/plugin"):
        asked = toml_of(f"{folder}/pyproject.toml")["project"]["requires-python"]
        assert asked == f">={PYTHONS[0]}"
    for name in (".github/workflows/release.yml", f"{template}/.github/workflows/test.yml"):
        used = re.findall(r'python-version: "(.+)"', text_of(name))
        assert set(used) <= set(PYTHONS)


def test_the_page_of_versions_names_the_bounds_of_each_package():
    named = {package for package, *_ in TAKEN}
    assert named == {
        "Python",
        "torch",
        "lightning",
        "pytorch_lightning",
        "transformers",
        "hydra-core",
    }
    everything = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    bounds = {each.name: each.specifier for each in map(Requirement, everything)}
    bounds["Python"] = SpecifierSet(PROJECT["requires-python"])
    for package, first, last, earliest, _ in TAKEN:
        begin, minor = (last or first).split(".")
        end = f"{begin}.{int(minor) + 1}"
        assert bounds[package] == SpecifierSet(f">={earliest or first},<{end}"), package


def test_the_page_of_versions_names_the_releases_that_are_tested():
    pins = {}
    for line in text_of("constraints.txt").splitlines():
        if line[0] != "#":
            name, _, version = line.partition(";")[0].strip().partition("==")
            pins[name.replace("-", "_")] = version
    for package, *_, tested in TAKEN:
        if package != "Python":
            assert f"{pins[package.replace('-', '_')]}.".startswith(f"{tested}."), package


def test_the_version_that_gets_fixes_is_the_one_that_is_built():
    minor = PROJECT["version"].rpartition(".")[0]
    rows = re.findall(r"^\| (\d+\.\d+) \| (yes|no) \|$", text_of("SECURITY.md"), re.MULTILINE)
    assert [version for version, is_fixed in rows if is_fixed == "yes"] == [minor]
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == PROJECT["version"]
    assert f'"flatout": "{PROJECT["version"]}"' in text_of("docs/versions.md")
