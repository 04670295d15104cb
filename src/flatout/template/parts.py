"""What is trained, and on what. Put your own network and data here; nothing below needs a library
beside Lightning.
"""

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, Tensor]


class WaveData(L.LightningDataModule):
    """Waves of three shapes in noise, made when training starts: sine, square and sawtooth."""

    def __init__(self, rows: int, length: int, noise: float, batch_size: int) -> None:
        super().__init__()
        self.rows = rows
        self.length = length
        self.noise = noise
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.training = self.make_waves(self.rows, seed=0)
        self.validation = self.make_waves(self.rows // 4, seed=1)
        self.testing = self.make_waves(self.rows // 4, seed=2)

    def make_waves(self, count: int, seed: int) -> TensorDataset:
        random = torch.Generator().manual_seed(seed)
        shapes = torch.randint(3, (count,), generator=random)
        periods = 1 + 3 * torch.rand(count, 1, generator=random)
        shifts = torch.rand(count, 1, generator=random)
        phases = (periods * torch.linspace(0, 1, self.length) + shifts) % 1
        sines = torch.sin(2 * torch.pi * phases)
        kinds = torch.stack([sines, sines.sign(), 2 * phases - 1])
        waves = kinds[shapes, torch.arange(count)]
        waves = waves + self.noise * torch.randn(waves.shape, generator=random)
        return TensorDataset(waves, shapes)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.validation, self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.testing, self.batch_size)


class WaveClassifier(L.LightningModule):
    """Names the shape of a wave by two convolutions and their mean over time."""

    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.network = nn.Sequential(
            nn.Conv1d(1, width, kernel_size=7, padding=3),
            nn.ReLU(),
            nn.Conv1d(width, width, kernel_size=7, padding=3),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(width, 3),
        )

    def forward(self, waves: Tensor) -> Tensor:
        return self.network(waves.unsqueeze(1))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.measure(batch, "train")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.measure(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.measure(batch, "test")

    def measure(self, batch: Batch, split: str) -> Tensor:
        waves, shapes = batch
        answers = self(waves)
        loss = nn.functional.cross_entropy(answers, shapes)
        right = (answers.argmax(dim=1) == shapes).float().mean()
        self.log_dict({f"{split}/loss": loss, f"{split}/accuracy": right})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)
