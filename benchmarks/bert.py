"""Encoders over flat batches: equal to padded ones, family by family, then against transformers'
own Trainer.

The same losses come first, then tokens a second. Both train the same model from the same weights on
the same rows, in batches of 32, with their defaults (the Trainer's: padded to the longest row of
the batch, fp32, fused AdamW, clipping at 1). The Trainer's best settings are measured too: bf16,
rows grouped by length, and compiled. Ours is a whole run, as `python -m train` makes it.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import nn

from benchmarks.claim import Claim, Options, at_least, bounded, quiet, reaching
from benchmarks.dispatched import dispatch_claims
from benchmarks.families import family_claims
from benchmarks.products_alone import passes_over_products
from benchmarks.sizes import size_claims
from benchmarks.step_times import wait_for_device
from flatout.checkpoints.settings import CheckpointConfig
from flatout.config import MonitorConfig, RunConfig
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import Plan, PlanSettings
from flatout.data.feeding import FeedKind
from flatout.data.info import TextInfo
from flatout.data.samples.tweets import TweetsConfig
from flatout.data.store.store import Store
from flatout.data.texts.data import TextData
from flatout.data.texts.settings import TextDataConfig
from flatout.data.tokens.vocabulary import VocabularyConfig
from flatout.engine.fast_loop import fast_loop_of
from flatout.engine.optimizer import OptimConfig
from flatout.engine.peaks import known_peak, measured_peak
from flatout.engine.precision import (
    LIGHTNING_NAMES,
    Precision,
    arithmetic,
    choose_precision,
    fast_fp32_products,
    product_type,
)
from flatout.errors import UserError, did_you_mean, require
from flatout.models.encoder.transformer import Compute, Outputs, Transformer, TransformerConfig
from flatout.run.launch import fit

_BATCH = 32
_LR = 2e-5
_WARM = 8
_SHAPE: dict[str, Any] = {"hidden": 384, "layers": 6, "heads": 12}
# DeBERTa-v3-small
_DEBERTA: dict[str, Any] = {"family": "deberta-v2", "hidden": 768, "layers": 6, "heads": 12}
_EXACT = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}


def claims(options: Options) -> Iterator[Claim]:
    """Equality, speed on short and on long texts and of DeBERTa, and what a GPU adds."""
    asked = options.only or ""
    parts = {
        name: part
        for name, part in _PARTS.items()
        if (asked in name if asked else name != _ONLY_ASKED)
    }
    require(
        bool(parts),
        "--only",
        f"no part {asked!r}",
        allowed=", ".join(_PARTS),
        hint=did_you_mean(asked, _PARTS),
    )
    # asked for when it starts
    has_trainer = parts.keys() == {_ONLY_ASKED} or importlib.util.find_spec("accelerate")
    hint = "Install it with pip install 'flatout[bench]'."
    require(
        bool(has_trainer),
        "bench bert",
        "transformers' Trainer needs the package accelerate",
        hint=hint,
    )
    with tempfile.TemporaryDirectory() as folder:
        for part in parts.values():
            yield from part(Path(folder), options)


def _short_claims(folder: Path, options: Options) -> Iterator[Claim]:
    short = BertBench(folder, options, _tweets(options), max_length=128)
    yield short.same_losses()
    yield from short.speed()


def _long_claims(folder: Path, options: Options) -> Iterator[Claim]:
    longest = options.choose(512, 256, 256)
    yield from BertBench(folder, options, _long_texts(options), max_length=longest).long_speed()


def _deberta_claims(folder: Path, options: Options) -> Iterator[Claim]:
    """The sizes of DeBERTa-v3-small: distances change its scores, so neither side has a fused
    kernel.
    """
    bench = BertBench(folder, options, _tweets(options), max_length=128, shape=_DEBERTA)
    yield bench.same_losses(steps=10)
    kinds = _kinds(replace(options, quick=True))
    ours, theirs, _ = bench.in_turn(kinds)
    best = max((name for name in kinds if name != "default"), key=lambda name: theirs[name])
    note = f"batch {_BATCH}, mean length {bench.rows_by_length.mean():.1f}"
    yield at_least(
        "DeBERTa: real tokens a second, Trainer's default",
        ours,
        theirs["default"],
        "tokens/s",
        3.0,
        note,
    )
    yield at_least(f"the same, Trainer's best ({best})", ours, theirs[best], "tokens/s", 1.3)


def _gpu_claims(folder: Path, options: Options) -> Iterator[Claim]:
    if torch.cuda.is_available():
        yield from base_claims(folder, options, torch.device("cuda"))
    else:
        print("BERT-base on a GPU: no GPU")


_PARTS: dict[str, Callable[[Path, Options], Iterator[Claim]]] = {
    "families": lambda folder, options: family_claims(quick=options.quick),
    "dispatched": lambda folder, options: dispatch_claims(),
    "tweets": _short_claims,
    "long texts": _long_claims,
    "deberta": _deberta_claims,
    "gpu": _gpu_claims,
    "sizes": lambda folder, options: size_claims(options),
}
_ONLY_ASKED = "sizes"
"""The part that takes longer than all others, without a goal."""


def base_claims(
    folder: Path, options: Options, device: torch.device, shape: dict[str, Any] | None = None
) -> Iterator[Claim]:
    """BERT-base on texts of some 128 tokens and on tweets, against the Trainer's best; its MFU, and
    its waits.
    """
    shape = shape or {"hidden": 768, "layers": 12, "heads": 12}
    # more than an epoch of the largest batches
    texts = {"train": joined_tweets(2, 11, tweets=60_000)}
    bench = BertBench(folder, options, texts, max_length=512, shape=shape, device=device)
    tweets = BertBench(
        folder, options, _tweets(options), max_length=128, shape=shape, device=device
    )
    kinds = {kind: settings for kind, settings in _kinds(options).items() if settings}
    # Before theirs: a Trainer that compiles sets TF32 for the whole process.
    compiled = {"texts": bench.compiled(), "tweets": tweets.compiled()}
    for each, name, goal in ((bench, "texts", 1.3), (tweets, "tweets", 3.0)):
        ours, theirs, _ = each.in_turn(kinds)
        ours, how = max((ours, "eager"), compiled[name])
        best = max(theirs, key=lambda kind: theirs[kind])
        note = f"batch {_BATCH}, mean length {each.rows_by_length.mean():.1f}, {how}"
        claim = f"BERT-base, {name}: tokens a second, Trainer's best ({best})"
        yield at_least(claim, ours, theirs[best], "tokens/s", goal, note)
    peak = known_peak(device, "bf16-mixed") or measured_peak(device, "bf16-mixed")
    if peak is not None:
        large = BertBench(
            folder,
            options,
            texts,
            max_length=512,
            shape=shape,
            device=device,
            batch_size=4 * _BATCH,
        )
        ours, how = max((large.in_turn({})[0], "eager"), large.compiled())
        tokens = 4 * _BATCH * large.rows_by_length.mean()
        note = f"of {peak.tflops:,.1f} TFLOP/s ({peak.source}), {tokens:,.0f} tokens a pass, {how}"
        share = 100 * ours * large.flops_a_token() / (peak.tflops * 1e12)
        yield reaching("BERT-base: MFU of real tokens", share, "%", least=45, note=note)
    steps = 10 if options.quick else 50
    what = bench.what_waits(steps)
    yield bounded(
        f"BERT-base: waits for the device in {steps} steps",
        float(bool(what)),
        "",
        most=0,
        note=what,
    )


def _tweets(options: Options) -> dict[str, Any]:
    """Published tweets, or the built-in ones."""
    if options.data is None:
        return {"sample": TweetsConfig(rows=options.choose(20_000, 5_000, 5_000))}
    return _published(options.data / "tweeteval_sentiment")


def _long_texts(options: Options) -> dict[str, Any]:
    """Published articles, or several built-in tweets joined: with `--quick` always, articles take
    long to prepare.
    """
    if options.data is None or options.quick:
        return {
            "train": joined_tweets(
                most=options.choose(60, 25, 25), tweets=options.choose(30_000, 6_000, 6_000)
            )
        }
    return _published(options.data / "newsgroups20")


def _published(folder: Path) -> dict[str, Any]:
    found = {
        split: next(iter(sorted(folder.glob(f"{split}.*"))), None)
        for split in ("train", "validation", "test")
    }
    if found["train"] is None:
        raise UserError(
            "--data",
            f"no {folder.name} there",
            hint="Name a folder that holds it, or leave it out.",
        )
    return {split: str(path) for split, path in found.items() if path is not None}


def joined_tweets(fewest: int = 5, most: int = 60, tweets: int = 30_000) -> dict[str, list[str]]:
    """Texts of so many tweets each."""
    from flatout.data.samples.tweets import TweetsTable

    blocks = list(TweetsTable(TweetsConfig(rows=tweets), "train").blocks(["text", "label"]))
    texts = [text for block in blocks for text in block.column("text").to_pylist()]
    labels = [label for block in blocks for label in block.column("label").to_pylist()]
    sizes = np.random.default_rng(0).integers(fewest, most, (tweets - 1_000) // (fewest + most) * 2)
    ends = np.cumsum(sizes)
    rows = [
        " ".join(texts[end - size : end])
        for size, end in zip(sizes, ends, strict=True)
        if end < len(texts)
    ]
    return {"text": rows, "label": labels[: len(rows)]}


@dataclass(slots=True)
class _Watch:
    """When each of our steps ended, and what it held."""

    ends: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def tokens_per_s(self, warm: int) -> float:
        return sum(self.tokens[warm:]) / (self.ends[-1] - self.ends[warm - 1])


class _Watching(L.Callback):
    """Writes down every step; a GPU is waited for only where its time is taken."""

    def __init__(self, watch: _Watch, timed: Sequence[int], *, keeps_losses: bool) -> None:
        self.watch = watch
        self.timed = timed
        self.keeps_losses = keeps_losses

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: FlatBatch, batch_idx: int
    ) -> None:
        wait_for_device(len(self.watch.ends) + 1, self.timed)
        self.watch.ends.append(time.perf_counter())
        self.watch.tokens.append(batch.num_tokens)
        if self.keeps_losses:
            loop = fast_loop_of(trainer)
            assert loop is not None
            self.watch.losses += [float(loss) for loss in loop.losses.values[-1:]]


class _NeverWaits(L.Callback):
    """From some step on whatever would wait for a GPU is an error."""

    def __init__(self, first: int) -> None:
        self.first = first

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: FlatBatch, batch_idx: int
    ) -> None:
        if trainer.global_step == self.first and pl_module.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        if trainer.global_step >= trainer.max_steps and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


class BertBench:
    """Both sides over the same rows."""

    def __init__(
        self,
        folder: Path,
        options: Options,
        source: dict[str, Any],
        max_length: int,
        shape: dict[str, Any] | None = None,
        device: torch.device | None = None,
        batch_size: int = _BATCH,
    ) -> None:
        """`shape` and `device` are those of the small encoder on a CPU where they are left out."""
        self.folder, self.options = folder, options
        self.shape, self.device = shape or _SHAPE, device or torch.device("cpu")
        self.pretrained = options.pretrained if shape is None else None
        self.compile: bool | None = None
        """What a run of ours is told; None: it chooses, and these are too short."""
        self.model = TransformerConfig(pretrained=self.pretrained, settings={}, **self.shape)
        data = TextDataConfig(
            **source,
            vocabulary=VocabularyConfig(size=30_522),
            max_length=max_length,
            batch_size=batch_size,
            feed=FeedKind.resident,
            cache=str(folder / "cache"),
        )
        self.config = RunConfig(data=data, model=self.model)
        with quiet():
            self.prepared: TextInfo = TextData.of(self.config.data).open_store()
        self.rows_by_length = self.prepared.store.splits["train"].lengths("tokens")

    def same_losses(self, steps: int = 50) -> Claim:
        """The largest difference of the first steps' losses, in fp32, without dropout, in the same
        order of rows.
        """
        steps = min(steps, 10) if self.options.quick else steps
        net = self._model(**_EXACT)
        watch = self._ours(copy.deepcopy(net), steps, Precision.fp32, keeps_losses=True)
        settings = {
            "train_sampling_strategy": "sequential",
            "learning_rate": _LR,
            "weight_decay": 0.01,
        }
        library = self._model(compute=Compute.padded, **_EXACT)
        library.load_state_dict(net.state_dict())
        theirs = self._theirs(library.net, steps, self._in_our_order(steps), settings)
        most = max(abs(a - b) for a, b in zip(watch.losses, theirs.losses[:steps], strict=True))
        note = (
            f"{steps} steps, first {watch.losses[0]:.4f} and {theirs.losses[0]:.4f}, last"
            f" {watch.losses[-1]:.4f}"
        )
        return bounded("largest difference of a step's loss, fp32", most, "", most=1e-4, note=note)

    def speed(self) -> Iterator[Claim]:
        """Tokens a second against the default and against the best settings; MFU; padding."""
        kinds = _kinds(self.options)
        ours, theirs, peaks = self.in_turn(kinds)
        best = max((name for name in kinds if name != "default"), key=lambda name: theirs[name])
        listed = ", ".join(f"{name} {value:,.0f}" for name, value in theirs.items())
        texts = f"batch {_BATCH}, mean length {self.rows_by_length.mean():.1f}; Trainer: {listed}"
        is_native = any("bf16" in name for name in kinds)
        goals = (4.5, 1.5) if is_native else (2.8, 1.35)
        yield at_least(
            "real tokens a second, Trainer's default",
            ours,
            theirs["default"],
            "tokens/s",
            goals[0],
            texts,
        )
        yield at_least(
            f"the same, Trainer's best ({best})", ours, theirs[best], "tokens/s", goals[1]
        )
        achieved = ours * self.flops_a_token()
        peak = statistics.median(peaks)
        name = str(product_type(_chosen_on_cpu())).removeprefix("torch.")
        note = (
            f"{achieved / 1e9:,.0f} of {peak / 1e9:,.0f} GFLOP/s, a product of {name} matrices in"
            " the same minutes"
        )
        yield reaching(
            "MFU of real tokens",
            100 * achieved / peak,
            "%",
            least=45 if is_native else 50,
            note=note,
        )
        padding = 100 * (1 - 1 / self._computed_share(self._model()))
        yield bounded("tokens computed that were padding", padding, "%", most=0.0)
        yield self.over_products()

    def over_products(self) -> Claim:
        """Forward and backward passes against the products in them."""
        model = self._model().train()
        count = self.options.choose(20, 5, 2)
        chosen = _chosen_on_cpu()

        def loss_of(batch: FlatBatch) -> torch.Tensor:
            assert batch.targets is not None
            with arithmetic(chosen, torch.device("cpu")):
                return nn.functional.cross_entropy(model(batch).float(), batch.targets.long())

        with fast_fp32_products(chosen, torch.device("cpu")):
            times, calls = passes_over_products(
                model, self._batches(count), loss_of, self.options.rounds
            )
        note = f"{count} batches, {calls} products each, those of attention among them"
        return bounded(
            "forward and backward, as multiple of their products alone",
            times,
            "",
            most=1.55,
            note=note,
        )

    def flops_a_token(self) -> float:
        """Operations of a training step for each real token."""
        flops = self._model().training_flops(self.rows_by_length)
        assert flops is not None, "the bench's encoder is of a family whose operations are known"
        return flops / float(self.rows_by_length.sum())

    def what_waits(self, steps: int) -> str:
        """What waits for a GPU in so many steps; empty where nothing does."""
        try:
            self._ours(
                self._model(), _WARM + steps, Precision.auto, also={"never": _NeverWaits(_WARM)}
            )
        except RuntimeError as error:
            return str(error)
        finally:
            if self.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        return ""

    def long_speed(self) -> Iterator[Claim]:
        kinds = _kinds(replace(self.options, quick=True))
        ours, theirs, _ = self.in_turn(kinds, warm=1, steps=3)
        note = (
            f"mean length {self.rows_by_length.mean():.0f} of at most {self.config.data.max_length}"
        )
        yield at_least(
            "long texts, Trainer's default", ours, theirs["default"], "tokens/s", 5.0, note
        )
        best = max((name for name in kinds if name != "default"), key=lambda name: theirs[name])
        yield at_least(f"long texts, Trainer's best ({best})", ours, theirs[best], "tokens/s", 1.4)

    def in_turn(
        self, kinds: dict[str, dict[str, Any]], *, warm: int = _WARM, steps: int = 50
    ) -> tuple[float, dict[str, float], list[float]]:
        """Medians of ours and of each of the Trainer's ways, one after the other in every round;
        products beside.

        Compiling takes longer than all else together, so it is measured in the first round alone.
        """
        # Grouping sorts fifty batches at a time, longest first: only whole groups are like the
        # rest.
        warm, steps = (
            self.options.choose(warm, min(warm, 3), 1),
            self.options.choose(steps, min(steps, 10), 2),
        )
        ours: list[float] = []
        theirs: dict[str, list[float]] = {name: [] for name in kinds}
        peaks: list[float] = []
        for turn in range(self.options.choose(self.options.rounds, 1, 1)):
            if self.device.type == "cpu":
                peaks.append(_peak_flops())
            timed = (warm, warm + steps)
            ours.append(
                self._ours(self._model(), warm + steps, Precision.auto, timed=timed).tokens_per_s(
                    warm
                )
            )
            for name, settings in kinds.items():
                if turn and "torch_compile" in settings:
                    continue
                rows = self._in_random_order(warm + steps)
                timeline = self._theirs(
                    self._model(compute=Compute.padded).net, warm + steps, rows, settings, timed
                )
                theirs[name].append(timeline.tokens_per_s(warm))
        return (
            statistics.median(ours),
            {name: statistics.median(values) for name, values in theirs.items()},
            peaks,
        )

    def best_of_theirs(self, warm: int, steps: int) -> tuple[str, float]:
        """The Trainer's fastest way but its default, and its tokens a second after `warm` steps."""
        rates = dict[str, float]()
        for name, settings in _kinds(self.options).items():
            if not settings:
                continue
            timeline = self._theirs(
                self._model(compute=Compute.padded).net,
                warm + steps,
                self._in_random_order(warm + steps),
                settings,
                (warm, warm + steps),
            )
            rates[name] = timeline.tokens_per_s(warm)
        return max(rates.items(), key=lambda rate: rate[1])

    def compiled(self) -> tuple[float, str]:
        """Our tokens a second with layers that torch compiled, as a long run's are; 0 with
        `--quick`.
        """
        if self.options.quick:
            return 0.0, ""
        self.compile = True
        found = self.in_turn({})[0]
        self.compile = None
        return found, "compiled"

    def _model(self, **settings: Any) -> Transformer:
        torch.manual_seed(0)
        config = TransformerConfig(pretrained=self.pretrained, **self.shape, **settings)
        encoder: Any = self.prepared.vocabulary
        outputs = Outputs(self.prepared.classes, "single")
        return config.build(
            outputs,
            vocabulary_size=encoder.size,
            padding_id=encoder.frame.padding,
            separator_id=None,
        )

    def _ours(
        self,
        model: nn.Module,
        steps: int,
        precision: Precision,
        *,
        timed: Sequence[int] = (),
        keeps_losses: bool = False,
        also: dict[str, L.Callback] | None = None,
    ) -> _Watch:
        watch = _Watch()
        accelerator = "cpu" if self.device.type == "cpu" else "gpu"
        with quiet():
            fit(
                self.config.data,
                model,
                optim=OptimConfig(lr=_LR, warmup=0.0, clip=1.0),
                precision=precision,
                compile=self.compile,
                checkpoint=CheckpointConfig(patience=None),
                callbacks={
                    "watch": _Watching(watch, timed, keeps_losses=keeps_losses),
                    **(also or {}),
                },
                # a flush takes the losses away
                monitor=MonitorConfig(flush_every=steps + 1, progress=False),
                trainer={
                    "max_steps": steps,
                    "limit_val_batches": 1,
                    "limit_test_batches": 1,
                    "accelerator": accelerator,
                },
                output=str(self.folder / "runs"),
            )
        return watch

    def _theirs(
        self,
        net: Any,
        steps: int,
        rows: list[Any],
        settings: dict[str, Any],
        timed: Sequence[int] = (),
    ) -> Any:
        from benchmarks.usual_bert import train

        # the library's own modules: ours have a faster dropout on a CPU
        usual = type(net)(net.config)
        usual.load_state_dict(net.state_dict())
        frozen = {name for name, weight in net.named_parameters() if not weight.requires_grad}
        for name, weight in usual.named_parameters():
            weight.requires_grad_(name not in frozen)
        if usual._can_set_attn_implementation():  # DeBERTa has its own attention, and no other
            usual.set_attn_implementation("sdpa")
        given = {"learning_rate": _LR, "use_cpu": self.device.type == "cpu"} | settings
        with quiet():
            return train(usual, rows, net.config.pad_token_id, steps, timed=timed, **given)

    def _in_our_order(self, steps: int) -> list[Any]:
        plan = Plan(self.rows_by_length, PlanSettings(rows_per_batch=_BATCH))
        return self._rows(plan.order[: steps * _BATCH])

    def _in_random_order(self, steps: int) -> list[Any]:
        order = np.random.default_rng(0).permutation(len(self.rows_by_length))
        return self._rows(order[: max(steps, 110) * _BATCH])

    def _rows(self, numbers: np.ndarray) -> list[Any]:
        from benchmarks.usual_bert import Row

        split = self.prepared.store.splits["train"]
        tokens = split.ragged("tokens")
        targets = split.fixed("targets")
        return [
            Row(tokens.values[tokens.offsets[i] : tokens.offsets[i + 1]].tolist(), int(targets[i]))
            for i in numbers
        ]

    def _computed_share(self, model: Transformer) -> float:
        batches = self._batches(100)
        return sum(map(model.computed_tokens, batches)) / sum(batch.num_tokens for batch in batches)

    def _batches(self, count: int) -> list[FlatBatch]:
        """The first ones of an epoch of ours."""
        from flatout.data.batches.feed import Feed

        store: Store = self.prepared.store
        return list(
            itertools.islice(
                Feed(store.splits["train"], PlanSettings(rows_per_batch=_BATCH)), count
            )
        )


def _kinds(options: Options) -> dict[str, dict[str, Any]]:
    """Ways of the Trainer that people use: its default, and its best with sixteen bits only where
    they are native.
    """
    chosen = choose_precision(
        Precision.auto, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ).value
    sixteen: dict[str, Any] = {} if chosen is Precision.fp32 else {chosen.value: True}
    name = "".join(f"{key}, " for key in sixteen)
    kinds: dict[str, dict[str, Any]] = {"default": {}}
    kinds[f"{name}grouped"] = {**sixteen, "train_sampling_strategy": "group_by_length"}
    if not options.quick:
        kinds[f"{name}grouped, compiled"] = {**kinds[f"{name}grouped"], "torch_compile": True}
    return kinds


def _chosen_on_cpu() -> Precision:
    """What a run computes with on this machine's CPU."""
    return choose_precision(Precision.auto, torch.device("cpu")).value


def _peak_flops() -> float:
    """Operations a second of a product of matrices, timed as a run times it for its own MFU."""
    cpu = torch.device("cpu")
    chosen = _chosen_on_cpu()
    with fast_fp32_products(chosen, cpu):
        peak = measured_peak(cpu, LIGHTNING_NAMES[chosen])
    assert peak is not None, "a CPU's products can be timed"
    return 1e12 * peak.tflops
