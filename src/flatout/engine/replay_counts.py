"""How the steps of a training were taken: by replays, in stretches or alone, or plainly, and why.

`StepGraphs` counts here while it takes steps. At the end `summary` is the line that is printed, and
`facts` is what stands in `summary.json` under `step_graph`. Open this file to change what is told
of captured steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ReplayCounts:
    """Counts of one training."""

    replayed: int = 0  # steps
    at_once: int = 0  # of these in stretches
    alone: Counter[str] = field(default_factory=Counter)
    """Replays that were in no stretch, by the reason."""
    plain: Counter[str] = field(default_factory=Counter)
    """Steps that were no replays, by the reason."""
    graphs: int = 0  # steps that were captured, also those that were forgotten
    thaws: int = 0  # behind which steps were captured and proven again
    most_bytes: int = 0  # that captures have held
    tokens: int = 0  # of all replayed batches
    computed_tokens: int = 0  # of their buffers

    def add_tokens(self, tokens: int, computed_tokens: int) -> None:
        """Count the tokens of replayed batches, and those of the buffers that held them."""
        self.tokens += tokens
        self.computed_tokens += computed_tokens

    @property
    def padding_share(self) -> float:
        """What buffers add to the tokens of their batches; 0.02 is 2 %."""
        return self.computed_tokens / max(1, self.tokens) - 1

    def summary(self, why_off: str) -> str:
        """Which share of the steps was replayed, and why each other one was not.

        `why_off`: why replays have ended; empty where they have not.
        """
        steps = self.replayed + self.plain.total()
        if not self.replayed:
            return f"off, {why_off}" if why_off else f"no step, {_by_reason(self.plain)}"
        graphs = f"{self.graphs} graphs"
        if self.thaws:
            graphs += f", captured again behind {self.thaws} thaws"
        replayed = (
            f"{self.replayed / steps:.1%} of {steps:,} steps in one launch each,"
            f" {graphs}, {self.padding_share:.1%} padding, {self.most_bytes / 1e6:.0f} MB"
            f"; {self.at_once:,} of them in stretches, alone: {_by_reason(self.alone)}"
        )
        return f"{replayed}; plainly: {_by_reason(self.plain)}" if self.plain else replayed

    def facts(self) -> dict[str, Any]:
        """The same as numbers."""
        return {
            "replayed_steps": self.replayed,
            "steps_in_stretches": self.at_once,
            "steps_alone": dict(self.alone),
            "plain_steps": dict(self.plain),
            "graphs": self.graphs,
            "thaws": self.thaws,
            "padding_share": self.padding_share,
            "memory_mb": self.most_bytes / 1e6,
        }


def _by_reason(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
