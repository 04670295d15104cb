"""The rows of `bench bert` that want a GPU are worked out as on any device."""

from __future__ import annotations

import pytest
import torch
from benchmarks.bert import base_claims
from benchmarks.claim import Options

pytest.importorskip("accelerate", reason="the Trainer's side needs the extra bench")


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
    assert found[0].ours > 0 and found[0].theirs and 100 < float(found[0].note.rpartition(" ")[2]) < 160
    assert found[1].ours > 0 and found[1].theirs and 10 < float(found[1].note.rpartition(" ")[2]) < 40
    assert 0 < found[2].ours < 100
    assert 13_000 < float(found[2].note.split()[-4].replace(",", "")) < 20_000
    assert found[3].holds and found[3].note == ""
