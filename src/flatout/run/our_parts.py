"""What a run of a task of flatout does: `OurRunParts`.

Each method hands over to the module that does the work. Open this file to let a run of flatout's
tasks do something more; `run/own_parts.py` has the same methods for modules of the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from flatout.callbacks.loggers import RunLoggers
from flatout.callbacks.run_curves import RunCurves
from flatout.checkpoints.kept import Start
from flatout.checkpoints.same_run import facts_of_run, plan_facts
from flatout.config import RunConfig
from flatout.data.batches.feed import Feed
from flatout.engine.fast_loop import FastLoop
from flatout.engine.graph_choice import require_static_steps
from flatout.engine.precision import LIGHTNING_NAMES, product_type
from flatout.models.encoder.transformer import Transformer
from flatout.perf.verdict.evidence import Evidence
from flatout.perf.verdict.gathering import report_early
from flatout.report.dashboard import compared_settings, layout, write_dashboard
from flatout.run import closing, evaluation, fitting, mixing, resolve, reuse
from flatout.run.answers import tune
from flatout.run.budget import settle_budget
from flatout.run.context import (
    Answers,
    OurParts,
    Run,
    RunAnswers,
    RunContext,
    RunParts,
    Settings,
    Training,
)
from flatout.run.kinds import kind_of, load_predictor
from flatout.run.length import follows_rows, settle_length
from flatout.run.micro_batches import restore_micro_batches
from flatout.run.own_parts import require_picklable
from flatout.run.parts import build_task, open_data, place_feeds, require_memory_for_model
from flatout.run.run_folder import SPLIT_ROWS, save_split_rows
from flatout.tasks.metrics import BEST_MODE, require_metric
from flatout.tasks.networks import report_attention
from flatout.tasks.task import Task
from flatout.tasks.task_class import TaskClass

_MOST_ROWS = 12  # rows of a step that its message names


@dataclass(frozen=True, slots=True)
class OurRunParts(OurParts, RunParts):
    """A task of flatout, its data and its feeds."""

    blames: ClassVar[str] = "trainer"
    compares_words: ClassVar[bool] = False
    may_draw: ClassVar[bool] = False

    @property
    def module(self) -> Task:
        return self.task

    @classmethod
    def name_of(cls, config: RunConfig) -> str:
        return type(config.model).__name__.removesuffix("Config")

    @classmethod
    def require_startable(cls, config: RunConfig, world: int, *, is_here: bool) -> None:
        if isinstance(config.task, TaskClass) and not is_here and world > 1:
            require_picklable(config.task.task, None)

    @classmethod
    def of_this_process(cls, config: RunConfig) -> RunConfig:
        return config

    @classmethod
    def open_answers(cls, config: RunConfig, folder: Path) -> Answers:
        return load_predictor(folder)

    @classmethod
    def metric_of(cls, config: RunConfig) -> str:
        return config.checkpoint.metric or kind_of(config.data).usual_metric(config.data)

    @classmethod
    def metrics_of(cls, config: RunConfig) -> list[str]:
        return kind_of(config.data).metrics(config.data)

    @classmethod
    def mode_of(cls, config: RunConfig) -> str:
        metric = cls.metric_of(config)
        # a task of the user's may have metrics of its own
        if not isinstance(config.task, TaskClass):
            require_metric(metric, [*BEST_MODE, "loss"], "checkpoint.metric")
        return config.checkpoint.mode_of(metric)

    @classmethod
    def leaves_length_open(cls, config: RunConfig) -> bool:
        return config.trainer.get("max_epochs") is None and follows_rows(config)

    @classmethod
    def make(cls, config: RunConfig, context: RunContext) -> tuple[Self, Settings]:
        ranks = context.ranks
        folder = context.folder
        data = open_data(config, ranks, folder)
        require_memory_for_model(config, data, ranks, context.device)
        mixing.require_mixable(config, data)
        # Whatever the settings leave open is chosen here: no later line changes them.
        config = tune(settle_length(config, data, ranks, folder), data, context)
        config = settle_budget(config, context, data)
        optim = resolve.choose_rate(config, ranks.world, folder)
        task = build_task(config, data, optim, folder)
        feeds = place_feeds(config, data, task, context.device, ranks)
        require_static_steps(config.graph, task, feeds.train)
        parts = cls(task, data, feeds)
        return parts, resolve.resolve(config, parts, context)

    def list_facts(self, settings: Settings, context: RunContext) -> dict[str, Any]:
        plan = plan_facts(self.feeds.train, settings.batches or 0)
        precision = LIGHTNING_NAMES[settings.precision.value]
        return facts_of_run(settings.values, self.data.info.key, self.task.model, plan, precision)

    def reuse_layers(self, run: Run, start: Start | None) -> None:
        with self.exact_products(run):
            reuse.reuse_layers(run, self, start)

    def exact_products(self, run: Run) -> AbstractContextManager[None]:
        return resolve.exact_products(run, self.feeds.train.device)

    def compile_network(self, run: Run) -> None:
        resolve.compile_network(run, self)

    def trainer_arguments(self, settings: Settings) -> dict[str, Any]:
        """How long a step accumulates, and where its gradient is cut."""
        return {
            "accumulate_grad_batches": self.feeds.train.plan.accumulate,
            "gradient_clip_val": settings.clip or None,
        }

    def curve_names(self, settings: Settings) -> list[str]:
        return ["loss", *self.task.all_metric_names]

    def wrap_loggers(self, loggers: dict[str, Any], run: Run, *, has_card: bool) -> RunLoggers:
        names = self.task.all_metric_names
        return RunLoggers(
            loggers,
            metrics=[f"val/{name}" for name in ("loss", *names)],
            settings=_settings_to_compare(run.settings),
            charts=layout(names, has_card=has_card),
        )

    def connect(self, run: Run, loop: FastLoop, curves: RunCurves) -> None:
        feed = self.feeds.train
        settings = run.settings
        batches = settings.batches or 1
        loop.losses.describe_rows = partial(_describe_rows, feed, batches // feed.plan.accumulate)
        # with FSDP ranks wait for each other in every layer: none can cut its batches alone
        if not settings.asked.is_sharded:
            restore_micro_batches(loop, self, run)
        if settings.asked.monitor.verdict:
            precision = LIGHTNING_NAMES[settings.precision.value]
            judge_early = partial(report_early, curves, feed, precision, batches, run.folder)
            curves.judge_early = judge_early

    def prepare(self, run: Run) -> None:
        folder = run.folder
        asked = run.settings.asked
        if folder.is_first and kind_of(asked.data).keeps_rows:
            save_split_rows(self.data.store, folder.path / SPLIT_ROWS)
        folder.put(self.task.prepare(self.feeds, folder, asked.seed))
        products = product_type(run.settings.precision.value)
        report_attention(self.task.model, self.feeds.train.device, products, folder)

    def report_start(self, run: Run) -> None:
        fitting.report_start(run, self)

    def expected_warnings(self) -> Sequence[str]:
        network = self.task.model
        if isinstance(network, Transformer) and network.stored_layers:
            # frozen layers are in eval mode so that they drop nothing; the run has said so
            return (".*in eval mode at the start of training.*",)
        return ()

    def take_weights(self, state: dict[str, Tensor] | None, strategy: Strategy) -> None:
        if self.task.is_sharded:
            cast(Any, strategy).hand_out(self.task, state)
        elif state is not None:
            self.task.load_state_dict(state)

    def tune_answers(self, run: Run, device: torch.device) -> None:
        self.task.to(device)  # Lightning has taken it back to the host
        run.folder.put(self.task.tune_answers(self.feeds, run.folder))
        if self.task.held_out is not None:
            run.folder.summary.set("abstention", self.task.held_out.facts())

    def can_judge(self, split: str) -> bool:
        return split == "val" or split in self.data.store.splits

    def scores_of(self, split: str, logged: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        if split == "val":
            self.task.count_answers()
        return self.task.results

    def report_test(self, run: Run) -> None:
        if self.feeds.test is not None:
            evaluation.add_intervals(self, run.folder)
            evaluation.add_truncation(self, run)

    def add_linear_model(self, run: Run, seconds: float) -> None:
        mixing.add_linear_model(run, self, seconds)

    def train_feed(self) -> Feed:
        return self.feeds.train

    def shares_of_rows(self) -> dict[str, float]:
        splits = self.data.store.splits
        return {name: split.num_rows / splits["train"].num_rows for name, split in splits.items()}

    def pace_facts(self, settings: Settings) -> dict[str, Any]:
        plan = self.feeds.train.plan
        return {
            "network": type(self.task.model).__name__,
            "data": self.data.info.key,
            "model": settings.values["model"],
            "rows": plan.rows_per_batch,
            "tokens": plan.tokens_per_batch,
            "accumulate": plan.accumulate,
            "compile": settings.values["compile"],
            "threads": settings.values["threads"],
        }

    def keep_answers(self, run: Run, training: Training) -> RunAnswers:
        return closing.keep_task(run, self, training)

    def find_evidence(self, run: Run, training: Training) -> Evidence | None:
        return closing.judge(self, run.settings, training, run.folder)

    @property
    def network(self) -> nn.Module:
        return self.task.model

    def rows_per_step(self, training: Training) -> int:
        plan = self.feeds.train.plan
        return plan.rows_per_batch * plan.parts

    def rate_names(self) -> list[str]:
        names = ["rows_per_s"]
        if self.task.counts_tokens:
            names += ["tokens_per_s", "padding_share"]
        return names

    def batch_size_sets_steps(self, settings: Settings) -> bool:
        plan = self.feeds.train.plan
        is_one_batch = plan.parts == 1 and plan.tokens_per_batch is None
        limits = ("max_steps", "limit_train_batches", "max_time")
        is_limited = any(settings.trainer.get(name) not in (None, -1) for name in limits)
        return is_one_batch and not is_limited

    def report_kind(self, run: Run, answers: Answers, seconds: float) -> None:
        closing.report_kind(run, self, answers, seconds)

    def write_dashboard(self, run: Run, summary: dict[str, Any]) -> None:
        if "tensorboard" in run.settings.asked.logger:
            compared = _settings_to_compare(run.settings)
            write_dashboard(run.folder.path, summary, compared, self.task.counted)


def _settings_to_compare(settings: Settings) -> dict[str, Any]:
    """The settings that dashboards compare, with the learning rate that was chosen."""
    return compared_settings(settings.values) | {"optim.lr": settings.optim.highest}


def _describe_rows(feed: Feed, steps_an_epoch: int, step: int) -> str:
    """The rows that an optimizer step trains, in words: ` (rows 12, 80 of the table)`.

    At most twelve are named, in order.
    """
    epoch, step_of_epoch = divmod(step, steps_an_epoch)
    numbers = feed.rows_of_step(epoch, step_of_epoch)
    if "rows" in feed.split.columns:
        numbers = feed.split.fixed("rows")[numbers] + 1
    named = sorted(numbers.tolist())[:_MOST_ROWS]
    rest = ", …" if len(numbers) > _MOST_ROWS else ""
    return f" (rows {', '.join(map(str, named))}{rest} of the table)"
