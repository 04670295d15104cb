"""The parts of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import torch

from flatout.config import RunConfig
from flatout.data.batches.feed import Feeds
from flatout.data.batches.plan import BatchLayout
from flatout.data.store_data import Placement
from flatout.distributed.ranks import Ranks
from flatout.engine.run_length import planned_steps, whole_steps
from flatout.errors import require
from flatout.perf.tune.probe import Parts
from flatout.run.kinds import kind_of
from flatout.run.memory import require_memory
from flatout.run.resolve import clip_of, resolve_rate
from flatout.run.run_folder import RunFolder, unwritten_run
from flatout.run_log import RunLog
from flatout.tasks.networks import report_network
from flatout.tasks.task import Task


def open_data(config: RunConfig, ranks: Ranks, folder: RunFolder) -> Any:
    """The DataModule, its store opened, which the first rank builds where it is missing; the user's
    own as it is.
    """
    if config.has_own_parts:
        is_own = isinstance(config.data, L.LightningDataModule)
        # The Trainer is given `data.accumulate`: in its DataModule it would be asked for twice.
        ours = None if is_own else replace(config.data, accumulate=1)
        data = config.data if is_own else kind_of(config.data).data.of(ours, seed=config.seed)
        folder.summary.set("data", {"source": type(data).__name__})
        return data
    data = kind_of(config.data).data.of(config.data, seed=config.seed, log=folder)

    def prepare() -> str:
        data.prepare_data()
        return str(data.info.key)

    key = ranks.agreed("store", prepare)
    data.setup()
    require(
        data.info.key == key,
        "data",
        f"rank {ranks.rank} sees other data than the first rank",
        hint="Every machine needs the same files, or one folder that all can read.",
    )
    facts = data.info.summary()
    rows = {
        "val" if split == "validation" else split: count
        for split, count in facts.pop("rows").items()
    }
    report = data.info.report
    cache = {"key": report.key, "hit": report.hit, "seconds": round(report.seconds, 4)}
    folder.summary.set("data", {"source": data.info.source, "rows": rows, **facts, "cache": cache})
    return data


def require_memory_for_model(
    config: RunConfig, data: Any, ranks: Ranks, device: torch.device
) -> None:
    """Refuse a model that this device cannot train, before it is built."""
    if config.has_own_parts:
        return
    copies = ranks.local_world if device.type == "cpu" else 1
    shares = ranks.world if config.is_sharded else 1
    task = kind_of(config.data).task
    require_memory(
        config.model,
        lambda model: task(model, config.task).build(data.info),
        device,
        copies / shares,
    )


def build_module(config: RunConfig, data: Any, log: RunLog) -> Any:
    """The task of the data, with the network of the settings or the user's own; or the user's own
    module.
    """
    if config.has_own_parts:
        return config.task
    task = kind_of(config.data).task(config.model, config.task, config.optim)
    report_network(task.build(data.info), config.model, data.info, log)
    return task


def place_feeds(
    config: RunConfig, data: Any, task: Task, device: torch.device, ranks: Ranks
) -> Feeds:
    """One feed a split, for this rank and for the layout that the network reads."""
    repeats = bool(config.trainer.get("overfit_batches"))
    data.place(
        Placement(ranks.rank, ranks.world, device, BatchLayout.of(task.model), repeats), config.data
    )
    return data.feeds


def build_parts(config: RunConfig, ranks: Ranks, device: torch.device) -> Parts:
    """Task and feed as a run has them, to measure how fast they are; in another process, by its
    name.
    """
    with unwritten_run() as folder:
        L.seed_everything(config.seed, verbose=False)
        data = open_data(config, Ranks(), folder)
        task = build_module(config, data, folder)
        feeds = place_feeds(config, data, task, device, ranks)
        task.total_steps = planned_steps(
            whole_steps(config.trainer, feeds.train, folder), feeds.train
        )
        task.optim = resolve_rate(config, task.model_config, feeds.train.plan, folder)
        task.prepare_probe(feeds, config.seed)
        return Parts(
            task, feeds.train.split, feeds.train.plan, device, config.data.workers, clip_of(config)
        )
