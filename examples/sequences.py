"""Estimate the state of charge of battery cells with an LSTM.

`python examples/sequences.py [cells]`.
"""

import sys

from flatout import CellsConfig, OptimConfig, RNNConfig, SequenceDataConfig, fit


def main(cells: int = 16) -> float:
    # Recordings of yours: SequenceDataConfig(source="cells/", features=["voltage", "current"],
    # target="soc", time="t")
    data = SequenceDataConfig(
        sample=CellsConfig(cells=cells, cycles=2, samples=180),
        features=["voltage", "current", "temperature"],
        target="soc",
        chunk=60,  # the hidden state is carried from chunk to chunk
        batch_size=16,
    )
    result = fit(
        data,
        RNNConfig(hidden=32),
        optim=OptimConfig(lr=5e-3),
        epochs=10,
        precision="fp32",
        name="sequences",
    )
    print(
        f"error {result.metrics['test/rmse']:.4f}, noise of the reference"
        f" {data.sample.floor('soc')}"
    )
    return result.metrics["test/rmse"]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
