"""What README and the reference pages say is so."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks import BENCHES

from flatout.report.summary import empty_summary

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_the_readme_is_short_and_its_links_lead_somewhere():
    assert len(README.splitlines()) <= 180
    for place in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / place).exists(), place


def test_the_measured_rows_are_those_that_the_chart_draws():
    written = re.findall(
        r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \| `(\w+)` (\w+) \|$", README, re.MULTILINE
    )
    published = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))[
        "rows"
    ]
    assert len(written) == len(published) <= 10
    for row, found in zip(written, published, strict=True):
        assert row[:3] + row[4:] == tuple(
            found[name] for name in ("claim", "ours", "other", "bench", "commit")
        )
        assert row[3] in (f"{found['ratio']:g}×", f"**{found['ratio']:g}×**", "**loss**")
        assert ("**" in row[3]) == (found["ratio"] < 1)


def test_every_key_of_the_summary_is_explained():
    listed = set(re.findall(r"`([\w.]+)`", page("summary")))
    for key, value in empty_summary().items():
        explained = {key}
        if isinstance(value, dict):
            explained |= {f"{key}.{name}" for name in value}
        assert explained & listed, key


def test_every_file_of_the_tree_exists():
    tree = page("design").split("## The tree")[1]
    for folder, names in re.findall(r"^  (\w+)/ +([\w (),·]+?)(?::|$)", tree, re.MULTILINE):
        for name in re.findall(r"\w+(?= ·|$| \()", names):
            place = ROOT / "src" / "flatout" / folder / name
            assert place.is_dir() or place.with_suffix(".py").is_file(), f"{folder}/{name}"


def test_every_bench_is_named():
    for name in BENCHES:
        assert f"bench {name}" in page("benchmarks")


def test_the_project_names_no_machine_of_its_makers():
    for path in [*ROOT.glob("*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("conf/**/*.yaml")]:
        assert not re.search(r"/(?:work|root|home)/", path.read_text(encoding="utf-8")), path


def test_bits_are_promised_on_a_gpu_only_with_deterministic_kernels():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    promising = [path for path in pages if "bit for bit" in path.read_text(encoding="utf-8")]
    assert ROOT / "docs" / "resume.md" in promising
    assert [
        path.name
        for path in promising
        if "trainer.deterministic" not in path.read_text(encoding="utf-8")
    ] == []
