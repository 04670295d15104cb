"""Write the golden loss curves anew: `python -m tests.golden.renew`.

The commit says why they changed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from flatout import (
    BiLSTMConfig,
    BitMLPConfig,
    BitsDataConfig,
    CheckpointConfig,
    EncodingConfig,
    GramsConfig,
    HeadlinesConfig,
    MonitorConfig,
    OptimConfig,
    PeopleConfig,
    TextCNNConfig,
    TextDataConfig,
    TransformerConfig,
    fit,
)
from flatout.bits.encodings import EncodingKind
from flatout.models.bit_mlp import Norm, Start
from flatout.models.words import Pooling
from tests.run_files import losses as read_losses

FOLDER = Path(__file__).parent
MODELS = {
    "bilstm": BiLSTMConfig(embedding=16, hidden=16),
    "bilstm_attention_2_layers": BiLSTMConfig(
        embedding=16, hidden=16, layers=2, pooling=Pooling.attention
    ),
    "textcnn": TextCNNConfig(embedding=16, filters=16),
    "transformer": TransformerConfig(hidden=32, layers=2, heads=4),
    "bitmlp": BitMLPConfig(widths=[16]),
    "bitmlp_from_scratch_on_sets": BitMLPConfig(
        widths=[16], start=Start.random, dropout=0.1, norm=Norm.layer
    ),
}
_RATES = {"transformer": 0.003}
ENCODINGS = {
    "bitmlp": EncodingConfig(size=256, hashes=6),
    "bitmlp_from_scratch_on_sets": EncodingConfig(kind=EncodingKind.twostep, size=64, hashes=3),
}


def losses(name: str, folder: Path) -> list[float]:
    """The loss of each of some thirty steps on a built-in sample, in fp32 on the CPU, dropout and
    all.
    """
    where: dict[str, Any] = {"batch_size": 64, "cache": str(folder / "cache")}
    if name in ENCODINGS:
        data: Any = BitsDataConfig(
            sample=PeopleConfig(rows=1_200), encoding=ENCODINGS[name], vocabulary=200, **where
        )
    else:
        data = TextDataConfig(sample=HeadlinesConfig(rows=960, eval_rows=50, classes=4), **where)
    result = fit(
        data,
        MODELS[name],
        epochs=2,
        task=GramsConfig(exposure=False) if name in ENCODINGS else None,
        precision="fp32",
        seed=1,
        optim=OptimConfig(lr=_RATES.get(name, 0.01)),
        checkpoint=CheckpointConfig(patience=None),
        monitor=MonitorConfig(flush_every=1, progress=False),
        output=str(folder / "runs"),
        trainer={"accelerator": "cpu"},
    )
    return read_losses(result.folder)


def read(name: str) -> list[float]:
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [float(line.split()[1]) for line in lines]


def main() -> None:
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            found = losses(name, Path(folder))
        text = "".join(f"{step} {loss:.6g}\n" for step, loss in enumerate(found, 1))
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
