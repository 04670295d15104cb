"""Outputs of frozen layers, stored and read, give what computing them gives, family by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch, cut_batch
from flatout.data.batches.plan import FeedKind, PlanSettings
from flatout.data.store.store import Column, Store, StoreWriter
from flatout.engine.precision import Precision
from flatout.models.encoder.lora import LoraConfig
from flatout.models.encoder.transformer import (
    FLAT_FAMILIES,
    Outputs,
    Transformer,
    TransformerConfig,
)
from flatout.tasks import frozen_outputs
from flatout.tasks.frozen_outputs import FrozenPart, StoredStates
from tests.params import at_once
from tests.refusals import refused

CPU = torch.device("cpu")
LENGTHS = np.array([5, 2, 9, 30, 7, 7, 2, 41, 12], np.int32)


def frozen(
    family: str = "bert", layers: int | str = 2, kind: str = "single", **settings: Any
) -> Transformer:
    """A tiny encoder that drops, of three layers."""
    torch.manual_seed(5)
    config = TransformerConfig(
        family=family, hidden=32, layers=3, heads=4, freeze_layers=layers, **settings
    )
    return config.build(
        Outputs(["a", "b", "c"], kind), vocabulary_size=90, padding_id=1, separator_id=2
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Some rows of unequal length."""
    folder = tmp_path_factory.mktemp("rows")
    writer = StoreWriter(folder)
    tokens = np.random.default_rng(2).integers(3, 90, LENGTHS.sum())
    writer.split("train", {"tokens": Column("uint16", ragged=True)}).append(
        tokens=(tokens, LENGTHS)
    )
    writer.close({})
    return Store(folder)


def stored(
    network: Transformer, rows: Store, folder: Path, kind: torch.dtype | None = None
) -> StoredStates:
    """What adds stored outputs to batches, written first."""
    part = FrozenPart(network, network.frozen_layers(), CPU, Precision.fp32, kind)
    network.keep_layers_still(part.layers)
    folder.mkdir()
    writer = StoreWriter(folder)
    part.write(writer, list(rows.splits.values()))
    writer.close({})
    return StoredStates(Store(folder), "train", network, CPU)


def batches_of(rows: Store, **settings: Any) -> list[FlatBatch]:
    return list(Feed(rows.splits["train"], PlanSettings(rows_per_batch=4, seed=1), **settings))


def answered(network: Transformer, batch: FlatBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs in training, what is dropped above the cut always the same, and gradients."""
    torch.manual_seed(8)
    network.zero_grad()
    outputs = network(batch)
    outputs.square().sum().backward()
    gradients = {
        name: each.grad.clone()
        for name, each in network.named_parameters()
        if each.grad is not None
    }
    return outputs.detach(), gradients


@pytest.mark.parametrize(
    ("layers", "kind"),
    [(2, "tags"), ("all", "single"), *at_once(of=[(1, "single"), ("all", "tags")], seconds=1)],
)
@pytest.mark.parametrize(
    "family", at_once(*sorted(FLAT_FAMILIES)[::2], of=sorted(FLAT_FAMILIES), seconds=1)
)
def test_reading_gives_outputs_and_gradients_of_computing(
    family: str,
    layers: int | str,
    kind: str,
    rows: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frozen_outputs, "_BLOCK_TOKENS", 40)  # several blocks
    # which has one layer, gone through again and again
    layers = "all" if family == "albert" else layers
    network = frozen(family, layers, kind)
    reads = stored(network, rows, tmp_path / "states")
    for batch in batches_of(rows):
        expected, wanted = answered(network, batch)
        outputs, found = answered(network, reads(batch))
        assert batch.states is not None
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
        assert found.keys() == wanted.keys()
        assert found
        for name, gradient in wanted.items():
            torch.testing.assert_close(
                found[name],
                gradient,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda told, at=name: f"{at}: {told}",
            )


def test_every_kind_of_feed_brings_the_same_states(rows: Store, tmp_path: Path) -> None:
    reads = stored(frozen(), rows, tmp_path / "states")
    found = []
    for kind in (FeedKind.resident, FeedKind.threaded, FeedKind.workers):
        batches = batches_of(rows, kind=kind, complete=reads)
        found.append([batch.states for batch in batches])
    for states in zip(*found, strict=True):
        assert states[0] is not None
        assert all(torch.equal(states[0], each) for each in states)


def test_pieces_of_a_batch_bring_their_own_states(rows: Store, tmp_path: Path) -> None:
    for layers in (2, "all"):
        network = frozen(layers=layers).eval()
        reads = stored(network, rows, tmp_path / f"{layers}")
        (batch, *_) = map(reads, batches_of(rows))
        pieces = [network(piece) for piece in cut_batch(batch, 3)]
        assert len(pieces) == 3
        torch.testing.assert_close(torch.cat(pieces), network(batch), rtol=1e-5, atol=1e-6)


def test_first_tokens_alone_are_kept_where_nothing_else_is_read(
    rows: Store, tmp_path: Path
) -> None:
    for layers, kind, numbers in (
        (2, "single", LENGTHS.sum()),
        ("all", "single", len(LENGTHS)),
        ("all", "tags", LENGTHS.sum()),
    ):
        folder = tmp_path / f"{layers}{kind}"
        stored(frozen(layers=layers, kind=kind), rows, folder)
        assert (folder / "train" / "states.bin").stat().st_size == 4 * 32 * numbers


def test_sixteen_bits_are_half_and_near(rows: Store, tmp_path: Path) -> None:
    network = frozen()
    exact = stored(network, rows, tmp_path / "exact")
    half = stored(network, rows, tmp_path / "half", torch.bfloat16)
    sizes = [
        (tmp_path / name / "train" / "states.bin").stat().st_size for name in ("exact", "half")
    ]
    assert sizes[0] == 2 * sizes[1]
    network.eval()
    for batch in batches_of(rows):
        near = network(half(batch))
        expected = network(exact(batch))
        assert 0 < (near - expected).abs().max() < 0.05


def test_a_layer_that_joins_ends_the_reading_and_drops_again(rows: Store, tmp_path: Path) -> None:
    network = frozen(unfreeze_epochs=3.0).train()
    reads = stored(network, rows, tmp_path / "states")
    lower = network.in_order()[0]
    assert network.training
    assert not lower.training
    assert network.epochs_frozen() == 1.0
    assert not network.thaw(0.5)
    assert reads(batches_of(rows)[0]).states is not None
    assert network.thaw(1.0)
    assert network.stored_layers == 0
    assert lower.training
    assert reads(batches_of(rows)[0]).states is None


def test_other_frozen_weights_are_refused_while_their_outputs_are_read(
    rows: Store, tmp_path: Path
) -> None:
    network = frozen()
    state = {name: weight.clone() for name, weight in network.state_dict().items()}
    stored(network, rows, tmp_path / "states")
    network.load_state_dict({**state, "net.classifier.bias": torch.ones(3)})  # the head may change
    state["net.bert.encoder.layer.0.output.dense.weight"][0, 0] += 1e-3
    with refused("model.reuse", "frozen weights", fix="model.reuse=false"):
        network.load_state_dict(state)


def test_layers_count_as_frozen_up_to_the_first_that_trains_anything() -> None:
    above = ["layer.2.attention.self.query", "layer.2.attention.self.value"]
    assert frozen(layers=0, lora=LoraConfig(rank=2, targets=above)).frozen_layers() == 2
    assert frozen(layers=0, lora=LoraConfig(rank=2)).frozen_layers() == 0
    assert frozen(layers=0).frozen_layers() == 0
    assert frozen(layers=0, freeze_embeddings=True).frozen_layers() == 0
    assert frozen(layers=1).frozen_layers() == 1
    assert frozen("deberta-v2", layers=2).frozen_layers() == 2
    assert frozen("deberta", layers=2).frozen_layers() == 0  # its rows are padded


def test_a_head_alone_on_pretrained_layers_has_the_rate_of_a_head() -> None:
    rates = [
        TransformerConfig(pretrained="x", freeze_layers=layers).recommended_lr
        for layers in (0, 4, "all")
    ]
    assert rates == [5e-5, 5e-5, 1e-3]
    assert (
        TransformerConfig(pretrained="x", freeze_layers="all", unfreeze_epochs=1.0).recommended_lr
        == 5e-5
    )


def test_layers_that_are_read_are_not_counted_as_computed(rows: Store, tmp_path: Path) -> None:
    network = frozen()
    whole = network.training_flops(LENGTHS)
    network.keep_layers_still(2)
    last = network.training_flops(LENGTHS)
    network.keep_layers_still(0)
    assert last is not None
    assert whole is not None
    assert last < whole / 1.5
    assert network.training_flops(LENGTHS) == whole
    head = frozen(layers="all")
    head.keep_layers_still(3)
    assert head.training_flops(LENGTHS) == pytest.approx(
        4 * len(LENGTHS) * 32 * 3 + 4 * len(LENGTHS) * 32 * 32 + 2 * len(LENGTHS) * 32 * 3, rel=0.5
    )
