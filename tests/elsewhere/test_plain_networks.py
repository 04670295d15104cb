"""Networks with few operators equal plain ones to the last bit, forwards and backwards."""

from __future__ import annotations

import json

import pytest
import torch

from tests.elsewhere import plain_networks
from tests.elsewhere.plain_networks import CASES, find_differences
from tests.warm import begin_function


def test_networks_elsewhere_equal_plain_ones_in_each_number_format(tmp_path):
    command = begin_function(plain_networks.compare_all, tmp_path)
    said, _ = command.communicate(timeout=120)
    assert command.returncode == 0, said
    differences = json.loads((tmp_path / plain_networks.DIFFERENCES).read_text(encoding="utf-8"))
    assert len(differences) == 3 * len(CASES)
    assert {name: found for name, found in differences.items() if found} == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_networks_on_a_cpu_equal_plain_ones(name, dtype):
    assert find_differences(name, torch.device("cpu"), dtype) == []
