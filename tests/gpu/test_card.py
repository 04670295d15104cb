"""`pytest -m gpu`: the parts of `bench gpu` that find right or wrong, and answers; one after the
other, on one card.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from benchmarks.claim import Options
from benchmarks.gpu import PARTS, part_claims, what_is_missing
from torch import nn

from flatout import HeadlinesConfig, TextDataConfig, TransformerConfig, fit, load_predictor
from flatout.cli.bench import line
from flatout.models.encoder import attention, network
from flatout.models.recurrent import run_layer
from tests.gpu.conftest import ROW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("card"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no card"),
]


@pytest.mark.parametrize("name", [name for name, part in PARTS.items() if part.is_check])
def test_a_card(name: str, record_property: Callable[[str, object], None]):
    if missing := what_is_missing(PARTS[name]):
        pytest.skip(missing)
    found = list(part_claims(name, Options(quick=True)))
    for claim in found:
        record_property(ROW, line(claim))
    assert not [line(claim) for claim in found if not claim.holds]


def test_a_card_answers_by_the_fused_kernel(monkeypatch, tmp_path):
    sample = HeadlinesConfig(rows=400, eval_rows=50, classes=4)
    model = TransformerConfig(hidden=32, layers=2, heads=4)
    result = fit(
        TextDataConfig(sample=sample, batch_size=16), model, epochs=2, folder=tmp_path / "run"
    )
    calls = []
    kernel = attention.KERNELS[attention.Kernel.varlen]

    def counted(*given, **named):
        calls.append(1)
        return kernel(*given, **named)

    monkeypatch.setitem(attention.KERNELS, attention.Kernel.varlen, counted)
    texts = ["one", "two words", "the words of a third text are a few more"]
    found = load_predictor(result.folder, "cuda").predict(texts)
    needs = network.choose_kernel(torch.device("cuda"), torch.bfloat16, 8)
    assert len(calls) == (model.layers if needs.value is attention.Kernel.varlen else 0)
    expected = load_predictor(result.folder, "cpu").predict(texts)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.probability == pytest.approx(theirs.probability, abs=0.03)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_cudnn_reads_cast_weights_where_they_lie(kind):
    layer = kind(3, 4).cuda()
    inputs = torch.randn(5, 2, 3, device="cuda")
    # Where they lie in another order, cuDNN copies them in each pass and warns: an error in tests.
    with torch.autocast("cuda", torch.bfloat16):
        states, _ = run_layer(layer, inputs)
    states.float().sum().backward()
    torch.testing.assert_close(states.float(), layer(inputs)[0], atol=0.02, rtol=0.05)
