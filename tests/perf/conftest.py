"""Parts of a small run, which no test changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flatout.perf.tune.probe import Parts
from tests.perf.tune.planted import small_parts


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """Those of a BiLSTM on four hundred headlines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATOUT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield small_parts()
