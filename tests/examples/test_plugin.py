"""The example of a package that adds parts: they are found by their names, and imported then."""

from __future__ import annotations

import csv
import importlib
import json
import random
import shutil
import sys
import tomllib

import pytest

from flatout import UserError
from flatout.callbacks.loggers import chosen_loggers
from flatout.models import model_class
from flatout.plugins.installed import PartGroup, all_parts, find_part, names_of_parts
from tests.composed import run_train
from tests.run_files import read_csv
from tests.verbs import verb

from .test_examples import EXAMPLES

PACKAGE = EXAMPLES / "plugin"
WORDS = {1: "awful broken", 2: "poor thin", 3: "fair plain", 4: "good solid", 5: "superb lovely"}


def install(folder, monkeypatch, name="more_parts", points=None):
    """Let Python find a package and what it offers, as if pip had installed it."""
    settings = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    lines = []
    for group, parts in (points or settings["entry-points"]).items():
        lines += [f"[{group}]", *(f"{part} = {path}" for part, path in parts.items())]
    described = folder / f"{name}-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    shutil.copytree(PACKAGE / "more_parts", tmp_path / "site" / "more_parts")
    install(tmp_path / "site", monkeypatch)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "more_parts"]:
        del sys.modules[name]


def test_parts_of_a_package_train_by_their_names_and_answer(installed, tmp_path, monkeypatch):
    assert "more_parts" not in sys.modules
    with (tmp_path / "reviews.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerow(["review", "stars"])
        for number in range(150):
            stars = 1 + number % 5
            word = random.choice(WORDS[stars].split())
            rows.writerow([f"{word} and {word} thing number {number}", stars])
    words = [
        f"data.source={tmp_path}/reviews.csv",
        "data=stars",
        "task=stars",
        "task.bend=0.25",
        "model=average",
        "model.embedding=8",
        "logger=json_lines",
        "trainer.max_epochs=2",
        "data.batch_size=50",
        "monitor.progress=false",
        "monitor.verdict=false",
        "monitor.rival=false",
        f"hydra.run.dir={tmp_path}/run",
    ]
    assert run_train(words, monkeypatch) == 0
    points = [json.loads(line) for line in (tmp_path / "run/curves.jsonl").read_text().splitlines()]
    assert any("val/mae" in point for point in points)
    model = json.loads((tmp_path / "run/model/config.json").read_text())["model"]
    assert model["kind"] == "average"
    answers = tmp_path / "answers.csv"
    assert verb("predict", tmp_path / "run", tmp_path / "reviews.csv", "--out", answers) == 0
    assert len(read_csv(answers)) == 150


def test_a_name_that_no_package_offers_is_refused_with_those_that_are(installed):
    assert names_of_parts(PartGroup.models) == ["average"]
    with pytest.raises(UserError, match=r"no model 'averag' \(bilstm, .*, average\)"):
        model_class("averag", "model")
    with pytest.raises(UserError, match=r"logger: 'json' .*csv, .*json_lines, trackio"):
        chosen_loggers("json")
    assert "more_parts" not in sys.modules


def test_a_package_that_cannot_be_imported_is_named_and_two_of_one_name_are_refused(
    tmp_path, monkeypatch
):
    broken = {"flatout.kinds": {"stars": "missing_package.stars:STARS"}}
    install(tmp_path / "one", monkeypatch, "broken", broken)
    with pytest.raises(UserError, match=r"flatout\.kinds\.stars: missing_package\.stars:STARS of"):
        list(all_parts(PartGroup.kinds))
    install(tmp_path / "two", monkeypatch, "another", broken)
    with pytest.raises(UserError, match=r"'stars' is offered by several packages \(another, bro"):
        find_part(PartGroup.kinds, "stars")
