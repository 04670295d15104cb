"""A Hydra that settings cannot be checked in is refused: the checks are a protection."""

from __future__ import annotations

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import OmegaConf

from flatout.cli.hydra_internals import GuardedLoader, guard_hydra, require_signature
from flatout.cli.train import register_schemas
from flatout.cli.words import conf_folder
from flatout.errors import UserError
from tests.params import at_once


def test_the_installed_hydra_can_be_guarded():
    guard_hydra()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("load_config", ["self", "path"]),
        ("load_all", ["self"]),
    ],
)
def test_a_hydra_with_another_loader_is_refused_in_one_sentence(name, parameters):
    with pytest.raises(
        UserError, match=rf"hydra-core: version 1.3.* has no ConfigRepository.{name}\(self.*Install"
    ):
        require_signature(ConfigRepository, name, parameters)


@pytest.mark.parametrize(
    ("words", "mode", "times"),
    [
        (["+experiment=bert_tiny", "model.hidden=32"], RunMode.RUN, 1),
        *at_once(
            of=[
                (["hydra.mode=RUN"], RunMode.RUN, 2),
                (["+experiment=headlines_sweep"], RunMode.MULTIRUN, 2),
            ],
            seconds=1,
        ),
    ],
    ids=["a run", "a run that says so", "a sweep"],
)
def test_a_single_run_is_composed_once_to_what_hydra_composes(words, mode, times, monkeypatch):
    composed = []
    plain = ConfigLoaderImpl.load_configuration

    def count(self, *given, **named):
        composed.append(plain(self, *given, **named))
        return composed[-1]

    register_schemas()
    path = create_automatic_config_search_path(None, None, str(conf_folder()))
    hydra = Hydra("train", GuardedLoader(path))
    theirs = ConfigLoaderImpl(path)
    with monkeypatch.context() as context:
        context.setattr(ConfigLoaderImpl, "load_configuration", count)
        overrides = list(words)
        assert hydra.get_mode("train", overrides) in (mode, None)
        overrides += (
            ["hydra.mode=RUN"] if "hydra.mode" not in str(words) and mode == RunMode.RUN else []
        )
        ours = hydra.compose_config("train", overrides, mode)
    assert len(composed) == times
    wanted = theirs.load_configuration("train", overrides, mode)
    assert OmegaConf.to_yaml(ours) == OmegaConf.to_yaml(wanted)
    assert ours.hydra.mode == mode


def test_what_goes_wrong_while_hydra_looks_for_the_mode_is_still_said():
    register_schemas()
    loader = GuardedLoader(create_automatic_config_search_path(None, None, str(conf_folder())))
    hydra = Hydra("train", loader)
    hydra.get_mode("train", ["model.hidden=1,2"])
    with pytest.raises(ConfigCompositionException, match="Ambiguous value for argument"):
        hydra.compose_config("train", ["model.hidden=1,2", "hydra.mode=RUN"], RunMode.RUN)
