"""Which weights of an encoder are trained, and how fast: frozen layers, slower ones, and LoRA."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.models.encoder_cases import FLAT, PADDED, VOCABULARY, batch_of, built
from tests.refusals import refused
from torch import Tensor

from flatout.engine.optimizer import OptimConfig
from flatout.errors import UserError
from flatout.models.encoder.lora import LoraConfig, merge_lora
from flatout.models.encoder.transformer import (
    Compute,
    Transformer,
    TransformerConfig,
)


def test_frozen_layers_join_from_the_last_to_the_first() -> None:
    model = built("bert", freeze_layers=2, unfreeze_epochs=3.0)

    def trained() -> list[bool]:
        return [next(block.parameters()).requires_grad for block in model.blocks()]

    assert trained() == [False, False, True]
    model.thaw(0.9)
    assert trained() == [False, False, True]
    model.thaw(1.0)
    assert trained() == [False, True, True]
    model.thaw(3.0)
    assert all(weight.requires_grad for weight in model.parameters())


def test_each_layer_learns_slower_than_the_one_above_it() -> None:
    model = built("bert")
    groups = OptimConfig(layer_decay=0.5).build(model).param_groups
    shares = {id(weight): group["lr_share"] for group in groups for weight in group["params"]}
    assert [shares[id(next(block.parameters()))] for block in model.blocks()] == [0.125, 0.25, 0.5]
    assert shares[id(model.net.classifier.weight)] == 1
    assert shares[id(model.net.get_input_embeddings().weight)] == 0.0625


NARROW = {"embedding_size": 16}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "albert": NARROW,
    "electra": NARROW,
}
"""What brings out weights below the layers that are in no module named embeddings."""


def weights_below(model: Transformer) -> set[str]:
    """Names of those weights of the backbone that come neither from a layer nor from above the
    last.
    """
    blocks = {id(weight) for block in model.blocks() for weight in block.parameters()}
    named = model.net.base_model.named_parameters()
    return {
        name
        for name, weight in named
        if id(weight) not in blocks and not re.match("pooler|final_norm|norm", name)
    }


@pytest.mark.parametrize("family", [*FLAT, *PADDED])
def test_nothing_below_the_last_layer_is_trained_where_all_layers_are_frozen(family: str) -> None:
    model = built(family, settings=OF_FAMILY.get(family, {}))
    # ALBERT goes through one layer again and again
    model.freeze(len(model.blocks()), embeddings=True)
    states: list[Tensor] = []
    model.blocks()[-1].register_forward_hook(
        lambda module, given, found: states.append(found[0] if isinstance(found, tuple) else found)
    )
    model(batch_of([3, 9])).sum().backward()
    assert not states[-1].requires_grad
    assert any(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("family", [*FLAT, *PADDED])
def test_frozen_embeddings_are_all_that_lies_below_the_layers(family: str) -> None:
    model = built(family, freeze_embeddings=True, settings=OF_FAMILY.get(family, {}))
    frozen = {
        name for name, weight in model.net.base_model.named_parameters() if not weight.requires_grad
    }
    assert frozen == weights_below(model)
    assert all(weight.requires_grad for block in model.blocks() for weight in block.parameters())


@pytest.mark.parametrize("family", [*FLAT, *PADDED])
def test_what_lies_below_the_layers_learns_slowest(family: str) -> None:
    model = built(family, settings=OF_FAMILY.get(family, {}))
    depths = model.depths()
    prefix = f"net.{model.net.base_model_prefix}."
    below = {prefix + name for name in weights_below(model)}
    assert below == {name for name, depth in depths.items() if depth == len(model.blocks()) + 1}
    assert all(
        re.search("classifier|pooler|head|dense|norm", name)
        for name, depth in depths.items()
        if depth == 0
    )


def test_what_deberta_declares_after_its_layers_lies_below_them() -> None:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    described = DebertaV2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        relative_attention=True,
        norm_rel_ebd="layer_norm",
        conv_kernel_size=3,
    )
    net = DebertaV2ForSequenceClassification(described)
    model = Transformer(net, is_tagging=False, compute=Compute.auto, separator_id=None)
    model.freeze(2, embeddings=True)
    trained = {name for name, weight in model.net.named_parameters() if weight.requires_grad}
    assert trained == {
        f"{part}.{kind}" for part in ("pooler.dense", "classifier") for kind in ("weight", "bias")
    }


def test_only_the_small_matrices_and_the_head_are_trained_with_lora() -> None:
    model = built("bert", lora=LoraConfig(rank=2))
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert names
    assert all("lora_" in name or "classifier" in name for name in names)
    batch = batch_of([3, 9])
    before = model.eval()(batch)
    merge_lora(model.net)
    torch.testing.assert_close(model(batch), before, rtol=1e-5, atol=1e-5)
    assert not any("lora_" in name for name in model.state_dict())


@pytest.mark.parametrize(
    "targets",
    [
        ["query", "valeu"],
        ["uery"],
        ["LayerNorm"],
        ["attention"],
    ],
)
def test_a_target_of_lora_that_is_no_layer_with_a_matrix_is_refused(targets: list[str]) -> None:
    with refused("model.lora.targets", "no layer named", allowed="dense, key, query, value"):
        built("bert", lora=LoraConfig(rank=2, targets=targets))
    assert built(
        "bert", lora=LoraConfig(rank=2, targets=["query", "word_embeddings", "output.dense"])
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"freeze_layers": 1},
        {"freeze_embeddings": True},
        {"freeze_layers": 1, "unfreeze_epochs": 1.0},
    ],
    ids=["layers", "embeddings", "thawing"],
)
def test_small_matrices_and_frozen_layers_are_two_ways_of_which_one_is_taken(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(
        UserError,
        match=r"model\.lora\.rank: 4 with model\.freeze_layers or model\.freeze_embeddings",
    ):
        TransformerConfig(lora=LoraConfig(rank=4), **settings)
    assert TransformerConfig(lora=LoraConfig(rank=0), **settings)
