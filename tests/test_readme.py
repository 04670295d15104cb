"""What the README says is so."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import BENCHES

from flatout.callbacks.columns import COLUMNS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_curve_table_lists_every_curve():
    listed = dict(re.findall(r"^\| `((?:train|speed|time|gpu|host)/\w+)` \| (.+?) \|$", README, re.MULTILINE))
    assert listed == COLUMNS


def test_every_file_of_the_tree_exists():
    tree = README.split("## The tree")[1]
    for folder, names in re.findall(r"^  (\w+)/ +([\w (),·]+?)(?::|$)", tree, re.MULTILINE):
        for name in re.findall(r"\w+(?= ·|$| \()", names):
            place = ROOT / "src" / "flatout" / folder / name
            assert place.is_dir() or place.with_suffix(".py").is_file(), f"{folder}/{name}"


def test_every_bench_is_named():
    for name in BENCHES:
        assert f"bench {name}" in README


def test_the_project_names_no_machine_of_its_makers():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("conf/**/*.yaml")]:
        assert not re.search(r"/(?:work|root|home)/", path.read_text(encoding="utf-8")), path
