"""Every private name of Hydra that flatout touches.

Hydra offers no public way to look at settings before it acts on them. Our checks protect you from
files of others, so no command works without them. If a release of Hydra has lost one of these
names, or has another signature, commands end with one sentence.
"""

from __future__ import annotations

import errno
import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra._internal.hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.utils import get_args_parser
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flatout.cli.composing import setting_meant
from flatout.cli.hydra_check import check_hydra
from flatout.cli.hydra_folders import check_folders
from flatout.cli.late_help import allow_late_help
from flatout.cli.masked_settings import mask_settings_in
from flatout.cli.options import store_part
from flatout.cli.typed import check_read_early, is_named_like_a_setting
from flatout.cli.words import require_folders
from flatout.errors import UserError, did_you_mean, first_line, require
from flatout.files import read_modest, require_modest

_SINGLE = "hydra.mode=RUN"  # what Hydra adds to the words of a single run
_MOST_PLACES = 5_000  # that name files of one run; of ours there are some hundred
_LONGEST_REASON = 200  # characters
_SIGNATURES: dict[tuple[type, str], str] = {
    (
        ConfigLoaderImpl,
        "load_configuration",
    ): "config_name overrides run_mode from_shell validate_sweep_overrides",
    (ConfigLoaderImpl, "load_sweep_config"): "master_config sweep_overrides",
    (ConfigLoaderImpl, "_process_config_searchpath"): "config_name parsed_overrides repo",
    (ConfigRepository, "_find_object_source"): "config_path object_type",
}


class _ModestFiles(ConfigRepository):
    """Settings in files, with a check of their size before Hydra reads them."""

    def _find_object_source(
        self, config_path: str, object_type: ObjectType | None
    ) -> ConfigSource | None:
        source = super()._find_object_source(config_path, object_type)
        if source is not None:
            _require_no_setting(config_path, object_type, source.path)
        if source is None and object_type is ObjectType.CONFIG:
            # Hydra copies its store with each repository, so this one has its own.
            stored: Any = next(each for each in self.sources if each.scheme() == "structured")
            if store_part(config_path, stored.store):
                return stored
        if source is not None and source.scheme() == "file" and object_type is ObjectType.CONFIG:
            file = Path(source.path) / source._normalize_file_name(config_path)
            text = read_modest(file)
            require_modest(text, str(file))
            check_read_early(text, str(file))
        return source


class _FewFiles(dict[str, Any]):
    """The files of one composition, by name: Hydra looks here at each place that names one.

    23 lists of defaults, each of which names the next one twice, would be four million places.
    """

    num_looks = 0

    def __contains__(self, name: object) -> bool:
        self.num_looks += 1
        require(self.num_looks <= _MOST_PLACES, "conf", "lists of defaults name files without end")
        return super().__contains__(name)


def _require_no_setting(config_path: str, object_type: ObjectType | None, source: str) -> None:
    """Refuse a folder of files that is named like a setting: words for it would count as typed.

    With a folder `data.source`, the word `data.source=evil` reads evil.yaml there.
    """
    folder, _, rest = config_path.partition("/")
    is_folder = object_type is ObjectType.GROUP or bool(rest)
    require(
        not (is_folder and is_named_like_a_setting(folder)),
        f"{source}/{folder}",
        "a folder of files is named like a setting",
        hint="Rename the folder.",
    )


class GuardedLoader(ConfigLoaderImpl):
    """Hydra's loader, but it refuses settings that execute code or write elsewhere.

    It also composes the settings of one run once, where Hydra composes them twice.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _ModestFiles(config_search_path)
        self._single: tuple[list[str], DictConfig] | None = None
        self._composes_trials = False

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        if not self._composes_trials:
            # Hydra's sweepers have just written all settings there, in clear.
            mask_settings_in(Path(str(master_config.hydra.sweep.dir)) / "multirun.yaml")
            self._composes_trials = True
        return super().load_sweep_config(master_config, sweep_overrides)

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        # Hydra composes twice: first to learn whether the words ask for one run or for many (it
        # then leaves out the validation), and again with that answer as one more word. For one run
        # both come to the same, so the first is kept for the second call:
        #
        #     call 1   a=1                   → composed and kept
        #     call 2   a=1 hydra.mode=RUN    → the kept one, with that word noted in it
        if not validate_sweep_overrides:
            # Words for several runs do not compose as one: then Hydra goes its own way, below.
            with suppress(HydraException):
                cfg = self._compose(config_name, list(overrides), RunMode.RUN, from_shell, True)
                self._single = ([*overrides, _SINGLE], cfg)
                return cfg
        if self._single is not None and self._single[0] == overrides:
            cfg = self._single[1]
            self._single = None
            cfg.hydra.mode = RunMode.RUN
            cfg.hydra.overrides.hydra.append(_SINGLE)
            # the mode may be a part of a folder's name
            check_folders(cfg, overrides, is_trial=False)
            return cfg
        return self._compose(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)

    def _compose(self, config_name: str | None, overrides: list[str], *settings: Any) -> DictConfig:
        try:
            cfg = super().load_configuration(config_name, overrides, *settings)
        except (UserError, HydraException, OmegaConfBaseException):
            raise
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            OSError,
            TypeError,
            ValueError,
        ) as error:
            # Hydra checks lists of defaults and the first lines of files by plain errors, and a
            # `hydra: null` not at all. The error of a file without keys has no number. It is
            # explained elsewhere, as are permissions.
            if isinstance(error, OSError) and error.errno in (None, errno.EACCES):
                raise
            raise UserError(
                "conf",
                f"a file cannot be composed ({first_line(error)[:_LONGEST_REASON]})",
                allowed="defaults: a list of FILE and of GROUP: OPTION; # @package NAME",
            ) from error
        # of all settings: options such as `--cfg job --resolve` print what references lead to
        check_hydra(cfg, overrides, is_trial=self._composes_trials)
        _require_package(cfg)
        return cfg

    def _process_config_searchpath(
        self,
        config_name: str | None,
        parsed_overrides: list[Override],
        repo: CachingConfigRepository,
    ) -> None:
        # Hydra imports a package that a search path names, in a file or as a word. So the path is
        # looked at before Hydra follows it.
        places: list[object] = []
        primary = None if config_name is None else repo.load_config(config_path=config_name)
        if primary is not None:
            require(
                isinstance(primary.config, DictConfig),
                f"{config_name}.yaml",
                "holds a list",
                hint="Write KEY: VALUE in each line.",
            )
            places += _read_search_path(primary.config, f"{config_name}.yaml")
        for override in parsed_overrides:
            if override.get_key_element() == "hydra.searchpath":
                places.append(override.value())
        require_folders("hydra.searchpath", str(places))
        repo.cache = _FewFiles(repo.cache)
        super()._process_config_searchpath(config_name, parsed_overrides, repo)


def _read_search_path(config: Container, file: str) -> list[str]:
    """The folders that the file of the settings names for more settings.

    Hydra resolves references in them, and says where a folder is missing: a secret would show.
    """
    plain: Any = OmegaConf.to_container(config, resolve=False)
    written = plain.get("hydra")
    where = f"{file}: hydra"
    require(isinstance(written, dict | None), where, "does not fit", allowed="a mapping")
    places = (written or {}).get("searchpath") or []
    are_texts = isinstance(places, list) and all(isinstance(place, str) for place in places)
    require(
        are_texts and "${" not in str(places),
        f"{where}.searchpath",
        "does not fit",
        allowed="a list of folders without ${…}",
        hint="Name a folder by --config-dir.",
    )
    return places


def _require_package(cfg: DictConfig) -> None:
    """Refuse a `--package` that `--cfg` cannot show."""
    # read only where it is typed: a sweep composes a thousand times
    if not any(word.startswith(("-p", "--p")) for word in sys.argv):
        return
    shown, _ = get_args_parser().parse_known_args()
    if not shown.cfg or shown.package in (None, "_global_"):
        return
    is_of_hydra = shown.package.partition(".")[0] == "hydra"
    is_shown = shown.cfg == "all" or is_of_hydra == (shown.cfg == "hydra")
    missing = object()
    value = OmegaConf.select(cfg, shown.package, default=missing) if is_shown else missing
    require(value is not None, "--package", f"{shown.package!r} is null", hint="Nothing is shown.")
    require(
        value is not missing,
        "--package",
        f"no settings {shown.package!r}",
        hint=did_you_mean(shown.package, [str(name) for name in cfg])
        or "python -m train --cfg job shows all.",
    )


def refuse_options(words: Sequence[str], written: Sequence[str]) -> None:
    """Refuse an option that Hydra does not have, and a `--config-dir` that is no folder.

    `written`: the words in their first order, where the value of such an option stands behind it.
    `--lr 0.1` is such an option: settings have no dashes, so the message names `optim.lr=0.1`.
    """
    options, unknown = get_args_parser().parse_known_args(list(words))
    if unknown:
        meant = setting_meant(unknown[0], written)
        hint = f"Did you mean {meant}?" if meant else "python -m train --help lists the settings."
        raise UserError(
            unknown[0].partition("=")[0], "no such option", hint=f"Settings are key=value. {hint}"
        )
    if options.config_dir is not None and not Path(options.config_dir).is_dir():
        raise UserError(
            "--config-dir",
            f"no such folder: {options.config_dir}",
            hint="Name the folder that holds your experiment/, data/ or model/ files.",
        )


def guard_hydra() -> None:
    """Make Hydra compose with our loader, in this process and those it starts."""
    for (owner, name), parameters in _SIGNATURES.items():
        require_signature(owner, name, ["self", *parameters.split()])
    vars(hydra._internal.hydra)["ConfigLoaderImpl"] = GuardedLoader
    allow_late_help()


def require_signature(owner: type, name: str, parameters: list[str]) -> None:
    """Refuse a Hydra whose loader is not the one that the checks know."""
    method: Callable[..., object] | None = getattr(owner, name, None)
    if method is None or list(inspect.signature(method).parameters) != parameters:
        raise UserError(
            "hydra-core",
            f"version {hydra.__version__} has no {owner.__name__}.{name}({', '.join(parameters)})",
            hint="Install hydra-core 1.3: flatout checks settings there.",
        )
