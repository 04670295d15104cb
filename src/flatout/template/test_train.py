"""A short training learns, and one that was cut short continues to the same weights."""

from pathlib import Path

from hydra import compose, initialize

from train import train


def test_a_training_learns_and_continues_to_the_same_weights(tmp_path: Path) -> None:
    with initialize("conf", version_base="1.3"):
        whole = compose("train", ["trainer.max_epochs=3", "data.rows=600"])
        cut = compose("train", ["trainer.max_epochs=1", "data.rows=600"])
    accuracy = train(whole, tmp_path / "whole")
    train(cut, tmp_path / "cut")
    train(whole, tmp_path / "cut")
    weights = [tmp_path / run / "checkpoints/last/tensors.safetensors" for run in ("whole", "cut")]
    assert accuracy > 0.5
    assert weights[0].read_bytes() == weights[1].read_bytes()
