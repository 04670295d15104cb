"""Is a training still the one that its checkpoint is of? What is compared, and the one comparison.

The manifest of a checkpoint holds the facts of its run: data, model, plan, precision and settings.
A resumed run must have the same ones. Settings that decide how long, where and how fast a run
trains may differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash

from flatout.data.batches.feed import Feed
from flatout.errors import UserError, require
from flatout.masking import mask_settings
from flatout.report.summary import flattened

_FREE = (
    # Settings that may differ: they decide how long, where and how fast to train, not what.
    *(
        f"trainer.{name}"
        for name in ("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps")
    ),
    *(f"trainer.{name}" for name in ("devices", "num_nodes", "accelerator", "strategy", "logger")),
    *(
        f"trainer.{name}"
        for name in ("val_check_interval", "check_val_every_n_epoch", "limit_val_batches")
    ),
    *(f"data.{name}" for name in ("feed", "workers", "cache", "eval_batch_size")),
    # a resumed run keeps the answers of its beginning
    *("tune", "compile", "model.reuse", "model.reuse_format"),
    # Compared as what they make: rows a step, steps an epoch, arithmetic.
    *(
        "data.batch_size",
        "data.accumulate",
        "data.effective_batch",
        "precision",
        "trainer.limit_train_batches",
    ),
    *(
        "monitor",
        "checkpoint",
        "price",
        "budget",
        "until",
        "callbacks",
        "output",
        "name",
        "resume",
        "resume_anyway",
        "allow_targets",
        "threads",
    ),
)


def is_free(key: str, but: Sequence[str] = ()) -> bool:
    """Whether a setting, by its dotted key, may differ in the same run."""
    return key not in but and any(key == name or key.startswith(f"{name}.") for name in _FREE)


def deciding_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that decide what is trained, by their dotted keys."""
    masked = mask_settings(flattened(settings))  # an earlier version wrote secrets in clear
    return {key: value for key, value in masked.items() if not is_free(key)}


def plan_facts(feed: Feed, batches: int) -> dict[str, Any]:
    """What decides which rows each step trains."""
    plan = feed.plan
    return {
        "rows": feed.split.num_rows,
        # Of all ranks: a run may continue on another number of them.
        "rows a step": None if plan.tokens_per_batch else plan.rows_per_batch * plan.parts,
        "tokens a step": plan.tokens_per_batch and plan.tokens_per_batch * plan.parts,
        "steps an epoch": batches // plan.accumulate,
        "layout": str(plan.layout),
    }


def length_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide how long a run trains."""
    lengths = {
        name: settings["trainer"].get(name) for name in ("max_epochs", "max_steps", "max_time")
    }
    return {**lengths, "patience": settings["checkpoint"]["patience"]}


def facts_of_run(
    settings: Mapping[str, Any],
    data_key: str | None,
    model: torch.nn.Module,
    plan: dict[str, Any],
    precision: str,
) -> dict[str, Any]:
    """The facts of a run from the command line; how long it shall train (`asked`) may differ."""
    shapes = [(name, list(weight.shape)) for name, weight in model.named_parameters()]
    return {
        "data": data_key,
        "model": xxhash.xxh3_128_hexdigest(json.dumps(shapes).encode()),
        "plan": plan,
        "precision": precision,
        "asked": length_of(settings),
        "settings": deciding_settings(settings),
        "torch": torch.__version__,
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """One text for each thing that makes two trainings different, as "optim.lr was 0.1 and is 0.2".

    `then` and `now` are what `facts_of_run` returns of each. Nothing if they are the same.
    """
    data_before = then.get("data")
    data_now = now.get("data")
    for name in ("settings", "plan", "precision"):
        before = _named_values(then, name)
        after = _named_values(now, name)
        # A plan counts rows or, for a foreign DataModule, devices: the data itself differs then.
        keys = before.keys() & after.keys() if name == "plan" else before.keys() | after.keys()
        for key in sorted(keys):
            # A sample in the settings is not the data of a run that names other data.
            is_unused = (
                key.startswith("data.sample") and data_now is not None and data_before == data_now
            )
            if before.get(key) != after.get(key) and not is_unused:
                yield f"{key} was {_or_null(before.get(key))} and is {_or_null(after.get(key))}"
    if data_before != data_now:
        yield "the data or its encoding has changed"


def _named_values(training: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The entry `name` as a mapping, with secrets masked; any other value becomes {name: value}."""
    values = mask_settings(training.get(name) or {})
    return values if isinstance(values, Mapping) else {name: values}


def _or_null(value: object) -> object:
    return "null" if value is None else value


def have_same_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether all settings of two runs decide the same training."""
    return not any(
        differences({"settings": deciding_settings(then)}, {"settings": deciding_settings(now)})
    )


def require_same_run(then: dict[str, Any], now: dict[str, Any], *, anyway: bool) -> list[str]:
    """Refuse a checkpoint of another run, and name the difference.

    Returns lines to print: what may change the last digits, and each difference that `anyway` lets
    pass.
    """
    changes = list(differences(then, now))
    lines = []
    if then.get("torch") != now["torch"]:
        lines.append(
            f"resume: saved with torch {then.get('torch')}, this is {now['torch']}: last digits may"
            " differ"
        )
    if then.get("model") != now["model"]:
        problem = "; ".join(["the model has other weights", *changes])
        raise UserError(
            "resume",
            f"this is not the run that was begun: {problem}",
            hint="Set the model back, or leave resume out: a new run begins.",
        )
    require(
        anyway or not changes,
        "resume",
        f"this is not the run that was begun: {'; '.join(changes)}",
        hint=(
            "Set it back, or add resume_anyway=true to go on all the same; without resume a new run"
            " begins."
        ),
    )
    return [*lines, *(f"resume: resuming although {each}" for each in changes)]


def require_same_training(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a checkpoint whose position counts other steps, in a plain Trainer."""
    changes = "; ".join(differences(then, now))
    require(
        not changes,
        "ExactCheckpoint",
        f"the checkpoint is of another training: {changes}",
        hint="Set it back, or leave ckpt_path out: training starts from the first step.",
    )
