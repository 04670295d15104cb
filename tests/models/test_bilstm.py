"""The BiLSTM without packing equals torch's own, row by row, in outputs and in gradients."""

from __future__ import annotations

import pytest
import torch
from tests.params import at_once
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.data.batches.flat_batch import FlatBatch, flat_batch
from flatout.errors import UserError
from flatout.models.bilstm import BiLSTM, BiLSTMConfig
from flatout.models.recurrent import reversed_places
from flatout.models.words import Pooling

ROWS = [[4, 5, 6, 7, 8], [9], [3, 4], [5, 6, 7], [8, 9, 3, 4, 5]]


def make(pooling: Pooling = Pooling.last, layers: int = 1) -> BiLSTM:
    config = BiLSTMConfig(embedding=6, hidden=5, layers=layers, dropout=0.0, pooling=pooling)
    return config.build(num_outputs=3, vocabulary_size=10)


def one_row_alone(model: BiLSTM, row: list[int], pooling: Pooling) -> torch.Tensor:
    """The same weights in torch's own bidirectional LSTM, over one row without padding."""
    states = model.embedding(torch.tensor([row]))
    for layer in model.layers:
        theirs = nn.LSTM(
            states.shape[-1], layer.ahead.hidden_size, batch_first=True, bidirectional=True
        )
        weights = {
            name: getattr(layer.ahead, name)
            for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
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
        torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=1e-5, msg=name)


def answer_and_gradients(model: nn.Module, batch: FlatBatch) -> list[torch.Tensor]:
    model.zero_grad()
    logits = model(batch)
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_what_lies_in_the_padding_changes_nothing(pooling, layers):
    model = make(pooling, layers)
    batch = flat_batch(ROWS)
    expected = model(batch)
    model.padding_id = 7
    assert torch.equal(model(batch), expected)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_no_gradient_reaches_the_word_that_fills_the_padding(pooling):
    model = make(pooling)
    model.padding_id = 2  # in no row, and not the embedding's own padding word
    _, embedding, *_ = answer_and_gradients(model, flat_batch(ROWS))
    assert embedding[2].tolist() == [0.0] * 6


def test_a_row_answers_the_same_whoever_its_neighbours_are():
    model = make(Pooling.attention)
    alone = model(flat_batch([[3, 4]]))
    together = model(flat_batch(ROWS))
    torch.testing.assert_close(together[1], alone[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_rows_of_one_length_take_the_short_way_to_the_same_answer(pooling, layers):
    model = make(pooling, layers)
    even = [[3, 4, 5], [6, 7, 8]]
    short_way = model(flat_batch(even))
    long_way = model(flat_batch([*even, [9]]))[1:]
    torch.testing.assert_close(short_way, long_way, atol=1e-6, rtol=1e-5)


def test_each_row_is_turned_round_by_itself_and_padding_stays():
    places = reversed_places(torch.tensor([1, 3, 4]), 4)
    assert places.view(4, 3).tolist() == [[0, 7, 11], [3, 4, 8], [6, 1, 5], [9, 10, 2]]
    assert torch.equal(places[places], torch.arange(12))


@pytest.mark.parametrize(
    "rows",
    [
        [[9]],
        [[9], [3]],
        [[9], [3, 4]],
    ],
)
@pytest.mark.parametrize("pooling", list(Pooling))
def test_rows_of_one_token_give_finite_answers_and_gradients(pooling, rows):
    found = answer_and_gradients(make(pooling), flat_batch(rows))
    assert all(tensor.isfinite().all() for tensor in found)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_bf16_autocast_stays_near_fp32(pooling):
    model = make(pooling, layers=2)
    batch = flat_batch(ROWS)
    expected = answer_and_gradients(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = answer_and_gradients(model, batch)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=0.03, rtol=0.1)


class CountWaits(TorchDispatchMode):
    """Counts values and shapes asked of tensors that are not on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
        if func._schema.name in waits and args[0].device.type != "cpu":
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [ROWS, [[3, 4], [5, 6]]])
@pytest.mark.parametrize("layers", [2, *at_once(of=[1], seconds=1)])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_nothing_is_asked_of_the_device(pooling, layers, rows):
    # Tensors without storage stand for a device's: they hold no value that could be read at all.
    device = torch.device("meta")
    model = make(pooling, layers).to(device)
    batch = flat_batch(rows).to(device)
    counter = CountWaits()
    with counter:
        model(batch).sum().backward()
    assert counter.found == []
    with pytest.raises(RuntimeError, match="meta"), counter:
        batch.tokens.sum().item()
    assert counter.found == ["aten::_local_scalar_dense"]


def test_weights_saved_and_loaded_give_the_same_answers(tmp_path):
    model = make(Pooling.attention, layers=2)
    other = make(Pooling.attention, layers=2)
    batch = flat_batch(ROWS)
    assert not torch.equal(model(batch), other(batch))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(model(batch), other(batch))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, 0.4),
        (0.0, 0.0),
        (0.1, 0.1),
    ],
)
def test_word_vectors_drop_as_much_as_the_rest_unless_told(given, expected):
    config = BiLSTMConfig(embedding=6, hidden=5, dropout=0.4, embedding_dropout=given)
    assert config.build(num_outputs=2, vocabulary_size=5).embedding_dropout.p == expected


def test_forget_gates_start_open_and_padding_is_zero():
    model = make()
    lstm = model.layers[0].ahead
    assert (lstm.bias_ih_l0 + lstm.bias_hh_l0).tolist() == [0.0] * 5 + [1.0] * 5 + [0.0] * 10
    for gate in lstm.weight_hh_l0.chunk(4):
        torch.testing.assert_close(gate @ gate.T, torch.eye(5), atol=1e-6, rtol=0)
    assert model.embedding.weight[0].abs().sum() == 0


def test_computed_tokens_count_the_padding():
    assert make().computed_tokens(flat_batch(ROWS)) == 25


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", 0),
        ("dropout", 1.0),
        ("embedding_dropout", -0.1),
        ("layers", -1),
    ],
)
def test_settings_out_of_range_name_themselves(field, value):
    with pytest.raises(UserError, match=f"model.{field}: {value}"):
        BiLSTMConfig(**{field: value})
