"""Curves in Trackio, whose dashboard runs on this machine: `logger=trackio`.

Trackio has one folder for all projects (`TRACKIO_DIR`), which `trackio show` opens. Its own
variables choose a server; settings cannot, as they may come from others.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from flatout.callbacks.loggers import RunPlace
from flatout.errors import require, setting


@dataclass(kw_only=True, slots=True)
class TrackioConfig:
    """A run in Trackio."""

    project: str | None = setting(None, "Its project; null: the experiment's name.", example="news")
    name: str | None = setting(None, "Its name; null: that of the run folder.", example="first")

    def build(self, run_place: RunPlace) -> Logger:
        require(
            find_spec("trackio") is not None,
            "logger=trackio",
            "the package trackio is not installed",
            hint="pip install 'flatout[trackio]'.",
        )
        return TrackioLogger(
            self.project or run_place.experiment, self.name or run_place.folder.name
        )


class TrackioLogger(Logger):
    """Lightning's logger for a run of Trackio; a run of the same name is continued."""

    def __init__(self, project: str, name: str) -> None:
        super().__init__()
        self._project = project
        self._name = name
        self._run: Any = None

    @property
    def name(self) -> str:
        return self._project

    @property
    def version(self) -> str:
        return self._name

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: object, **more: object
    ) -> None:
        settings = params if isinstance(params, Mapping) else params.__dict__
        self._begin({name: str(value) for name, value in settings.items()})

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._begin({})
        self._run.log(dict(metrics), step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _begin(self, settings: dict[str, str]) -> None:
        """Begin the run, which takes its settings then and not later."""
        if self._run is None:
            trackio = importlib.import_module("trackio")
            self._run = trackio.init(
                project=self._project, name=self._name, config=settings, resume="allow"
            )
