"""What `precision=auto` measures of this processor does not hang on who else computes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flatout.engine.precision import bf16_is_native_on_cpu

pytestmark = pytest.mark.soak(seconds=25)
BURN = "import torch; a = torch.randn(1500, 1500); torch.set_num_threads(2)\nwhile True: a @ a"
SHARE = "from flatout.engine.precision import bf16_share; print(bf16_share())"


def share() -> float:
    done = subprocess.run([sys.executable, "-c", SHARE], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(not bf16_is_native_on_cpu(), reason="this processor has no bf16")
def test_a_product_takes_the_same_share_of_its_time_beside_processes_that_compute():
    quiet = share()
    others = [
        subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(2 * torch.get_num_threads())
    ]
    try:
        busy = [share() for _ in range(3)]
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert sorted(busy)[1] == pytest.approx(quiet, rel=0.25)
