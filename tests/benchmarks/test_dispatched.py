"""The counter of `bench bert` counts what launches, and a step of ours reads nothing from the
device.
"""

from __future__ import annotations

import pytest
import torch
from benchmarks import dispatched
from benchmarks.dispatched import Counter, ours_counted

from tests.params import at_once

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*", "ignore:.*number of training batches.*"
)


def test_views_and_allocations_launch_nothing_and_numbers_on_the_host_are_reads():
    values = torch.ones(4)
    with Counter() as counter:
        torch.empty(3)
        total = (values.view(2, 2).transpose(0, 1) + 1).sum()
        assert float(total) == 8
    assert (counter.launches, counter.reads) == (2, 1)


@pytest.mark.parametrize(
    "precision", ["bf16-mixed", *at_once(of=["32-true", "16-mixed"], seconds=1)]
)
def test_a_training_step_reads_nothing_from_the_device(monkeypatch, precision):
    monkeypatch.setattr(dispatched, "_ENCODER", {"hidden": 16, "layers": 2, "heads": 2})
    counter = ours_counted(precision)
    assert counter.reads == 0
    assert 50 < counter.launches < 200
