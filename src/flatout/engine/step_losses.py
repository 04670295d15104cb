"""Losses and gradient norms of the latest steps, kept on the device, and the guard against those
that are not finite.

One transfer brings many of them to the host, on request; no step waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flatout.distributed.collectives import are_several
from flatout.errors import UserError, require

_MOST_IN_A_ROW = 20  # steps that may be skipped one after the other
NotFinite = StrEnum("NotFinite", "stop skip")


class StepLosses:
    """What is not read yet of the steps taken, and which steps were left out."""

    def __init__(self, policy: NotFinite) -> None:
        require(
            policy in list(NotFinite), "not_finite", repr(policy), allowed=" or ".join(NotFinite)
        )
        self.policy = NotFinite(policy)
        self.describe_rows: Callable[[int], str] = _describe_nothing
        self.values: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.skipped: list[int] = []
        self._broken: Tensor | None = None

    @property
    def may_be_broken(self) -> bool:
        """Whether the device has found a step that is not finite; waits for it, and
        never on a CPU.
        """
        return self._broken is not None and self.policy is NotFinite.stop and bool(self._broken)

    @contextmanager
    def of_step(self, loss: Tensor | None) -> Iterator[None]:
        """Around a step with this loss; one that an error ends is trained again, and counts only
        then.
        """
        counts = len(self.values), len(self.norms)
        if loss is not None:
            self.values.append(loss)
        try:
            yield
        except BaseException:  # an interrupt, too
            del self.values[counts[0] :], self.norms[counts[1] :]
            raise

    def to(self, device: torch.device) -> None:
        self.values = [loss.to(device) for loss in self.values]
        self.norms = [norm.to(device) for norm in self.norms]

    def accept(self, step: int, *, is_finite: bool) -> bool:
        """Whether a step may be taken, known on the host."""
        stops = self.policy is NotFinite.stop
        if is_finite and (not stops or not self.values or math.isfinite(self.values[-1])):
            return True
        if stops:
            raise self._not_finite(step)
        self.skipped.append(step)
        if _are_too_many(self.skipped[-_MOST_IN_A_ROW:]):
            raise self._not_finite(step)
        return False

    def flag_broken(self, norm: Tensor) -> Tensor:
        """1 on the device where a step must be left out, else 0."""
        broken = (~torch.isfinite(norm)).float()
        if self.policy is NotFinite.stop and self._broken is not None:
            broken = torch.maximum(broken, self._broken)
        self._broken = broken
        return broken

    def take(self, steps_done: int, *, is_scaled: bool) -> tuple[list[float], list[float]]:
        """Losses and gradient norms since the last call: the one wait for the device, before each
        validation.
        """
        if not self.values:
            return [], []
        losses = torch.stack(self.values).float()
        count = len(self.values)
        if are_several():
            dist.all_reduce(losses)  # gradients are averaged over ranks, and so are losses
            losses /= dist.get_world_size()
        both = torch.cat(
            [losses, torch.stack(self.norms).float()] if self.norms else [losses]
        ).tolist()
        losses_of, norms_of = both[:count], both[count:]
        wrong = {place for place, value in enumerate(losses_of) if not math.isfinite(value)}
        left_out = {place for place, value in enumerate(norms_of) if not math.isfinite(value)}
        if not is_scaled:  # a scaler looks for steps it must leave out by just that
            wrong = wrong | left_out
        first = steps_done - count
        if wrong and (self.policy is NotFinite.stop or is_scaled):
            raise self._not_finite(first + min(wrong))
        self.skipped += [
            first + place for place in sorted(left_out) if first + place not in self.skipped
        ]
        if left_out and _are_too_many(self.skipped[-count - _MOST_IN_A_ROW :]):
            raise self._not_finite(self.skipped[-1])
        self.values, self.norms = [], []
        kept = [value for place, value in enumerate(losses_of) if place not in wrong]
        return kept, [value for value in norms_of if math.isfinite(value)]

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what is not read yet, on the host, as ranks that unpickle it would open
        every GPU.
        """
        kept = {"losses": self.values, "norms": self.norms}
        unread = {
            name: torch.stack(values).cpu() if values else None for name, values in kept.items()
        }
        return {**unread, "skipped": list(self.skipped)}

    def load(self, of_ranks: list[dict[str, Any]], rank: int, *, is_same_world: bool) -> None:
        """What `state` was on each rank; in another world the first rank takes the sum of all
        losses.
        """
        own = of_ranks[rank if is_same_world else 0]
        losses, norms = own["losses"], own["norms"]
        if losses is not None and not is_same_world:
            losses = sum(each["losses"] for each in of_ranks) / len(of_ranks)
        self.values = [] if losses is None else list(losses.unbind())
        self.norms = [] if norms is None else list(norms.unbind())
        self.skipped = list(own["skipped"])

    def _not_finite(self, step: int) -> UserError:
        what = (
            f"the loss or its gradient is not finite at step {step + 1}{self.describe_rows(step)}"
        )
        hint = (
            "Lower optim.lr, set precision=fp32, or leave such steps out with"
            " optim.not_finite=skip."
        )
        kept = (
            'In a script that is FastLoop(not_finite="skip"). No weight was changed by it;'
            " checkpoints are kept."
        )
        return UserError("training", what, hint=f"{hint} {kept}")


def _describe_nothing(step: int) -> str:
    """The rows of a step, counted from 0, where nothing is known of them."""
    return ""


def _are_too_many(skipped: list[int]) -> bool:
    """Whether of these steps too many were left out one right after the other."""
    steps = sorted(skipped)
    later = steps[_MOST_IN_A_ROW - 1 :]
    return any(last - step == _MOST_IN_A_ROW - 1 for step, last in zip(steps, later, strict=False))
