"""Forms of a family: heads, distances and positions that equal the padded reference too."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
from tests.models.encoder_cases import (
    FORMS,
    MODERN,
    PADDING,
    VOCABULARY,
    assert_equal,
    batch_of,
    built,
    gradients,
    reference,
)
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
)

from flatout.data.batches.flat_batch import flat_batch
from flatout.errors import UserError
from flatout.models.encoder.attention import Kernel
from flatout.models.encoder.lora import LoraConfig, merge_lora
from flatout.models.encoder.network import choose_kernel
from flatout.models.encoder.transformer import (
    Compute,
    Outputs,
    Transformer,
    TransformerConfig,
)


def test_small_matrices_beside_the_layers_of_gpt2_are_merged_to_the_same_answers() -> None:
    model = built("gpt2", lora=LoraConfig(rank=2)).eval()
    batch = batch_of([3, 9, 9, 21])
    trained = {
        name.split(".lora_")[0].rpartition(".")[2]
        for name in model.state_dict()
        if ".lora_" in name
    }
    assert trained == {"c_attn", "c_proj", "c_fc"}
    with torch.no_grad():
        expected = model(batch)
        merge_lora(model.net)
        torch.testing.assert_close(model(batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["rectangles", "padded"])
@pytest.mark.parametrize(("family", "form"), FORMS)
def test_other_forms_of_a_family_equal_it_too_on_each_device(
    family: str, form: dict[str, Any], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat, padded = (built(family, compute=compute, settings=form) for compute in ("flat", "padded"))
    monkeypatch.setattr(flat, "_kernel", lambda device: Kernel(kernel))
    longest = 30 if form.get("position_biased_input") is not True else 20
    assert_equal(flat, padded, batch_of([1, 2, 9, longest]))


@pytest.mark.parametrize("family", ["deberta-v2", "mpnet"])
def test_distances_that_a_validation_has_met_first_are_trained_with(family: str) -> None:
    """Also where the validation's rows are longer than what is kept."""
    model = built(family)
    short = batch_of([3, 5, 5])
    plain = gradients(model, model(short))
    with torch.inference_mode():
        model(batch_of([600]) if family == "deberta-v2" else batch_of([60]))
    later = gradients(model, model(short))
    assert all(torch.equal(later[name], gradient) for name, gradient in plain.items())
    fresh = built(family)
    with torch.inference_mode():
        fresh(short)
    first = gradients(fresh, fresh(short))
    assert all(torch.equal(first[name], gradient) for name, gradient in plain.items())


@pytest.mark.parametrize("family", ["deberta-v2", "mpnet"])
def test_small_matrices_beside_distances_have_the_gradients_of_the_padded_reference(
    family: str,
) -> None:
    flat, padded = (
        built(family, compute=compute, lora=LoraConfig(rank=2)) for compute in ("flat", "padded")
    )
    padded.load_state_dict(flat.state_dict())
    assert_equal(flat, padded, batch_of([3, 9, 9]))


@pytest.mark.parametrize("family", ["deberta-v2", "mpnet"])
def test_scores_by_distance_drop_their_share_and_keep_the_mean(family: str) -> None:
    model = built(family).eval()
    batch = batch_of([4, 9, 9, 30])
    share = 0.2
    with torch.inference_mode():
        plain = model(batch)
        for layer in model.flat_layers():
            dropout = layer.part(layer.names.attention_dropout)
            dropout.p = share
            dropout.train()
        answers = torch.stack([model(batch) for _ in range(200)])
    assert (answers.std(0) > 1e-3).all()
    torch.testing.assert_close(answers.mean(0), plain, rtol=0.1, atol=0.1)


def test_a_gpu_pads_scores_that_distances_change_in_any_number_format() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        choice = choose_kernel(
            torch.device("cuda"), dtype, 64, capability=(9, 0), has_distances=True
        )
        assert (choice.value, choice.why) == (
            Kernel.padded,
            "no fused kernel adds to scores what distances say",
        )


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"conv_kernel_size": 3}, "deberta-v2 with a convolution has no flat layers"),
        ({"attention_head_size": 16}, "deberta-v2 with heads of 16 numbers has no flat layers"),
    ],
)
def test_a_form_that_cannot_run_flat_is_padded_and_says_so(form: dict[str, Any], why: str) -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    described = CONFIG_MAPPING["deberta-v2"](vocab_size=VOCABULARY, **sizes, **form)
    net = Outputs(["a", "b"], "single").auto_class.from_config(described)
    model = Transformer(net, is_tagging=False, compute=Compute.auto, separator_id=None)
    assert (model.layout, model.why_padded) == ("padded", why)
    with pytest.raises(UserError, match=f"model.compute: {why}"):
        Transformer(net, is_tagging=False, compute=Compute.flat, separator_id=None)


@pytest.mark.parametrize("kind", ["single", "tags"])
def test_ettin_and_mmbert_run_flat_as_modernbert(kind: str) -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    described = CONFIG_MAPPING["modernbert"](
        vocab_size=VOCABULARY, pad_token_id=PADDING, **sizes, **MODERN
    )
    assert described.rope_parameters["full_attention"]["rope_theta"] == 160000.0
    outputs = Outputs(["a", "b", "c"], kind)
    outputs.tell(described)
    flat, padded = (
        Transformer(
            outputs.auto_class.from_config(described), kind == "tags", compute, None
        ).train()
        for compute in (Compute.auto, Compute.padded)
    )
    padded.load_state_dict(flat.state_dict())
    assert flat.is_flat
    assert any(layer.part("attn").sliding_window for layer in flat.flat_layers())
    assert_equal(flat, padded, batch_of([3, 9, 9, 40]))


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert"])
def test_places_of_the_roberta_kind_begin_after_the_padding_id(family: str) -> None:
    model = built(family)
    seen: list[Tensor] = []
    table = model.net.base_model.embeddings.position_embeddings
    table.register_forward_hook(lambda module, given, found: seen.append(given[0]))
    model(batch_of([2, 3]))
    assert seen[0].tolist() == [2, 3, 2, 3, 4]


def test_mpnet_counts_no_place_for_the_token_that_pads_its_own_tables() -> None:
    """Whatever the padding of the vocabulary is: `[UNK]` has that number in the pieces of random
    weights.
    """
    config = TransformerConfig(family="mpnet", hidden=32, layers=1, heads=4)
    model = config.build(
        Outputs(["a", "b"], "single"), vocabulary_size=60, padding_id=0, separator_id=None
    ).eval()
    rows = [[2, 1, 7], [2, 7, 1, 8, 9]]
    found = model(flat_batch(rows))
    net = model.net
    padded = replace(config, compute=Compute.padded).build(
        Outputs(["a", "b"], "single"), vocabulary_size=60, padding_id=0, separator_id=None
    )
    padded.load_state_dict(model.state_dict())
    assert net.base_model.embeddings.position_embeddings.padding_idx == 1
    for row, logits in zip(rows, found, strict=True):
        alone = padded.eval().net(input_ids=torch.tensor([row])).logits[0]
        torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)


def test_means_of_tokens_equal_the_padded_reference_where_a_head_takes_means() -> None:
    batch = batch_of([2, 5, 5, 18])
    settings = {"classifier_pooling": "mean"}
    flat = built("modernbert", settings=settings)
    padded = built("modernbert", settings=settings, compute="padded")
    torch.testing.assert_close(flat(batch), reference(padded, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "albert", "electra", "deberta-v2", "megatron-bert"])
def test_the_texts_of_a_pair_are_numbered_as_the_padded_reference_has_them(family: str) -> None:
    separator = 3
    torch.manual_seed(0)
    typed: dict[str, Any] = {
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "settings": {"type_vocab_size": 2},
    }
    config = TransformerConfig(family=family, hidden=32, layers=2, heads=4, **typed)
    model = config.build(
        Outputs(["a", "b"], "single"),
        vocabulary_size=VOCABULARY,
        padding_id=0,
        separator_id=separator,
    ).eval()
    rows = [[2, 9, separator, 8, separator], [2, 7, 7, 7, separator, 6, 5, 9, separator]]
    numbers = [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1, 1]]
    found = model(flat_batch(rows))
    padded = replace(config, compute=Compute.padded).build(
        Outputs(["a", "b"], "single"),
        vocabulary_size=VOCABULARY,
        padding_id=0,
        separator_id=separator,
    )
    padded.load_state_dict(model.state_dict())
    padded.eval().net.set_attn_implementation("eager")
    for row, number, logits in zip(rows, numbers, found, strict=True):
        alone = padded.net(
            input_ids=torch.tensor([row]), token_type_ids=torch.tensor([number])
        ).logits[0]
        torch.testing.assert_close(logits, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["roberta", "distilbert", "mpnet"])
def test_pairs_are_not_numbered_where_a_family_knows_no_numbers(family: str) -> None:
    config = TransformerConfig(family=family, hidden=32, layers=1, heads=4)
    model = config.build(
        Outputs(["a", "b"], "single"), vocabulary_size=VOCABULARY, padding_id=1, separator_id=3
    )
    assert not model._numbers_pairs
    assert model(flat_batch([[2, 9, 3, 8, 3], [2, 7, 3, 6, 3]])).isfinite().all()


@pytest.mark.parametrize(
    ("family", "owner", "name", "part"),
    [
        ("bert", "encoder.layer.0.attention.self", "query", "encoder.layer.*.attention.self.query"),
        ("modernbert", "layers.0.attn", "Wqkv", "layers.*.attn.Wqkv"),
        ("eurobert", "", "layers", "layers"),
    ],
)
def test_a_release_that_names_a_layers_parts_in_another_way_is_padded_and_says_so(
    family: str, owner: str, name: str, part: str
) -> None:
    described = built(family, compute="padded").described
    net = Outputs(["a", "b"], "single").auto_class.from_config(described)
    modules = net.base_model.get_submodule(owner)._modules
    modules[f"new_{name}"] = modules.pop(name)
    model = Transformer(net, is_tagging=False, compute=Compute.auto, separator_id=None)
    assert model.layout == "padded"
    release = f"transformers {version('transformers')}"
    assert model.why_padded == f"{release} has no {part} in {family}, so it has no flat layers"
