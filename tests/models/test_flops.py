"""Operations counted from a model's shape are those that torch's own counter sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.params import at_once
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flatout.data.batches.flat_batch import FlatBatch, flat_batch
from flatout.models.bilstm import BiLSTM, BiLSTMConfig
from flatout.models.bit_mlp import BitMLPConfig, Norm
from flatout.models.encoder.lora import LoraConfig
from flatout.models.encoder.transformer import (
    FLAT_FAMILIES,
    Compute,
    Outputs,
    Transformer,
    TransformerConfig,
)
from flatout.models.textcnn import TextCNNConfig
from flatout.models.words import Pooling

META = torch.device("meta")
EVEN = [[3, 4, 5, 6, 7], [4, 4, 4, 4, 4], [5, 6, 7, 8, 9]]


def counted(model: nn.Module, batch: FlatBatch) -> tuple[int, int]:
    """Operations that the counter sees in a forward pass, and in a forward and a backward one."""
    with FlopCounterMode(display=False) as counter:
        answers = model(batch)
        forward = counter.get_total_flops()
        answers.sum().backward()
    return forward, counter.get_total_flops()


def assert_counted(model: nn.Module, batch: FlatBatch) -> None:
    lengths = batch.lengths.numpy()
    forward, both = counted(model, batch)
    assert sum(each.flops for each in model.products(lengths)) == forward
    assert model.training_flops(lengths) == both


# The counter knows no LSTM kernels, so these stand in for nn.LSTM: the same weights, one product at
# a time.


class _Unrolled(nn.Module):
    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, inputs_LBE: Tensor) -> tuple[Tensor, None]:
        lstm = self.lstm
        gates_LBG = inputs_LBE @ lstm.weight_ih_l0.T + lstm.bias_ih_l0
        # The kernels give the state before the first token a gradient too, wanted or not.
        state, cell = (
            torch.zeros(inputs_LBE.shape[1], lstm.hidden_size, requires_grad=True) for _ in range(2)
        )
        states = []
        for place in range(len(inputs_LBE)):
            gates = gates_LBG[place] + state @ lstm.weight_hh_l0.T + lstm.bias_hh_l0
            add, forget, new, out = gates.chunk(4, -1)
            cell = forget.sigmoid() * cell + add.sigmoid() * new.tanh()
            state = out.sigmoid() * cell.tanh()
            states.append(state)
        return torch.stack(states), None


def unrolled(model: BiLSTM) -> BiLSTM:
    for layer in model.layers:
        layer.ahead, layer.back = _Unrolled(layer.ahead), _Unrolled(layer.back)
    return model


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize(
    ("layers", "pooling"),
    [
        (1, Pooling.max),
        (2, Pooling.attention),
    ],
)
def test_a_bilstm_is_counted_as_if_it_were_unrolled_by_hand(layers, pooling, is_frozen):
    config = BiLSTMConfig(embedding=6, hidden=5, layers=layers, dropout=0.0, pooling=pooling)
    model = config.build(num_outputs=3, vocabulary_size=10)
    batch = flat_batch(EVEN)
    model.embedding.weight.requires_grad_(not is_frozen)
    lengths = batch.lengths.numpy()
    answers = model(batch)
    expected = sum(each.flops for each in model.products(lengths)), model.training_flops(lengths)
    by_hand = unrolled(model)
    torch.testing.assert_close(by_hand(batch), answers)
    assert counted(by_hand, batch) == expected


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("widths", [[3], [1, 3, 5]])
def test_a_textcnn_is_counted(widths, is_frozen):
    model = TextCNNConfig(embedding=6, filters=4, widths=widths).build(
        num_outputs=3, vocabulary_size=10
    )
    model.embedding.weight.requires_grad_(not is_frozen)
    assert_counted(model.to(META), flat_batch(EVEN).to(META))


def test_a_filter_of_even_width_has_a_window_more_than_a_row_has_words():
    model = TextCNNConfig(embedding=6, filters=4, widths=[2, 4]).build(
        num_outputs=3, vocabulary_size=10
    )
    batch = flat_batch(EVEN)
    forward, _ = counted(model.to(META), batch.to(META))
    assert sum(each.flops for each in model.products(batch.lengths.numpy())) == forward


def bits_batch(rows: int, num_bytes: int) -> FlatBatch:
    batch = flat_batch([[7] * num_bytes] * rows)
    batch.tokens = batch.tokens.to(torch.uint8)
    return batch


PLAIN = {"detectors": False, "straight": True}


@pytest.mark.parametrize(
    ("settings", "is_set"),
    [
        ({}, False),
        ({"train_detectors": True}, False),
        ({"widths": []}, False),
        (
            {
                "widths": [12, 12, 9],
                "depth": 2,
                "residual": True,
                "norm": Norm.layer,
            },
            False,
        ),
        (PLAIN, False),
        (PLAIN | {"widths": []}, False),
        (PLAIN, True),
        ({}, True),
        ({"train_detectors": True}, True),
    ],
)
def test_a_bitmlp_is_counted(settings, is_set):
    config = BitMLPConfig(**settings)
    model = config.build(num_inputs=16, is_set=is_set, hashed_of_label=[0, 2, -1], num_hashed=5)
    assert_counted(model, flat_batch([[1, 5], [2, 3, 9]]) if is_set else bits_batch(4, num_bytes=2))


# Lengths so far apart that a CPU's rectangles of rows hold nothing but tokens.
APART = [3, 3, 40, 40, 40, 150]


def encoder(family: str, kind: str = "single", **settings) -> Transformer:
    torch.manual_seed(0)
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
    config = TransformerConfig(family=family, hidden=32, layers=4, heads=4, **quiet, **settings)
    outputs = Outputs(["a", "b", "c"], kind)
    return config.build(outputs, vocabulary_size=50, padding_id=1, separator_id=None)


def tokens_batch(lengths: list[int]) -> FlatBatch:
    return flat_batch([[5] * length for length in lengths])


@pytest.mark.parametrize("kind", ["tags", *at_once(of=["single"], seconds=1)])
@pytest.mark.parametrize("family", sorted({*FLAT_FAMILIES} - {"deberta-v2"}))
def test_an_encoder_over_flat_rows_of_any_length_is_counted(family, kind):
    lengths = APART if family != "modernbert" else [3, 3, 40, 40, 40]  # within its window
    assert_counted(encoder(family, kind), tokens_batch(lengths))


@pytest.mark.parametrize(
    "settings",
    [
        {"settings": {"embedding_size": 16}},
        {"freeze_embeddings": True},
    ],
)
@pytest.mark.parametrize("family", ["albert", "electra"])
def test_a_narrow_table_of_words_is_counted_with_what_widens_it(family, settings):
    assert_counted(encoder(family, **settings), tokens_batch(APART))


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert", "mpnet"])
def test_an_encoder_over_padded_rows_is_counted(family):
    model = encoder(family, compute=Compute.padded)
    model.net.set_attn_implementation("eager")  # the counter knows no fused kernel of a CPU
    assert_counted(model, tokens_batch([9, 9, 9]))


@pytest.mark.parametrize(
    "settings",
    [
        {"freeze_embeddings": True},
        {"freeze_layers": 2},
        {"freeze_layers": 4},
        {"lora": LoraConfig(rank=2)},
        {"lora": LoraConfig(rank=2, targets=["query", "value"])},
    ],
)
def test_what_is_frozen_takes_no_gradient_of_its_weights_and_passes_none_below(settings):
    model = encoder("bert", **settings)
    whole = encoder("bert")
    assert_counted(model, tokens_batch(APART))
    lengths = np.array(APART)
    assert model.training_flops(lengths) < 1.1 * whole.training_flops(lengths)


def test_layers_that_thaw_are_counted_from_then_on():
    model = encoder("bert", freeze_layers=2, unfreeze_epochs=2.0)
    lengths = np.array(APART)
    before = model.training_flops(lengths)
    model.thaw(2.0)
    assert before < model.training_flops(lengths) == encoder("bert").training_flops(lengths)


def test_activations_computed_anew_are_not_counted_twice():
    model = encoder("bert", gradient_checkpointing=True)
    plain = encoder("bert")
    lengths = np.array(APART)
    assert model.training_flops(lengths) == plain.training_flops(lengths)
    assert counted(model, tokens_batch(APART))[1] > plain.training_flops(lengths)


def test_attention_within_a_window_counts_the_pairs_within_it():
    model = encoder("modernbert", settings={"local_attention": 8})
    length, window = 20, 5  # half of eight to each side, and the token itself
    place = np.arange(length)
    near = int((np.abs(place - place[:, None]) < window).sum())
    of_attention = [each.flops for each in model.products(np.array([length])) if each.is_between]
    kinds = [each.attn.sliding_window for each in model.blocks()]
    assert set(kinds) == {window, None}
    pairs_within = {None: length**2, window: near}
    every = [4.0 * 32 * pairs_within[kind] for kind in kinds]
    # the head reads first tokens: only they ask
    of_first = 4.0 * 32 * (length if kinds[-1] is None else window)
    assert of_attention == [*every[:-1], of_first]


def test_a_family_with_products_of_its_own_kind_is_not_counted():
    assert encoder("deberta-v2").training_flops(np.array(APART)) is None


def test_a_large_encoder_takes_about_six_operations_for_each_weight_and_token():
    torch.manual_seed(0)
    with META:
        config = TransformerConfig(family="bert", hidden=768, layers=12, heads=12)
        model = config.build(
            Outputs(["a", "b"], "single"), vocabulary_size=30000, padding_id=0, separator_id=None
        )
    lengths = np.full(8, 128)
    layers = sum(
        weight.numel()
        for block in model.blocks()
        for weight in block.parameters()
        if weight.ndim == 2
    )
    keys_and_values = 2 * 768**2
    last = (
        sum(weight.numel() for weight in model.blocks()[-1].parameters() if weight.ndim == 2)
        - keys_and_values
    )
    expected = 8 * 128 * (6 * (layers - last) + 11 * 12 * 768 * 128)
    assert model.training_flops(lengths) == pytest.approx(expected, rel=0.005)
