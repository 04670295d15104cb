"""The exposure report of a finished run: what encodings give away of records that took no part in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.bits.exposure_page import write_exposure
from flatout.bits.exposure_study import ExposureStudy
from flatout.bits.predictor import GramPredictor
from flatout.bits.ridge_start import STEEPNESS
from flatout.bits.task import GramDecoder
from flatout.data.batches.feed import Feeds
from flatout.models.bit_mlp import BitMLP
from flatout.run_log import RunLog


def report_exposure(
    task: GramDecoder, predictor: GramPredictor, feeds: Feeds, summary: dict[str, Any], folder: Path, log: RunLog
) -> None:
    """Write `exposure.html` and `exposure.json`, and report their conclusion."""
    if not task.config.exposure:
        return
    if not isinstance(task.model, BitMLP) or task.model.detectors is None:
        log.say("exposure.html is not written: a model without detectors rebuilds no texts")
        return
    task.to(feeds.validation.device)
    study = ExposureStudy(task.info, task.labels, task, predictor, feeds)
    exposure = study.measure(summary, steepness=STEEPNESS)
    write_exposure(folder, exposure)
    for line in exposure["conclusion"]:
        log.say(line)
