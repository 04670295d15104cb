"""Both directions of a layer: in turn on a CPU, on two streams of a GPU, the same numbers."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from flatout.data.batches.flat_batch import flat_batch
from flatout.models import recurrent
from flatout.models.bilstm import BiLSTM, BiLSTMConfig

BESIDE = "the stream beside"
HERE = "the stream here"
ROWS = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11]]


class Recorded:
    """A stream that writes down what it is told, and which one is current."""

    def __init__(self, name, told):
        self.name = name
        self.told = told

    def wait_stream(self, other):
        self.told.append(f"{self.name} waits for {other.name}")


class Layer(nn.LSTM):
    """Writes down on which stream it runs."""

    def forward(self, inputs):
        self.told.append(f"{self.title} runs on {self.current[-1]}")
        return super().forward(inputs)


@pytest.fixture
def told(monkeypatch):
    """Stand-ins for the streams of a GPU; what they were told."""
    found = []
    current = [HERE]

    @contextmanager
    def stream(chosen):
        current.append(chosen.name)
        yield
        current.pop()

    monkeypatch.setattr(recurrent, "_has_streams", lambda device: True)
    monkeypatch.setattr(recurrent, "_stream_beside", lambda device: Recorded(BESIDE, found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Recorded(HERE, found))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, other: found.append(f"{tensor.shape[-1]} kept for {other.name}"),
    )
    monkeypatch.setattr(Layer, "told", found, raising=False)
    monkeypatch.setattr(Layer, "current", current, raising=False)
    return found


def test_on_a_gpu_one_direction_runs_beside_the_other_and_each_waits_where_it_reads(told):
    ahead = Layer(3, 4)
    back = Layer(3, 4)
    ahead.title = "ahead"
    back.title = "back"
    inputs = torch.randn(5, 2, 3)
    both = recurrent.run_both(ahead, back, inputs, None)
    assert told[:4] == [
        f"{BESIDE} waits for {HERE}",
        f"back runs on {BESIDE}",
        f"ahead runs on {HERE}",
        f"{HERE} waits for {BESIDE}",
    ]
    assert told[4:] == [f"3 kept for {BESIDE}", f"4 kept for {HERE}"]
    assert torch.equal(both[0], nn.LSTM.forward(ahead, inputs)[0])
    assert torch.equal(both[1], nn.LSTM.forward(back, inputs.flip(0))[0].flip(0))


def test_a_cpu_and_ranks_of_ddp_stay_on_one_stream(monkeypatch):
    assert not recurrent._has_streams(torch.device("cpu"))
    assert recurrent._has_streams(torch.device("cuda"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not recurrent._has_streams(torch.device("cuda"))


def test_cast_weights_of_a_layer_lie_one_after_the_other_as_cudnn_reads_them(monkeypatch):
    monkeypatch.setattr(recurrent, "_kernel_dtype", lambda device: torch.bfloat16)
    layers = [nn.GRU(3, 4), nn.LSTM(3, 4)]
    found = recurrent.cast_layers(layers, torch.device("cpu"))
    for layer, cast in zip(layers, found, strict=True):
        weights = layer.all_weights[0]  # of inputs, of states, and a bias for each
        places = [weight.storage_offset() for weight in cast]
        counts = [weight.numel() for weight in weights]
        assert places == [sum(counts[:number]) for number in range(4)]
        assert cast[0].untyped_storage().nbytes() == 2 * sum(counts)
        assert len({weight.untyped_storage().data_ptr() for weight in cast}) == 1
        for ours, weight in zip(cast, weights, strict=True):
            assert torch.equal(ours, weight.bfloat16())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_finds_the_answers_and_gradients_of_a_cpu():
    torch.manual_seed(0)
    model = BiLSTM(
        BiLSTMConfig(embedding=8, hidden=8, layers=2, dropout=0.0),
        num_outputs=3,
        vocabulary_size=20,
    )
    batch = flat_batch([torch.tensor(row) for row in sorted(ROWS, key=len)])
    found = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        answer = model(batch.to(device))
        answer.pow(2).sum().backward()
        found.append([answer.detach().cpu(), *(weight.grad.cpu() for weight in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
