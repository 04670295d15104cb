"""Bit strings to 2-grams: detectors that read grams off the bits, and a composer that makes the
answer of them.

An encoder hashes the raw text; what is asked for are grams of the plain text. The two differ
(`2/5/1994` is hashed, `51` is asked for), so the model has two parts. *Detectors* are one linear
layer from the bits to every gram that was hashed, each squeezed to 0 … 1. Ridge regression gives
them in closed form, far better than gradients find them. The *composer* is a small network from
detected grams to answers; a gram that is asked for as it was hashed also has a straight path.
Answers and detections leave side by side, so that both can be trained. After training, ridge
regression on the answers themselves may have a vote. Where an encoding hides almost everything, a
linear function is hard to beat. Without detectors it is a plain network from bits to answers, with
a straight linear path beside it if asked for.

Shapes: B records, D bits (or known numbers of a set), H hashed grams, C answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from flatout.data.batches.flat_batch import FlatBatch
from flatout.errors import check_settings, require, setting
from flatout.models.casts import cast_in_pass, dtype_of_pass
from flatout.models.contract import Lengths, Network, Product, look_up, through
from flatout.models.lean import LeanDropout

# logits before training: of a gram detected beyond doubt, and of one nothing speaks for
_SURE = 8.0
_UNSEEN = -8.0
# logit at which every answer of a plain network starts: a record holds some twenty of a thousand
# grams
_RARE = -4.0
Norm = StrEnum("Norm", "none layer batch")
_NORMS = {Norm.layer: nn.LayerNorm, Norm.batch: nn.BatchNorm1d}
Init = StrEnum("Init", "xavier he")
Start = StrEnum("Start", "ridge random")


@dataclass(kw_only=True, slots=True)
class BitMLPConfig:
    """A network from bit strings, or sets of numbers, to 2-grams."""

    widths: list[int] = setting(
        lambda: [256],
        "Width of each hidden layer.",
        least=1,
        allowed="widths of 1 or more",
        example="[3,4,5]",
    )
    depth: int = setting(1, "Times each hidden layer stands one after the other.", least=1)
    residual: bool = setting(False, "Whether hidden layers of equal width add to what they get.")
    norm: Norm = setting(
        Norm.none, "What follows each hidden layer: none, layer or batch normalisation."
    )
    dropout: float = setting(0.0, "Share of hidden values dropped.", least=0, below=1)
    init: Init = setting(Init.he, "How other weights start: xavier or he.")
    detectors: bool = setting(
        True, "Whether hashed grams are detected first; else a plain network on the bits."
    )
    start: Start = setting(
        Start.ridge, "Where detectors start: at ridge regression's solution, or at random."
    )
    train_detectors: bool = setting(
        False, "Whether detectors that start at ridge's solution are trained further."
    )
    straight: bool = setting(True, "Whether answers have a straight path past the hidden layers.")
    blend: bool = setting(
        True, "Whether ridge regression has a vote, as large as the validation records say."
    )

    def __post_init__(self) -> None:
        check_settings(self, "model")
        require(
            bool(self.widths) or self.straight,
            "model.widths",
            "an empty list without model.straight leaves no way from bits to answers",
            hint="Set model.straight=true, or name widths: model.widths=[512].",
        )

    @property
    def starts_at_ridge(self) -> bool:
        return self.detectors and self.start is Start.ridge

    def build(
        self, *, num_inputs: int, is_set: bool, hashed_of_label: Sequence[int], num_hashed: int
    ) -> BitMLP:
        """`hashed_of_label` gives each answer's number among the hashed grams, or -1."""
        model = BitMLP(self, num_inputs, is_set, hashed_of_label, num_hashed)
        if self.starts_at_ridge and not self.train_detectors and model.detectors is not None:
            model.detectors.requires_grad_(False)
        return model


class BitMLP(Network, nn.Module):
    def __init__(
        self,
        config: BitMLPConfig,
        num_inputs: int,
        is_set: bool,
        hashed_of_label: Sequence[int],
        num_hashed: int,
    ) -> None:
        super().__init__()
        num_labels = len(hashed_of_label)
        is_plain = not config.detectors
        self.starts_at_ridge = config.starts_at_ridge
        self.is_set = is_set
        # Whether an answer depends on the other rows of a pass, in training.
        self.normalises_over_rows = config.norm is Norm.batch
        self._narrow: tuple[Any, tuple[Tensor, Tensor]] | None = None
        sources = torch.tensor(hashed_of_label, dtype=torch.long)
        self.label_sources = nn.Buffer(sources.clamp(min=0), persistent=False)
        self.has_source = nn.Buffer((sources >= 0).float(), persistent=False)
        self.unseen = nn.Buffer(_UNSEEN * (1 - self.has_source), persistent=False)
        self.detectors = None if is_plain else _first_layer(num_inputs, num_hashed, is_set)
        self.composer = _composer(
            config, num_inputs if is_plain else num_hashed, num_labels, is_plain and is_set
        )
        self.straight = (
            _first_layer(num_inputs, num_labels, is_set) if is_plain and config.straight else None
        )
        for layer in self.modules():
            if isinstance(layer, nn.Linear | _SetLinear):
                _start(layer, config.init)
        self.ridge = _first_layer(num_inputs, num_labels, is_set) if config.blend else None
        self.ridge_share = nn.Buffer(torch.zeros(()))
        if self.ridge is not None:
            self.ridge.requires_grad_(False)
            nn.init.zeros_(self.ridge.get_parameter("weight"))
        self.lean = nn.Parameter(torch.full((num_labels,), _RARE if is_plain else 0.0))
        self.sureness = None
        if config.detectors and config.straight:
            self.sureness = nn.Parameter(torch.full((num_labels,), _SURE))
            if config.widths:
                # answers start at what is detected
                nn.init.zeros_(self.composer[-1].get_parameter("weight"))

    @torch.no_grad()
    def start_at(self, layer: nn.Module, weight: Tensor, bias: Tensor) -> None:
        """Start the detectors, or the vote of ridge regression, at a linear function of inputs."""
        layer.get_parameter("weight").copy_(weight if self.is_set else weight.T)
        layer.get_parameter("bias").copy_(bias)

    def blended(self, logits_BC: Tensor, batch: FlatBatch) -> Tensor:
        """Logits of the answers' probabilities after ridge has voted."""
        if self.ridge is None:
            return logits_BC
        share = self.ridge_share
        scores_BC = self.ridge(self._features(batch)).float()
        return torch.logit((1 - share) * logits_BC.float().sigmoid() + share * scores_BC, eps=1e-6)

    @property
    def trains_detectors(self) -> bool:
        return self.detectors is not None and next(self.detectors.parameters()).requires_grad

    def forward(self, batch: FlatBatch, known_RH: Tensor | None = None) -> Tensor:
        """`[B, C]` logits of the answers; `[B, C + H]` with those of the hashed grams where
        detectors are trained.

        `known_RH`: hashed grams (0 or 1) of R more records, which are answered in the same pass.
        Their rows stand before those of the batch; in columns of hashed grams they are as given.
        """
        if self.detectors is None:
            return self._answers(self._features(batch))
        detected_BH = self.detect(batch)
        hashed_BH = detected_BH.sigmoid()
        if known_RH is not None:
            hashed_BH = torch.cat([known_RH, hashed_BH])
        logits_BC = self.compose(hashed_BH)
        if not self.trains_detectors:
            return logits_BC
        if known_RH is not None:
            detected_BH = torch.cat([known_RH, detected_BH])
        return torch.cat([logits_BC, detected_BH], dim=1)

    def detect(self, batch: FlatBatch) -> Tensor:
        """`[B, H]` logits of the hashed grams."""
        assert self.detectors is not None, "this model has no detectors"
        features = self._features(batch)
        if self.is_set or self.trains_detectors or features.dtype is torch.float32:
            return self.detectors(features)
        with torch.autocast(features.device.type, enabled=False):
            return nn.functional.linear(features, *self._narrow_detectors(features.dtype))

    def _narrow_detectors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Weights of detectors that are not trained, cast once instead of at every step."""
        assert self.detectors is not None
        weight, bias = self.detectors.get_parameter("weight"), self.detectors.get_parameter("bias")
        about = (dtype, weight.device, weight._version, bias._version)
        if self._narrow is None or self._narrow[0] != about:
            self._narrow = (about, (weight.detach().to(dtype), bias.detach().to(dtype)))
        return self._narrow[1]

    def compose(self, hashed_BH: Tensor) -> Tensor:
        """`[B, C]` logits of the answers, from grams that were detected (0 … 1) or are known (0 or
        1).
        """
        logits_BC = self._answers(hashed_BH)
        if self.sureness is None:
            return logits_BC
        # (2 own - 1) x sureness where the gram was hashed, and a fixed logit elsewhere.
        own_BC = hashed_BH.gather(1, self.label_sources.expand(len(hashed_BH), -1))
        sureness_C = self.sureness * self.has_source
        shift_C = self.unseen - sureness_C
        return torch.addcmul(logits_BC + shift_C, own_BC, sureness_C, value=2)

    def _answers(self, features: Tensor) -> Tensor:
        with self._cast_at_once(self.lean.device):
            logits_BC = self.lean + self.composer(features) if len(self.composer) else self.lean
            return logits_BC if self.straight is None else logits_BC + self.straight(features)

    def _cast_at_once(self, device: torch.device) -> AbstractContextManager[object]:
        """Context manager: where it can, one operator casts the weights of layers that answer."""
        dtype = dtype_of_pass(self, device)
        if dtype is None:
            return nullcontext()
        modules = [*self.composer.modules(), self.straight]
        return cast_in_pass(dtype, [[layer] for layer in modules if type(layer) is nn.Linear])

    def products(self, lengths: Lengths) -> list[Product]:
        """Each record meets every weight once; sets only add up rows, and turns of the composer are
        not counted.
        """
        rows = len(lengths)
        products = [] if self.detectors is None else [_product(rows, self.detectors)]
        layers = [
            _product(rows, each)
            for each in self.composer.modules()
            if isinstance(each, nn.Linear | _SetLinear)
        ]
        if self.straight is not None:  # reads what the first hidden layer reads
            layers[:1] = [sum(layers[:1], _product(rows, self.straight))]
        return products + layers

    def _features(self, batch: FlatBatch) -> Any:
        if self.is_set:
            return batch
        device = self.lean.device.type
        return batch.bits(
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else self.lean.dtype
        )


class _SetLinear(nn.Module):
    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_inputs, num_outputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, batch: FlatBatch) -> Tensor:
        starts_B = batch.offsets[:-1].to(batch.tokens.dtype)
        return (
            nn.functional.embedding_bag(batch.tokens, self.weight, starts_B, mode="sum") + self.bias
        )


def _product(rows: int, layer: nn.Module) -> Product:
    weight = layer.get_parameter("weight")
    return look_up(weight) if isinstance(layer, _SetLinear) else through(rows, weight)


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, values: Tensor) -> Tensor:
        return values + self.inner(values)


def _first_layer(num_inputs: int, width: int, is_set: bool) -> nn.Module:
    return _SetLinear(num_inputs, width) if is_set else nn.Linear(num_inputs, width)


def _composer(
    config: BitMLPConfig, num_inputs: int, num_labels: int, is_set: bool
) -> nn.Sequential:
    """Hidden layers and the output; empty without hidden layers."""
    layers = list[nn.Module]()
    width = num_inputs
    for wanted in [width for width in config.widths for _ in range(config.depth)]:
        norms = [_NORMS[config.norm](wanted)] if config.norm in _NORMS else []
        first = _first_layer(width, wanted, is_set and not layers)
        block = nn.Sequential(first, *norms, nn.ReLU(), LeanDropout(config.dropout))
        layers.append(_Residual(block) if config.residual and width == wanted else block)
        width = wanted
    if layers:
        layers.append(nn.Linear(width, num_labels))
    return nn.Sequential(*layers)


def _start(layer: nn.Module, init: Init) -> None:
    own = layer.get_parameter("weight")
    # its rows are what a linear layer's columns are
    weight = own.T if isinstance(layer, _SetLinear) else own
    if init is Init.xavier:
        nn.init.xavier_uniform_(weight)
    else:
        nn.init.kaiming_uniform_(weight, nonlinearity="relu")
    nn.init.zeros_(layer.get_parameter("bias"))
