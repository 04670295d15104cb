"""The branches that DDP takes on GPUs, on two CPU ranks: moved arguments, and
compressed gradients.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import card_rank
from tests.distributed.card_rank import STEPS
from tests.started import free_port, said_by_all
from tests.warm import begin_function


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("cards")
    place = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "NODE_RANK": "0",
    }
    ranks = [
        begin_function(card_rank.main, folder, rank, LOCAL_RANK=str(rank), **place)
        for rank in (0, 1)
    ]
    try:
        said = said_by_all(ranks, 120)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_ddp_with_a_device_of_its_own_trains_the_weights_of_lightnings_loop(of_ranks):
    for found in of_ranks:
        assert found["fast"]["steps"] == STEPS
        assert found["fast"]["weights"] == pytest.approx(found["plain"]["weights"], abs=1e-6)


def test_gradients_are_still_compressed_after_layers_have_thawed(of_ranks):
    assert [found["plain"]["hook"] for found in of_ranks] == ["", ""]
    assert all("fp16_compress_hook" in found["compressed"]["hook"] for found in of_ranks)
    first, second = (found["compressed"]["weights"] for found in of_ranks)
    assert first == second
