"""A run's folder: made at the start, with a summary that is never missing and never half written."""

from __future__ import annotations

import dataclasses
import shlex
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from flatout.config import RunConfig
from flatout.errors import RunBroke, UserError
from flatout.report.page import read_curves, write_page
from flatout.report.run_log import RunLog
from flatout.report.summary import Summary


@dataclasses.dataclass(slots=True)
class RunFolder:
    """Where one run puts everything, and the two things it always writes: its summary and its log."""

    path: Path
    summary: Summary
    log: RunLog
    is_first: bool = True
    """Whether this rank prints and writes; the others only read here."""

    def choose(self, name: str, value: object, why: str, evidence: str) -> None:
        """Keep and print one choice that the run made by itself."""
        self.summary.add_choice(name, value, why, evidence)
        self.log.say(f"{name}: {value} ({why}; {evidence})")


@contextmanager
def open_run_folder(
    config: RunConfig, path: Path, overrides: Sequence[str], *, is_first: bool = True
) -> Iterator[RunFolder]:
    """The folder of a run that is about to begin; closes its summary with how the run ended."""
    command = shlex.join(["python", "-m", "train", *overrides])
    if not is_first:
        with RunLog(None) as log:
            unwritten = Summary(None, experiment=config.experiment, command=command, seed=config.seed)
            yield RunFolder(path, unwritten, log, is_first=False)
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("output", f"cannot make {path}: {error.strerror}", mend="Set output=FOLDER.") from None
    summary = Summary(path, experiment=config.experiment, command=command, seed=config.seed)
    (path / "config.yaml").write_text(
        yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    (path / "overrides.txt").write_text("".join(f"{override}\n" for override in overrides), encoding="utf-8")
    with RunLog(path / "log.txt") as log:
        try:
            yield RunFolder(path, summary, log)
        except BaseException as error:
            log.keep(str(error) if isinstance(error, UserError | RunBroke) else traceback.format_exc())
            status = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
            summary.finish(status)
            with suppress(OSError):
                write_page(path, summary.values, read_curves(path), [])
            log.say(f"{status}: {path}")
            raise
        summary.finish("finished")


def plain(value: Any) -> Any:
    """Settings as mappings, lists and plain values; an object a person handed over is named by its type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value) if isinstance(value, Path) else f"<{type(value).__module__}.{type(value).__qualname__}>"


def new_folder(config: RunConfig) -> Path:
    """A folder named after this moment; a number is added when another run took the same second."""
    parent = Path(config.output) / config.experiment
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    names = [stamp, *(f"{stamp}_{number}" for number in range(2, 100))]
    return next(parent / name for name in names if not (parent / name).exists())
