"""Errors of composing, explained."""

from __future__ import annotations

import runpy

import pytest

from flatout.cli.composing import chain_of, explain, explain_errors
from flatout.errors import UserError


def ring() -> UserError:
    """A mistake that is a cause of itself."""
    mistake = UserError("data.source", "no such file", hint="Check the name.")
    wrapped = RuntimeError("in a class")
    mistake.__cause__ = wrapped
    wrapped.__cause__ = mistake
    return mistake


def test_a_mistake_that_is_a_cause_of_itself_is_found_once():
    mistake = ring()
    assert explain(mistake) is mistake
    assert list(map(str, chain_of(mistake))) == [str(mistake), "in a class"]


def test_a_ring_of_causes_ends_with_the_mistake():
    with pytest.raises(UserError, match="no such file"), explain_errors():
        raise ring()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_that_another_error_hides_ends_what_is_done(kind):
    with pytest.raises(kind), explain_errors():
        try:
            raise kind
        finally:
            raise AttributeError("defaults")  # as OmegaConf fails where a signal leaves it


@pytest.mark.parametrize("part", ["launcher", "sweeper"])
def test_what_a_plugin_refuses_names_the_settings_of_that_plugin(part, tmp_path):
    package = tmp_path / "hydra_plugins" / f"hydra_own_{part}"
    package.mkdir(parents=True)
    (package / "core.py").write_text("float('ten')")
    with pytest.raises(UserError, match=rf"^hydra\.{part}: does not fit"), explain_errors():
        runpy.run_path(str(package / "core.py"))
