"""Encoders at their published sizes, with random weights: parameters, tokens a second of our
training, memory.

Speed and memory hang on the sizes alone, not on what weights are. Each encoder trains for some
steps as `python -m train` would, in a process of its own: its peak is that of a whole run. The rate
is the median over steps, and then over rounds. Runs with `python -m flatout bench bert --only
sizes`; `docs/which_encoder.md` shows the figures.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.claim import Claim, Options, measured_apart, quiet, reaching
from benchmarks.step_times import wait_for_device
from flatout import OptimConfig, TransformerConfig, fit
from flatout.checkpoints.settings import CheckpointConfig
from flatout.config import MonitorConfig
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.samples.tweets import TweetsConfig, TweetsTable
from flatout.data.texts.data import TextData
from flatout.data.texts.settings import TextDataConfig
from flatout.data.tokens.subwords import Subwords
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.ladder.climb import peak_memory_gb
from flatout.models.encoder.transformer import Outputs, Transformer

_WARM = 2
"""Steps before the rate counts."""


@dataclass(frozen=True, slots=True)
class Size:
    """A published encoder: its family, and what its folder says of it."""

    family: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self, padding_id: int) -> Transformer:
        """Its network with random weights, to tell three classes apart."""
        sizes = {
            name: getattr(self, name) for name in ("hidden", "layers", "heads", "intermediate")
        }
        config = TransformerConfig(family=self.family, settings=self.settings, **sizes)
        outputs = Outputs(["a", "b", "c"], "single")
        ids = {"padding_id": padding_id, "separator_id": None}
        return config.build(outputs, vocabulary_size=self.vocabulary, **ids)


_BASE = (768, 12, 12, 3072)
_NARROW = {"embedding_size": 128}
_PLACES = {"max_position_embeddings": 514, "type_vocab_size": 1}
SIZES = {
    "Ettin-17M": Size("modernbert", 50_368, 256, 7, 4, 384),
    "ELECTRA-small": Size("electra", 30_522, 256, 12, 4, 1024, _NARROW),
    "MiniLM-L6 (all-MiniLM-L6-v2)": Size("bert", 30_522, 384, 6, 12, 1536),
    "Ettin-32M": Size("modernbert", 50_368, 384, 10, 6, 576),
    "MiniLM-L12": Size("bert", 30_522, 384, 12, 12, 1536),
    "DistilBERT-base": Size("distilbert", 30_522, 768, 6, 12, 3072),
    "Ettin-68M": Size("modernbert", 50_368, 512, 19, 8, 768),
    "DeBERTa-v3-xsmall": Size("deberta-v2", 128_100, 384, 12, 6, 1536, {"type_vocab_size": 0}),
    "ALBERT-base-v2": Size("albert", 30_000, *_BASE, _NARROW),
    "BERT-base": Size("bert", 30_522, *_BASE),
    "MPNet-base": Size("mpnet", 30_527, *_BASE, {"max_position_embeddings": 514}),
    "RoBERTa-base": Size("roberta", 50_265, *_BASE, _PLACES),
    "mmBERT-small": Size("modernbert", 256_000, 384, 22, 6, 1152),
    "DeBERTa-v3-small": Size("deberta-v2", 128_100, 768, 6, 12, 3072, {"type_vocab_size": 0}),
    "ModernBERT-base, Ettin-150M": Size("modernbert", 50_368, 768, 22, 12, 1152),
    "DeBERTa-v3-base": Size("deberta-v2", 128_100, *_BASE, {"type_vocab_size": 0}),
    "EuroBERT-210m": Size("eurobert", 128_256, *_BASE),
    "XLM-RoBERTa-base": Size("xlm-roberta", 250_002, *_BASE, _PLACES),
}
"""By the name of the folder that people choose; the tokens of its vocabulary are those of its
table."""


def size_claims(options: Options) -> Iterator[Claim]:
    """A figure for each size, with no goal, on the built-in tweets."""
    for name in SIZES:
        given = {"name": name, "steps": options.choose(20, 5, 2)}
        rounds = [
            measured_apart("benchmarks.sizes:measure", given)
            for _ in range(options.choose_rounds(3, 1, 1))
        ]
        rate, peak = (
            statistics.median(each[key] for each in rounds) for key in ("tokens_per_s", "peak_gb")
        )
        first = rounds[0]
        note = (
            f"{first['parameters'] / 1e6:.1f} M parameters, {peak:.1f} GB at its peak,"
            f" {first['precision']}"
        )
        yield reaching(
            f"{name}: tokens a second of training", rate, "tokens/s", least=None, note=note
        )


class _Steps(L.Callback):
    """When each step ended, and its tokens."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokens: list[int] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: FlatBatch, batch_idx: int
    ) -> None:
        wait_for_device(batch_idx, (batch_idx,))
        self.ends.append(time.perf_counter())
        self.tokens.append(batch.num_tokens)

    def rate(self) -> float:
        steps = zip(self.ends, self.ends[1:], self.tokens[1:], strict=False)
        return statistics.median(
            [count / (end - begin) for begin, end, count in steps][_WARM - 1 :]
        )


def measure() -> None:
    """Train the size that standard input names; its figures go to standard output."""
    given = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder, quiet():
        tweets = next(
            TweetsTable(TweetsConfig(rows=1_500), "train").blocks(["text", "label"])
        ).to_pydict()
        # validation takes no part in what is measured
        few = {name: values[:64] for name, values in tweets.items()}
        pieces = VocabularyConfig(size=30_000, kind=VocabularyKind.wordpiece)
        data = TextDataConfig(
            train=tweets, validation=few, vocabulary=pieces, batch_size=32, cache=f"{folder}/cache"
        )
        subwords = TextData.of(data).open_store().vocabulary
        assert isinstance(subwords, Subwords)
        torch.manual_seed(0)
        model = SIZES[given["name"]].build(subwords.frame.padding)
        steps = _Steps()
        result = fit(
            data,
            model,
            optim=OptimConfig(lr=2e-5),
            checkpoint=CheckpointConfig(patience=None),
            callbacks={"steps": steps},
            monitor=MonitorConfig(progress=False, verdict=False, rival=False),
            trainer={"max_steps": _WARM + given["steps"]},
            output=f"{folder}/runs",
        )
    count = result.summary["model"]["parameters"]
    found = {"parameters": count, "tokens_per_s": steps.rate(), "peak_gb": peak_memory_gb()}
    print(json.dumps({**found, "precision": result.summary["hardware"]["precision"]}))


def table(rows: list[dict[str, Any]]) -> str:
    """What `--json` has of these claims as the rows of the page's table."""
    lines = []
    for row in rows:
        name = row["claim"].partition(":")[0]
        note = row["note"].split()
        family = SIZES[name].family
        lines.append(f"| {name} | {family} | {note[0]} | {row['ours']:,.0f} | {note[3]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
