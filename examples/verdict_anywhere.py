"""What limits a training of yours, and what a fix is worth.

`python examples/verdict_anywhere.py [rows]`.
"""

import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.callbacks import Verdict


class Lines(Dataset):
    """Lines of text, read letter by letter in Python: slow, as many data sets are."""

    def __init__(self, rows: int) -> None:
        self.lines = [
            " ".join(str(number * factor) for factor in range(1, 80)) for number in range(rows)
        ]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        counts = [0.0] * 16
        for letter in self.lines[number]:
            counts[ord(letter) % 16] += 1
        return torch.tensor(counts), number % 2


class Counts(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2)
        )

    def training_step(
        self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(rows: int = 20_000) -> str:
    verdict = Verdict()
    trainer = L.Trainer(
        max_epochs=10, callbacks=[verdict], logger=False, enable_checkpointing=False
    )
    trainer.fit(Counts(), DataLoader(Lines(rows), batch_size=32, shuffle=True))
    verdict.save("verdict.json")
    return verdict.verdict["cause"] if verdict.verdict else verdict.why_none


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
