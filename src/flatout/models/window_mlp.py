"""A feed-forward network on the window: quick, and on many tasks as good as a recurrent one.

Shapes: B rows, L samples of the window, F inputs, K targets, H samples of the horizon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from flatout.errors import check_settings, require, setting
from flatout.models.contract import Lengths, Network, Product, through
from flatout.models.lean import LeanDropout
from flatout.models.series import Residual, WindowRidge, own_pasts, windows_of

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch
    from flatout.data.sequences.info import SequenceShape


@dataclass(kw_only=True, slots=True)
class WindowMLPConfig:
    """A feed-forward network on all numbers of a window."""

    widths: list[int] = setting(
        lambda: [128],
        "Width of each hidden layer.",
        least=1,
        allowed="a list of one or more widths of 1 or more",
        example="[3,4,5]",
    )
    dropout: float = setting(0.0, "Share of values dropped after each layer.", least=0, below=1)
    shared: bool = setting(
        False, "Of forecasts: one network for all series, each from its own past."
    )
    residual: Residual = setting(
        Residual.none, "ridge: the network learns what ridge regression on the window leaves."
    )

    def __post_init__(self) -> None:
        check_settings(self, "model")
        require(
            bool(self.widths),
            "model.widths",
            f"{self.widths}",
            allowed="one number or more, each 1 or more",
        )

    def build(self, *, shape: SequenceShape) -> WindowMLP:
        require(
            shape.lookback is not None,
            "model",
            "window_mlp reads windows",
            hint="Set data.lookback, or model=rnn.",
        )
        is_fine = bool(shape.horizon) or not self.shared
        require(
            is_fine,
            "model.shared",
            "is for forecasts",
            hint="Leave it out, or set data.problem=forecast.",
        )
        return WindowMLP(self, shape)


class WindowMLP(Network, nn.Module):
    def __init__(self, config: WindowMLPConfig, shape: SequenceShape) -> None:
        super().__init__()
        assert shape.lookback is not None
        self.config, self.shape = config, shape
        inputs = shape.lookback if config.shared else shape.lookback * shape.inputs
        layers: list[nn.Module] = []
        for width in config.widths:
            layers += [nn.Linear(inputs, width), nn.ReLU(), LeanDropout(config.dropout)]
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(inputs, shape.horizon if config.shared else shape.outputs)
        self.ridge = WindowRidge(shape) if config.residual is Residual.ridge else None
        if self.ridge is not None or shape.horizon:
            nn.init.zeros_(self.output.weight)
            nn.init.zeros_(self.output.bias)

    def forward(self, batch: FlatBatch) -> Tensor:
        """`[B, K]` for windows, `[B, H, K]` for forecasts."""
        return self.answer(windows_of(batch, self.shape))

    def answer(self, windows_BLF: Tensor) -> Tensor:
        """The answers of `forward` to windows that are cut out already."""
        shape = self.shape
        if not shape.horizon:
            answers = self.output(self.layers(windows_BLF.flatten(1)))
            return answers if self.ridge is None else answers + self.ridge.answer(windows_BLF)
        series_BKL, last_BK1 = own_pasts(windows_BLF, shape)
        if self.config.shared:
            answers = self.output(self.layers(series_BKL)).transpose(1, 2)
        else:
            centred = windows_BLF - windows_BLF[:, -1:]
            answers = self.output(self.layers(centred.flatten(1))).view(
                -1, shape.horizon, shape.targets
            )
        return answers + (
            last_BK1.transpose(1, 2) if self.ridge is None else self.ridge.answer(windows_BLF)
        )

    def products(self, lengths: Lengths) -> list[Product]:
        """A window meets the weights of each layer, once a series where they are shared."""
        count = float(len(lengths)) * (self.shape.targets if self.config.shared else 1)
        layers = [layer for layer in [*self.layers, self.output] if isinstance(layer, nn.Linear)]
        return [through(count, layer.weight) for layer in layers]

    def residual_of(self) -> WindowRidge | None:
        return self.ridge
