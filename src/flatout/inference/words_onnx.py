"""Networks on words that were trained from scratch (BiLSTM, TextCNN), as ONNX.

The file reads token ids in padded rows, and the length of each row; it answers logits. The run's
temperature, or the unit of a regression, is part of it. Beside it lie a tokenizer that the package
`tokenizers` opens, and `signature.json` with names, shapes and labels. A run that answers with a
linear model as well gets its arrays, and a program that reads them without flatout. The folder is
asked as anybody would ask it, and its answers to made-up texts must equal the run's own.

Shapes: B rows, L longest row, E inputs of a layer, H hidden, C outputs.
"""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from flatout.data.checks.cleaning import Escapes
from flatout.data.info import Labels
from flatout.data.problem import Problem
from flatout.data.tables.roles import Roles
from flatout.data.tokens.long_texts import Long, LongTexts
from flatout.data.tokens.subwords import Encoder, Subwords
from flatout.data.tokens.vocabulary import PADDING, SEPARATOR, UNKNOWN_ID
from flatout.errors import require
from flatout.inference import linear_part
from flatout.inference.linear_part import LINEAR, LinearPart
from flatout.inference.onnx_file import (
    MOST_APART,
    ONNX,
    open_onnx,
    require_close,
    save_onnx,
    write_signature,
)
from flatout.report.page import render_text
from flatout.tasks.mixture import Mixture

if TYPE_CHECKING:
    from flatout.baselines.linear_text import QuickModel

LINEAR_PROGRAM = "linear_part.py"
PROGRAM = "predict.py"
TOKENS = "tokenizer.json"
_TEXTS = 64
_LONGEST = 200  # words of most made-up texts; the longest one is cut
_ODD_TEXTS = ["", " ", "A text of 9 words: naïve, ÉCOLE & more…", f"private {PADDING}{SEPARATOR}"]


class WordsRun(Protocol):
    """What an export asks of the predictor of a network on words."""

    model: nn.Module
    vocabulary: Encoder
    roles: Roles
    labels: Labels
    max_length: int
    long_texts: LongTexts
    escapes: Escapes
    temperature: float
    linear: QuickModel | None
    mixture: Mixture

    def outputs(self, texts: pa.Array) -> Tensor: ...

    def logit_scale(self) -> tuple[float, float]: ...

    def least_shares(self) -> Tensor: ...


def export_words(predictor: WordsRun, folder: Path) -> list[str]:
    """Write the ONNX file of a run, with its tokenizer, into a folder that is there; lines to
    print.
    """
    kind = predictor.long_texts.kind
    require(
        kind is Long.cut,
        "export",
        f"its tokenizer would cut the texts that the run reads with data.long={kind}",
        hint="Train with data.long=cut.",
    )
    require(
        len(predictor.roles.texts) == 1 or predictor.linear is None,
        "export",
        "the linear model of a run on pairs of texts has no exported form",
        hint="Train with model.ngrams=off.",
    )
    network = _PaddedWords(predictor).eval()
    # Rows of two lengths; the file takes any others.
    tokens = torch.ones(2, 3, dtype=torch.int64)
    inputs = {"tokens": tokens, "lengths": torch.tensor([3, 2])}
    axes = ({0: "rows", 1: "length"}, {0: "rows"})
    save_onnx(network, inputs, ["logits"], axes, folder / ONNX)
    _save_tokenizer(predictor, folder / TOKENS)
    signature: dict[str, Any] = {
        "inputs": {"tokens": ["rows", "length"], "lengths": ["rows"]},
        "outputs": ["logits"],
        "problem": predictor.labels.problem.value,
        "labels": predictor.labels.classes,
    }
    if predictor.labels.problem is Problem.multi:
        signature["thresholds"] = predictor.least_shares().tolist()
    lines = [f"inputs tokens, lengths, from {TOKENS}; output logits, one for each label"]
    if predictor.linear is not None:
        _, spread = predictor.logit_scale()
        signature["linear"] = {"file": LINEAR, "weight": predictor.mixture.linear * spread}
        lines.append(_write_linear_part(predictor, predictor.linear, folder))
    write_signature(folder, signature)
    apart = _compare(predictor, folder)
    if predictor.escapes is Escapes.decode:
        lines.append("texts with escapes (\\u00e9): the run decodes them, its tokenizer does not")
    who = ONNX if predictor.linear is None else f"{ONNX} and {LINEAR}"
    lines.append(
        f"{who}: largest difference from the run's own logits: {apart:.1e} on {_TEXTS} made-up"
        " texts"
    )
    return lines


def _write_linear_part(predictor: WordsRun, linear: QuickModel, folder: Path) -> str:
    """Write the linear model and what answers with it; a line to print."""
    save_file(linear.arrays(), folder / LINEAR)
    shutil.copyfile(linear_part.__file__, folder / LINEAR_PROGRAM)
    write_program(folder, ONNX, predictor)
    return (
        f"a linear model on n-grams answers too, which ONNX cannot hold: {LINEAR_PROGRAM} adds its"
        f" logits, and {PROGRAM} answers with both"
    )


def write_program(folder: Path, file: str, predictor: WordsRun, *, encoder: bool = False) -> None:
    """Write a program that answers texts by a file of the folder, without flatout."""
    program = render_text(
        "predict.py",
        onnx=file.endswith(".onnx"),
        is_encoder=encoder,
        is_mixed=predictor.linear is not None,
        file=file,
        problem=predictor.labels.problem.value,
        least=predictor.least_shares().tolist(),
    )
    (folder / PROGRAM).write_text(f"{program}\n", encoding="utf-8")


def open_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / TOKENS))


def encode_padded(tokenizer: Tokenizer, texts: list[str]) -> dict[str, Tensor]:
    """Texts as the inputs of an exported file: `[B, L]` tokens and `[B]` lengths."""
    rows = tokenizer.encode_batch(texts)
    tokens = np.array([row.ids for row in rows], np.int64)
    lengths = np.array([sum(row.attention_mask) for row in rows], np.int64)
    return {"tokens": torch.from_numpy(tokens), "lengths": torch.from_numpy(lengths)}


class _PaddedRows:
    """What a network on words reads of a batch, of rows that are padded already."""

    # Of two rows, on the host. They differ, so that the file has the way for uneven rows, which
    # even ones may take too.
    lengths = (1, 2)

    def __init__(self, tokens_BL: Tensor, lengths_B: Tensor) -> None:
        self.tokens_BL = tokens_BL
        self.lengths_B = lengths_B

    def padded(self, fill: int) -> tuple[Tensor, Tensor]:
        return self.tokens_BL, self.lengths_B


class _PaddedWords(nn.Module):
    """Padded rows in, logits at the run's temperature (or numbers in the labels' unit) out."""

    def __init__(self, predictor: WordsRun) -> None:
        super().__init__()
        self.model = deepcopy(predictor.model).cpu()
        self.mean, spread = predictor.logit_scale()
        self.spread = spread * predictor.mixture.network
        for name, layer in list(self.model.named_modules()):
            if isinstance(layer, nn.LSTM):
                self.model.set_submodule(name, _LSTMOperator(layer))

    def forward(self, tokens_BL: Tensor, lengths_B: Tensor) -> Tensor:
        # A text without a word is one unknown word to the run. A tokenizer makes no token of it,
        # and of such texts alone no place either: [] → [0] → [1].
        tokens_BL = nn.functional.pad(tokens_BL, (0, 1))
        tokens_BL = tokens_BL.masked_fill((lengths_B == 0).unsqueeze(1), UNKNOWN_ID)
        logits_BC = self.model(_PaddedRows(tokens_BL, lengths_B.clamp_min(1)))
        return logits_BC * self.spread + self.mean


class _LSTMOperator(nn.Module):
    """A layer of torch's LSTM as the operator LSTM of ONNX.

    Torch's own exporter takes the places of the example for those of all rows.
    """

    def __init__(self, layer: nn.LSTM) -> None:
        super().__init__()
        self.hidden = layer.hidden_size
        weights, states, *biases = [_order_gates(each) for each in layer.all_weights[0]]
        self.weights = nn.Buffer(weights.unsqueeze(0))
        self.states = nn.Buffer(states.unsqueeze(0))
        self.biases = nn.Buffer(torch.cat(biases).unsqueeze(0))

    def forward(self, inputs_LBE: Tensor) -> tuple[Tensor, tuple[()]]:
        longest, num_rows, _ = inputs_LBE.shape
        states_L1BH = torch.onnx.ops.symbolic(
            "LSTM",
            (inputs_LBE, self.weights, self.states, self.biases),
            {"hidden_size": self.hidden},
            dtype=inputs_LBE.dtype,
            shape=(longest, 1, num_rows, self.hidden),
        )
        return states_L1BH.squeeze(1), ()


def _order_gates(weight: Tensor) -> Tensor:
    """Torch's input, forget, cell, output → ONNX's input, output, forget, cell."""
    into, forget, cell, out = weight.detach().chunk(4)
    return torch.cat([into, out, forget, cell])


def _save_tokenizer(predictor: WordsRun, file: Path) -> None:
    """Write the run's tokenizer, which then pads and cuts as well."""
    vocabulary = predictor.vocabulary
    described = json.loads(vocabulary.tokenizer.to_str())
    padding = 0
    if isinstance(vocabulary, Subwords):
        padding = vocabulary.frame.padding
    else:
        # No text may hold a special token of ours. The run removes them from texts; here they are
        # replaced by blanks first, and known as tokens no more.
        blank = {
            "type": "Replace",
            "pattern": {"Regex": f"[{PADDING}-{SEPARATOR}]"},
            "content": " ",
        }
        described["added_tokens"] = []
        described["normalizer"]["normalizers"].insert(0, blank)
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.enable_truncation(predictor.max_length)
    tokenizer.enable_padding(pad_id=padding)
    tokenizer.save(str(file))


def _compare(predictor: WordsRun, folder: Path) -> float:
    """The largest difference between the folder's logits and the run's own.

    All texts are compared in one batch; each odd one and the longest are compared alone, too.
    """
    tokenizer = open_tokenizer(folder)
    session = open_onnx(folder / ONNX)
    linear = LinearPart.of(folder)

    def ask(texts: list[str]) -> Tensor:
        inputs = encode_padded(tokenizer, texts)
        (logits,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        return torch.from_numpy(logits if linear is None else logits + linear.read(texts))

    texts = made_up_texts(predictor)
    expected = predictor.outputs(pa.array(texts)) / predictor.temperature
    alone = [*range(len(_ODD_TEXTS)), -1]
    found = torch.cat([ask(texts), *(ask([texts[number]]) for number in alone)])
    return require_close(found, torch.cat([expected, expected[alone]]), ONNX, MOST_APART)


def made_up_texts(predictor: WordsRun) -> list[str]:
    """Odd texts, then random words of the vocabulary: one word to 200, and one text that is cut."""
    words = sorted(predictor.vocabulary.tokenizer.get_vocab())
    random = np.random.default_rng(0)
    most = min(_LONGEST, predictor.max_length)
    counts = np.linspace(1, most, _TEXTS - len(_ODD_TEXTS) - 1, dtype=int)
    longest = predictor.max_length + 1
    texts = [" ".join(random.choice(words, count)) for count in (*counts, longest)]
    return [*_ODD_TEXTS, *texts]
