"""Write a run's encoder as a folder that transformers opens, on request with an ONNX file.

The weights are put into the library's own class, so that nothing of flatout is needed to use them.
The folder is then opened by that library, and its padded logits on made-up rows must equal the
run's own. Networks of other kinds are written by `words_onnx`, `recordings_onnx` and
`bits/bits_onnx`.

Shapes: B rows, L longest row.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import torch
from torch import Tensor, nn

from flatout.data.batches.flat_batch import flat_batch
from flatout.data.tables.hub import fetch_model
from flatout.data.tokens.checked_tokenizer import parse_tokenizer
from flatout.data.tokens.long_texts import Long, LongTexts
from flatout.data.tokens.subwords import Subwords
from flatout.errors import require
from flatout.files import load_json
from flatout.inference.onnx_file import (
    DEFECT,
    MOST_APART,
    ONNX,
    open_onnx,
    require_close,
    save_onnx,
)
from flatout.models.encoder.lora import merge_lora
from flatout.models.encoder.transformer import Outputs, Transformer, quiet_library

_ONNX_APART = 1e-4
_ROWS = 8
_LONGEST = 200
_JOINED = {
    "mean": "a text has the mean of its windows' logits",
    "max": "a text has the max of its windows' logits",
    "attention": (
        "a text has the mean of its windows' logits, weighted by an attention that stays in the run"
    ),
    "tags": "a word has the tag of the window with most words around it",
}  # what is answered to several windows


class EncoderRun(Protocol):
    """What an export asks of the predictor of an encoder."""

    model: Transformer
    vocabulary: Subwords
    max_length: int
    long_texts: LongTexts

    def logit_scale(self) -> tuple[float, float]: ...


def export_encoder(load: Callable[[], Any], folder: Path, name: Path, *, onnx: bool) -> list[str]:
    """Write a run's encoder into a folder; return lines to print.

    `name`: the name that the folder will get.
    """
    with quiet_library():
        predictor: EncoderRun = load()
        apart_by = export(predictor, folder)
        rows = made_up_rows(predictor)
        checked = f"on {len(rows)} made-up rows of {len(rows[0])} to {len(rows[-1])} tokens"
        kind = outputs_of(predictor.model).auto_class.__name__
        lines = [f"open it with {kind}.from_pretrained({str(name)!r}), and with AutoTokenizer"]
        if window := predictor.model.window:
            joined = _JOINED["tags" if predictor.model.is_tagging else predictor.model.joins.value]
            lines += [f"it answers one window of {window} tokens; {joined}"]
        if predictor.long_texts.kind is Long.head_tail:
            lines += [
                "texts that are too long: its tokenizer cuts their end off, the run cuts out their"
                " middle"
            ]
        lines += [f"largest difference from the run's own logits: {apart_by:.1e} {checked}"]
        if onnx:
            apart = export_onnx(predictor, folder)
            lines += [
                f"{ONNX}: largest difference from transformers: {apart:.1e} on batches of two"
                " shapes"
            ]
    return lines


def export(predictor: EncoderRun, folder: Path) -> float:
    """Write the model and its tokenizer into a folder that exists.

    Return the largest difference of its logits from the run's own.
    """
    rows = made_up_rows(predictor)
    mean, spread = predictor.logit_scale()
    with torch.inference_mode():
        expected = predictor.model.eval()(flat_batch(rows)) * spread + mean
    plain_model(predictor.model, *predictor.logit_scale()).save_pretrained(folder)
    _save_tokenizer(predictor, folder)
    with torch.inference_mode():
        answered = _opened(predictor.model, folder)(**_pad_rows(predictor.model, rows)).logits
    if predictor.model.answers_tokens:
        answered = answered[_mask(rows)]
    return require_close(answered, expected, "the exported model", MOST_APART)


def export_onnx(predictor: EncoderRun, folder: Path) -> float:
    """Write the model of an exported folder as ONNX too.

    Return the largest difference of its logits from those of transformers.
    """
    rows = made_up_rows(predictor)
    model = _OnlyLogits(_opened(predictor.model, folder), _input_names(predictor.model)).eval()
    inputs = _pad_rows(predictor.model, rows[:3])
    axes = {0: "rows", 1: "length"}
    save_onnx(model, inputs, ["logits"], (tuple(axes for _ in inputs),), folder / ONNX)
    session = open_onnx(folder / ONNX)
    apart = 0.0
    for batch in (rows, rows[2:3]):
        inputs = _pad_rows(predictor.model, batch)
        with torch.inference_mode():
            expected = model(*inputs.values())
        (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        apart = max(apart, require_close(torch.from_numpy(found), expected, ONNX, _ONNX_APART))
    return apart


def plain_model(model: Transformer, mean: float = 0.0, spread: float = 1.0) -> Any:
    """The library's own model with the trained weights.

    Its head multiplies what it answers by `spread`, and then adds `mean`.
    """
    net = model.net
    if any("lora_" in name for name, _ in net.named_parameters()):
        merge_lora(net)
    plain = outputs_of(model).auto_class.from_config(
        type(net.config).from_dict(net.config.to_dict())
    )
    plain.load_state_dict(net.state_dict())
    if (mean, spread) != (0.0, 1.0):
        _scale_outputs(plain, net.config.num_labels, mean, spread)
    return plain.eval()


def outputs_of(model: Transformer) -> Outputs:
    """The kind of an encoder's outputs, without their names."""
    if model.predicts_words:
        return Outputs([], "words")
    return Outputs([], "tags" if model.is_tagging else "single")


def made_up_rows(predictor: EncoderRun) -> list[list[int]]:
    """Rows of random ids in the frame of the tokenizer, shortest first."""
    frame = predictor.vocabulary.frame
    apart = {
        *frame.opening,
        *frame.closing,
        *frame.parting,
        frame.padding,
        predictor.model.padding_id,
    }
    size = min(predictor.vocabulary.size, predictor.model.described.vocab_size)
    ids = [number for number in range(size) if number not in apart]
    longest = (
        min(_LONGEST, predictor.model.longest_row(), predictor.model.window or _LONGEST)
        - frame.size
    )
    random = torch.Generator().manual_seed(0)
    rows = []
    for length in torch.linspace(1, max(1, longest), _ROWS).long().tolist():
        chosen = torch.randint(len(ids), (length,), generator=random).tolist()
        rows.append([*frame.opening, *(ids[number] for number in chosen), *frame.closing])
    return rows


def _pad_rows(model: Transformer, rows: list[list[int]]) -> dict[str, Tensor]:
    """The inputs of transformers for these rows, each of one text.

    Rows [5 6] and [7] become ids [[5, 6], [7, padding]] with the mask [[1, 1], [1, 0]].
    """
    mask_BL = _mask(rows)
    tokens_BL = torch.full(mask_BL.shape, model.padding_id)
    tokens_BL[mask_BL] = torch.tensor([token for row in rows for token in row])
    inputs = {
        "input_ids": tokens_BL,
        "attention_mask": mask_BL.long(),
        "token_type_ids": torch.zeros_like(tokens_BL),
    }
    return {name: inputs[name] for name in _input_names(model)}


def _mask(rows: list[list[int]]) -> Tensor:
    """`[B, L]` whether a place is a token."""
    lengths_B = torch.tensor([len(row) for row in rows])
    return torch.arange(int(lengths_B.max())) < lengths_B.unsqueeze(1)


def _input_names(model: Transformer) -> list[str]:
    """The inputs of the model; a pair has type numbers only if it had them in training."""
    return ["input_ids", "attention_mask", *(["token_type_ids"] if model._numbers_pairs else [])]


@torch.no_grad()
def _scale_outputs(net: nn.Module, num_labels: int, mean: float, spread: float) -> None:
    """Let the last layer do what came after it: its values times a spread, plus a mean."""
    linear = [each for each in net.modules() if isinstance(each, nn.Linear)]
    layers = [each for each in linear if each.out_features == num_labels]
    require(
        bool(layers) and (not mean or layers[-1].bias is not None),
        "export",
        "the head of this family has no bias, which the mean of the labels would be added to",
        hint="Train one of another model.family.",
    )
    layers[-1].weight.mul_(spread)
    if layers[-1].bias is not None:
        layers[-1].bias.mul_(spread).add_(mean)


def _save_tokenizer(predictor: EncoderRun, folder: Path) -> None:
    predictor.vocabulary.save(folder)
    path = folder / "tokenizer_config.json"
    settings = load_json(path)
    require(isinstance(settings, dict), "export", f"{path.name} of the run holds no settings")
    # the library opens this file, and the run another text: what is checked there is checked here
    files = predictor.vocabulary.files
    fetch_model(str(folder), "export", lambda: parse_tokenizer(files["tokenizer.json"]))
    longest = predictor.model.window or predictor.model.longest_row()
    settings["model_max_length"] = min(longest, predictor.max_length)
    settings["model_input_names"] = _input_names(predictor.model)
    path.write_text(json.dumps(settings, ensure_ascii=False, indent=2), encoding="utf-8")
    from transformers import AutoTokenizer

    text = "A short text, of 12 words or so: naïve, ÉCOLE & more."
    expected = predictor.vocabulary.encode(pa.array([text]), max_length=1_000).tokens.tolist()
    opened = partial(AutoTokenizer.from_pretrained, folder, trust_remote_code=False)
    # the run may come from others, and so may what its folder says of the tokenizer
    found = fetch_model(str(folder), "export", lambda: opened()(text)["input_ids"])
    require(
        found == expected,
        "export",
        "the saved tokenizer makes other tokens than the run's",
        hint=DEFECT,
    )


def _opened(model: Transformer, folder: Path) -> Any:
    kind = outputs_of(model).auto_class
    opened = partial(kind.from_pretrained, folder, dtype=torch.float32, trust_remote_code=False)
    return fetch_model(str(folder), "export", opened).eval()


class _OnlyLogits(nn.Module):
    def __init__(self, net: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.net = net
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net(**dict(zip(self.names, inputs, strict=True))).logits
