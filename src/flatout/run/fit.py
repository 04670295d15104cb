"""`fit`: train from Python, with the settings that `python -m train` takes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

from flatout.bits.data import BitsDataConfig
from flatout.data.sequences.settings import SequenceDataConfig
from flatout.data.store_data import StoreData
from flatout.data.text import TextDataConfig
from flatout.errors import UserError, require
from flatout.run.build import RunBuilder
from flatout.run.launch import start
from flatout.run.stages import Result
from flatout.tasks.task import Task


def fit(
    data: TextDataConfig | BitsDataConfig | SequenceDataConfig | StoreData[Any, Any] | None = None,
    model: Any = None,
    *,
    epochs: int | None = None,
    max_epochs: int | None = None,
    folder: str | Path | None = None,
    **settings: Any,
) -> Result:
    """Train a model on a table. `settings` are fields of RunConfig; `max_epochs` is short for `trainer.max_epochs`.

    `data` is a DataModule or its Config; `model` a task, the Config of a network, or a network. `epochs` is another
    name for `max_epochs`.
    """
    require(epochs is None or max_epochs is None, "fit", "epochs and max_epochs", hint="Leave one of them out.")
    epochs = epochs if max_epochs is None else max_epochs
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        what = "is called while another process reads this script"
        raise UserError("fit", what, hint="Put it below: if __name__ == '__main__':")
    if isinstance(data, StoreData):
        settings.setdefault("seed", data.seed)
        data = data.config
    if isinstance(model, Task):
        settings = {"task": model.config, "optim": model.optim, **settings}
        model = model.model if model.model_config is None else model.model_config
    given: dict[str, Any] = {name: value for name, value in (("data", data), ("model", model)) if value is not None}
    build = RunBuilder.of(max_epochs=epochs, **given, **settings)
    return start(build, folder=None if folder is None else Path(folder))
