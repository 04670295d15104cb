"""One of several ranks that gather a value of each; one of them is killed by the system before."""

from __future__ import annotations

import os
import signal
import sys

from flatout.distributed.ranks import Ranks
from tests.faults.runs import code_of


def main(killed: int) -> None:
    ranks = Ranks.here()
    sys.exit(code_of(lambda: gather(ranks, killed), sys.stderr))


def gather(ranks: Ranks, killed: int) -> list[int]:
    def answer() -> int:
        if ranks.rank == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return ranks.rank

    with ranks.train_together():
        return ranks.gathered("answer", answer)
