"""A model whose training cannot fit into memory is refused before it is built; any other is not."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import train
from flatout import BiLSTMConfig, BitMLPConfig, TextCNNConfig, TransformerConfig, UserError
from flatout.models.encoder.lora import LoraConfig
from flatout.models.encoder.transformer import Outputs
from flatout.run import memory
from flatout.run.memory import require_memory, training_bytes
from tests.params import at_once

CPU = torch.device("cpu")
Build = Callable[[Any], nn.Module]


def of_texts(settings: Any) -> nn.Module:
    built: nn.Module = settings.build(num_outputs=4, vocabulary_size=5_000)
    return built


def of_bits(settings: Any) -> nn.Module:
    built: nn.Module = settings.build(
        num_inputs=500, is_set=False, hashed_of_label=[0, 1, 2], num_hashed=3
    )
    return built


def of_subwords(settings: Any) -> nn.Module:
    outputs = Outputs(["a", "b"], "single")
    built: nn.Module = settings.build(
        outputs, vocabulary_size=5_000, padding_id=0, separator_id=None
    )
    return built


ENCODER = TransformerConfig(hidden=32, heads=4)
HUGE: dict[str, tuple[Any, Build, str]] = {
    "bilstm": (BiLSTMConfig(layers=1_000_000), of_texts, "model.layers=1000000"),
    "wide bilstm": (BiLSTMConfig(hidden=10_000_000), of_texts, "model.hidden=10000000"),
    "textcnn": (TextCNNConfig(filters=1_000_000_000), of_texts, "model.filters=1000000000"),
    "bit_mlp": (BitMLPConfig(depth=10_000_000), of_bits, "model.depth=10000000"),
    "wide bit_mlp": (
        BitMLPConfig(widths=[10_000_000_000]),
        of_bits,
        r"model.widths=\[10000000000\]",
    ),
    "transformer": (
        replace(ENCODER, hidden=128, layers=10_000_000),
        of_subwords,
        "model.layers=10000000",
    ),
    "modernbert": (
        replace(ENCODER, hidden=128, layers=10_000_000, family="modernbert"),
        of_subwords,
        "model.layers=10000000",
    ),
}


@pytest.mark.parametrize("case", HUGE)
def test_a_model_that_cannot_fit_is_refused_within_a_second(case):
    settings, build, key = HUGE[case]
    if isinstance(settings, TransformerConfig):
        build(replace(settings, layers=1))  # imports transformers
    began = time.perf_counter()
    with pytest.raises(
        UserError,
        match=rf"^{key}: needs about [\d.,]+ [GTPE]B for weights, .* are free\. Lower model\.",
    ):
        require_memory(settings, build, CPU)
    assert time.perf_counter() - began < 1


FITTING: dict[str, tuple[Any, Build]] = {
    "bilstm": (BiLSTMConfig(layers=5, hidden=24, embedding=16), of_texts),
    "textcnn": (TextCNNConfig(widths=[2, 3, 4, 5]), of_texts),
    "bit_mlp": (BitMLPConfig(widths=[64, 32], depth=4, residual=True), of_bits),
    "trained detectors": (BitMLPConfig(train_detectors=True), of_bits),
    "transformer": (replace(ENCODER, layers=5), of_subwords),
    "modernbert": (replace(ENCODER, layers=5, family="modernbert"), of_subwords),
    "albert": (replace(ENCODER, layers=5, family="albert"), of_subwords),
    "frozen layers": (replace(ENCODER, layers=5, freeze_layers=3), of_subwords),
    "all frozen": (replace(ENCODER, layers=3, freeze_layers=3), of_subwords),
    "frozen embeddings": (replace(ENCODER, layers=4, freeze_embeddings=True), of_subwords),
    "lora": (replace(ENCODER, layers=5, lora=LoraConfig(rank=2)), of_subwords),
}


@pytest.mark.parametrize("case", at_once(*list(FITTING)[::2], of=FITTING, seconds=1))
def test_the_estimate_is_that_of_the_model_itself(case, monkeypatch):
    settings, build = FITTING[case]
    weights = list(build(settings).parameters())
    # a trained weight has a gradient and two moments of its size beside it
    needed = sum(weight.nbytes for weight in weights)
    needed += sum(3 * weight.nbytes for weight in weights if weight.requires_grad)
    assert training_bytes(settings, build) == needed
    monkeypatch.setattr(memory, "free_memory", lambda device: needed)
    require_memory(settings, build, CPU)
    require_memory(settings, build, CPU, 0.5)
    with pytest.raises(UserError, match="are free"):
        require_memory(settings, build, CPU, 2)


def test_layers_that_join_the_training_later_count_as_trained():
    thawing = replace(ENCODER, layers=4, freeze_layers=4, unfreeze_epochs=1.0)
    assert training_bytes(thawing, of_subwords) == training_bytes(
        replace(ENCODER, layers=4), of_subwords
    )


def test_vectors_that_stay_as_they_are_have_no_gradient(tmp_path):
    file = tmp_path / "vectors.txt"
    file.write_text("a 1 2\n")
    settings = BiLSTMConfig(embedding=2, vectors=str(file))
    frozen = replace(settings, freeze_vectors=True)
    assert (
        training_bytes(settings, of_texts) - training_bytes(frozen, of_texts) == 3 * 5_000 * 2 * 4
    )


def test_random_numbers_are_those_of_a_run_without_the_estimate():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for settings, build in FITTING.values():
        require_memory(settings, build, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_of_ones_own_and_pretrained_weights_are_not_estimated():
    def build(settings: object) -> nn.Module:
        raise AssertionError("is not asked for")

    require_memory(nn.Linear(2, 2), build, CPU)
    require_memory(TransformerConfig(pretrained="somewhere"), build, CPU)


def test_the_command_line_refuses_a_million_layers(tmp_path, monkeypatch, capsys):
    words = [
        "model.layers=1000000",
        "data.sample.rows=200",
        "data.sample.eval_rows=40",
        f"output={tmp_path}",
    ]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    with pytest.raises(SystemExit) as left:
        train.main()
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "model.layers=1000000: needs about 6.3 TB for weights, gradients and optimizer, "
    )
    assert line.endswith("are free. Lower model.layers or model.hidden.")
