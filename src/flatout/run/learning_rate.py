"""The learning rate of a run: the setting's or the model's usual one, scaled to the rows of a step."""

from __future__ import annotations

from typing import Any

from flatout.data.batches.plan import PlanSettings
from flatout.data.store_data import StoreData
from flatout.engine.optimizer import OptimConfig, ScaleRate
from flatout.engine.run_length import planned_steps
from flatout.errors import UserError
from flatout.run.run_folder import RunFolder
from flatout.tasks.task import Task


def set_rate(task: Task, data: StoreData[Any, Any], trainer: dict[str, Any], folder: RunFolder) -> None:
    """Set the planned steps, and the learning rate that was asked for or that suits the model."""
    feed = data.feeds.train
    task.total_steps = planned_steps(trainer, feed)
    if (rate := task.take_recommended_rate()) is not None:
        why = "usual for such a model"
        folder.choose("optim.lr", f"{rate:g}", why, "set optim.lr for another", replaces=True)
    is_asked = data.config.effective_batch is not None or task.optim.scale_lr is not ScaleRate.none
    if is_asked:
        task.optim = _scale(task.optim, feed.plan, folder)


def _scale(optim: OptimConfig, plan: PlanSettings, folder: RunFolder) -> OptimConfig:
    """The rate for the rows of a step, with a line on how these come about."""
    if plan.tokens_per_batch is not None:
        what = f"{optim.scale_lr.value}, but data.tokens_per_batch makes steps of unequal rows"
        raise UserError("optim.scale_lr", what, hint="Leave one of them out.")
    rows = plan.rows_per_batch * plan.parts
    scaled = optim.scaled(rows)
    product, rates = f"{plan.rows_per_batch} × {plan.accumulate} × {plan.world}", (optim.highest, scaled.highest)
    is_capped = scaled is not optim and scaled.highest == optim.max_lr
    how = "not scaled" if scaled is optim else f"{optim.scale_lr.value} from {optim.base_batch} rows"
    value = f"{product} = {rows} rows, lr {rates[0]:g} → {rates[1]:g}"
    folder.choose("micro × accumulation × devices", value, "as asked", f"lr {how}{', capped' if is_capped else ''}")
    return scaled
