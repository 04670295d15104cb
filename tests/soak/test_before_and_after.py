"""The files of the pages for people who come from elsewhere run as they are written."""

from __future__ import annotations

import importlib.util
import re

import pytest

from flatout.cli.new import make_project
from tests.cli.test_new import begin_line, ended
from tests.docs.blocks import blocks
from tests.docs.test_blocks import write_tables

PAGES = {
    "from_lightning_cli.md": "jsonargparse",
    "from_lightning_hydra_template.md": "hydra",
    "from_transformers_trainer.md": "accelerate",
}
"""Each page, and the package that its first file needs."""
SAYS = {
    "from_lightning_cli.md": ["max_epochs=2` reached", "verdict: "],
    "from_lightning_hydra_template.md": ["test/accuracy", "verdict: "],
    "from_transformers_trainer.md": ["eval_loss", "test/accuracy"],
}


@pytest.mark.soak(seconds=20)
@pytest.mark.parametrize("page", PAGES)
def test_the_files_before_and_after_train(page, tmp_path, monkeypatch):
    if importlib.util.find_spec(PAGES[page]) is None:
        # what people come from is no dependency of flatout: install it to run its page
        pytest.skip(f"{PAGES[page]} is not installed")
    make_project(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    write_tables(tmp_path / "mine")
    of_page = [block for block in blocks() if block.page == page]
    for block in of_page:
        named = re.match(r"# (\w+\.py)\n", block.text)
        if named and block.language == "python":
            (tmp_path / "mine" / named[1]).write_text(block.text)
    lines = ["python before.py", "python after.py"]
    for block in of_page:
        found = [line for line in block.commands() if re.match(r"python \w+\.py .", line)]
        lines = found if block.language == "sh" and found else lines
    assert len(lines) == 2
    for line, words in zip(lines, SAYS[page], strict=True):
        assert words in ended(begin_line(line))
