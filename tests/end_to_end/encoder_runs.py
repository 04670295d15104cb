"""Small encoders trained on made-up rows, and the files they answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tests.run_files import write_jsonl
from tests.verbs import verb

from flatout import (
    OptimConfig,
    TextDataConfig,
    TransformerConfig,
    fit,
)

SMALL = TransformerConfig(hidden=32, layers=2, heads=4)


def topic_rows(rows: int, seed: int = 0) -> dict[str, list[Any]]:
    random = np.random.default_rng(seed)
    things = {
        "animals": ["cat", "dog", "horse"],
        "plants": ["rose", "oak", "fern"],
    }
    texts = []
    labels = []
    for number in range(rows):
        topic = list(things)[number % 2]
        words = [f"w{random.integers(30)}" for _ in range(random.integers(1, 12))]
        words.insert(
            random.integers(len(words) + 1),
            things[topic][random.integers(3)],
        )
        texts.append(f"{' '.join(words)} {number}")
        labels.append(topic)
    return {"text": texts, "label": labels}


def train_encoder(
    tmp_path: Path,
    data: TextDataConfig,
    model: TransformerConfig = SMALL,
    **settings: Any,
):
    given: dict[str, Any] = {
        "optim": OptimConfig(lr=3e-3),
        "epochs": 4,
        "output": str(tmp_path / "runs"),
    }
    return fit(data, model, **(given | settings))


def predict_rows(folder, file, out, *options):
    assert verb("predict", folder, file, "--out", out, *options) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def pa_texts(texts: list[str]):
    return pa.array(texts, pa.large_string())


def write_columns(path: Path, columns: dict[str, list[Any]]) -> Path:
    """Write a row as JSON on each line; the path."""
    values_of_rows = zip(*columns.values(), strict=True)
    return write_jsonl(
        path,
        (dict(zip(columns, row, strict=True)) for row in values_of_rows),
    )
