"""The rows of `bench bert` that want a GPU are worked out as on any device."""

from __future__ import annotations

import re

import pytest
import torch
from benchmarks.bert import base_claims
from benchmarks.claim import Claim, Options

pytest.importorskip("accelerate", reason="the Trainer's side needs the extra bench")


def number_in(claim: Claim, before: str) -> float:
    """The number that follows some words in a claim's note."""
    found = re.search(rf"{before}([\d,.]+\d)", claim.note)
    assert found is not None, claim.note
    return float(found[1].replace(",", ""))


@pytest.mark.soak(seconds=60)
def test_an_encoder_is_held_against_the_trainer_against_the_peak_and_does_not_wait(tmp_path):
    small = {"hidden": 32, "layers": 1, "heads": 2}
    found = list(base_claims(tmp_path, Options(quick=True), torch.device("cpu"), small))
    assert [claim.claim.partition(" (")[0] for claim in found] == [
        "BERT-base, texts: tokens a second, Trainer's best",
        "BERT-base, tweets: tokens a second, Trainer's best",
        "BERT-base: MFU of real tokens",
        "BERT-base: waits for the device in 10 steps",
    ]
    assert found[0].ours > 0
    assert found[0].theirs
    assert 100 < number_in(found[0], "mean length ") < 160
    assert found[1].ours > 0
    assert found[1].theirs
    assert 10 < number_in(found[1], "mean length ") < 40
    assert 0 < found[2].ours < 100
    assert 13_000 < number_in(found[2], "[)], ") < 20_000
    assert found[3].holds
    assert found[3].note == ""
