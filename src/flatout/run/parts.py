"""Build the parts of a run from its settings: the opened data, the task, and its feeds.

`open_data` opens or builds the store, `build_task` makes the task with its network, `place_feeds`
gives each split a feed for this rank. A run opens its data first, and decides what its settings
leave open before it builds the rest (`run/our_parts.py`). `build_parts` does everything at once, to
measure training steps in another process. Open this file to change how a part comes from the
settings; what differs between kinds of data is in `run/kinds.py`.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn

from flatout.config import RunConfig
from flatout.data.batches.feed import Feeds
from flatout.data.batches.plan import BatchLayout
from flatout.data.batches.store_data import Placement, StoreData
from flatout.distributed.ranks import Ranks
from flatout.engine.optimizer import OptimConfig
from flatout.errors import require
from flatout.models.contract import ModelConfig
from flatout.perf.tune.probe import Parts
from flatout.run.kinds import kind_of
from flatout.run.memory import require_memory
from flatout.run.resolve import choose_rate, clip_of
from flatout.run.run_folder import RunFolder, unwritten_run
from flatout.run_log import RunLog
from flatout.tasks.networks import report_network
from flatout.tasks.task import Task
from flatout.tasks.task_class import TaskClass


def open_data(config: RunConfig, ranks: Ranks, folder: RunFolder) -> StoreData[Any, Any]:
    """The DataModule with its store open; the first rank builds a missing store.

    The summary gets the section `data`.
    """
    data = kind_of(config.data).data.of(config.data, seed=config.seed, log=folder)

    def prepare_store() -> str:
        data.prepare_data()
        return str(data.info.key)

    key = ranks.agreed("store", prepare_store)
    data.setup()
    require(
        data.info.key == key,
        "data",
        f"rank {ranks.rank} sees other data than the first rank",
        hint="Every machine needs the same files, or one folder that all can read.",
    )
    folder.summary.set("data", _summarise_data(data))
    return data


def _summarise_data(data: StoreData[Any, Any]) -> dict[str, Any]:
    """The section `data` of `summary.json`: source, fingerprints, rows, counts and cache."""
    facts = data.info.summary()
    # the summary names splits as metrics do: `val/loss`
    rows_of_split = {}
    for split, count in facts.pop("rows").items():
        rows_of_split["val" if split == "validation" else split] = count
    report = data.info.report
    cache = {"key": report.key, "hit": report.hit, "seconds": round(report.seconds, 4)}
    # parts of other packages may have another recipe
    fingerprints = data.store.manifest["recipe"].get("source")
    return {
        "source": data.info.source,
        "fingerprints": fingerprints,
        "rows": rows_of_split,
        **facts,
        "cache": cache,
    }


def require_memory_for_model(
    config: RunConfig, data: Any, ranks: Ranks, device: torch.device
) -> None:
    """Refuse a model that this device cannot train, before it is built."""

    def build(model: Any) -> nn.Module:
        return make_task(config, model, config.optim).build(data.info)

    # Ranks on one CPU share its memory; ranks of FSDP hold a slice of the weights each.
    copies = ranks.local_world if device.type == "cpu" else 1
    slices = ranks.world if config.is_sharded else 1
    require_memory(config.model, build, device, copies / slices)


def build_task(config: RunConfig, data: Any, optim: OptimConfig, log: RunLog) -> Task:
    """The task of the data with its network built.

    `optim`: with the learning rate of the run, which the task is made with and keeps.
    """
    task = make_task(config, config.model, optim)
    report_network(task.build(data.info), config.model, data.info, log)
    return task


def _require_takes_batches(network: nn.Module) -> None:
    """Refuse a network whose first layer is one of torch's own: these take tensors."""
    first = network
    while isinstance(first, nn.Sequential) and len(first):
        first = first[0]
    name = type(first).__name__
    require(
        not type(first).__module__.startswith("torch.nn.modules."),
        "model",
        f"{name} takes tensors, and a network gets the rows of a batch as one object",
        hint=f"Call {name} within a module of your own: docs/own_parts.md.",
    )


def make_task(config: RunConfig, model: nn.Module | ModelConfig, optim: OptimConfig) -> Task:
    """The task of a run around a network or its Config: of the user's class, or the kind's own."""
    if isinstance(config.task, TaskClass):
        return config.task.task(model, config.task.config, optim)
    if isinstance(model, nn.Module):
        _require_takes_batches(model)  # a task of yours may hand on tensors
    return kind_of(config.data).task(model, config.task, optim)


def place_feeds(
    config: RunConfig, data: Any, task: Task, device: torch.device, ranks: Ranks
) -> Feeds:
    """One feed a split, for this rank and in the layout that the network reads."""
    placement = Placement(
        rank=ranks.rank,
        world=ranks.world,
        device=device,
        layout=BatchLayout.of(task.model),
        repeats=bool(config.trainer.get("overfit_batches")),
    )
    data.place(placement, config.data)
    return data.feeds


def build_parts(config: RunConfig, ranks: Ranks, device: torch.device) -> Parts:
    """Task and feed as a run of these settings has them, to measure its training steps.

    Nothing is printed or written. Another process calls this by its name.
    """
    with unwritten_run() as folder:
        L.seed_everything(config.seed, verbose=False)
        data = open_data(config, Ranks(), folder)
        task = build_task(config, data, choose_rate(config, ranks.world, folder), folder)
        feeds = place_feeds(config, data, task, device, ranks)
        task.prepare_probe(feeds, config.seed)
        return Parts(
            task=task,
            split=feeds.train.split,
            plan=feeds.train.plan,
            device=device,
            workers=config.data.workers,
            clip=clip_of(config),
        )
