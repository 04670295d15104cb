"""What a training is of, as the manifests of its checkpoints say it, and whether a resumed one is the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L

from flatout.data.batches.feed import Feed
from flatout.engine.run_length import batches_in_epoch
from flatout.errors import require

if TYPE_CHECKING:
    from flatout.data.store_data import StoreData


def batches_of(trainer: L.Trainer, feed: Feed) -> int:
    """Batches of one rank in each epoch, before Lightning has counted them."""
    return batches_in_epoch({"limit_train_batches": trainer.limit_train_batches}, feed)


def plan_facts(feed: Feed, batches: int) -> dict[str, Any]:
    """What decides which rows each step trains."""
    plan = feed.plan
    return {
        "rows": feed.split.num_rows,
        "rows a step": None if plan.tokens_per_batch else plan.rows_per_batch * plan.parts,
        "tokens a step": plan.tokens_per_batch and plan.tokens_per_batch * plan.parts,
        "steps an epoch": batches // plan.accumulate,
        "layout": str(plan.layout),
    }


def facts_of(trainer: L.Trainer, data: StoreData[Any, Any] | None) -> dict[str, Any]:
    """The facts of a plain Trainer: how long it trains, and the data where they are known."""
    facts: dict[str, Any] = {"asked": {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}}
    if data is None:  # its position counts the batches of one rank
        return {**facts, "plan": {"devices": trainer.world_size}}
    feed = data.feeds.train
    return {**facts, "data": data.info.key, "plan": plan_facts(feed, batches_of(trainer, feed))}


def require_same_training(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a checkpoint whose position counts other steps."""
    before, after = then.get("plan", {}), now.get("plan", {})
    names = [name for name in before if name in after and before[name] != after[name]]
    changes = [f"{name} was {before[name]} and is {after[name]}" for name in names]
    if then.get("data") != now.get("data"):
        changes.append("the data or its encoding has changed")
    hint = "Set it back, or leave ckpt_path out: training starts from the first step."
    require(not changes, "ExactCheckpoint", f"the checkpoint is of another training: {'; '.join(changes)}", hint=hint)
