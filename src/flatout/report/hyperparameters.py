"""TensorBoard's HPARAMS page: settings and final metrics of a run, in a separate event file beside its curves.

The file is replaced as a whole. So a resumed run is listed once, and a sweep can list the settings it searched instead
of all the settings of a trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUFFIX = ".hparams"


def write_hyperparameters(
    folder: Path, settings: Mapping[str, Any], metrics: Mapping[str, float | None], step: int
) -> None:
    """List a run on the page that `tensorboard --logdir` shows for its folder or a folder above.

    Each metric becomes a curve of one point under `final/`; the run's own curves do not change.
    """
    from torch.utils.tensorboard.summary import hparams

    found = {f"final/{name.replace('/', '_')}": value for name, value in metrics.items() if value is not None}
    with EventFile(folder, SUFFIX) as writer:
        for summary in hparams({name: _plain(value) for name, value in settings.items()}, found):
            writer._get_file_writer().add_summary(summary)
        for name, value in found.items():
            writer.add_scalar(name, value, step)


class EventFile:
    """A writer of an event file that replaces those with the same suffix when it is complete."""

    def __init__(self, folder: Path, suffix: str) -> None:
        self.folder, self.suffix = folder, suffix

    def __enter__(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        self._before = list(self.folder.glob(f"events.*{self.suffix}"))
        self._writer = SummaryWriter(str(self.folder), filename_suffix=self.suffix)
        return self._writer

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._writer.close()
        if kind is None:
            for path in self._before:
                path.unlink(missing_ok=True)


def compared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by which runs are compared, by their dotted keys, without those that are not set."""
    kept: dict[str, Any] = {}
    for group in ("model", "optim", "task"):
        kept |= {f"{group}.{name}": value for name, value in _flat(settings.get(group)).items()}
    data = _flat(settings.get("data"))
    names = ("batch_size", "accumulate", "effective_batch", "tokens_per_batch", "max_length")
    kept |= {f"data.{name}": data[name] for name in names if name in data}
    kept |= {name: settings[name] for name in ("precision", "seed") if name in settings}
    kept["trainer.max_epochs"] = (settings.get("trainer") or {}).get("max_epochs")
    return {name: value for name, value in kept.items() if value is not None}


def _flat(group: Any) -> dict[str, Any]:
    if not isinstance(group, dict):
        return {}
    flat: dict[str, Any] = {}
    for name, value in group.items():
        flat |= (
            {f"{name}.{key}": each for key, each in _flat(value).items()} if isinstance(value, dict) else {name: value}
        )
    return flat


def _plain(value: Any) -> Any:
    """A value the page can sort by: a number, a text or a boolean."""
    return value if isinstance(value, bool | int | float | str) else str(value)
