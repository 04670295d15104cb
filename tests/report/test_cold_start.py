"""What a cold start imports: matplotlib and SciPy wait until they are used, and a metric can still be plotted."""

from __future__ import annotations

import subprocess
import sys

import torchmetrics.utilities.plot as plots
from matplotlib import pyplot

from flatout.engine.torchmetrics_internals import import_torchmetrics

CODE = """
import sys
from flatout.engine.torchmetrics_internals import import_torchmetrics
import_torchmetrics()
import lightning, flatout.cli.boundary
assert "torchmetrics" in sys.modules
assert not [name for name in sys.modules if name.split(".")[0] == "matplotlib"], "imported too early"
assert "scipy.signal" not in sys.modules, "imported too early"
import scipy
assert scipy.signal.windows.hamming(3)[1] == 1.0

import matplotlib
matplotlib.use("Agg")
import torch, torchmetrics
metric = torchmetrics.MeanMetric()
metric.update(torch.tensor(2.0))
figure, axes = metric.plot()
assert [line.get_ydata()[0] for line in axes.lines] == [2.0]
matrix = torchmetrics.classification.MulticlassConfusionMatrix(3)
matrix.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
figure, axes = matrix.plot()
assert "1" in [text.get_text() for text in axes.texts]
"""


def test_a_run_imports_matplotlib_only_when_it_draws_and_metrics_can_be_plotted():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_imported_already_is_left_alone():
    """This process has imported torchmetrics with everything that it finds."""
    before = plots.plt
    import_torchmetrics()
    assert plots.plt is before is pyplot
