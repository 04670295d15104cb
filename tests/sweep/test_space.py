"""What a search space cannot mean is refused."""

from __future__ import annotations

import pytest

from flatout.errors import UserError
from flatout.sweep.space import is_by_factors


def test_the_tag_log_asks_for_factors_and_none_for_steps():
    assert is_by_factors("optim.lr", {"log"}, is_interval=True)
    assert not is_by_factors("optim.lr", set(), is_interval=True)
    assert not is_by_factors("model.hidden", set(), is_interval=False)


@pytest.mark.parametrize(
    ("tags", "is_interval", "message"),
    [
        ({"lgo"}, True, r"sweep: optim.lr: no tag 'lgo' \(log\)\. Did you mean 'log'\?"),
        (
            {"log", "quick"},
            True,
            r"no tag 'quick' \(log\)\. Write tag\(log,interval\(1e-4,1e-1\)\), or leave tag",
        ),
        (
            {"log"},
            False,
            (
                r"sweep: optim.lr: listed values have no factors between them\. Write"
                r" tag\(log,interval\("
            ),
        ),
    ],
)
def test_a_tag_that_means_nothing_is_refused(tags, is_interval, message):
    with pytest.raises(UserError, match=message):
        is_by_factors("optim.lr", tags, is_interval=is_interval)
