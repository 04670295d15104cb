"""TensorBoard's HPARAMS page over the trials of a sweep: settings and metrics, in each trial's own folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatout.report.sweep_page import SweepReport, TrialRow


def write_hyperparameters(folder: Path, report: SweepReport) -> None:
    """Add every complete trial to the page that `tensorboard --logdir FOLDER` shows."""
    for row in report.trials:
        if row.status == "complete" and row.value is not None and (folder / row.folder).is_dir():
            _write(folder / row.folder, row)


def _write(folder: Path, row: TrialRow) -> None:
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    if any(folder.glob("events.*.hparams")):
        return
    metrics = {name: value for name, value in row.metrics.items() if value is not None}
    with SummaryWriter(str(folder), filename_suffix=".hparams") as writer:
        for summary in hparams({key: _plain(value) for key, value in row.params.items()}, metrics):
            writer._get_file_writer().add_summary(summary)
        for name, value in metrics.items():
            writer.add_scalar(name, value, row.number)


def _plain(value: Any) -> Any:
    """What the page can sort by: numbers, texts and booleans."""
    return value if isinstance(value, bool | int | float | str) else str(value)
