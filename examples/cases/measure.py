"""What the verdict promises for a training of an open project, and what comes of it.

`pip install pytorch-forecasting==1.8.0` or `darts==0.48.1`, then `python examples/cases/measure.py
pytorch_forecasting` or `darts`. The data are made here, and no file of the project is changed.

It trains three ways: as the project does, with `Verdict()` beside it, and with the fix that the
verdict named. The first and the third take turns. It prints a row of the table in README.md.
"""

import importlib.metadata
import logging
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from flatout.callbacks import Verdict
from flatout.perf.measure.own_clock import OwnClock


@dataclass(frozen=True)
class TrainingOptions:
    """What a fix of the verdict may change."""

    batch_size: int = 32
    workers: int = 0
    precision: str = "32-true"
    threads: int = torch.get_num_threads()
    callbacks: Sequence[Any] = ()
    epochs: int = 3

    @property
    def trainer(self) -> dict[str, Any]:
        """Arguments of the Trainer, of either name."""
        return {
            "max_epochs": self.epochs,
            "precision": self.precision,
            "callbacks": list(self.callbacks),
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }

    @property
    def loader(self) -> dict[str, Any]:
        """Arguments of the loader."""
        return {"num_workers": self.workers, "persistent_workers": self.workers > 0}


def make_series(count: int, length: int) -> np.ndarray:
    """`[count, length]`: a daily wave of each series, with noise."""
    random = np.random.default_rng(0)
    phases = random.uniform(0, 2 * np.pi, (count, 1))
    waves = np.sin(np.arange(length) * 2 * np.pi / 24 + phases)
    return (waves + 0.2 * random.standard_normal((count, length))).astype("float32")


def train_pytorch_forecasting(options: TrainingOptions) -> torch.nn.Module:
    import lightning as L
    import pandas as pd
    from pytorch_forecasting import NHiTS, TimeSeriesDataSet

    series = make_series(20, 200)
    count, length = series.shape
    table = pd.DataFrame(
        {
            "series": np.repeat(np.arange(count), length).astype(str),
            "time": np.tile(np.arange(length), count),
            "value": series.ravel(),
        }
    )
    windows = TimeSeriesDataSet(
        table,
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=48,
        max_prediction_length=12,
        time_varying_unknown_reals=["value"],
    )
    loader = windows.to_dataloader(train=True, batch_size=options.batch_size, **options.loader)
    L.seed_everything(0, verbose=False)
    model = NHiTS.from_dataset(windows, learning_rate=1e-3, hidden_size=32)
    L.Trainer(**options.trainer).fit(model, loader)
    return model


def train_darts(options: TrainingOptions) -> torch.nn.Module:
    from darts import TimeSeries
    from darts.models import NBEATSModel

    model = NBEATSModel(
        48,
        12,
        layer_widths=64,
        num_stacks=4,
        batch_size=options.batch_size,
        n_epochs=options.epochs,
        random_state=0,
        pl_trainer_kwargs={
            name: value for name, value in options.trainer.items() if name != "max_epochs"
        },
    )
    series = [TimeSeries.from_values(values) for values in make_series(20, 200)]
    model.fit(series, dataloader_kwargs=options.loader)
    return model.model


CASES: dict[str, Callable[[TrainingOptions], torch.nn.Module]] = {
    "pytorch_forecasting": train_pytorch_forecasting,
    "darts": train_darts,
}


def options_of_fix(fix: str, options: TrainingOptions) -> TrainingOptions | None:
    """The options that a fix names, as words of Python; None where it names none of these."""
    changed: dict[str, Any] = {}
    for pattern, name, read in (
        (r"num_workers=(\d+)", "workers", int),
        (r"batch_size=(\d+)", "batch_size", int),
        (r'precision="([\w-]+)"', "precision", str),
        (r"set_num_threads\((\d+)\)", "threads", int),
    ):
        found = re.search(pattern, fix)
        if found is not None:
            changed[name] = read(found[1])
    if "FastLoop()" in fix:
        from flatout.engine import FastLoop

        changed["callbacks"] = [FastLoop()]
    return replace(options, **changed) if changed else None


def time_training(train: Callable[..., torch.nn.Module], options: TrainingOptions) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    # With one thread, and no workers, the time that other processes took is left out.
    is_alone = options.threads == 1 and options.workers == 0
    clock = OwnClock() if is_alone else time.perf_counter
    began = clock()
    train(options)
    seconds = clock() - began
    torch.set_num_threads(before)
    return seconds


def have_equal_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    weights = second.state_dict()
    return all(torch.equal(weights[name], value) for name, value in first.state_dict().items())


def choose_promise(
    found: dict[str, Any], options: TrainingOptions
) -> tuple[str, str, TrainingOptions | None]:
    """The first fix that has a promise and can be applied here, else the first fix."""
    for finding in (found, *found.get("others", [])):
        value = finding.get("predicted_gain") or finding.get("gain")
        fix = str(finding.get("override") or "")
        fixed = options_of_fix(fix, options)
        if value is not None and fixed is not None:
            bounds = f"{finding['gain_low']:.2f}–{finding['gain_high']:.2f}"
            return fix, f"≈ {value:.2f}× ({bounds})", fixed
    return str(found.get("fix") or ""), "none", None


def measure(name: str, epochs: int = 3, rounds: int = 3) -> str:
    """A row of the table: the project, cause, promise, what came of it, whether weights changed."""
    train = CASES[name]
    options = TrainingOptions(epochs=epochs)
    plain = train(options)
    verdict = Verdict()
    watched = train(replace(options, callbacks=[verdict]))
    found = verdict.verdict or {"sentence": verdict.why_none}
    print(found["sentence"])
    fix, promise, fixed = choose_promise(found, options)
    measured = "nothing to apply"
    if fixed is not None:
        ratios = [
            time_training(train, options) / time_training(train, fixed) for _ in range(rounds)
        ]
        measured = f"{statistics.median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f})"
    package = name.replace("_", "-")
    equal = "equal" if have_equal_weights(plain, watched) else "changed"
    version = importlib.metadata.version(package)
    cells = [f"{package} {version}", str(found.get("cause", found["sentence"])), fix or "none"]
    return f"| {' | '.join([*cells, promise, measured, equal])} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for each in ("lightning.pytorch", "pytorch_lightning", "darts"):
        logging.getLogger(each).setLevel(logging.ERROR)
    print(measure(sys.argv[1], *map(int, sys.argv[2:])))
