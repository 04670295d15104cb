"""Callbacks of one concern each; every one works alone in a plain `L.Trainer`.

A name is imported at its first use, so one callback does not load the others.
"""

from __future__ import annotations

from flatout import importer

_PLACES = {
    "HardwareMonitor": "flatout.callbacks.hardware_monitor",
    "StepTimer": "flatout.callbacks.step_timer",
    "Throughput": "flatout.callbacks.throughput",
    "ProfileSteps": "flatout.callbacks.profile_steps",
    "ProgressLine": "flatout.callbacks.progress_line",
    "ExactCheckpoint": "flatout.checkpoints.exact",
    "ScaleBatch": "flatout.perf.scale_batch",
    "Verdict": "flatout.perf.verdict.anywhere",
}
__all__ = sorted(_PLACES)
__getattr__ = importer(__name__, _PLACES)
