"""Each case of the catalogue ends in a clear error or a counted repair: no traceback, no
half-written store.
"""

from __future__ import annotations

import pytest
from tests.data.cases import Case
from tests.data.catalogue import CASES
from tests.params import at_once
from tests.stores import open_store

from flatout.data.checks.checkup import check
from flatout.data.problem import Problem
from flatout.data.tables.prints import NOTES
from flatout.errors import UserError

LARGE = ("a text of 10 MB", "100,000 classes")


def as_parameter(case):
    marks = pytest.mark.soak(seconds=4) if case.name in LARGE else ()
    return pytest.param(case, id=case.name.replace(" ", "_"), marks=marks)


EACH = [as_parameter(case) for case in CASES]
QUICK = [case for case in CASES if case.name not in LARGE]


@pytest.mark.parametrize("case", EACH)
def test_a_case_is_told_or_repaired(case: Case, tmp_path):
    if case.is_error:
        said = error_of(case, tmp_path)
    else:
        said = "\n".join(remark.line() for remark in check(case.config(tmp_path)).remarks)
    assert case.says in said
    assert not list(tmp_path.glob("cache/**/manifest.json"))


@pytest.mark.parametrize("case", at_once(*QUICK[::3], of=CASES, seconds=4))
def test_a_run_says_the_same_and_leaves_no_half_store(case: Case, tmp_path):
    if case.is_error:
        with pytest.raises(UserError) as mistake:
            open_store(case.config(tmp_path))
        assert case.says in str(mistake.value) or case.config(tmp_path).problem is Problem.tags
    elif case.config(tmp_path).problem is not Problem.tags:
        assert case.says in "\n".join(open_store(case.config(tmp_path)).facts["lines"])
    stores = [path for path in tmp_path.glob("cache/*") if path.is_dir() and path.name != NOTES]
    assert all((store / "manifest.json").is_file() for store in stores)
    assert not [store for store in stores if store.name.startswith(".building")]


def error_of(case: Case, folder) -> str:
    """The error, or the remarks that stand for one where the rest could still be told."""
    try:
        return "\n".join(
            remark.line()
            for remark in check(case.config(folder)).remarks
            if remark.level == "error"
        )
    except UserError as mistake:
        return str(mistake)
