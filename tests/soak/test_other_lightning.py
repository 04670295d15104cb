"""The tests of parts in plain Trainers, with `pytorch_lightning` in the place of `lightning`.

The tests are copied, and the copy imports the other package. flatout itself stays as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak(seconds=600)
ROOT = Path(__file__).parents[2]
FILES = [
    *sorted((ROOT / "tests/plain_trainer").glob("test_*.py")),
    ROOT / "tests/tasks/test_plain_trainer.py",
]
HELPERS = ("plain_trainer/*.py", "callbacks/plain.py", "trainers.py", "elsewhere/*.py")
OTHER_NAMES = {
    r"\bL\.pytorch\.": "L.",
    r"\bimport lightning as L\b": "import pytorch_lightning as L",
    r"\bfrom lightning\.pytorch\b": "from pytorch_lightning",
    r'"lightning\.pytorch\b': '"pytorch_lightning',
}


@pytest.fixture(scope="module")
def copied_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    for name in ("tests", "conf", "benchmarks", "examples", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    written = [path for pattern in HELPERS for path in (folder / "tests").glob(pattern)]
    written.append(folder / "tests/tasks/test_plain_trainer.py")
    for path in written:
        if path.name == "test_both_lightnings.py":
            continue
        text = path.read_text(encoding="utf-8")
        for name, other_name in OTHER_NAMES.items():
            text = re.sub(name, other_name, text)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_parts_pass_the_same_tests_in_the_other_package(copied_tests, file):
    paths = os.pathsep.join([str(ROOT / "src"), str(copied_tests)])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-m",
        "soak or not soak",
        str(file.relative_to(ROOT)),
    ]
    done = subprocess.run(
        command,
        cwd=copied_tests,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "[100%]" in done.stdout
