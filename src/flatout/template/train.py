"""Train by the settings in conf/: `python train.py model.width=64`; README.md has more."""

from pathlib import Path

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from flatout.callbacks import ExactCheckpoint, Verdict
from flatout.cli.late_help import allow_late_help


def train(settings: DictConfig, folder: Path) -> float:
    """Train, or continue what lies in the folder; returns the metric of the best checkpoint."""
    L.seed_everything(settings.seed, verbose=False)
    exact = ExactCheckpoint(folder / "checkpoints", monitor=settings.metric)
    logger = instantiate(settings.logger, save_dir=folder)
    trainer = L.Trainer(**settings.trainer, logger=logger, callbacks=[exact, Verdict()])
    module = instantiate(settings.model)
    data = instantiate(settings.data)
    trainer.fit(module, datamodule=data, ckpt_path=exact.latest())
    trainer.test(module, datamodule=data, ckpt_path="best")
    (scores,) = trainer.validate(module, datamodule=data, ckpt_path="best", verbose=False)
    return scores[settings.metric]


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(settings: DictConfig) -> float:
    return train(settings, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    allow_late_help()  # without it Hydra 1.3 does not start on Python 3.14
    main()
