"""The notebook of examples/ runs from its first cell to its last."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"


@pytest.mark.soak(seconds=60)
@pytest.mark.filterwarnings("default")  # what a kernel's packages warn of is theirs
def test_the_notebook_runs(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="the extra `docs` is not installed")
    nbclient = pytest.importorskip("nbclient", reason="the extra `docs` is not installed")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells[1].source = notebook.cells[1].source.replace("ROWS = 4000", "ROWS = 400")
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    assert any("test/accuracy" in str(output) for output in printed)
    assert list((tmp_path / "outputs" / "notebook").glob("*/report.html"))
