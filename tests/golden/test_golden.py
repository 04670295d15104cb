"""Training follows the same loss curve as it always did.

A change of numbers is a change that says so.
"""

from __future__ import annotations

import pytest

from tests.golden.renew import MODELS, losses, read


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_curve_is_the_golden_one(name, tmp_path):
    # Another processor sums in another order: equal to three parts in ten thousand of the first
    # loss is equal.
    golden = read(name)
    assert losses(name, tmp_path) == pytest.approx(golden, abs=3e-4 * golden[0])
