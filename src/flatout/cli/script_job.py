"""`ScriptJob`: one trial of a script of the user's own, whose `-m` starts it by our launcher.

The script has a function below `@hydra.main`, which trains and returns the number to compare by. A
trial calls that function in a process of its own. Open this file when a script behaves differently
with `-m` than alone.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from flatout.checkpoints.settings import CheckpointConfig
from flatout.errors import require
from flatout.files import load_json, write_atomically
from flatout.masking import mask_words
from flatout.run.own_parts import plain_name

RECORD = "trial.json"
"""The file in a trial's folder with its words and, when it has ended, what it returned."""


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """What a trial of a script brings back."""

    objective: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScriptJob:
    """One trial of a script, by its composed settings; it can be pickled."""

    settings: DictConfig  # with Hydra's own
    context: HydraContext
    function: str  # the name of the function in the script

    @property
    def name(self) -> str:
        """The name that the settings have, else the script's."""
        return str(self.settings.get("name") or self.settings.hydra.job.name)

    @property
    def command(self) -> list[str]:
        """What is typed before its words to train it alone."""
        return ["python", sys.argv[0]]

    @property
    def metric(self) -> str:
        """What the function returns, by the setting `metric` of the script."""
        return plain_name(str(self.settings.get("metric") or "returned"), "val")

    @property
    def metrics(self) -> list[str]:
        """The one metric that is returned."""
        return [self.metric]

    @property
    def mode(self) -> str:
        """The setting `mode` of the script, else by the name of its metric."""
        given = self.settings.get("mode")
        return str(given or CheckpointConfig().mode_of(self.metric))

    @property
    def validations(self) -> int | None:
        """Unknown: the script decides."""
        return None

    def train(self, folder: Path, overrides: Sequence[str], *, resumes: bool) -> ScriptResult:
        """Call the script's function, as the script alone would with this folder."""
        began = time.monotonic()
        record: dict[str, Any] = {"words": mask_words(overrides)}
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / RECORD, json.dumps(record))
        # Lightning starts its other ranks by this line, and each must train the same trial.
        sys.argv[1:] = [f"hydra.run.dir={folder}", *overrides]
        setup_globals()
        # raises what the function has raised
        value = run_job(
            function_named(self.function),
            self.settings,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            hydra_context=self.context,
        ).return_value
        result = ScriptResult(None)
        if isinstance(value, SupportsFloat):  # a tensor is one, too
            result = ScriptResult(float(value), {f"val/{self.metric}": float(value)})
        record |= {"metrics": result.metrics, "seconds": time.monotonic() - began}
        write_atomically(folder / RECORD, json.dumps(record))
        return result

    def can_resume(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether a trial of these words has begun there: the script itself finds checkpoints."""
        return _read_record(folder).get("words") == mask_words(overrides)

    def is_finished(self, folder: Path, overrides: Sequence[str]) -> bool:
        """Whether a trial of these words has returned there."""
        return self.can_resume(folder, overrides) and "metrics" in _read_record(folder)

    def read_ending(self, folder: Path) -> tuple[float, dict[str, float]]:
        """The seconds and the metrics of a trial that has finished there."""
        record = _read_record(folder)
        return record["seconds"], record["metrics"]


def name_of_function(task: TaskFunction) -> str:
    """The name by which a trial's process finds the function of the script."""
    function: Callable[..., Any] = task
    name = function.__qualname__
    require(
        function.__module__ == "__main__" and name.isidentifier(),
        "hydra/launcher",
        f"flatout trains functions of the script itself, and {name} is not one",
        hint="Put @hydra.main above a function of the script that you start.",
    )
    return name


def function_named(name: str) -> TaskFunction:
    """The function of the script, below the decorator of Hydra."""
    # The process of a trial has imported the script already, as Python's own pools do.
    return inspect.unwrap(getattr(sys.modules["__main__"], name))


def _read_record(folder: Path) -> dict[str, Any]:
    """What `RECORD` in a folder holds; nothing where there is none, or half of one."""
    try:
        record = load_json(folder / RECORD)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
