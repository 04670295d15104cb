"""Memory of a run: a model that cannot fit is refused, and how much of a batch fits is noted once.

A model is refused before minutes pass in building it: torch's meta device builds one without memory
for its numbers. A million layers would still take minutes there, so models of one and of two layers
are built, and their difference is the price of a layer. This costs 20 to 100 ms a run. The estimate
is a lower bound: activations come on top. Batches shrink where those do not fit, weights do not:
what fitted is noted (`flatout.perf.notes`), and the next run begins with that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from flatout.data.batches.feed import Feeds, free_memory
from flatout.data.batches.gather import TOKENS
from flatout.data.batches.plan import PlanSettings
from flatout.data.store.cache import Cache
from flatout.distributed.ranks import Ranks
from flatout.engine.fast_loop import FastLoop
from flatout.engine.passes import EVALUATION, TRAINING, running_statistics
from flatout.engine.precision import by_lightning_name
from flatout.errors import UserError
from flatout.models.encoder.transformer import ALL
from flatout.perf.notes import Limit, MicroBatches, micro_batch_key
from flatout.run.run_folder import RunFolder
from flatout.tasks.task import Task

Build = Callable[[Any], nn.Module]
_COPIES_TRAINED = 4  # a trained weight has a gradient and AdamW's two moments beside it
_NAMES = {TRAINING: "micro-batch", EVALUATION: "evaluation batch"}
_COUNTS = ("layers", "depth")
# what decides how large a model is
_SIZES = (*_COUNTS, "hidden", "intermediate", "filters", "widths", "embedding")


def require_memory(settings: Any, build: Build, device: torch.device, copies: float = 1.0) -> None:
    """Refuse a model from scratch that a device cannot hold; `copies`: those it must hold, below 1
    if devices share.
    """
    if not dataclasses.is_dataclass(settings) or getattr(settings, "pretrained", None) is not None:
        return  # a pretrained model has its weights already
    try:
        needed = int(training_bytes(settings, build) * copies)
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError):
        # some families of transformers cannot be built without memory, or not with other numbers of
        # layers
        return
    if needed <= (free := free_memory(device)):
        return
    growth = {
        name: _growth(settings, name)
        for name in _SIZES
        if getattr(settings, name, None) is not None
    }
    first, *others = sorted(growth, key=lambda name: -growth[name])
    what = (
        f"needs about {_in_units(needed)} for weights, gradients and optimizer, {_in_units(free)}"
        " are free"
    )
    lower = " or ".join(f"model.{name}" for name in (first, *others[:1]))
    raise UserError(f"model.{first}={getattr(settings, first)}", what, hint=f"Lower {lower}.")


def training_bytes(settings: Any, build: Build) -> int:
    """Bytes of weights, gradients and optimizer state of the model that these settings describe."""
    layers = next((getattr(settings, name) for name in _COUNTS if hasattr(settings, name)), 1)
    asked = getattr(settings, "freeze_layers", 0)
    frozen = (
        0
        if getattr(settings, "unfreeze_epochs", 0)
        else layers
        if asked == ALL
        else min(layers, asked)
    )
    first = _bytes_of(settings, build, layers=1, frozen=min(1, frozen))
    if layers == 1:
        return first
    a_layer = _bytes_of(settings, build, layers=2, frozen=0) - _bytes_of(
        settings, build, layers=1, frozen=0
    )
    is_free = max(0, frozen - 1)  # the first layer is counted above
    return first + (layers - 1 - is_free) * a_layer + is_free * a_layer // _COPIES_TRAINED


def _bytes_of(settings: Any, build: Build, *, layers: int, frozen: int) -> int:
    changes: dict[str, Any] = {
        **dict.fromkeys(_COUNTS, layers),
        "freeze_layers": frozen,
        "unfreeze_epochs": 0.0,
    }
    changes |= {"vectors": None, "freeze_vectors": False, "reuse": False}
    # beside all layers: those that are named may not be among the few
    if hasattr(settings, "lora"):
        changes["lora"] = dataclasses.replace(settings.lora, targets=[])
    small = dataclasses.replace(
        settings, **{name: each for name, each in changes.items() if hasattr(settings, name)}
    )
    with torch.device("meta"), _DrawNothing():
        model = build(small)
    if getattr(settings, "freeze_vectors", False):
        model.get_submodule("embedding").requires_grad_(False)
    return sum(
        weight.nbytes * (_COPIES_TRAINED if weight.requires_grad else 1)
        for weight in model.parameters()
    )


class _DrawNothing(TorchFunctionMode):
    """Random numbers and lists stay off the meta device: torch would import its compiler for them,
    in seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else given["tensor"]
        if func is torch.tensor:
            given = {"device": "cpu", **given}
        return func(*args, **given)


def _growth(settings: Any, name: str) -> float:
    value, usual = getattr(settings, name), getattr(type(settings)(), name)
    if isinstance(value, list):
        return sum(value) / sum(usual)
    return float(value / (usual or getattr(settings, "hidden", value)))


def _in_units(num_bytes: int) -> str:
    amount = num_bytes / 1e6
    names = ["MB", "GB", "TB", "PB", "EB"]
    while amount >= 1000 and len(names) > 1:
        amount = amount / 1000
        names = names[1:]
    return f"{amount:,.{1 if amount < 10 else 0}f} {names[0]}"


def _agreed_limits(notes: MicroBatches, ranks: Ranks, place: RunFolder) -> dict[str, Limit]:
    def read() -> dict[str, Any]:
        limits, word = notes.read()
        if word:
            place.say(word)
        return {name: [each.most, each.has_ended] for name, each in limits.items()}

    return {name: Limit(*each) for name, each in ranks.agreed("micro-batches", read).items()}


def mind_memory(
    task: Task,
    loop: FastLoop,
    feeds: Feeds,
    about: dict[str, Any],
    ranks: Ranks,
    cache: str | None,
    place: RunFolder,
) -> None:
    """Begin with what fitted the last time, and let the task say and note what does not fit now."""
    plans = {TRAINING: feeds.train.plan, EVALUATION: feeds.validation.plan}
    notes = MicroBatches(Cache(cache).folder, about_memory(feeds, about))
    limits = _agreed_limits(notes, ranks, place)
    for name, plan in plans.items():
        whole, unit = capacity(plan)
        if (limit := limits.get(f"{name} {unit}")) is None or limit.most >= whole:
            continue
        pieces = loop.passes.pieces[name] = -(-whole // limit.most)
        if limit.has_ended:
            loop.passes.least[name] = pieces
        evidence = f"noted in {notes.path}; delete it to try whole batches again"
        value = f"{-(-whole // pieces)} {unit} of {whole}"
        place.decision(
            _NAMES[name],
            value,
            "an earlier run like this one ran out of memory",
            evidence,
            replaces=True,
        )

    def tell(name: str, pieces: int, before: int, step: int, why: str, has_ended: bool) -> None:
        whole, unit = capacity(plans[name])
        most = -(-whole // pieces)
        at = (
            f"at step {step + 1}, whose rows stay the same"
            if name == TRAINING
            else f"after step {step}"
        )
        value = f"{most} {unit} (was {-(-whole // before)})"
        place.decision(_NAMES[name], value, f"out of memory {at}", why, replaces=True)
        if name == TRAINING and running_statistics(task):
            place.say(
                "batch normalisation sees each smaller piece alone: results differ a little from"
                " now on"
            )
        longest = int(feeds.train.split.lengths(TOKENS).max())
        precision = by_lightning_name(str(about["precision"]))
        # By this key `tune=auto` finds the note, to try no more rows than have fitted.
        key = micro_batch_key(
            task.model, longest=longest, device=feeds.train.device, precision=precision
        )
        try:
            notes.note(f"{name} {unit}", Limit(most, has_ended), key)
        except OSError as error:
            place.say(
                f"{notes.path} cannot be written ({error.strerror}): the next run begins with whole"
                " batches"
            )
        else:
            place.say(
                f"the next run like this one begins so; delete {notes.path} to try whole batches"
                " again"
            )

    loop.passes.report = tell


def about_memory(feeds: Feeds, about: dict[str, Any]) -> dict[str, Any]:
    """What decides how much memory a row takes, and how much there is."""
    device = feeds.train.device
    plan = feeds.train.plan
    settings = about["settings"]
    is_cuda = device.type == "cuda"
    longest = int(feeds.train.split.lengths(TOKENS).max())
    of_model = {
        name: settings[name] for name in sorted(settings) if name.partition(".")[0] == "model"
    }
    found = {
        "model": about["model"],
        "settings": of_model,
        "average": bool(settings.get("optim.ema")),
    }
    found |= {
        "precision": about["precision"],
        "longest": longest,
        "layout": str(plan.layout),
        "ranks": plan.world,
    }
    found["device"] = torch.cuda.get_device_name(device) if is_cuda else device.type
    return found | {
        "memory": torch.cuda.get_device_properties(device).total_memory if is_cuda else None
    }


def capacity(plan: PlanSettings) -> tuple[int, str]:
    """The most that a plan puts into one batch, and of what."""
    return (
        (plan.rows_per_batch, "rows")
        if plan.tokens_per_batch is None
        else (plan.tokens_per_batch, "tokens")
    )
