"""The public cases: the fix that a verdict names is what is applied, and nothing else changes."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from .test_examples import EXAMPLES


@pytest.fixture
def measure(monkeypatch):
    path = EXAMPLES / "cases" / "measure.py"
    spec = importlib.util.spec_from_file_location("measure_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measure_cases", module)
    spec.loader.exec_module(module)
    return module


def test_the_words_of_a_fix_become_options_of_the_training(measure):
    options = measure.TrainingOptions()
    words = "DataLoader(num_workers=2, persistent_workers=True) with torch.set_num_threads(1)"
    fixed = measure.options_of_fix(words, options)
    assert (fixed.workers, fixed.threads, fixed.batch_size) == (2, 1, options.batch_size)
    assert fixed.loader == {"num_workers": 2, "persistent_workers": True}
    precise = measure.options_of_fix('Trainer(precision="bf16-mixed")', options)
    assert precise.trainer["precision"] == "bf16-mixed"
    assert measure.options_of_fix("end the other programs, or run elsewhere", options) is None


def test_the_first_promise_that_can_be_applied_is_measured(measure):
    options = measure.TrainingOptions()
    found = {"fix": "more num_workers in your DataLoader", "override": None}
    assert measure.choose_promise(found, options) == (found["fix"], "none", None)
    other = {"override": "DataLoader(batch_size=128)", "gain": 2, "gain_low": 1.2, "gain_high": 4}
    fix, promise, fixed = measure.choose_promise(found | {"others": [other]}, options)
    assert (fix, promise) == (other["override"], "≈ 2.00× (1.20–4.00)")
    assert fixed.batch_size == 128


@pytest.mark.soak(seconds=60)
@pytest.mark.parametrize("name", ["pytorch_forecasting", "darts"])
def test_a_case_gives_a_row_and_its_weights_are_those_of_the_project_alone(measure, name):
    if importlib.util.find_spec(name) is None:
        # each brings some fifty packages, so none of them is in `dev`: install it to run the case
        pytest.skip(f"{name} is not installed")
    assert measure.measure(name, epochs=1).endswith("| equal |")
