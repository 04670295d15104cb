"""Encoders over flat batches give what padded ones give, family by family."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.params import at_once
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from flatout.data.batches.flat_batch import FlatBatch, flat_batch
from flatout.engine.optimizer import OptimConfig
from flatout.errors import UserError
from flatout.models.encoder.attention import Kernel, Scores
from flatout.models.encoder.lora import LoraConfig, merge_lora
from flatout.models.encoder.network import choose_kernel
from flatout.models.encoder.rectangle_attention import attend_by_rectangles
from flatout.models.encoder.rectangles import lay_out_rows
from flatout.models.encoder.transformer import (
    FLAT_FAMILIES,
    Compute,
    Outputs,
    Transformer,
    TransformerConfig,
)

VOCABULARY = 90
PADDING = 1
FLAT = sorted(FLAT_FAMILIES)
PADDED = ["deberta", "ernie"]


def built(
    family: str, *, kind: str = "single", compute: str = "auto", **settings: Any
) -> Transformer:
    """A tiny encoder of random weights; the same ones for every way of computing."""
    torch.manual_seed(3)
    config = TransformerConfig(
        family=family,
        hidden=32,
        layers=3,
        heads=4,
        dropout=0.0,
        attention_dropout=0.0,
        head_dropout=0.0,
        compute=Compute(compute),
        **settings,
    )
    model = config.build(
        Outputs(["a", "b", "c"], kind),
        vocabulary_size=VOCABULARY,
        padding_id=PADDING,
        separator_id=None,
    )
    # classifiers start so small that a wrong row would hardly show
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1) if weight.ndim > 1 else None
    return model.train()


DEBERTA = {
    "with keys of its own for distances": {"share_att_key": False},
    "content to position alone": {"pos_att_type": ["c2p"], "norm_rel_ebd": "none"},
    "position to content alone": {"pos_att_type": ["p2c"], "share_att_key": False},
    "few buckets, which long rows share": {"position_buckets": 4, "max_position_embeddings": 32},
    "no buckets": {"position_buckets": -1, "max_relative_positions": 12},
    "absolute positions too": {"position_biased_input": True, "type_vocab_size": 2},
    "no distances": {"relative_attention": False},
}
"""Forms of DeBERTa-v2 besides v3's, which is what random weights have."""
# Ettin's and mmBERT's folders say modernbert, and differ from ModernBERT's in this.
MODERN = {
    "classifier_pooling": "mean",
    "local_attention": 8,
    "classifier_activation": "gelu",
    "classifier_bias": False,
}
MODERN |= {
    "global_rope_theta": 160000.0,
    "local_rope_theta": 160000.0,
    "position_embedding_type": "sans_pos",
}
EURO = {"heads that share keys": {"num_key_value_heads": 2}, "first": {"classifier_pooling": "bos"}}
EURO |= {"mean": {"classifier_pooling": "mean"}}
FORMS = [pytest.param("deberta-v2", form, id=name) for name, form in DEBERTA.items()]
FORMS += [pytest.param("eurobert", form, id=f"eurobert, {name}") for name, form in EURO.items()]


def batch_of(lengths: list[int], seed: int = 0) -> FlatBatch:
    random = torch.Generator().manual_seed(seed)
    return flat_batch(
        [torch.randint(5, VOCABULARY, (length,), generator=random) for length in lengths]
    )


def reference(model: Transformer, batch: FlatBatch) -> Tensor:
    """The library's own forward over padded rows with an attention mask."""
    model.net.set_attn_implementation("eager")
    longest = int(batch.lengths.max())
    tokens = torch.full((batch.num_rows, longest), model.padding_id)
    mask = torch.zeros(batch.num_rows, longest, dtype=torch.long)
    for row, (start, length) in enumerate(
        zip(batch.offsets.tolist(), batch.lengths.tolist(), strict=False)
    ):
        tokens[row, :length] = batch.tokens[start : start + length]
        mask[row, :length] = 1
    logits = model.net(input_ids=tokens, attention_mask=mask).logits
    return logits[mask.bool()] if model.is_tagging else logits


def gradients(model: Transformer, outputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, outputs.numel()).view(outputs.shape)
    (outputs * weights).sum(1).mean().backward()  # a mean over rows, as losses are
    return {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


LENGTHS = [[1], [7, 7, 7], [2, 3, 9, 21, 21, 22, 40], [3, 161, 170, 170, 200]]


def assert_equal(flat: Transformer, padded: Transformer, batch: FlatBatch) -> None:
    outputs = flat(batch)
    expected = reference(padded, batch)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    found, wanted = gradients(flat, outputs), gradients(padded, expected)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda told, at=name: f"{at}: {told}"
        )


@pytest.mark.parametrize("kind", ["tags", *at_once(of=["single"], seconds=1)])
@pytest.mark.parametrize("family", FLAT)
def test_flat_logits_and_gradients_equal_the_padded_reference(family: str, kind: str) -> None:
    flat, padded = (built(family, kind=kind, compute=compute) for compute in ("flat", "padded"))
    for lengths in LENGTHS:
        assert_equal(flat, padded, batch_of(lengths))


@pytest.mark.parametrize("kind", at_once("single", of=["single", "tags"], seconds=1))
@pytest.mark.parametrize("family", FLAT)
def test_rows_that_round_a_batch_up_change_no_answer_and_no_gradient(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat, padded = (built(family, kind=kind, compute=compute) for compute in ("flat", "padded"))
    round_up = flat._in_steps
    for lengths in [*LENGTHS, [2] * 35, [5] * 200]:
        batch = batch_of(lengths)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = round_up(batch)
        assert rounded.num_tokens % 16 == 0
        # no place that the tables of a small encoder lack
        assert rounded.lengths.max() == batch.lengths.max()
        assert rounded.offsets.diff().equal(rounded.lengths)
        assert rounded.num_tokens < max(batch.num_tokens + 16, batch.num_tokens * 33 / 32)
        monkeypatch.setattr(flat, "_in_steps", lambda _, rounded=rounded: rounded)
        assert_equal(flat, padded, batch)


@pytest.mark.parametrize("at", [None, [0, 4, 30]])
def test_words_are_answered_at_their_places_in_a_batch_that_is_rounded_up(
    at: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built("bert", kind="words").eval()
    batch = batch_of([3, 9, 21])
    batch = replace(batch, places=None if at is None else torch.tensor(at))
    expected = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model._in_steps(batch)
    monkeypatch.setattr(model, "_in_steps", lambda _: rounded)
    assert rounded.num_tokens == 48
    assert expected.shape[0] == (33 if at is None else 3)
    torch.testing.assert_close(model(batch), expected, rtol=1e-5, atol=1e-5)


def test_a_batch_is_rounded_up_in_sixteen_bits_alone() -> None:
    model = built("bert")
    batch = batch_of([3, 9, 21])
    assert model._in_steps(batch) is batch
    with torch.autocast("cpu", torch.bfloat16):
        assert model._in_steps(batch).num_tokens == 48
        assert model(batch).shape == (3, 3)
        even = batch_of([3, 9, 20])
        assert model._in_steps(even) is even


@pytest.mark.parametrize("family", [*PADDED, "deberta-v2", "bert"])
def test_padded_rows_are_computed_under_autocast_too(family: str) -> None:
    model = built(family, compute="padded").eval()
    batch = batch_of([3, 9, 21])
    with torch.no_grad():
        expected = model(batch)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(batch)
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", ["single", "tags"])
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("gpt2", {}),
        ("llama", {}),
        ("qwen2", {}),
        ("bert", {"is_decoder": True}),
        ("esm", {}),
        ("eurobert", {}),
    ],
)
def test_a_row_has_the_same_answer_beside_rows_of_other_lengths(
    family: str, form: dict[str, Any], kind: str
) -> None:
    model = built(family, kind=kind, compute="padded", settings=form).eval()
    lengths = [3, 9, 21]
    batch = batch_of(lengths)
    alone = [
        flat_batch([batch.tokens[start : start + size]])
        for start, size in zip(batch.offsets, lengths, strict=False)
    ]
    with torch.no_grad():
        torch.testing.assert_close(
            model(batch), torch.cat([model(each) for each in alone]), rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(model(batch), reference(model, batch), rtol=1e-5, atol=1e-5)
    assert built("bert", settings={"is_decoder": True}).layout == "padded"


@pytest.mark.parametrize("kind", ["single", "tags", "words"])
@pytest.mark.parametrize("family", ["xlnet", "fnet", "convbert", "nystromformer", "yoso"])
def test_families_that_read_padding_get_rows_of_one_length_at_a_time(
    family: str, kind: str
) -> None:
    sizes = {"num_hidden_layers": 2, "intermediate_size": 64}
    own = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64} if family == "xlnet" else sizes
    heads = {} if family in ("xlnet", "fnet") else {"num_attention_heads": 4}
    sized = own if family == "xlnet" else {"hidden_size": 32, **heads, **own}
    described = CONFIG_MAPPING[family](vocab_size=VOCABULARY, pad_token_id=PADDING, **sized)
    outputs = Outputs(["a", "b", "c"], kind)
    if kind == "words" and type(described) not in MODEL_FOR_MASKED_LM_MAPPING:
        pytest.skip("it has no head for masked words")
    outputs.tell(described)
    model = outputs.wrap(outputs.auto_class.from_config(described), Compute.auto, None).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1) if weight.ndim > 1 else None
    batch = batch_of([3, 9, 9, 21])
    lengths = [3, 9, 9, 21]
    with torch.no_grad():
        rows = batch.tokens.long().split(lengths)
        found = [model.net(input_ids=row[None]).logits for row in rows]
        expected = torch.cat(found) if kind == "single" else torch.cat(found, dim=1)[0]
        torch.testing.assert_close(model(batch), expected, rtol=1e-5, atol=1e-5)
        assert model.computed_tokens(batch) == sum(lengths)
        if kind == "words":
            places = torch.tensor([1, 4, 40])
            torch.testing.assert_close(
                model(replace(batch, places=places)), expected[places], rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"num_hidden_layers": 4},
            r"model\.pretrained: .*: 16 weights of the encoder are missing there, or of another",
        ),
        ({"hidden_size": 64}, r"model\.pretrained: .*: 50 weights .* describes another encoder"),
        (None, r"model\.pretrained: .* is no folder that transformers can open"),
    ],
    ids=["more layers", "wider", "half of the file"],
)
def test_weights_that_do_not_fill_the_encoder_are_refused(
    changed: Any, message: str, tmp_path: Path
) -> None:
    whole = built("bert").net
    whole.save_pretrained(tmp_path)
    ids = {"vocabulary_size": VOCABULARY, "padding_id": PADDING, "separator_id": None}
    of_more_classes = TransformerConfig(pretrained=str(tmp_path)).build(
        Outputs(list("abcde"), "single"), **ids
    )
    found = of_more_classes.net.get_input_embeddings().weight
    torch.testing.assert_close(found, whole.get_input_embeddings().weight)  # the head alone is new
    if changed is None:
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    else:
        described = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(described | changed))
    with pytest.raises(UserError, match=message):
        TransformerConfig(pretrained=str(tmp_path)).build(Outputs(["a", "b", "c"], "single"), **ids)


def test_sizes_that_a_family_cannot_have_are_refused_in_one_sentence() -> None:
    with pytest.raises(
        UserError,
        match=r"model\.family: xlnet cannot be made so: .*d_head.*model\.pretrained=FOLDER",
    ):
        TransformerConfig(family="xlnet", hidden=32, heads=4).read_description()


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
    assert flat.is_flat and any(layer.part("attn").sliding_window for layer in flat.flat_layers())
    assert_equal(flat, padded, batch_of([3, 9, 9, 40]))


@pytest.mark.parametrize("kind", ["single", *at_once(of=["tags"], seconds=1)])
# long rows are fused
@pytest.mark.parametrize("lengths", [[4, 9, 9, 30], [161, 170, 170, 200]], ids=["short", "long"])
@pytest.mark.parametrize("family", FLAT)
def test_a_row_answers_the_same_bits_whatever_its_neighbours_say(
    family: str, lengths: list[int], kind: str
) -> None:
    model = built(family, kind=kind).eval()
    batch, other = batch_of(lengths), batch_of(lengths)
    tokens = slice(*batch.offsets[1:3].tolist())
    other.tokens[tokens] = (other.tokens[tokens] + 7) % 80 + 5
    with torch.inference_mode():
        before, after = model(batch), model(other)
    is_changed = torch.zeros(len(before), dtype=torch.bool)
    is_changed[tokens if kind == "tags" else 1] = True
    assert torch.equal(before[~is_changed], after[~is_changed])
    assert not torch.equal(before[is_changed], after[is_changed])


@pytest.mark.parametrize("family", PADDED)
def test_families_that_cannot_run_flat_are_padded_and_say_so(family: str) -> None:
    model = built(family)
    batch = batch_of([3, 8, 8, 13])
    assert (model.layout, model.why_padded) == ("padded", f"{family} has no flat attention")
    torch.testing.assert_close(model(batch), reference(model, batch), rtol=1e-5, atol=1e-5)
    assert model.computed_tokens(batch) == 4 * 13


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
    flat, padded = (
        built("modernbert", settings=settings),
        built("modernbert", settings=settings, compute="padded"),
    )
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


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_checkpointed_gradients_are_the_same(family: str) -> None:
    batch = batch_of([2, 5, 5, 18])
    plain, saving = built(family), built(family, gradient_checkpointing=True)
    expected, found = gradients(plain, plain(batch)), gradients(saving, saving(batch))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def test_activations_computed_anew_are_refused_where_a_family_cannot() -> None:
    what = r"model\.gradient_checkpointing: squeezebert cannot compute its activations again"
    with pytest.raises(UserError, match=what):
        built("squeezebert", gradient_checkpointing=True, settings={"embedding_size": 32})


@pytest.mark.parametrize("is_first", [False, True])
def test_attention_dropout_keeps_the_mean_and_its_gradient_is_of_what_it_computed(
    is_first: bool,
) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([3, 5, 5, 170])
    rows = lay_out_rows(lengths.numpy())
    query, others = (
        torch.randn(4, 2, 4, requires_grad=True),
        torch.randn(183, 2, 2, 4, requires_grad=True),
    )
    every = torch.randn(183, 3, 2, 4, requires_grad=True)
    changed = query if is_first else every

    def attended(share: float, given: Tensor) -> Tensor:
        scores = Scores(0.5, share, None)
        if is_first:
            return attend_by_rectangles(others, given, rows, scores)
        return attend_by_rectangles(given, None, rows, scores)

    with torch.no_grad():
        mean = torch.stack([attended(0.4, changed) for _ in range(400)]).mean(0)
        torch.testing.assert_close(mean, attended(0.0, changed), rtol=0.2, atol=0.2)
    torch.manual_seed(7)
    attended(0.4, changed).square().sum().backward()
    step = 1e-2
    direction = torch.randn_like(changed)
    values = []
    for sign in (1, -1):
        torch.manual_seed(7)
        values.append(
            float(attended(0.4, changed.detach() + sign * step * direction).detach().square().sum())
        )
    assert changed.grad is not None
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(
        float((changed.grad * direction).sum()), rel=2e-2
    )


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=60).flatmap(
        lambda rows: st.sampled_from([rows, sorted(rows)])
    )
)
def test_rectangles_hold_every_token_once_and_nothing_of_another_row(lengths: list[int]) -> None:
    host = torch.tensor(lengths)
    rows = lay_out_rows(host.numpy())
    total = sum(lengths)
    assert sorted(rows.tokens[rows.places].tolist()) == list(range(total))
    row_of_token = np.repeat(np.arange(len(lengths)), lengths)
    row = 0
    for part in rows.rectangles:
        for own in rows.tokens[part.first : part.first + part.places].reshape(
            part.rows, part.length
        ):
            assert set(row_of_token[own.numpy()]) == {row}
            row += 1
    assert row == len(lengths)


def shares_dropped(modules: list[nn.Module]) -> set[float]:
    """Of dropout modules, and of attention that keeps its share as a plain number."""
    plain = {getattr(module, "attention_dropout", None) for module in modules}
    return {module.p for module in modules if isinstance(module, nn.Dropout)} | {
        share for share in plain if isinstance(share, float)
    }


@pytest.mark.parametrize("kind", ["single", "tags"])
@pytest.mark.parametrize("family", [*FLAT, *PADDED])
def test_each_share_to_drop_arrives_in_the_modules_that_drop_it(family: str, kind: str) -> None:
    shares = {"dropout": 0.11, "attention_dropout": 0.22, "head_dropout": 0.33}
    if family == "eurobert":  # it drops some of attention, and nothing else
        shares |= {"dropout": 0.0, "head_dropout": 0.0}
    config = TransformerConfig(family=family, hidden=32, layers=2, heads=4, **shares)
    model = config.build(
        Outputs(["a", "b"], kind), vocabulary_size=VOCABULARY, padding_id=1, separator_id=None
    )
    backbone = list(model.net.base_model.modules())
    head = [module for module in model.net.modules() if module not in set(backbone)]
    assert shares_dropped(backbone) == {0.11, 0.22} - ({0.11} if family == "eurobert" else set())
    assert shares_dropped(head) == ({0.33} if family != "eurobert" else set())


def test_a_share_that_a_family_does_not_drop_is_refused() -> None:
    config = TransformerConfig(family="fnet", hidden=32, layers=2, heads=4, attention_dropout=0.1)
    with pytest.raises(UserError, match=r"model\.attention_dropout: fnet has no such share"):
        config.build(
            Outputs(["a", "b"], "single"),
            vocabulary_size=VOCABULARY,
            padding_id=1,
            separator_id=None,
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
    assert names and all("lora_" in name or "classifier" in name for name in names)
    batch = batch_of([3, 9])
    before = model.eval()(batch)
    merge_lora(model.net)
    torch.testing.assert_close(model(batch), before, rtol=1e-5, atol=1e-5)
    assert not any("lora_" in name for name in model.state_dict())


@pytest.mark.parametrize("targets", [["query", "valeu"], ["uery"], ["LayerNorm"], ["attention"]])
def test_a_target_of_lora_that_is_no_layer_with_a_matrix_is_refused(targets: list[str]) -> None:
    with pytest.raises(
        UserError, match=r"model\.lora\.targets: no layer named .* \(dense, key, query, value\)"
    ):
        built("bert", lora=LoraConfig(rank=2, targets=targets))
    assert built(
        "bert", lora=LoraConfig(rank=2, targets=["query", "word_embeddings", "output.dense"])
    )


def test_a_decoder_without_a_padding_token_is_refused() -> None:
    net = GPT2ForSequenceClassification(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(
        UserError, match=r"gpt2 has no padding token\. Set pad_token_id in its config\.json\."
    ):
        Transformer(net, is_tagging=False, compute=Compute.auto, separator_id=None)


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


@pytest.mark.parametrize("kind", ["single", "tags", "words"])
@pytest.mark.parametrize("family", [*FLAT, *PADDED])
def test_weights_have_the_names_of_the_library_so_that_earlier_checkpoints_open(
    family: str, kind: str
) -> None:
    model = built(family, kind=kind)
    library = Outputs(["a", "b", "c"], kind).auto_class.from_config(model.described).state_dict()
    left_out = {name.removeprefix("net.") for name in model.first_names}
    expected = {
        f"net.{name}": weight.shape for name, weight in library.items() if name not in left_out
    }
    assert {name: weight.shape for name, weight in model.state_dict().items()} == expected
    earlier = {f"net.{name}": torch.full_like(weight, 0.5) for name, weight in library.items()}
    model.load_state_dict(earlier)
    assert all(
        (weight == 0.5).all()
        for weight in model.state_dict().values()
        if weight.is_floating_point()
    )
