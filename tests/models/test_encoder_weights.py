"""Folders of weights that an encoder opens, and those that it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.models.encoder_cases import FLAT, PADDED, PADDING, VOCABULARY, built
from tests.refusals import refused
from transformers import (
    BertConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from flatout.errors import UserError
from flatout.models.encoder.transformer import (
    Compute,
    Outputs,
    Transformer,
    TransformerConfig,
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
    changed: dict[str, int] | None, message: str, tmp_path: Path
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
    with refused("model.family", "xlnet", "d_head", fix="model.pretrained=FOLDER"):
        TransformerConfig(family="xlnet", hidden=32, heads=4).read_description()


def test_a_decoder_without_a_padding_token_is_refused() -> None:
    net = GPT2ForSequenceClassification(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    with refused("model", "gpt2", "padding token", fix="pad_token_id"):
        Transformer(net, is_tagging=False, compute=Compute.auto, separator_id=None)


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


@pytest.mark.parametrize(
    ("width", "rate"),
    [
        (32, 3e-4),
        (384, 1e-4),
        (768, 5e-5),
        (1_024, 3.75e-5),
    ],
)
def test_the_narrower_pretrained_weights_are_the_larger_is_their_rate(
    width: int, rate: float, tmp_path: Path
) -> None:
    BertConfig(hidden_size=width, num_attention_heads=4).save_pretrained(tmp_path)
    assert TransformerConfig(pretrained=str(tmp_path)).recommended_lr == pytest.approx(rate)
    assert TransformerConfig(hidden=width).recommended_lr == 1e-3


def test_a_folder_without_a_width_gets_the_usual_rate(tmp_path: Path) -> None:
    BertConfig(hidden_size=0, num_attention_heads=4).save_pretrained(tmp_path)
    assert TransformerConfig(pretrained=str(tmp_path)).recommended_lr == 5e-5
