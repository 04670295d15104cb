"""Training follows the same loss curve as it always did. A change of numbers is a change that says so."""

from __future__ import annotations

import pytest

from tests.golden.renew import MODELS, losses, read


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_curve_is_the_golden_one(name, tmp_path):
    # Another processor sums in another order: equal to four digits is equal.
    assert losses(name, tmp_path) == pytest.approx(read(name), abs=2e-4)
