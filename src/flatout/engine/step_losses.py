"""Losses and gradient norms of the latest steps, and the guard against those that are not finite.

`StepLosses` keeps one number a step on the device, so no step waits. `take` brings them all to the
host in one transfer, for a row of curves or before a validation. With `stop`, a loss or gradient
that is not finite ends the training. With `skip`, that step changes no weight and training
continues, until 20 steps in a row were skipped.

On a CPU the host decides at once that a step is left out (`accept`). On a GPU the device does
(`flag_broken`), and the host finds it in the next `take`.
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
from flatout.engine.clipping import clip_divisor_and_check
from flatout.errors import UserError, require

_MOST_IN_A_ROW = 20  # so many steps skipped one after the other end the training
NotFinite = StrEnum("NotFinite", "stop skip")


class StepLosses:
    """Losses and gradient norms that the host has not read yet, and the steps that were skipped."""

    def __init__(self, policy: NotFinite) -> None:
        require(
            policy in list(NotFinite), "not_finite", repr(policy), allowed=" or ".join(NotFinite)
        )
        self.policy = NotFinite(policy)
        # Text with the rows of a step (counted from 0), for error messages.
        self.describe_rows: Callable[[int], str] = _describe_nothing
        self.values: list[Tensor] = []  # losses that were not read yet, one a step
        self.norms: list[Tensor] = []  # gradient norms likewise; none where nobody computes them
        self.skipped: list[int] = []  # all steps left out so far, counted from 0
        self.broken: Tensor | None = None
        """1 on the device where the step must be left out, else 0; None before `flag_broken`.

        It is always the same tensor: a captured step writes to its address.
        """
        self._inverse_norms: dict[float, Tensor] = {}  # 1 / the longest norm, on the device

    @property
    def is_flagged(self) -> bool:
        """Whether the device has left out the last step; waits for it.

        Always False where the host decides.
        """
        return self.broken is not None and bool(self.broken)

    @property
    def may_be_broken(self) -> bool:
        """Whether the device has found a step that is not finite, so that training will stop.

        Waits for the device. Always False where the host decides.
        """
        return self.policy is NotFinite.stop and self.is_flagged

    @contextmanager
    def of_step(self, loss: Tensor | None) -> Iterator[None]:
        """Context manager around one optimizer step with this loss.

        If an error ends the step, its loss and norm are removed: a resumed run trains it again.
        """
        num_values = len(self.values)
        num_norms = len(self.norms)
        if loss is not None:
            self.values.append(loss)
        try:
            yield
        except BaseException:
            # an interrupt, too: a resumed run trains the step again
            del self.values[num_values:]
            del self.norms[num_norms:]
            raise

    def to(self, device: torch.device) -> None:
        """Begin a training on this device, with the losses that a checkpoint may have brought."""
        self.broken = None
        self._inverse_norms.clear()
        self.values = [loss.to(device) for loss in self.values]
        self.norms = [norm.to(device) for norm in self.norms]

    def accept(self, step: int, *, is_finite: bool) -> bool:
        """Decide on the host whether a step may change the weights.

        `step` is counted from 0; `is_finite` says it of the gradient. False if the step is skipped;
        `UserError` if training stops.
        """
        stops = self.policy is NotFinite.stop
        if is_finite and (not stops or not self.values or math.isfinite(self.values[-1])):
            return True
        if stops:
            raise self._not_finite(step)
        self.skipped.append(step)
        if _are_too_many(self.skipped[-_MOST_IN_A_ROW:]):
            raise self._not_finite(step)
        return False

    def flag_broken(self, norm: Tensor, longest: float) -> Tensor:
        """Decide on the device, in `broken`, whether the step must be left out.

        Returns what the gradient is divided by to be no longer than `longest`: at least 1. With
        `stop` the flag stays 1 in all later steps: none of them may change a weight before the host
        learns of it. For norms 2.0, inf, 2.0, the flags are 0, 1, 1 with `stop`, and 0, 1, 0 with
        `skip`.
        """
        if self.broken is None:
            self.broken = torch.zeros((), device=norm.device)
        elif self.policy is NotFinite.skip:
            self.broken.zero_()
        if longest not in self._inverse_norms:
            # `full` fills on the device; a tensor made of a number would be copied there
            self._inverse_norms[longest] = torch.full((), 1.0 / longest, device=norm.device)
        return clip_divisor_and_check(norm, self._inverse_norms[longest], self.broken)

    def take(self, steps_done: int, *, is_scaled: bool) -> tuple[list[float], list[float]]:
        """Read and forget the losses and gradient norms since the last call, those that are finite.

        `steps_done`: optimizer steps so far. `is_scaled`: a gradient scaler (fp16) is at work.
        Waits for the device, and is a collective: every rank calls it. Raises `UserError` if one is
        not finite and training has to stop.
        """
        if not self.values:
            return [], []
        count = len(self.values)
        losses, norms = self._read()
        broken_losses = _find_not_finite(losses)
        broken_norms = _find_not_finite(norms)
        # A gradient scaler makes norms infinite in order to find its factor, and leaves such steps
        # out itself. Without one, such a norm is as wrong as such a loss.
        broken = broken_losses if is_scaled else broken_losses | broken_norms
        first_step = steps_done - count
        if broken and (self.policy is NotFinite.stop or is_scaled):
            raise self._not_finite(first_step + min(broken))
        for index in sorted(broken_norms):
            step = first_step + index
            if step not in self.skipped:  # `accept` may have noted it
                self.skipped.append(step)
        if broken_norms and _are_too_many(self.skipped[-count - _MOST_IN_A_ROW :]):
            raise self._not_finite(self.skipped[-1])
        self.values = []
        self.norms = []
        finite_losses = [loss for index, loss in enumerate(losses) if index not in broken]
        finite_norms = [norm for index, norm in enumerate(norms) if index not in broken_norms]
        return finite_losses, finite_norms

    def _read(self) -> tuple[list[float], list[float]]:
        """All losses (means over ranks) and norms, in one transfer from the device."""
        losses = torch.stack(self.values).float()
        if are_several():
            # Gradients are averaged over ranks, and so are losses.
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        tensors = [losses]
        if self.norms:
            tensors.append(torch.stack(self.norms).float())
        numbers = torch.cat(tensors).tolist()
        count = len(self.values)
        return numbers[:count], numbers[count:]

    def state(self) -> dict[str, Any]:
        """For a checkpoint: losses and norms that were not read yet, and skipped steps."""
        return {
            "losses": _stack_on_host(self.values),
            "norms": _stack_on_host(self.norms),
            "skipped": list(self.skipped),
        }

    def load(self, of_ranks: list[dict[str, Any]], rank: int, *, is_same_world: bool) -> None:
        """Restore `state`, of which `of_ranks` has one entry a rank.

        If the number of ranks is another now, each takes the mean losses of all ranks. Norms and
        skipped steps are equal on all ranks.
        """
        state = of_ranks[rank if is_same_world else 0]
        losses = state["losses"]
        norms = state["norms"]
        if losses is not None and not is_same_world:
            losses = sum(other["losses"] for other in of_ranks) / len(of_ranks)
        self.values = [] if losses is None else list(losses.unbind())
        self.norms = [] if norms is None else list(norms.unbind())
        self.skipped = list(state["skipped"])

    def _not_finite(self, step: int) -> UserError:
        rows = self.describe_rows(step)
        return UserError(
            "training",
            f"the loss or its gradient is not finite at step {step + 1}{rows}",
            hint=(
                "Lower optim.lr, set precision=fp32, or leave such steps out with"
                ' optim.not_finite=skip. In a script that is FastLoop(not_finite="skip"). No weight'
                " was changed by it; checkpoints are kept."
            ),
        )


def _describe_nothing(step: int) -> str:
    """Stands for `describe_rows` where a step's rows are unknown."""
    return ""


def _find_not_finite(numbers: list[float]) -> set[int]:
    """Indices of the numbers that are infinite or NaN."""
    # One call for all, as the sum is finite only if each number is.
    if math.isfinite(sum(numbers)):
        return set()
    return {index for index, number in enumerate(numbers) if not math.isfinite(number)}


def _stack_on_host(tensors: list[Tensor]) -> Tensor | None:
    """One tensor of all, on the host; None of none.

    Ranks send each other this state. A tensor on a GPU would make each of them open every GPU.
    """
    return torch.stack(tensors).cpu() if tensors else None


def _are_too_many(skipped: list[int]) -> bool:
    """Whether 20 of these steps came one right after the other."""
    # Of sorted steps, the 20th from any one is exactly 19 later only if none is missing between.
    steps = sorted(skipped)
    later = steps[_MOST_IN_A_ROW - 1 :]
    return any(last - step == _MOST_IN_A_ROW - 1 for step, last in zip(steps, later, strict=False))
