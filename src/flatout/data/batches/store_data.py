"""The base of all DataModules: a store, built once and memory-mapped, and a feed for each split.

It works in any `L.Trainer`. The Trainer's accumulation and world size go into the plan of the
training rows. So each batch knows how many real rows its whole optimizer step has
(`batch.step_rows`). Feeds divide the rows among ranks, so Lightning's distributed sampler has
nothing to replace. The state is the position in the plan. Open this file to change what a Trainer
gets from a store; a subclass has what is special about texts, tags or recordings.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Self, TypeVar, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from flatout.data.batches.feed import Feed, Feeds, choose_feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.large_plan import WINDOW_ROWS, is_large, is_sorted_by
from flatout.data.batches.plan import BatchLayout, FeedKind, PlanSettings
from flatout.data.feeding import FeedingConfig
from flatout.data.info import DataInfo
from flatout.data.store.store import Ragged, Store, StoreSplit
from flatout.distributed.both_lightnings import InBothLightnings, either
from flatout.distributed.limits import free_bytes
from flatout.errors import UserError, did_you_mean, require
from flatout.run_log import RunLog

Config = TypeVar("Config", bound=FeedingConfig)
Info = TypeVar("Info", bound=DataInfo)
_START = {"epoch": 0, "consumed": 0}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a feed's batches are computed: which rank of how many, on which device, in which
    layout.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    layout: BatchLayout = BatchLayout.flat
    repeats: bool = False  # whether each epoch has the batches of the first


class StoreData(InBothLightnings, L.LightningDataModule, Generic[Config, Info]):
    """Data from a store; a subclass names its settings and opens its store."""

    settings: type[Config]  # the dataclass of the constructor's keywords

    @property
    def is_stream(self) -> bool:
        """Whether rows continue each other, so that plans keep their order."""
        return False

    def __init__(self, *, seed: int = 0, log: RunLog | None = None, **settings: Any) -> None:
        """`seed` starts the order of the rows; all other keywords are fields of the
        settings class.
        """
        super().__init__()
        names = [setting.name for setting in fields(self.settings)]
        for name in settings:
            require(
                name in names,
                f"{type(self).__name__}.{name}",
                "no such setting",
                hint=did_you_mean(name, names),
            )
        self.config: Config = self.settings(**settings)
        self.seed = seed
        self.run_log = RunLog() if log is None else log
        self._info: Info | None = None
        self._is_announced = False
        self._has_fitted = False
        self._placement: Placement | None = None
        self._kinds: dict[torch.device, FeedKind] = {}
        self._feeds: dict[str, Feed] = {}
        self._position: dict[str, int] = dict(_START)

    @classmethod
    def of(cls, config: Config, *, seed: int = 0, log: RunLog | None = None) -> Self:
        """The same from a settings object, as Hydra builds it."""
        settings = {setting.name: getattr(config, setting.name) for setting in fields(config)}
        return cls(seed=seed, log=log, **settings)

    @abstractmethod
    def open_store(self) -> Info:
        """Open the store, building it first when there is none."""

    def prepare_data(self) -> None:
        """Build the store where it is missing; Lightning calls it on one rank of each machine."""
        if self._info is None:
            self._info = self.open_store()

    def setup(self, stage: str | None = None) -> None:
        """Open the store and report what it holds; a second fit starts from the first batch."""
        self.prepare_data()
        if self.trainer is not None and self.trainer.world_size > 1:
            key = self.trainer.strategy.broadcast(self.info.key)
            rank = self.trainer.global_rank
            require(
                key == self.info.key,
                "data",
                f"rank {rank} sees other data than the first rank",
                hint="Every machine needs the same files, or one folder that all can read.",
            )
        if not self._is_announced and self._is_first:
            for line in self.info.lines:
                self.run_log.say(line)
        self._is_announced = True
        if stage == "fit" and self._has_fitted:
            self._has_fitted = False
            self.load_state_dict(_START)

    def teardown(self, stage: str | None = None) -> None:
        self._has_fitted |= stage == "fit"

    @property
    def info(self) -> Info:
        """Labels, vocabulary, columns and counts."""
        if self._info is None:
            raise UserError(
                f"{type(self).__name__}.info",
                "the store is not open yet",
                hint="Call setup() first.",
            )
        return self._info

    @property
    def store(self) -> Store:
        return self.info.store

    def place(self, placement: Placement, config: Config | None = None) -> None:
        """Set rank, device and layout instead of reading them from the Trainer.

        `config`: settings with a measured batch size, which replace those of the constructor.
        """
        self._placement = placement
        self.config = self.config if config is None else config

    @property
    def feeds(self) -> Feeds:
        """The feed of each split, made once and kept while nothing changes."""
        test = self._feed("test") if "test" in self.store.splits else None
        return Feeds(self._feed("train"), self._feed("validation"), test)

    def train_dataloader(self) -> Feed:
        feed = self._feed("train")
        if self.trainer is not None and self._placement is None:
            # An epoch may not end inside a step: its batches are weighted by the rows of the whole
            # step.
            limit = self.trainer.limit_train_batches
            accumulate = feed.plan.accumulate
            batches = limit if isinstance(limit, int) else int(limit * len(feed))
            whole = max(1, batches // accumulate) * accumulate
            is_whole = batches >= len(feed) or batches % accumulate == 0
            require(
                is_whole,
                "limit_train_batches",
                f"{limit} ends an epoch inside a step of {accumulate} batches",
                hint=f"Set Trainer(limit_train_batches={whole}).",
            )
        return feed

    def val_dataloader(self) -> Feed:
        return self._feed("validation")

    def test_dataloader(self) -> Feed | list[Feed]:
        """The test rows; nothing where there are none."""
        return self._feed("test") if "test" in self.store.splits else []

    def predict_dataloader(self) -> Feed:
        """The test rows, or the validation rows where there are none; `batch.rows` numbers them."""
        return self._feed("test" if "test" in self.store.splits else "validation")

    def transfer_batch_to_device(
        self, batch: object, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Move a batch that is not on the device yet."""
        if not isinstance(batch, FlatBatch):
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        return batch if batch.tokens.device == device else batch.to(device)

    def _plan(self, name: str, placement: Placement) -> PlanSettings:
        """Training rows in random order, by steps; all others by length, the same in each pass."""
        config = self.config
        plan = PlanSettings(
            layout=placement.layout,
            rank=placement.rank,
            world=placement.world,
            is_stream=self.is_stream,
        )
        if name != "train":
            return replace(plan, rows_per_batch=config.eval_batch_size, shuffle=False)
        return replace(
            plan,
            rows_per_batch=config.batches(placement.world)[0],
            tokens_per_batch=config.tokens_per_batch,
            accumulate=self._accumulation(placement),
            repeats=placement.repeats,
            seed=self.seed,
        )

    def _feed(self, name: str) -> Feed:
        """The feed of a split. While nothing changes it is the same one, and keeps its position."""
        placement = self._current_placement()
        plan = self._plan(name, placement)
        device = placement.device
        is_train = name == "train"
        kind = self._choose_kind(device)
        if not is_train and kind is not FeedKind.resident:
            kind = FeedKind.threaded  # rows that are only evaluated need no worker processes
        before = self._feeds.get(name)
        if before is not None and (before.plan, before.kind, before.device) == (plan, kind, device):
            return before
        split = self.store.splits[name]
        feed = Feed(
            split,
            plan,
            kind=kind,
            device=device,
            workers=self.config.workers,
            keeps_position=is_train,
        )
        if is_train:
            feed.load_state_dict(self._position)
            if plan.world > 1:
                product = (
                    f"{plan.rows_per_batch} rows x {plan.accumulate} batches x {plan.world} ranks"
                )
                value = f"{plan.rows_per_batch * plan.parts} rows"
                self._report("rows a step", value, "each rank trains its share", product)
            self._warn_of_order(split, plan)
        self._feeds[name] = feed
        return feed

    def _choose_kind(self, device: torch.device) -> FeedKind:
        if device not in self._kinds:
            choice = choose_feed(
                self.config.feed,
                sum(split.num_bytes for split in self.store.splits.values()),
                device,
            )
            self._kinds[device] = choice.value
            self._report("feed", choice.value.value, choice.why, choice.evidence)
            self._limit_reading_ahead()
        return self._kinds[device]

    def _limit_reading_ahead(self) -> None:
        """Let the system read no pages ahead if memory cannot hold the rows that are shuffled
        together.
        """
        train = self.store.splits["train"]
        share = 1.0
        if not self.config.tokens_per_batch:
            share = min(1.0, WINDOW_ROWS / max(1, train.num_rows))
        together = train.num_bytes * share
        free = free_bytes()
        if together > free:
            for split in self.store.splits.values():
                split.read_single_pages()
            evidence = f"rows shuffled together {together / 1e9:.1f} GB, free {free / 1e9:.1f} GB"
            self._report(
                "reading",
                "single pages",
                "what is read ahead would be dropped before it is used",
                evidence,
            )

    def _current_placement(self) -> Placement:
        trainer = self.trainer
        if self._placement is not None:
            return self._placement
        if trainer is None:
            return Placement()
        # Any LightningModule is trained; those of ours keep the network in `model`.
        network = getattr(trainer.lightning_module, "model", None)
        return Placement(
            rank=trainer.global_rank,
            world=trainer.world_size,
            device=trainer.strategy.root_device,
            layout=BatchLayout.of(network),
            repeats=bool(getattr(trainer, "overfit_batches", 0)),
        )

    def _accumulation(self, placement: Placement) -> int:
        """Batches of a step: the Trainer's, which must agree with the settings."""
        config = self.config
        trainer = self.trainer
        wanted = config.batches(placement.world)[1]
        if trainer is None or self._placement is not None:
            return wanted
        scheduler = either(GradientAccumulationScheduler)
        callbacks = cast(Any, trainer).callbacks  # Lightning sets the list without declaring it
        changes = any(isinstance(callback, scheduler) for callback in callbacks)
        require(
            not changes,
            "accumulate_grad_batches",
            "changes from epoch to epoch, but the rows of each step are planned before training",
            hint=(
                "Set Trainer(accumulate_grad_batches=…) instead of the"
                " GradientAccumulationScheduler."
            ),
        )
        of_trainer = trainer.accumulate_grad_batches
        hint = f"Set Trainer(accumulate_grad_batches={wanted})"
        if config.effective_batch is not None:
            require(
                of_trainer == wanted,
                "data.effective_batch",
                f"{config.effective_batch} rows are {wanted} batches a step, but the Trainer takes"
                f" {of_trainer}",
                hint=f"{hint}.",
            )
        elif wanted > 1:
            require(
                of_trainer == wanted,
                "data.accumulate",
                f"{wanted}, but the Trainer takes {of_trainer}"
                f" {'batch' if of_trainer == 1 else 'batches'} a step",
                hint=f"{hint}, or leave data.accumulate out.",
            )
        return of_trainer

    def state_dict(self) -> dict[str, int]:
        """The position in the plan: the epoch, and the batches of it that were taken."""
        return self._feeds["train"].state_dict() if "train" in self._feeds else dict(self._position)

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a position, now or when the feed is made."""
        self._position = dict(state_dict)
        self._has_fitted = False
        if "train" in self._feeds:
            self._feeds["train"].load_state_dict(state_dict)

    @property
    def _is_first(self) -> bool:
        return self.trainer is None or self.trainer.is_global_zero

    def _report(self, name: str, value: object, why: str, evidence: str) -> None:
        if self._is_first:
            self.run_log.decision(name, value, why, evidence)

    def _warn_of_order(self, split: StoreSplit, plan: PlanSettings) -> None:
        """Warn if rows are sorted by label and too many to be shuffled at once."""
        targets = split.columns.get("targets")
        if targets is None or isinstance(targets, Ragged) or targets.dtype.kind != "i":
            return
        if is_large(split.num_rows, plan) and self._is_first and is_sorted_by(targets):
            shuffled = (
                f"{WINDOW_ROWS / 1e6:.1f} of {split.num_rows / 1e6:,.1f} million rows are shuffled"
                " together"
            )
            self.run_log.say(
                f"data: the source is sorted by label, and {shuffled}; bring its rows into random"
                " order"
            )
