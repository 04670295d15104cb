"""What flatout asks of a network: a network of one's own may say as little as it likes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.refusals import refused
from torch import nn

from flatout import BiLSTMConfig, TransformerConfig
from flatout.data.batches.flat_batch import flat_batch
from flatout.models.contract import Network, contract, recommended_clip, recommended_lr

ROWS = [[1, 2, 3], [4]]


class Own(nn.Module):
    """A network as anybody writes one; its `blocks` are modules, not an answer."""

    def __init__(self, **said: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(1, 1)])
        for name, value in said.items():
            setattr(self, name, value)


def test_a_network_that_says_nothing_is_read_by_the_defaults():
    found = contract(Own())
    assert (found.layout, found.blocks(), found.depths(), found.thaw(1.0)) == (
        "flat",
        (),
        {},
        False,
    )
    assert found.computed_tokens(flat_batch(ROWS)) == 4
    assert found.training_flops(np.array([3, 1])) is None
    assert found.make_state(1) is None


def test_what_a_network_says_of_itself_stands_beside_the_defaults():
    found = contract(Own(layout="padded", training_flops=lambda lengths: float(lengths.sum())))
    assert found.computed_tokens(flat_batch(ROWS)) == 6
    assert found.training_flops(np.array([3, 1])) == 4.0


def test_a_network_with_a_state_and_no_way_to_take_it_gets_one_sentence():
    found = contract(Own(make_state=lambda rows, device="cpu": (torch.zeros(rows, 2),)))
    assert found.make_state(1) is not None
    with refused("model", "make_state()", "no run()", fix="run("):
        found.run(torch.zeros(1, 3, 2), found.make_state(1))


def test_networks_of_flatout_answer_themselves():
    network = BiLSTMConfig(embedding=4, hidden=4).build(num_outputs=2, vocabulary_size=9)
    assert isinstance(network, Network)
    assert contract(network) is network


def test_a_config_recommends_a_rate_and_a_clip_or_neither():
    assert recommended_clip(TransformerConfig(pretrained="somewhere")) == 1.0
    network = torch.nn.Linear(1, 1)
    assert (recommended_lr(network), recommended_clip(network)) == (None, 0.0)


def test_the_page_on_own_parts_names_all_that_a_network_may_say():
    page = (Path(__file__).parents[2] / "docs" / "own_parts.md").read_text(encoding="utf-8")
    names = [name for name in vars(Network) if not name.startswith("_")]
    assert [name for name in names if f"| `{name}" not in page] == []
