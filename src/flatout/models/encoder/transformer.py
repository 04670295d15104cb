"""The settings of an encoder of transformers, and how its network is built from them.

Weights are pretrained (a folder of a run or an encoder, or a name on the Hub) or random. The model
is the library's own `AutoModelForSequenceClassification`, `…TokenClassification` or `…MaskedLM`, so
its weights load from and save to the plain classes. `network.py` says how it runs. Open this file
for a setting under `model`, or for what happens between a setting and a built network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from flatout.data.tables.hub import fetch_model
from flatout.data.tokens.run_model import model_of_run
from flatout.errors import UserError, check_settings, did_you_mean, require, setting
from flatout.models.encoder.families import FLAT_FAMILIES, WRITTEN, read_setting
from flatout.models.encoder.lora import LoraConfig, add_lora
from flatout.models.encoder.network import Compute, Transformer
from flatout.models.encoder.windows import Windows

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ALL = "all"  # of the layers to freeze: each of them, for a head alone
# Learning rate of pretrained weights with so many numbers a token. Narrower ones want larger rates
# (Turc et al. 2019 take up to 3e-4 for small BERTs).
_RATE = 5e-5
_USUAL_WIDTH = 768
_MOST_WORDS = 1 << 31  # of a family that does not say how many it has
_MOST_RATE = 3e-4
_CODE = (
    "auto_map",
    "attn_implementation",
    "experts_implementation",
    "quantization_config",
    "use_kernels",
)
"""Settings of an encoder's own configuration that can name code to be fetched and run."""
# The library has these itself. For any other name, `flash_attention_2` too, it may fetch a kernel.
_OF_LIBRARY = ("eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")
# Settings of the form in which the library returns its numbers: ours reads it in one.
_FORM = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "chunk_size_feed_forward": 0,
}
ReuseFormat = StrEnum("ReuseFormat", "auto bf16")


@dataclass(kw_only=True, slots=True)
class TransformerConfig:
    """An encoder of transformers, from pretrained weights or from random ones."""

    recommended_clip: ClassVar[float] = 1.0

    pretrained: str | None = setting(
        None,
        "Folder of a run or an encoder, or name on the Hub; null: random weights.",
        example="bert-base-uncased",
    )
    family: str = setting(
        "bert", "Encoder of random weights by transformers' name: bert, …", example="roberta"
    )
    hidden: int = setting(128, "Numbers a token, for random weights.", least=1)
    layers: int = setting(2, "Layers, for random weights.", least=1)
    heads: int = setting(4, "Attention heads a layer, for random weights.", least=1)
    intermediate: int | None = setting(
        None,
        "Width of the feed-forward layers, for random weights; null: four times `hidden`.",
        least=1,
        example="256",
    )
    settings: dict[str, Any] = setting(
        dict, "Of its own configuration.", example="+model.settings.layer_norm_eps=1e-7"
    )
    compute: Compute = setting(
        Compute.auto, "Flat (nothing padded) or padded batches; auto: flat where a family can."
    )
    dropout: float | None = setting(
        None,
        "Dropped after embeddings and sub-layers; null: as the encoder has it.",
        least=0,
        below=1,
        example="0.1",
    )
    attention_dropout: float | None = setting(
        None, "Share dropped; null: its own.", least=0, below=1, example="0"
    )
    head_dropout: float | None = setting(
        None, "Dropped before output; null: its own.", least=0, below=1, example="0.2"
    )
    freeze_embeddings: bool = setting(False, "Whether the embeddings stay as they are.")
    freeze_layers: Any = setting(
        0, "The first layers that stay as they are.", allowed="a number, or all", example="all"
    )
    reuse: Any = setting(
        "auto",
        "Whether frozen layers are computed once, and read from a store in each epoch; auto: where"
        " it pays.",
        allowed="auto, true, false",
        example="model.freeze_layers=4 model.reuse=true",
    )
    reuse_format: ReuseFormat = setting(
        ReuseFormat.auto,
        "Number format of what is stored; auto: as the layer hands it on; bf16: half of that.",
        example="model.freeze_layers=4 model.reuse_format=bf16",
    )
    unfreeze_epochs: float = setting(
        0.0,
        "Epochs over which frozen layers join the training, from the last to the first; 0: frozen"
        " ones stay frozen.",
        least=0,
        example="model.freeze_layers=2 model.unfreeze_epochs=1",
    )
    windows: Windows = setting(
        Windows.mean,
        "The answer to a text in windows (data.long=windows): the mean of their logits, the largest"
        " of each class, or a mean weighted by a small attention over the windows' vectors.",
        example="data.long=windows data.max_length=1024 model.windows=max",
    )
    gradient_checkpointing: bool = setting(
        False,
        "Whether activations are computed again in the backward pass: less memory, about a third"
        " more time.",
    )
    lora: LoraConfig = setting(LoraConfig, "Train small matrices beside the frozen ones.")

    @property
    def recommended_lr(self) -> float:
        """Small for pretrained weights that are trained; larger for LoRA, heads, or random ones.

        The narrower a pretrained encoder, the larger: 5e-5 for 768 numbers a token, 1e-4 for 384.
        """
        is_head_alone = self.freeze_layers == ALL and not self.unfreeze_epochs
        trains_pretrained = self.pretrained is not None and not self.lora.rank and not is_head_alone
        if not trains_pretrained:
            return 1e-3
        return min(_MOST_RATE, _RATE * _USUAL_WIDTH / self._width())

    def __post_init__(self) -> None:
        check_settings(self, "model")
        require(
            self.hidden % self.heads == 0,
            "model.hidden",
            f"{self.hidden}",
            allowed=f"a multiple of {self.heads} heads",
        )
        require(
            self.reuse in ("auto", True, False),
            "model.reuse",
            f"{self.reuse}",
            allowed="auto, true, false",
        )
        is_count = self.freeze_layers == ALL or (
            type(self.freeze_layers) is int and self.freeze_layers >= 0
        )
        require(
            is_count, "model.freeze_layers", f"{self.freeze_layers}", allowed=f"0 or more, or {ALL}"
        )
        require(
            bool(self.freeze_layers) or not self.unfreeze_epochs,
            "model.unfreeze_epochs",
            "nothing is frozen",
            hint="Set model.freeze_layers=N.",
        )
        require(
            bool(self.freeze_layers or self.lora.rank) or self.reuse is not True,
            "model.reuse",
            "true, but nothing is frozen",
            hint="Set model.freeze_layers=N or all.",
        )
        require(
            not (self.lora.rank and (self.freeze_layers or self.freeze_embeddings)),
            "model.lora.rank",
            f"{self.lora.rank} with model.freeze_layers or model.freeze_embeddings",
            allowed="beside small matrices the whole encoder is frozen",
            hint="Leave out the one or the other.",
        )

    def build(
        self, outputs: Outputs, *, vocabulary_size: int, padding_id: int, separator_id: int | None
    ) -> Transformer:
        """The encoder with a head for these outputs, ready to train.

        `vocabulary_size` and `padding_id` are those of random weights; pretrained ones bring their
        own. `separator_id`: the token between the two texts of a pair, None without pairs.
        """
        described = self.read_description()
        if outputs.kind == "words":
            self._require_words(described)
        self._set(described, outputs, vocabulary_size, padding_id)
        model = outputs.wrap(self._weighted(described, outputs), self.compute, separator_id)
        if self.head_dropout is not None:
            model.drop_before_output(self.head_dropout)
        if self.lora.rank:
            add_lora(model.net, self.lora)
        else:
            layers = len(model.blocks()) if self.freeze_layers == ALL else self.freeze_layers
            model.freeze(layers, embeddings=self.freeze_embeddings)
        if self.unfreeze_epochs:
            model.thaw_over(self.unfreeze_epochs)
        if self.gradient_checkpointing:
            _recompute(model)
        return model.train()  # from_pretrained gives what is meant to answer, without dropout

    def rebuild(
        self, outputs: Outputs, described: dict[str, Any], separator_id: int | None, window: int = 0
    ) -> Transformer:
        """The encoder that a run saved, without its weights.

        `described` is the library's configuration as the run saved it; `window` is the number of
        tokens of a window, 0 without windows.
        """
        settings = dict(described)
        require_no_code(settings, "encoder.json")
        settings |= {name: usual for name, usual in _FORM.items() if name in settings}
        config = _config_class(settings.pop("model_type"))(**settings)
        padding_id = read_setting(config, "pad_token_id", 0)
        words: int = read_setting(config, "vocab_size", _MOST_WORDS)
        is_word = 0 <= padding_id < words
        require(is_word, "encoder.json: pad_token_id", repr(padding_id), allowed="a word's number")
        model = outputs.wrap(outputs.auto_class.from_config(config), self.compute, separator_id)
        model.set_windows(window, self.windows)
        if self.lora.rank:
            add_lora(model.net, self.lora)
        return model

    def _require_words(self, described: PretrainedConfig) -> None:
        """Refuse an encoder that cannot predict masked words, or LoRA in pretraining."""
        from transformers import MODEL_FOR_MASKED_LM_MAPPING

        where = "model.family" if self.pretrained is None else "model.pretrained"
        require(
            type(described) in MODEL_FOR_MASKED_LM_MAPPING,
            where,
            f"{described.model_type} has no head that predicts masked words",
            allowed=f"{', '.join(FLAT_FAMILIES)}, or another of transformers with such a head",
        )
        require(
            not self.lora.rank,
            "model.lora.rank",
            f"{self.lora.rank}, but task=mlm trains the encoder itself",
            hint="Leave it out.",
        )

    def _width(self) -> int:
        """Numbers a token in the layers of the pretrained encoder."""
        try:
            width = read_setting(self.read_description(), "hidden_size", _USUAL_WIDTH)
        except UserError:
            # no such encoder: the store and the network refuse it, each with its own words
            return _USUAL_WIDTH
        # of a damaged folder, which the network refuses
        return width if width > 0 else _USUAL_WIDTH

    def read_description(self) -> PretrainedConfig:
        """The library's configuration of the encoder, before our settings change it."""
        if self.pretrained is None:
            return self._describe_random()
        run = model_of_run(self.pretrained)
        if run:
            settings = run.configuration()
            require_no_code(settings, f"model.pretrained: {self.pretrained}")
            return _config_class(str(settings.pop("model_type", None)))(**settings)
        from transformers import AutoConfig

        name = self.pretrained
        config = fetch_model(
            name,
            "model.pretrained",
            lambda: AutoConfig.from_pretrained(name, trust_remote_code=False),
        )
        require_no_code(config, f"model.pretrained: {self.pretrained}")
        return config

    def _describe_random(self) -> PretrainedConfig:
        """The configuration of an encoder with random weights, by `family` and sizes."""
        names = WRITTEN["sizes"].get(self.family, WRITTEN["sizes"]["bert"])
        settings: dict[str, Any] = {
            names["hidden"]: self.hidden,
            names["layers"]: self.layers,
            names["heads"]: self.heads,
            names["intermediate"]: self.intermediate or 4 * self.hidden,
        }
        # the width of their tables, which may be narrower than the layers
        if self.family in ("electra", "albert"):
            settings["embedding_size"] = self.hidden
        settings |= WRITTEN["random_weights"].get(self.family, {})
        config_class = _config_class(self.family)
        with _refusing(self.family):
            config = config_class(**settings)
        # of decoders: one a head, where model.settings name no fewer
        if hasattr(config, "num_key_value_heads"):
            config.num_key_value_heads = self.heads
        return config

    def _set(
        self, described: PretrainedConfig, outputs: Outputs, vocabulary_size: int, padding_id: int
    ) -> None:
        """Write our settings and the outputs into the library's configuration."""
        self._set_dropout(described, "dropout", self.dropout)
        self._set_dropout(described, "attention_dropout", self.attention_dropout)
        self._set_dropout(described, "head_dropout", self.head_dropout)
        require_no_code(self.settings, "model.settings")
        for name, value in self.settings.items():
            if not _set_one(described, name, value):
                raise UserError(
                    f"model.settings.{name}",
                    f"no setting of {described.model_type}",
                    hint=did_you_mean(name, list(described.to_dict())),
                )
        for name, usual in _FORM.items():
            is_usual = self.settings.get(name, usual) == usual
            require(is_usual, f"model.settings.{name}", "is not for training", hint="Leave it out.")
            if hasattr(described, name):
                setattr(described, name, usual)
        layers: object = read_setting(described, "num_hidden_layers", 1)
        where = "model.layers"
        if self.pretrained is not None:
            where = f"model.pretrained: {self.pretrained}"
        for name in ("num_hidden_layers", described.attribute_map.get("num_hidden_layers", "")):
            if name in self.settings:
                where = f"model.settings.{name}"
        has_layers = isinstance(layers, int) and layers >= 1
        require(has_layers, where, f"{layers} layers", allowed="1 or more")
        if self.pretrained is None:
            described.vocab_size, described.pad_token_id = vocabulary_size, padding_id
            for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
                if hasattr(described, name):
                    setattr(described, name, None)
        outputs.tell(described)

    def _set_dropout(self, described: PretrainedConfig, key: str, share: float | None) -> None:
        """Write a dropout rate under the names that the family has for it; None: leave its own."""
        if share is None:
            return
        names = [name for name in WRITTEN["dropouts"][key] if hasattr(described, name)]
        # The rate of a head is set in its modules, too (`drop_before_output`).
        require(
            not share or bool(names) or key == "head_dropout",
            f"model.{key}",
            f"{described.model_type} has no such share",
            hint="Leave it out.",
        )
        for name in names:
            setattr(described, name, share)

    def _weighted(self, described: PretrainedConfig, outputs: Outputs) -> PreTrainedModel:
        """The library's model with its weights."""
        auto = outputs.auto_class
        if self.pretrained is None:
            with _refusing(self.family):
                return auto.from_config(described)
        if run := model_of_run(self.pretrained):
            net: PreTrainedModel = auto.from_config(described)
            run.load_into(net)
            return net
        name = self.pretrained
        load = partial(
            auto.from_pretrained,
            name,
            trust_remote_code=False,
            config=described,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            weights_only=True,
            output_loading_info=True,
        )
        # The library warns that the head is newly initialised; that is intended here.
        with quiet_library():
            net, loading_info = fetch_model(name, "model.pretrained", load)
        mismatched = [key for key, *_ in loading_info["mismatched_keys"]]
        lost = list[str]()
        for key in sorted([*loading_info["missing_keys"], *mismatched]):
            # a head is new, and so is a pooler where the encoder was trained without one
            if key.startswith(f"{net.base_model_prefix}.") and "pooler" not in key:
                lost.append(key)
        named = ", ".join(lost[:2])
        require(
            not lost,
            "model.pretrained",
            f"{name}: {len(lost)} weights of the encoder are missing there, or of another shape:"
            f" {named}",
            hint="Its config.json, or model.settings, describes another encoder.",
        )
        return net


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the outputs of a head mean."""

    names: Sequence[str]
    kind: str  # single, multi, regression, tags or words

    @property
    def auto_class(self) -> Any:
        """The class of transformers that opens and writes such a model."""
        import transformers

        kinds = {"words": "MaskedLM", "tags": "TokenClassification"}
        return getattr(
            transformers, f"AutoModelFor{kinds.get(self.kind, 'SequenceClassification')}"
        )

    def wrap(self, net: PreTrainedModel, compute: Compute, separator_id: int | None) -> Transformer:
        """The network around a model of transformers."""
        return Transformer(
            net, self.kind == "tags", compute, separator_id, predicts_words=self.kind == "words"
        )

    def tell(self, described: PretrainedConfig) -> None:
        """Write the outputs into an encoder's configuration, as transformers knows them."""
        if self.kind == "words":
            return
        kinds = {"single": "single_label_classification", "multi": "multi_label_classification"}
        values = {
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
            "problem_type": None if self.kind == "tags" else kinds.get(self.kind, "regression"),
        }
        described.update(values)


@contextmanager
def quiet_library() -> Iterator[None]:
    """Hide the library's progress bars and notes: they name files, not the result."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    had_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if had_bars:
            logging.enable_progress_bar()


@contextmanager
def _refusing(family: str) -> Iterator[None]:
    """Turn what the library raises for sizes that a family cannot have into a `UserError`."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (
        ValueError,
        TypeError,
        KeyError,
        AssertionError,
        RuntimeError,
        StrictDataclassError,
    ) as error:
        raise UserError(
            "model.family",
            f"{family} cannot be made so: {' '.join(str(error).split()):.200}",
            hint="Name a folder of it: model.pretrained=FOLDER.",
        ) from None


def _recompute(model: Transformer) -> None:
    """Let a model compute its activations again in the backward pass."""
    if model.is_flat:
        model.recomputes = True
        return
    require(
        model.net.supports_gradient_checkpointing,
        "model.gradient_checkpointing",
        f"{model.family} cannot compute its activations again",
        hint="Leave it out, or set a smaller data.batch_size.",
    )
    enable = getattr(
        model.net, "activation_checkpointing_enable", model.net.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


def require_no_code(described: Mapping[str, Any] | PretrainedConfig, where: str) -> None:
    """Refuse a configuration that names code to be run: a module beside it, or a kernel.

    Those of the parts of a composed encoder stand within its own.
    """
    settings = described if isinstance(described, Mapping) else vars(described)
    for name, value in ((str(key), item) for key, item in settings.items()):
        if isinstance(value, Mapping) or hasattr(value, "to_diff_dict"):
            require_no_code(value, f"{where}: {name}")
        is_named = value is not None and name.removeprefix("_").removesuffix("_internal") in _CODE
        require(
            not is_named or value in _OF_LIBRARY,
            f"{where}: {name}",
            f"{value!r} names code of others",
            hint="Take it out.",
        )


def _set_one(described: PretrainedConfig, name: str, value: object) -> bool:
    """Set a value of a configuration; false where it has no setting of that name.

    Methods, names of Python's own, and what the library does not let change are no settings.
    """
    from huggingface_hub.errors import StrictDataclassError

    is_there = hasattr(described, name) and not name.startswith("__")
    if not is_there or callable(getattr(described, name)):
        return False
    try:
        setattr(described, name, value)
    except AttributeError:
        return False
    except StrictDataclassError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(f"model.settings.{name}", f"{value!r} does not fit ({reason})") from None
    return True


def _config_class(family: str) -> type[PretrainedConfig]:
    """The library's class of configurations of a family that classifies; else a `UserError`."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if (
        family not in CONFIG_MAPPING
        or CONFIG_MAPPING[family] not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    ):
        raise UserError(
            "model.family",
            f"no encoder {family!r}",
            allowed=f"{', '.join(FLAT_FAMILIES)}, or another of transformers that classifies",
            hint=did_you_mean(family, FLAT_FAMILIES),
        )
    return CONFIG_MAPPING[family]
