"""What the device that captures is asked for in two short epochs, in the order of asking.

    python -m tests.elsewhere.transcript "window mlp"

A line is a capture with its operators, or a replay with how many operators the host has asked for
since the line before. Replays of one stretch follow each other with none between them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from unittest import mock

from torch._ops import OpOverload

from tests.elsewhere.capture import Captured, ElsewhereCapture, is_view
from tests.elsewhere.device import There
from tests.elsewhere.graphs import CASES, begin_elsewhere, train

_SHOWN = 6  # names of operators, the most frequent ones


class Transcript:
    """Notes captures and replays of a training."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._asked = 0  # operators since the last line

    def note(self, operator: OpOverload) -> None:
        self._asked += not is_view(operator)

    def capture(self, capture: ElsewhereCapture, function: Callable[[], None]) -> Captured:
        asked = self._take_asked()
        captured = plain_capture(capture, function)
        self._take_asked()  # those of the capture itself
        names = Counter(
            operator._schema.name.partition("::")[2]
            for operator, *_ in captured.recording.operators
        )
        shown = names.most_common(_SHOWN)
        listed = ", ".join(f"{name} {count}" for name, count in shown)
        number = len(capture.captured)
        self.lines.append(f"{asked}capture {number}, {names.total()} operators: {listed}, …")
        return captured

    def replay(self, captured: Captured) -> None:
        asked = self._take_asked()
        There.watch = None
        plain_replay(captured)
        There.watch = self.note
        number = captured._capture.captured.index(captured) + 1
        self.lines.append(f"{asked}replay of capture {number}")

    def end(self) -> None:
        self.lines.append(f"{self._take_asked()}the end")

    def _take_asked(self) -> str:
        asked = self._asked
        self._asked = 0
        return f"{asked} operators, then " if asked else ""


plain_capture = ElsewhereCapture.capture
plain_replay = Captured.replay


def transcript(name: str) -> tuple[list[str], str]:
    """The lines of two epochs of a case, and what the training says of its steps."""
    noted = Transcript()
    with (
        mock.patch.object(ElsewhereCapture, "capture", lambda *given: noted.capture(*given)),
        mock.patch.object(Captured, "replay", lambda captured: noted.replay(captured)),
        mock.patch.object(There, "watch", noted.note),
    ):
        trained = train(name, "on", epochs=2)
    noted.end()
    return noted.lines, trained.summary


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "window mlp"
    if name not in CASES:
        raise SystemExit(f"no case {name!r}; there are: {', '.join(CASES)}")
    begin_elsewhere()
    lines, summary = transcript(name)
    print("\n".join(lines))
    print(f"step graph: {summary}")


if __name__ == "__main__":
    main()
