"""The site's own parts: drawings, generated pages, navigation."""

from __future__ import annotations

import importlib
import re

import pytest
import yaml
from docs.pictures import drawings

from flatout.callbacks.gpu import CURVES
from flatout.tasks.metrics import BEST_MODE
from tests.docs.blocks import ROOT

MOST_BYTES = 300_000
FEATURES = (
    *(
        "answers",
        "attached",
        "audit",
        "bit_strings",
        "callbacks",
        "data",
        "gpu",
        "ladder",
        "lightning",
    ),
    *(
        "many_devices",
        "many_machines",
        "own_parts",
        "resume",
        "reuse",
        "sequences",
        "speed",
        "sweeps",
        "tags",
    ),
    *(
        "texts",
        "transformers",
        "tune",
        "verdict",
        "verdict_anywhere",
        "versions",
        "which_encoder",
        "windows",
    ),
)
"""Pages that are built alike: what it is for, one command, what it prints, what it costs, when
not."""


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_is_what_its_script_draws(name):
    kept = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
    assert kept == drawings.DRAWINGS[name](), "python -m docs.pictures.drawings"


def test_pictures_are_small_and_fetch_nothing():
    for path in (ROOT / "docs" / "pictures").iterdir():
        if path.suffix in (".svg", ".png"):
            assert path.stat().st_size <= MOST_BYTES, path.name
        if path.suffix == ".svg":
            found = re.findall(r"https?://[^\"') ]+", path.read_text(encoding="utf-8"))
            assert set(found) <= {"http://www.w3.org/2000/svg"}, path.name


def test_every_page_has_a_place_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"(\w+)\.md$", str(text), re.MULTILINE))
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= listed
    assert yaml.safe_load(text)["theme"]["font"] is False


def test_the_reading_order_names_files_that_are_there():
    page = (ROOT / "docs" / "reading_order.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| `([\w/]+\.py)` \| \d+ \|", page, re.MULTILINE)
    assert len(files) == len(set(files)) > 50
    assert [file for file in files if not (ROOT / "src" / "flatout" / file).is_file()] == []


def test_recordings_and_bit_strings_are_exported_with_the_option_that_they_need():
    page = (ROOT / "docs" / "answers.md").read_text(encoding="utf-8")
    forms = [line for line in page.splitlines() if line.startswith("|") and "`export" in line]
    for kind in ("recordings", "bit strings"):
        (form,) = [line for line in forms if kind in line]
        assert "`export RUN --onnx --out FOLDER`" in form


def test_every_metric_and_every_curve_is_explained_on_one_page():
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in (*BEST_MODE, *CURVES) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", FEATURES)
def test_a_page_of_a_feature_has_a_command_what_it_prints_what_it_costs_and_when_not(page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert [
        head for head in ("What it prints", "What it costs", "When not") if heads.count(head) != 1
    ] == []
    assert "```" in text.split("## What it prints")[0], "one command first"


@pytest.mark.parametrize("package", ["", ".data", ".tasks", ".callbacks", ".bits"])
def test_every_public_name_is_on_the_page_of_the_python_api(package):
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: [\w.]+\.(\w+)$", page, re.MULTILINE))
    assert set(importlib.import_module(f"flatout{package}").__all__) - listed == set()


def test_generated_pages_name_every_setting_and_every_verb():
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    from docs.hooks.generated_pages import commands_page, curves_page, settings_page

    from flatout.__main__ import VERBS
    from flatout.callbacks.gpu import CURVES
    from flatout.cli.settings import all_settings

    settings = settings_page()
    commands = commands_page()
    curves = curves_page()
    assert [each.key for each in all_settings() if f"| `{each.key}` |" not in settings] == []
    assert [verb for verb in VERBS if f"\n## {verb}\n" not in commands] == []
    assert [name for name in CURVES if f"| `{name}` |" not in curves] == []
