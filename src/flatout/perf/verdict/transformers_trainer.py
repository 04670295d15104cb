"""`HFVerdict`: a callback for transformers' Trainer that says what limited the training.

`Trainer(callbacks=[HFVerdict()])` is enough. It reads clocks at the Trainer's own events, and looks
at the shapes and masks of batches as they enter the model. No Lightning is imported. Each gain is
predicted from the clock, with its bounds. Where `attach` has named the Trainer, other ways are
raced on copies when the training has ended (`transformers_races.py`).

The events of an optimizer step, and what the time up to each is counted as:

    step begin | model in | model out | before optimizer | after it | step end | log | save
       wait       other      forward      backward        optimizer    other     logging checkpoint

On a GPU the model's three parts are timed by events on the device (`phase_clocks.py`).
"""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from flatout.callbacks.hardware_watch import Watch, hardware_of
from flatout.callbacks.phase_clocks import PHASES, DevicePhaseClock, HookPhaseClock
from flatout.callbacks.read_places import ReadPlaces
from flatout.distributed.collectives import are_several, of_all_ranks
from flatout.perf.measure.own_clock import OwnClock
from flatout.perf.verdict.evidence import LEAST_STEPS, OWN_LOADER, Evidence, without_none
from flatout.perf.verdict.kept import (
    JudgingCallback,
    KeptVerdict,
    Pace,
    describe_machine,
    describe_missed,
)
from flatout.perf.verdict.predicted import TransformersFacts, predict_findings
from flatout.perf.verdict.rules import verdict
from flatout.run_log import RunLog

if TYPE_CHECKING:
    from transformers import Trainer

_FIRST_STEPS = 5  # they warm up caches and compilers, and are not counted
_STEPS_THAT_COUNT_READS = range(20, 23)
_SAMPLE_S = 2.0  # between samples of the hardware
# All batches up to here are looked at for padding, then one of eight.
_LOOKED_AT = 64
_LOOK_EVERY = 8
_EVERY_50_STEPS = 50
# Hooks of callbacks that run in each step.
_HOOKS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")
_HOOKS_TIMED = (*_HOOKS, "on_step_end", "on_log")
# Patterns of flatout's overrides, and what a script with transformers' Trainer writes instead.
_IN_PYTHON: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"~callbacks\.(\w+)": r"leaving \1 out of Trainer(callbacks=…)",
    r"monitor\.flush_every=(\d+)": r"TrainingArguments(logging_steps=\1)",
    r"\+\+trainer\.val_check_interval=.*": 'TrainingArguments(eval_strategy="epoch")',
    r"checkpoint\.every_steps=null .*": 'TrainingArguments(save_strategy="epoch")',
    r"(?<!\S)precision=bf16": "TrainingArguments(bf16=True)",
    r"(?<!\S)precision=fp16": "TrainingArguments(fp16=True)",
    r"(?<!\S)compile=false": "TrainingArguments(torch_compile=False)",
    r"DataLoader\(batch_size=(\d+)\) \+\+trainer\.accumulate_grad_batches=1": (
        r"TrainingArguments(per_device_train_batch_size=\1, gradient_accumulation_steps=1)"
    ),
    r"DataLoader\(batch_size=(\d+)\)": r"TrainingArguments(per_device_train_batch_size=\1)",
    r"DataLoader\(([^)]*)\)": lambda found: f"TrainingArguments({_of_loader(found[1])})",
    r"data\.accumulate=(\d+)": r"TrainingArguments(gradient_accumulation_steps=\1)",
    r"a larger data\.batch_size|larger batches in your DataLoader": (
        "a larger per_device_train_batch_size"
    ),
    r"more num_workers in your DataLoader": "more dataloader_num_workers",
    r"threads=(\d+)": r"torch.set_num_threads(\1)",
}


@dataclass(slots=True)
class _BetweenSteps:
    """Seconds that belong to no phase of a step: by part, and by callback of the user."""

    spent: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    callbacks: dict[str, float] = field(default_factory=dict)
    edge: Callable[[int], None] | None = None

    def spend(self, part: str, seconds: float) -> None:
        self.spent[part] = self.spent.get(part, 0.0) + seconds
        self.counts[part] = self.counts.get(part, 0) + 1

    @property
    def callbacks_s(self) -> float:
        return sum(self.callbacks.values())

    @property
    def not_in_phases_s(self) -> float:
        return sum(self.spent.values()) + self.callbacks_s


@dataclass(slots=True)
class _Counts:
    """What is counted of a training after its first few steps."""

    began_s: float
    steps: int = 0
    batches: int = 0
    seen: int = 0  # batches that the model was given
    rows: int = 0
    wait_s: float = 0.0
    wait_cpu_s: float = 0.0  # that this thread has computed meanwhile
    wait_own_s: float = 0.0  # without the time in which others had its core
    start_s: float = 0.0  # of the wait: for the first batch of an epoch
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    tokens: Tensor | None = None  # real ones; rows times the longest row; computed ones


class HFVerdict(JudgingCallback, TrainerCallback):
    """Says what limited a training by transformers' Trainer, and what each fix would be worth."""

    def __init__(self, *, log: RunLog | None = None) -> None:
        self._log = log or RunLog()
        self._trainer: Callable[[], Trainer | None] = lambda: None
        self._watched: list[TrainerCallback] = []
        self._undo = ExitStack()
        self._reading = ExitStack()
        self._is_in_step = False

    def note_missed(self, steps: int) -> None:
        """Say that a Trainer has taken so many steps before this verdict was attached."""
        self.why_none = describe_missed(steps)
        self._log.say(f"verdict: none, {self.why_none}")

    def watch(self, callbacks: Iterable[TrainerCallback]) -> None:
        """Time the hooks of these callbacks by name in the next training.

        Those of transformers are left out. `flatout.attach(trainer)` calls this.
        """
        for callback in callbacks:
            is_of_user = not type(callback).__module__.startswith(("transformers.", "flatout."))
            if is_of_user and callback not in self._watched:
                self._watched.append(callback)

    def race_for(self, trainer: Trainer) -> None:
        """Race other ways on copies when a training by this Trainer has ended.

        `flatout.attach(trainer)` calls this.
        """
        self._trainer = weakref.ref(trainer)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        # An error may have ended an earlier training.
        self._reading.close()
        self._undo.close()
        self.verdict = None
        self.evidence = None
        self.kept = None
        self._model: nn.Module = others["model"]
        self._loader = others.get("train_dataloader")
        self._device = torch.device(args.device)
        self._steps = 0
        self._is_in_step = False
        self._is_evaluating = False
        self._is_epoch_start = False
        self._may_look = not (args.torch_compile or _is_compiled(self._model))
        self._reads = ReadPlaces()
        self._pace = Pace()
        self._own_clock = OwnClock()
        self._restart()
        self._watch = Watch([], self._log.say, _SAMPLE_S)
        if state.is_world_process_zero:
            self._watch = Watch(hardware_of(self._device), self._log.say, _SAMPLE_S)
            self._undo.enter_context(self._watch)
        # Replicas of one process share a module's hooks, and a compiled model would compile again.
        if args.n_gpu <= 1 and self._may_look:
            before = self._model.register_forward_pre_hook(self._enter_model, with_kwargs=True)
            after = self._model.register_forward_hook(self._leave_model)
            self._undo.callback(before.remove)
            self._undo.callback(after.remove)
        for callback in self._watched:
            self._time_hooks(callback)

    def _restart(self) -> None:
        """Count from now on."""
        now = time.perf_counter()
        self._between = _BetweenSteps()
        self._device_clock = DevicePhaseClock() if self._device.type == "cuda" else None
        self._clock = HookPhaseClock(self._between, self._device_clock)
        self._now = _Counts(began_s=now)
        self._mark_s = now
        self._mark_cpu_s = time.thread_time()
        self._mark_waited_s = self._own_clock.waited_s()
        self._callbacks_before_s = 0.0

    def _time_hooks(self, callback: TrainerCallback) -> None:
        name = type(callback).__name__
        for hook_name in _HOOKS_TIMED:
            hook = getattr(callback, hook_name)
            if hook.__func__ is not getattr(TrainerCallback, hook_name):
                setattr(callback, hook_name, partial(self._run_timed, name, hook))
                self._undo.callback(delattr, callback, hook_name)

    def _run_timed(self, name: str, hook: Callable[..., Any], *args: Any, **others: Any) -> Any:
        began = time.perf_counter()
        try:
            return hook(*args, **others)
        finally:
            seconds = self._between.callbacks
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    def _take_mark(self) -> float:
        """Seconds since the last mark, without those of watched callbacks; a new mark is set."""
        now = time.perf_counter()
        callbacks_s = self._between.callbacks_s
        seconds = now - self._mark_s - (callbacks_s - self._callbacks_before_s)
        self._mark_s = now
        self._mark_cpu_s = time.thread_time()
        self._mark_waited_s = self._own_clock.waited_s()
        self._callbacks_before_s = callbacks_s
        return max(0.0, seconds)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._take_mark()
        self._is_epoch_start = True

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._take_mark()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        began_cpu_s = self._mark_cpu_s
        began_waited_s = self._mark_waited_s
        seconds = self._take_mark()
        self._now.wait_s += seconds
        self._now.wait_own_s += seconds - (self._mark_waited_s - began_waited_s)
        self._now.wait_cpu_s += self._mark_cpu_s - began_cpu_s
        if self._is_epoch_start:
            self._now.start_s += seconds
        self._is_epoch_start = False
        self._is_in_step = True
        if self._may_look and self._steps in _STEPS_THAT_COUNT_READS:
            self._reading.enter_context(self._reads)
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._awaits_model = True
        self._clock.edge(0)

    def _enter_model(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """A hook of the model before its forward pass; evaluation is none of ours."""
        if self._is_in_step and self._awaits_model:
            self._awaits_model = False
            self._look_at(args, named)
            self._clock.edge(0)

    def _leave_model(self, *_: object) -> None:
        if self._is_in_step:
            self._clock.edge(1)

    def _look_at(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Count rows and tokens of a batch; nothing is read from the device."""
        now = self._now
        tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
        now.seen += 1
        now.rows += next((len(tensor) for tensor in tensors if tensor.ndim), 0)
        if now.seen > _LOOKED_AT and now.seen % _LOOK_EVERY:
            return
        real = _real_tokens(self._model, named)
        if real is not None:
            lengths = real.sum(1)
            longest = lengths.max() * len(lengths)
            counts = torch.stack([lengths.sum(), longest, torch.full_like(longest, real.numel())])
            now.tokens = counts if now.tokens is None else now.tokens + counts

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._end_passes()
        self._clock.edge(3)
        self._now.batches += 1
        self._begin_batch()

    def _end_passes(self) -> None:
        if self._awaits_model:  # no hook of the model was called: all counts as the forward pass
            self._clock.edge(1)
        self._clock.edge(2)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._end_passes()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._clock.edge(3)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._reading.close()
        self._is_in_step = False
        self._steps += 1
        self._now.steps += 1
        self._now.batches += 1
        self._take_mark()
        if self._steps == _FIRST_STEPS:
            self._restart()
        if self._steps >= _FIRST_STEPS:
            outside_s = sum(self._between.spent.values())
            self._pace.note_step(self._mark_s, outside_s, self._mark_waited_s)
        if self._steps % _EVERY_50_STEPS == 0:
            self._take_phases()

    def _take_phases(self) -> None:
        """Add the phases that the clocks have counted."""
        if self._device_clock is None:
            self._now.phase_s = {phase: self._clock.spent[phase] for phase in PHASES}
            return
        for phase, seconds in self._device_clock.take()[0].items():
            self._now.phase_s[phase] += seconds

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self._is_evaluating = True

    def on_log(self, *_: Any, **others: Any) -> None:
        # The log of an evaluation counts as a part of it, and the one at the end is no curve.
        if not self._is_evaluating and "train_runtime" not in others["logs"]:
            self._between.spend("logging", self._take_mark())

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._is_evaluating = False
        self._between.spend("validation", self._take_mark())

    def on_save(self, *_: Any, **__: Any) -> None:
        self._between.spend("checkpoint", self._take_mark())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self._undo.close()
        evidence = self._gather(args, state)
        if evidence is None:
            needed = f"{LEAST_STEPS} steps after the first {_FIRST_STEPS}"
            self.why_none = f"a verdict needs {needed}, this training had {self._now.steps}"
        elif are_several():
            evidence.ranks = of_all_ranks(evidence.ms)
        if not state.is_world_process_zero:
            return
        if evidence is not None:
            # Imported late: most of it is needed here only.
            from flatout.perf.verdict.transformers_races import race_copies

            facts = self._facts(args)
            find_real = partial(_real_tokens, self._model)
            race_copies(self._trainer(), self._model, evidence, facts, find_real)
            found = predict_findings(evidence, facts)
            self.verdict = verdict(evidence, in_transformers, found)
            self.evidence = evidence
        self.kept = KeptVerdict(
            verdict=self.verdict,
            evidence=self.evidence,
            why_none=self.why_none,
            pace=self._pace.steps_per_s(),
            # While this thread waits for a core, a GPU computes.
            own_pace=self._pace.own_steps_per_s() if self._device.type == "cpu" else None,
            machine=describe_machine(self._device, args.world_size),
        )
        for line in self.kept.lines():
            self._log.say(f"verdict: {line}")

    def _gather(self, args: TrainingArguments, state: TrainerState) -> Evidence | None:
        """The evidence of this training; None if it was too short."""
        self._take_phases()
        now = self._now
        if now.steps < LEAST_STEPS:
            return None
        seconds = {"wait": now.wait_s, **now.phase_s, **self._between.spent}
        seconds["callbacks"] = self._between.callbacks_s
        seconds["other"] = max(0.0, self._mark_s - now.began_s - sum(seconds.values()))
        per_batch = 1000 / now.batches
        rows = now.rows / max(1, now.seen) or args.per_device_train_batch_size
        counts = now.tokens.tolist() if now.tokens is not None else [1, 1, 1]
        hardware = self._watch.summary()
        logs_in_steps = args.logging_strategy == "steps"
        return Evidence(
            device=self._device.type,
            steps=now.steps,
            batches=now.batches,
            rows_per_batch=rows * args.world_size,
            accumulate=args.gradient_accumulation_steps,
            world=args.world_size,
            ms={part: per_batch * spent for part, spent in seconds.items() if spent},
            padding_share=1 - counts[0] / max(1, counts[2]),
            feed=OWN_LOADER,
            precision=_precision(args, self._model),
            native=_native(args, self._device),
            threads=torch.get_num_threads(),
            cores=len(os.sched_getaffinity(0)),
            machine_cores=psutil.cpu_count() or 1,
            flush_every=max(1, int(state.logging_steps)) if logs_in_steps else now.steps,
            counts=dict(self._between.counts),
            epochs=float(state.epoch or 0.0),
            callbacks={
                name: per_batch * spent for name, spent in self._between.callbacks.items() if spent
            },
            reads_by_line=self._reads_by_line(),
            workers=args.dataloader_num_workers,
            host=without_none(hardware.get("host", {})),
            gpu=without_none(hardware.get("gpu", {})),
        )

    def _facts(self, args: TrainingArguments) -> TransformersFacts:
        now = self._now
        counts = now.tokens.tolist() if now.tokens is not None else [1, 1, 1]
        return TransformersFacts(
            workers=args.dataloader_num_workers,
            reading_cores=_reading_cores(args, now),
            keeps_workers=args.dataloader_persistent_workers,
            start_ms=1000 * now.start_s / now.batches,
            fixed_padding=1 - counts[1] / max(1, counts[2]),
            recomputes=_recomputes(self._model),
            groups_lengths=_groups_lengths(args),
            reads=self._reads_by_line(),
        )

    def _reads_by_line(self) -> dict[str, float]:
        """How often each line of the script reads a number of the device in a step."""
        steps = len(_STEPS_THAT_COUNT_READS)
        return {place: count / steps for place, count in self._reads.counts.items()}


def attach_to(trainer: Trainer) -> HFVerdict:
    """Add a verdict to a Trainer of transformers, which times its callbacks by name; return it.

    A verdict that the Trainer has already is taken.
    """
    callbacks = trainer.callback_handler.callbacks
    verdicts = [callback for callback in callbacks if isinstance(callback, HFVerdict)]
    verdict = verdicts[0] if verdicts else HFVerdict()
    if not verdicts:
        trainer.add_callback(verdict)
        if trainer.state.global_step:
            verdict.note_missed(trainer.state.global_step)
    verdict.watch(callbacks)
    verdict.race_for(trainer)
    return verdict


def _of_loader(arguments: str) -> str:
    """Arguments of a DataLoader by the Trainer's names: num_workers is dataloader_num_workers."""
    return re.sub(r"(\w+)=", r"dataloader_\1=", arguments)


def in_transformers(words: str) -> str:
    """Rewrite overrides for transformers' Trainer."""
    for pattern, replacement in _IN_PYTHON.items():
        words = re.sub(pattern, replacement, words)
    return words


def _real_tokens(model: nn.Module, named: dict[str, Any]) -> Tensor | None:
    """[rows, length], true where a token is no padding; None where a batch has no tokens."""
    mask = named.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask != 0
    ids = named.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not hasattr(model, "config"):
        return None
    config: Any = model.config
    settings = config.to_dict()
    padding = settings.get("pad_token_id")
    # A model whose rows end with the token of padding has real ones, too.
    is_ambiguous = padding is None or padding == settings.get("eos_token_id")
    return None if is_ambiguous else ids != padding


def _is_compiled(model: nn.Module) -> bool:
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )


def _precision(args: TrainingArguments, model: nn.Module) -> str:
    """The precision by Lightning's name."""
    if args.bf16:
        return "bf16-mixed"
    if args.fp16:
        return "16-mixed"
    weight = next(model.parameters(), torch.empty(0))
    names = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}
    return names.get(weight.dtype, "32-true")


def _native(args: TrainingArguments, device: torch.device) -> str:
    """The 16-bit precision that a GPU has in hardware and a training in fp32 does not use."""
    if device.type != "cuda" or args.bf16 or args.fp16:
        return ""
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    return "bf16" if has_bf16 else "fp16"


def _reading_cores(args: TrainingArguments, now: _Counts) -> float:
    """Cores that reading keeps busy: workers are taken to compute all the time."""
    if args.dataloader_num_workers:
        return float(args.dataloader_num_workers)
    return min(1.0, now.wait_cpu_s / max(now.wait_own_s, 1e-9))


def _recomputes(model: nn.Module) -> bool:
    """Whether any layer computes its activations again in the backward pass."""
    layers = (layer for layer in model.modules() if hasattr(layer, "gradient_checkpointing"))
    return any(layer.gradient_checkpointing for layer in layers)


def _groups_lengths(args: TrainingArguments) -> bool:
    """Whether batches are of rows of like length; releases before 5.1 have another name for it."""
    settings = args.to_dict()
    is_grouped = settings.get("train_sampling_strategy", "random") != "random"
    return is_grouped or bool(settings.get("group_by_length"))
