"""Encoders over flat batches give what padded ones give, family by family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models.encoder_cases import (
    FLAT,
    LENGTHS,
    PADDED,
    PADDING,
    VOCABULARY,
    assert_equal,
    batch_of,
    built,
    gradients,
    reference,
)
from tests.params import at_once
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from flatout.data.batches.flat_batch import flat_batch
from flatout.errors import UserError
from flatout.models.encoder.rectangles import lay_out_rows
from flatout.models.encoder.transformer import (
    Compute,
    Outputs,
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
    own = (
        {
            "d_model": 32,
            "n_layer": 2,
            "n_head": 4,
            "d_inner": 64,
        }
        if family == "xlnet"
        else sizes
    )
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


@pytest.mark.parametrize("kind", ["single", *at_once(of=["tags"], seconds=1)])
# long rows are fused
@pytest.mark.parametrize(
    "lengths",
    [
        [4, 9, 9, 30],
        [161, 170, 170, 200],
    ],
    ids=["short", "long"],
)
@pytest.mark.parametrize("family", FLAT)
def test_a_row_answers_the_same_bits_whatever_its_neighbours_say(
    family: str, lengths: list[int], kind: str
) -> None:
    model = built(family, kind=kind).eval()
    batch = batch_of(lengths)
    other = batch_of(lengths)
    tokens = slice(*batch.offsets[1:3].tolist())
    other.tokens[tokens] = (other.tokens[tokens] + 7) % 80 + 5
    with torch.inference_mode():
        before = model(batch)
        after = model(other)
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


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_checkpointed_gradients_are_the_same(family: str) -> None:
    batch = batch_of([2, 5, 5, 18])
    plain = built(family)
    saving = built(family, gradient_checkpointing=True)
    expected = gradients(plain, plain(batch))
    found = gradients(saving, saving(batch))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def test_activations_computed_anew_are_refused_where_a_family_cannot() -> None:
    what = r"model\.gradient_checkpointing: squeezebert cannot compute its activations again"
    with pytest.raises(UserError, match=what):
        built("squeezebert", gradient_checkpointing=True, settings={"embedding_size": 32})


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
        for own in rows.tokens[part.first_place : part.first_place + part.places].reshape(
            part.rows, part.length
        ):
            assert set(row_of_token[own.numpy()]) == {row}
            row += 1
    assert row == len(lengths)


@pytest.mark.parametrize(
    ("family", "name", "value", "problem"),
    [
        ("bert", "num_hidden_layers", 0, "0 layers"),
        ("distilbert", "n_layers", 0, "0 layers"),
        ("bert", "num_hidden_layers", "x", "'x' does not fit"),
    ],
)
def test_a_number_of_layers_among_further_settings_is_refused_by_that_key(
    family: str, name: str, value: object, problem: str
) -> None:
    with pytest.raises(UserError, match=rf"^model\.settings\.{name}: {problem}"):
        built(family, settings={name: value})
