"""An LSTM or GRU over recordings, windows or chunks, exact on rows of unequal length and without
packing.

Packed sequences keep oneDNN and cuDNN from their fast kernels. Rows are batched by length instead,
and what stands behind a row's end is never read. A network answers at each sample (`run`), once a
window (`answer`), or once a recording read in both directions. A forecast is added to the window's
last value. Chunks of long recordings carry the hidden state from batch to batch
(`carried_state.py`).

Shapes: T samples, B rows, L samples of a row, F inputs, H hidden, K targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from flatout.errors import check_settings, require, setting
from flatout.models.carried_state import CarriedState
from flatout.models.contract import Lengths, Network, Product, through
from flatout.models.lean import LeanDropout
from flatout.models.recurrent import (
    State,
    cast_layers,
    reversed_places,
    run_both,
    run_layer,
    start_layer,
)
from flatout.models.series import (
    Residual,
    WindowRidge,
    flatten,
    is_even,
    last_of,
    rectangle,
    windows_of,
)

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch
    from flatout.data.sequences.info import SequenceShape

Cell = StrEnum("Cell", "lstm gru")
Smoothing = StrEnum("Smoothing", "none ema")


@dataclass(kw_only=True, slots=True)
class RNNConfig:
    """A recurrent network over numeric sequences."""

    recommended_clip: ClassVar[float] = 0.5  # recurrent gradients explode now and then

    cell: Cell = setting(Cell.lstm, "lstm or gru.")
    hidden: int = setting(64, "State of a layer.", least=1)
    layers: int = setting(1, "Layers on top of each other.", least=1)
    dropout: float = setting(
        0.0, "Share of values dropped between layers and before the output.", least=0, below=1
    )
    bidirectional: bool = setting(
        False,
        "Whether recordings are read in both directions; for data.problem=label only.",
        example="data.problem=label model.bidirectional=true task=classification",
    )
    smoothing: Smoothing = setting(
        Smoothing.none, "ema: a learned exponential mean of answers, one for each target."
    )
    residual: Residual = setting(
        Residual.none, "ridge: the network learns what ridge regression on the window leaves."
    )

    def __post_init__(self) -> None:
        check_settings(self, "model")

    def build(self, *, shape: SequenceShape) -> RNN:
        require(
            bool(shape.labels) or not self.bidirectional,
            "model.bidirectional",
            "reads what comes later, which is not known then",
            hint="Leave it out, or set data.problem=label.",
        )
        require(
            shape.is_each_step or self.smoothing is Smoothing.none,
            "model.smoothing",
            f"{self.smoothing} needs an answer at each time",
            hint="Leave out data.lookback, or set model.smoothing=none.",
        )
        require(
            self.residual is Residual.none or shape.lookback is not None,
            "model.residual",
            "ridge reads windows",
            hint="Set data.lookback, or model.residual=none.",
        )
        return RNN(self, shape)


class RNN(Network, nn.Module):
    """Recurrent layers in one direction, or in both, and a linear output."""

    layout = "padded"

    def __init__(self, config: RNNConfig, shape: SequenceShape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        kind = nn.LSTM if config.cell is Cell.lstm else nn.GRU
        self.is_lstm = config.cell is Cell.lstm
        self.is_both = config.bidirectional
        width = config.hidden * (2 if self.is_both else 1)
        widths = [shape.inputs] + [width] * (config.layers - 1)
        self.ahead = nn.ModuleList(kind(each, config.hidden) for each in widths)
        self.back = nn.ModuleList(kind(each, config.hidden) for each in widths * self.is_both)
        self.dropout = LeanDropout(config.dropout) if config.dropout else nn.Identity()
        self.output = nn.Linear(width, shape.outputs)
        self.memory = (
            nn.Parameter(torch.zeros(shape.targets)) if config.smoothing is Smoothing.ema else None
        )
        self.ridge = WindowRidge(shape) if config.residual is Residual.ridge else None
        self.carried = CarriedState() if shape.is_stateful else None
        self.carried_of_others = CarriedState() if shape.is_stateful else None
        for layer in [*self.ahead, *self.back]:
            start_layer(layer)
        # starts at the ridge's answers, or repeats the last value
        if self.ridge is not None or shape.horizon:
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)

    def forward(self, batch: FlatBatch) -> Tensor:
        """`[T, K]` for each sample, `[B, K]` for windows, `[B, H, K]` for forecasts,
        `[B, labels]`.
        """
        shape = self.shape
        if shape.horizon:
            return self.answer(windows_of(batch, shape))
        inputs_BLF = rectangle(batch)[..., : shape.inputs]
        if self.is_both:
            return self._both_ways(inputs_BLF, batch)
        if not shape.is_each_step:
            states_LBH, after_layers, output = self._recur(inputs_BLF, None)
            if is_even(batch):
                last_BH = _hidden_after(after_layers)
            else:
                last_BH = last_of(states_LBH.transpose(0, 1), batch)
            answers = self._read(last_BH, output)
            return answers if self.ridge is None else answers + self.ridge(batch)
        carrier = self.carried if self.training else self.carried_of_others
        zeros = self.make_state(len(inputs_BLF), inputs_BLF.device)
        answers_BLK, after = self.run(inputs_BLF, zeros if carrier is None else carrier.take(zeros))
        if carrier is not None:
            carrier.keep(after)
        return flatten(answers_BLK, batch)

    def run(self, inputs_BLF: Tensor, before: State) -> tuple[Tensor, State]:
        """`[B, L, K]` answers to samples that follow a state, and the state after them; zeros begin
        a recording.
        """
        # A row that ends before the rectangle does is the last of its recording: nothing continues
        # its state.
        states_LBH, after_layers, output = self._recur(
            inputs_BLF, before[:-1] if self.memory is not None else before
        )
        after = after_layers[0]
        if len(after_layers) > 1:
            after = tuple(torch.cat(parts) for parts in zip(*after_layers, strict=True))
        answers_BLK = self._read(states_LBH, output).transpose(0, 1)
        if self.memory is None:
            return answers_BLK, after
        answers_BLK, filtered = smooth(answers_BLK, self.memory.sigmoid(), before[-1])
        return answers_BLK, (*after, filtered)

    def make_state(self, rows: int, device: torch.device | str = "cpu") -> State:
        """Zeros: a hidden state a layer, for an LSTM a cell state too, and the last answers of the
        filter.
        """
        state = (torch.zeros(len(self.ahead), rows, self.config.hidden, device=device),) * (
            1 + self.is_lstm
        )
        if self.memory is None:
            return state
        # The last number is 1 once a recording has begun: then the filter has something to
        # remember.
        filtered = torch.zeros(1, rows, self.shape.targets + 1, device=device)
        return (*state, filtered)

    def _recur(
        self, inputs_BLF: Tensor, before: State | None
    ) -> tuple[Tensor, list[State], list[Tensor] | None]:
        """`[L, B, H]` states of the last layer, the states after each layer, and weights to read
        answers with. `before`: None: zeros.

        Time comes first: oneDNN then copies less (8 % of a step).
        """
        states = inputs_BLF.transpose(0, 1)
        after = list[State]()
        *weights, output = cast_layers([*self.ahead, self.output], states.device)
        for depth, layer in enumerate(self.ahead):
            of_layer = before
            if before is not None and len(self.ahead) > 1:
                of_layer = tuple(part[depth : depth + 1] for part in before)
            if depth:
                states = self.dropout(states)
            states, end = run_layer(layer, states, of_layer, weights[depth])
            after.append(end)
        return states, after, output

    def _read(self, states: Tensor, weights: list[Tensor] | None) -> Tensor:
        """Answers from states of the last layer. `weights`: of the output, if they were cast."""
        states = self.dropout(states)
        return self.output(states) if weights is None else linear(states, *weights)

    def answer(self, windows_BLF: Tensor) -> Tensor:
        """`[B, K]`, or `[B, H, K]` of a forecast, from whole windows."""
        shape = self.shape
        last_B1F = windows_BLF[:, -1:]
        inputs_BLF = windows_BLF - last_B1F if shape.horizon else windows_BLF
        _, after_layers, output = self._recur(inputs_BLF, None)
        answers = self._read(_hidden_after(after_layers), output)
        if shape.horizon:
            answers = answers.view(-1, shape.horizon, shape.targets)
        if self.ridge is not None:
            return answers + self.ridge.answer(windows_BLF)
        return answers + last_B1F[..., -shape.targets :] if shape.horizon else answers

    def _both_ways(self, inputs_BLF: Tensor, batch: FlatBatch) -> Tensor:
        """`[B, labels]` from the state at the end of a recording, and at its beginning of the way
        back.
        """
        lengths_B = batch.offsets[1:] - batch.offsets[:-1]
        turned = None if is_even(batch) else reversed_places(lengths_B, inputs_BLF.shape[1])
        states_LBD = inputs_BLF.transpose(0, 1)
        sides = [side for both in zip(self.ahead, self.back, strict=True) for side in both]
        *weights, output = cast_layers([*sides, self.output], inputs_BLF.device)
        for depth in range(len(self.ahead)):
            both = slice(2 * depth, 2 * depth + 2)
            ahead, back = sides[both]
            states_LBD = self.dropout(states_LBD) if depth else states_LBD
            there_LBH, back_LBH = run_both(ahead, back, states_LBD, turned, weights[both])
            states_LBD = torch.cat([there_LBH, back_LBH], -1)
        ends_BD = torch.cat([last_of(there_LBH.transpose(0, 1), batch), back_LBH[0]], -1)
        return self._read(ends_BD, output)

    def products(self, lengths: Lengths) -> list[Product]:
        """A sample meets the weights of each layer; an answer is made for each sample, or a row."""
        samples = float(lengths.sum()) - self.shape.horizon * len(lengths)
        products = list[Product]()
        for depth in range(len(self.ahead)):
            layers = [self.ahead[depth]]
            if self.is_both:
                layers.append(self.back[depth])
            weights = list[Tensor]()
            for layer in layers:
                weights.append(layer.get_parameter("weight_ih_l0"))
                weights.append(layer.get_parameter("weight_hh_l0"))
            products.append(through(samples, *weights))
        answers = samples if self.shape.is_each_step else len(lengths)
        products.append(through(answers, self.output.weight))
        return products

    def residual_of(self) -> WindowRidge | None:
        return self.ridge


def _hidden_after(after_layers: list[State]) -> Tensor:
    """`[B, H]`: the hidden state of the last layer after a rectangle's last place.

    A view, also backwards. The gradient of one place of many would be filled up with zeros.
    """
    return after_layers[-1][0].squeeze(0)


def smooth(answers_BLK: Tensor, memory_K: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """An exponential mean over time: `mean = memory * mean + (1 - memory) * answer`.

    `before` `[1, B, K + 1]` is the mean so far, and 1 where there is one. Where there is none (0),
    the mean begins at the first answer. Returns the means, and what is `before` the next samples.
    """
    # In log2(L) steps instead of L: each step adds to every mean what the mean `reach` samples
    # earlier holds. With a = (1 - memory) * answers, m = memory, after the first step (reach 1)
    # place 3 holds a3 + m a2; after the second (reach 2) a3 + m a2 + m^2 a1 + m^3 a0.
    has_begun_B1 = before[0, :, -1:] > 0
    start_BK = torch.where(has_begun_B1, before[0, :, :-1].to(answers_BLK.dtype), answers_BLK[:, 0])
    length = answers_BLK.shape[1]
    means_BLK = (1 - memory_K) * answers_BLK
    reach = 1
    while reach < length:
        later = means_BLK[:, reach:] + memory_K**reach * means_BLK[:, :-reach]
        means_BLK = torch.cat([means_BLK[:, :reach], later], 1)
        reach *= 2
    powers_LK = memory_K ** torch.arange(1, length + 1, device=memory_K.device).unsqueeze(1)
    means_BLK = means_BLK + powers_LK * start_BK.unsqueeze(1)
    return means_BLK, torch.cat([means_BLK[:, -1], torch.ones_like(start_BK[:, :1])], -1).unsqueeze(
        0
    )
