"""`logger=json_lines`: a line of JSON for each point of the curves."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from flatout.callbacks.loggers import RunPlace


@dataclass(kw_only=True, slots=True)
class JSONLinesConfig:
    """Settings of the logger."""

    file: str = "curves.jsonl"

    def build(self, place: RunPlace) -> Logger:
        return JSONLines(place.folder / self.file)


class JSONLines(Logger):
    """Lightning's interface of a logger."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Nothing is written: the run folder has the settings."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            print(json.dumps({"step": step, **metrics}), file=file)
