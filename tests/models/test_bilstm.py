"""The BiLSTM without packing equals torch's own, row by row, in outputs and in gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatout.data.batch import flat_batch
from flatout.errors import UserError
from flatout.models.bilstm import BiLSTM, BiLSTMConfig
from flatout.models.pooling import Pooling

ROWS = [[4, 5, 6, 7, 8], [9], [3, 4], [5, 6, 7], [8, 9, 3, 4, 5]]


def make(pooling: Pooling = Pooling.last, layers: int = 1) -> BiLSTM:
    config = BiLSTMConfig(embedding=6, hidden=5, layers=layers, dropout=0.0, pooling=pooling)
    return config.build(num_outputs=3, vocabulary_size=10)


def one_row_alone(model: BiLSTM, row: list[int], pooling: Pooling) -> torch.Tensor:
    """The same weights in torch's own bidirectional LSTM, over one row without padding."""
    states = model.embedding(torch.tensor([row]))
    for layer in model.layers:
        theirs = nn.LSTM(states.shape[-1], layer.ahead.hidden_size, batch_first=True, bidirectional=True)
        weights = {
            name: getattr(layer.ahead, name) for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        }
        weights |= {f"{name}_reverse": getattr(layer.back, name) for name in list(weights)}
        states, (last, _) = torch.func.functional_call(theirs, weights, (states,))
    if pooling is Pooling.last:
        pooled = torch.cat([last[0], last[1]], -1)
    elif pooling is Pooling.max:
        pooled = states.amax(1)
    elif pooling is Pooling.mean:
        pooled = states.mean(1)
    else:
        shares = model.pool.score(states).softmax(1)
        pooled = (shares * states).sum(1)
    return model.output(pooled)[0]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_outputs_and_gradients_equal_each_row_alone(pooling, layers):
    model = make(pooling, layers)
    batch = flat_batch(ROWS)
    together = model(batch)
    together.square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = torch.stack([one_row_alone(model, ROWS[i], pooling) for i in batch.rows.tolist()])
    alone.square().sum().backward()
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name == "embedding.weight":
            expected[0] = 0  # the padding word
        torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_what_lies_in_the_padding_changes_nothing(pooling):
    model = make(pooling)
    batch = flat_batch(ROWS)
    expected = model(batch)
    model.padding_id = 7
    assert torch.equal(model(batch), expected)


def test_a_row_answers_the_same_whoever_its_neighbours_are():
    model = make(Pooling.attention)
    alone = model(flat_batch([[3, 4]]))
    together = model(flat_batch(ROWS))
    torch.testing.assert_close(together[1], alone[0], atol=1e-6, rtol=1e-5)


def test_rows_of_one_length_take_the_short_way_to_the_same_answer():
    model = make(Pooling.max)
    even = [[3, 4, 5], [6, 7, 8]]
    short_way = model(flat_batch(even))
    long_way = model(flat_batch([*even, [9]]))[1:]
    torch.testing.assert_close(short_way, long_way, atol=1e-6, rtol=1e-5)


def test_forget_gates_start_open_and_padding_is_zero():
    model = make()
    lstm = model.layers[0].ahead
    assert lstm.bias_ih_l0[5:10].tolist() == [1.0] * 5
    assert model.embedding.weight[0].abs().sum() == 0


def test_computed_tokens_count_the_padding():
    assert make().computed_tokens(flat_batch(ROWS)) == 25


@pytest.mark.parametrize(("field", "value"), [("hidden", 0), ("dropout", 1.0), ("layers", -1)])
def test_settings_out_of_range_name_themselves(field, value):
    with pytest.raises(UserError, match=f"model.{field}: {value}"):
        BiLSTMConfig(**{field: value})
