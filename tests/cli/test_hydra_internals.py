"""A Hydra that settings cannot be checked in is refused: the checks are a protection."""

from __future__ import annotations

import pytest
from hydra._internal.config_repository import ConfigRepository

from flatout.cli.hydra_internals import guard_hydra, require_signature
from flatout.errors import UserError


def test_the_installed_hydra_can_be_guarded():
    guard_hydra()


@pytest.mark.parametrize(("name", "parameters"), [("load_config", ["self", "path"]), ("load_all", ["self"])])
def test_a_hydra_with_another_loader_is_refused_in_one_sentence(name, parameters):
    with pytest.raises(UserError, match=rf"hydra-core: version 1.3.* has no ConfigRepository.{name}\(self.*Install"):
        require_signature(ConfigRepository, name, parameters)
