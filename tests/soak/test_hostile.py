"""Every hostile target and every path that leads outside: nothing is executed, and nothing outside
is touched.
"""

from __future__ import annotations

import pytest

from flatout.distributed.processes import warm_start
from tests.hostile.attempts import stayed, tried
from tests.hostile.paths import path_cases
from tests.hostile.targets import all_cases

PARTS = 8
pytestmark = pytest.mark.soak(seconds=30)


def problems_of(name: str, is_fine: bool) -> list[str]:
    return [] if is_fine else [name]


@pytest.mark.parametrize("part", range(PARTS))
def test_every_hostile_target_is_refused_and_nothing_is_executed(part, survive):
    warm_start()
    outcomes = [(case, tried(case)) for case in all_cases()[part::PARTS]]
    survive(
        problems_of(case.name, found.is_refused and not found.is_executed)
        for case, found in outcomes
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_outside_of_the_folder_of_runs_is_touched_by_any_path(part, survive):
    warm_start()
    cases = path_cases(full=True)[part::PARTS]
    survive(problems_of(case.name, stayed(case)) for case in cases)
