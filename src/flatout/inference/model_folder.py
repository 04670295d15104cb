"""The `model/` folder of a finished run: weights, names of the outputs, and settings.

The settings rebuild the network, and tell a predictor how files are read. A folder may come from
others: it holds data alone, and whatever is wrong with it becomes one sentence. Open this file to
change what a run keeps of its model; the predictors say what stands in their settings.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from flatout.data.tables.roles import Roles
from flatout.data.tokens.long_texts import CUT, LongTexts
from flatout.data.tokens.run_model import MOST_BYTES
from flatout.data.tokens.subwords import PAIR, Encoder, Subwords, pair_separator, read_encoder
from flatout.errors import UserError, first_line, is_failure, require, settings_of
from flatout.files import errors_of_the_disk, read_modest, require_ordinary
from flatout.inference.linear_part import LINEAR
from flatout.inference.records import Record, is_name, read_record
from flatout.models import kind_of, model_class
from flatout.models.contract import ModelConfig
from flatout.models.encoder.transformer import Outputs, Transformer
from flatout.models.without_memory import without_memory

if TYPE_CHECKING:
    from flatout.baselines.linear_text import QuickModel
    from flatout.data.info import Labels

Built = TypeVar("Built", bound=nn.Module)

_MOST_TOKENS = 1 << 31
_USUAL_LAYERS = 64
# how families of transformers call their number of layers
_COUNTS_LAYERS = re.compile(r"(^|_)(layers?|depth|blocks?|groups?|group_num)$")
_OF_CLASSES = ("label2id", "id2label")  # their keys are names of classes
_SPARE_WEIGHTS = 1000  # a network may register some weights more than once
_CHANGED = "The folder was changed, or comes from another version: train again."
WEIGHTS = "model.safetensors"
RIVAL = "rival.safetensors"
_THRESHOLDS = "thresholds"
SETTINGS = "config.json"
LABELS = "labels.json"
# of models of texts; what transformers builds an encoder by
TOKENIZER = "tokenizer.json"
ENCODER = "encoder.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """What `config.json` says of rows of texts; runs of older versions say less."""

    max_length: int
    columns: dict[str, Any]
    escapes: str = "keep"
    label_delimiter: str | None = None
    group: str | None = None
    long_texts: LongTexts = CUT


class ModelFolder:
    """Reads and writes one `model/` folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def find(cls, run: str | Path) -> ModelFolder:
        """The folder of a run, given the run's folder or the folder itself."""
        path = Path(run)
        for folder in (path, path / "model"):
            if (folder / SETTINGS).is_file() and (folder / WEIGHTS).is_file():
                require_ordinary(*folder.iterdir())
                return cls(folder)
        require(path.exists(), str(path), "no such run", hint="Name a folder below outputs/.")
        inside = [each.parent for at in ("*", "*/*") for each in path.glob(f"{at}/model/{WEIGHTS}")]
        inside.sort(key=lambda model: model.parent.name)  # a run's folder is named for its time
        usual = "A run that ended well has one, unless it trained a module of your own."
        if path.is_file():
            usual = "It is a file: the folder of a run stands first, the file behind it."
        hint = f"Did you mean {inside[-1].parent}?" if inside else usual
        raise UserError(str(path), "no finished run: it has no model/ folder", hint=hint)

    def settings(self) -> dict[str, Any]:
        with self.read():
            settings = self.read_json(SETTINGS)
            require(
                isinstance(settings, dict) and settings.get("schema") == 1,
                str(self.path),
                f"{SETTINGS} holds no settings of a model",
            )
            return settings

    def labels(self) -> list[str]:
        labels = self.read_json(LABELS)
        is_plain = isinstance(labels, list) and bool(labels) and all(map(is_name, labels))
        require(is_plain, f"{self.path}: {LABELS}", "is no list of names", hint=_CHANGED)
        return labels

    def read_json(self, name: str) -> Any:
        return json.loads(read_modest(self.path / name))

    @contextmanager
    def read(self) -> Iterator[None]:
        """Turn any error inside into one sentence: a folder of others may hold anything."""
        try:
            yield
        except UserError:
            raise
        except BaseException as error:
            # no narrower class: for damaged files tokenizers raises Exception itself, or panics
            if not is_failure(error):
                raise
            raise UserError(
                str(self.path),
                f"no model that can be read ({type(error).__name__}: {first_line(error)})",
                hint="It is damaged, or was not written by this program.",
            ) from error

    def config(self) -> Any:
        """The Config of the model, without the files that only the start of training needs."""
        described = self.settings()["model"]
        without = {"vectors": None, "freeze_vectors": False, "pretrained": None}
        values = {name: without.get(name, value) for name, value in described["config"].items()}
        self._require_few_layers(values, SETTINGS)
        return settings_of(model_class(described["kind"], f"{self.path}: {SETTINGS}"), values)

    def _require_few_layers(self, values: dict[str, Any], name: str) -> None:
        """Refuse more layers than the weights can hold: a billion of them would be built first."""
        with safe_open(self.path / WEIGHTS, framework="numpy") as weights:
            most = max(_USUAL_LAYERS, len(list(weights.keys())))
        for key, count in values.items():
            if isinstance(count, dict) and key not in _OF_CLASSES:
                self._require_few_layers(count, name)
            is_few = not isinstance(count, int | float) or count <= most
            is_other = _COUNTS_LAYERS.search(key) is None
            require(
                is_few or is_other, f"{self.path}: {name}", f"{key} does not fit", hint=_CHANGED
            )

    def linear_model(self, labels: Labels) -> QuickModel:
        """The linear model that answers with the network."""
        # scikit-learn takes a second to import, and most runs have none
        from flatout.baselines.linear_text import QuickModel

        arrays = load_arrays(self.path / LINEAR)
        return QuickModel.of_arrays(labels.problem, labels.num_outputs, arrays)

    def write_linear_model(self, model: QuickModel) -> None:
        with errors_of_the_disk():
            save_arrays(model.arrays(), self.path / LINEAR)

    def write_rival(self, model: QuickModel, thresholds: list[float]) -> None:
        """Keep a rival, with the least probability of each label; empty: one half."""
        arrays = model.arrays() | {_THRESHOLDS: np.array(thresholds, np.float32)}
        with errors_of_the_disk():
            save_arrays(arrays, self.path / RIVAL)

    def rival(self, labels: Labels) -> tuple[QuickModel, list[float]] | None:
        """The rival that the run has kept, with its thresholds; None where it has none."""
        from flatout.baselines.linear_text import QuickModel

        if not (self.path / RIVAL).is_file():
            return None
        with self.read():
            arrays = load_arrays(self.path / RIVAL)
            thresholds = arrays.pop(_THRESHOLDS)
            fit = thresholds.ndim == 1 and len(thresholds) in (0, labels.num_outputs)
            require(fit, f"{self.path}: {RIVAL}", "its thresholds do not fit", hint=_CHANGED)
            model = QuickModel.of_arrays(labels.problem, labels.num_outputs, arrays)
            return model, thresholds.tolist()

    def network(self, **sizes: Any) -> nn.Module:
        """The network with its weights; `sizes`: what its Config builds it for."""
        config = self.config()
        return self._with_weights(lambda: config.build(**sizes))

    def encoder(
        self, outputs: Outputs, roles: Roles, window: int = 0
    ) -> tuple[Transformer, Subwords]:
        """The encoder with its weights, and its tokenizer."""
        vocabulary = self.vocabulary()
        assert isinstance(vocabulary, Subwords)
        described = self.read_json(ENCODER)
        self._require_few_layers(described, ENCODER)
        config = self.config()
        separator_id = pair_separator(vocabulary, roles)
        encoder = self._with_weights(
            lambda: config.rebuild(outputs, described, separator_id, window)
        )
        vocabulary.num_ids = encoder.num_ids()
        return encoder, vocabulary

    def _with_weights(self, build: Callable[[], Built]) -> Built:
        """What `build` makes, with the weights of the folder.

        Settings of others may describe a network of terabytes, so their shapes are compared first.
        """
        with safe_open(self.path / WEIGHTS, framework="numpy") as weights:
            names = list(weights.keys())
            saved = {name: weights.get_slice(name).get_shape() for name in names}
        with self._building(most=4 * len(saved) + _SPARE_WEIGHTS):
            described = _shapes_of(build)
            fits = described is None or described == saved
            require(fits, f"{self.path}: {WEIGHTS}", "does not fit", hint=_CHANGED)
            network = build()
        network.load_state_dict(load_file(self.path / WEIGHTS))
        return network

    @contextmanager
    def _building(self, most: int) -> Iterator[None]:
        """Within it, no network is built that registers more weights than `most`.

        Settings may ask for a billion layers of no size, under names that only their family knows.
        """
        numbers = itertools.count(1)

        def count_weight(*_: object) -> None:
            is_few = next(numbers) <= most
            require(is_few, f"{self.path}: {WEIGHTS}", "has fewer layers", hint=_CHANGED)

        hook = register_module_parameter_registration_hook(count_weight)
        try:
            yield
        finally:
            hook.remove()

    def vocabulary(self) -> Encoder:
        return read_encoder(read_modest(self.path / TOKENIZER, MOST_BYTES))

    def roles(self) -> Roles:
        """The columns of the tables that a model of texts was trained on."""
        columns = self.settings()["data"]["columns"]
        # Before version 0.3 another character stood between the texts of a pair.
        join = PAIR if columns["join"] == "\ue003" else columns["join"]
        texts = columns["texts"]
        names = [columns["label"], join, *texts]
        is_plain = isinstance(texts, list) and all(isinstance(name, str) for name in names)
        self.require(is_plain and bool(texts), "data.columns")
        return Roles(tuple(texts), columns["label"], join)

    def record(self, kind: type[Record], values: object, name: str) -> Record:
        """A part of the settings, each value compared with its type; `name`: its key."""
        return read_record(kind, values, f"{self.path}: {SETTINGS}", name)

    def require_rows(self, data: RowSettings) -> None:
        """Refuse lengths that no row can have."""
        long = data.long_texts
        self.require(0 < data.max_length < _MOST_TOKENS, "data.max_length")
        self.require(0 <= long.window < _MOST_TOKENS, "data.long_texts.window")
        self.require(0 <= long.overlap <= long.window // 2, "data.long_texts.overlap")

    def require_short(self, data: RowSettings, encoder: Transformer) -> None:
        """Refuse rows that are longer than the encoder has positions."""
        longest = data.long_texts.window or data.max_length
        self.require(longest <= encoder.longest_row(), "data.max_length")

    def require(self, condition: bool, name: str) -> None:
        """Refuse a setting of a folder that others have changed."""
        require(condition, f"{self.path}: {SETTINGS}", f"{name} does not fit", hint=_CHANGED)

    def write(
        self,
        network: nn.Module,
        config: ModelConfig,
        labels: list[str],
        settings: dict[str, Any],
        vocabulary: Encoder | None = None,
    ) -> None:
        """Write what is read above; `config` must be of a class in MODELS."""
        self.path.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in network.state_dict().items()}
        with errors_of_the_disk():
            save_file(tensors, self.path / WEIGHTS)
        self.write_json(LABELS, labels)
        described = {"kind": kind_of(config), "config": asdict(config)}
        self.write_json(SETTINGS, {"schema": 1, "model": described, **settings})
        if isinstance(network, Transformer):
            self.write_json(ENCODER, network.described.to_diff_dict())
        if vocabulary is not None:
            (self.path / TOKENIZER).write_text(vocabulary.to_json(), encoding="utf-8")

    def write_json(self, name: str, value: object) -> None:
        (self.path / name).write_text(
            json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8"
        )


def _shapes_of(build: Callable[[], nn.Module]) -> dict[str, list[int]] | None:
    """The shapes of the weights that a network would have; None where only building it tells.

    An installed part may compute with numbers as it builds its network, such as
    `torch.linspace(0, 1, layers).tolist()`. No network of this package does.
    """
    try:
        with without_memory():
            return {name: list(weight.shape) for name, weight in build().state_dict().items()}
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError):
        return None
