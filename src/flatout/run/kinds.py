"""The kinds of data that a run can have, each as one record of everything that differs.

The settings of the data choose the kind (`kind_of`), and so does `config.json` of a finished run
(`load_predictor`). This is the only file that asks which kind something is; others take what the
record names. A new kind is a folder with its data, task and predictor, and a record in `KINDS`.
Kinds of other packages are found where none of these fits (`plugins/installed.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch

from flatout.bits.data import BitData
from flatout.bits.predictor import GramPredictor
from flatout.bits.scores import NAMES
from flatout.bits.settings import BitsDataConfig
from flatout.bits.task import GramDecoder
from flatout.data.batches.feed import Feeds
from flatout.data.batches.store_data import StoreData
from flatout.data.feeding import FeedingConfig
from flatout.data.problem import Problem
from flatout.data.sequences.data import SequenceData
from flatout.data.sequences.settings import SequenceDataConfig, SequenceProblem
from flatout.data.tags.data import TagData
from flatout.data.texts.data import TextData
from flatout.data.texts.settings import TextDataConfig
from flatout.data.tokens.long_texts import Long
from flatout.data.tokens.vocabulary import VocabularyKind
from flatout.engine.precision import Precision
from flatout.errors import UserError, require
from flatout.inference.exact import ask_for_equal_bits
from flatout.inference.masked_words import MaskedWordPredictor
from flatout.inference.model_folder import ModelFolder
from flatout.inference.run_predictor import RunPredictor
from flatout.inference.sequences import SequencePredictor
from flatout.inference.tags import TagPredictor
from flatout.inference.text import Predictor
from flatout.models import MODELS, OF_BITS, OF_RECORDINGS, OF_TEXTS
from flatout.models.encoder.transformer import TransformerConfig
from flatout.models.encoder.windows import Windows
from flatout.plugins.installed import PartGroup, all_parts
from flatout.report.figures import Chart
from flatout.report.page import draw_answers
from flatout.run.rival import COMMONEST, LINEAR, Rival
from flatout.run_log import RunLog
from flatout.tasks.classification import Classifier
from flatout.tasks.masked_language import METRICS as MASKED_METRICS
from flatout.tasks.masked_language import MaskedLanguageConfig, MaskedLanguageModel
from flatout.tasks.metrics import TaskMetrics, monitored_metric
from flatout.tasks.sequence_scores import names_of
from flatout.tasks.sequences import SequenceLabeller, SequenceRegressor
from flatout.tasks.tagging import METRICS as TAG_METRICS
from flatout.tasks.tagging import Tagger
from flatout.tasks.task import Task
from flatout.tasks.task_class import TaskClass


@dataclass(frozen=True, slots=True, kw_only=True)
class DataKind:
    """A kind of data: what chooses it, the parts of its runs, and what their end adds."""

    settings: type[Any]  # the Config of its data, a subclass of FeedingConfig
    data_option: str  # the name of its data in `conf/schema/data`
    # the values of `data.problem` that choose it; empty: there is no such setting
    problems: tuple[str, ...] = ()
    data: type[StoreData[Any, Any]]
    task: type[Task]
    predictor: type[RunPredictor]
    task_option: str  # the name of its task in `conf/task/`
    # those of ours that read its batches, the usual one first; the user's own may always
    models: tuple[type[Any], ...]
    # what only an encoder answers; empty: every model that reads its batches answers
    answers: str = ""
    rows: str  # what a row of it is called
    model_hint: str  # what helps where the model reads other rows
    # whether the task that fits helps where another is named; else `model_hint` does
    names_task: bool = False
    # what helps where its task is named without the `data.problem` that it needs
    way_to_task: str = ""
    in_parts: bool = False  # whether its store can be built in parts
    why_whole: str = ""  # why its weights cannot be sharded; empty: they can
    metrics: Callable[[Any], list[str]]  # from the settings of the data the metrics to choose from
    usual_metric: Callable[[Any], str]  # the one that decides unless the settings name one
    length_by_rows: bool = False  # whether few rows get small batches and more epochs
    mixes_ngrams: bool = False  # whether a linear model on n-grams may answer with its networks
    # whether its rows are a table's, so that a run keeps which of them are in which split
    keeps_rows: bool = False
    draw: Callable[[Any, Feeds, Path], list[Chart]] | None = None
    """Charts of a trained task's answers, and the files that go with them; every rank takes
    part."""
    rival: Rival | None = None  # the simple model that is trained beside each result
    report: Callable[[Any, Any, Feeds, dict[str, Any], Path, RunLog], None] | None = None
    """What the first rank writes when everything else is done."""

    def has(self, config: object) -> bool:
        """Whether data with these settings are of this kind."""
        if not isinstance(config, self.settings):
            return False
        return not self.problems or config.problem in self.problems


def _names_for(problem: Problem) -> list[str]:
    return TaskMetrics.build(problem, ["no", "yes"]).names()


def _recording_metric(config: SequenceDataConfig) -> str:
    return "rmse" if len(config.targets) == 1 else "mse_scaled"


def _report_exposure(*parts: Any) -> None:
    from flatout.bits.exposure import report_exposure  # only the end of such a run needs the study

    report_exposure(*parts)


TEXTS = DataKind(
    settings=TextDataConfig,
    data_option="text",
    problems=(Problem.single, Problem.multi, Problem.regression),
    data=TextData,
    task=Classifier,
    predictor=Predictor,
    task_option="classification",
    models=tuple(OF_TEXTS.values()),
    rows="texts",
    model_hint="Set data=bits for bit strings, or model=bilstm task=classification for texts.",
    metrics=lambda config: [*_names_for(config.problem), "loss"],
    usual_metric=lambda config: monitored_metric(config.problem),
    length_by_rows=True,
    mixes_ngrams=True,
    keeps_rows=True,
    in_parts=True,
    rival=LINEAR,
)
TAGS = replace(
    TEXTS,
    problems=(Problem.tags,),
    data=TagData,
    task=Tagger,
    predictor=TagPredictor,
    task_option="tagging",
    in_parts=False,
    mixes_ngrams=False,
    answers="tags",
    way_to_task="Set data.problem=tags for words and tags, or task=classification.",
    metrics=lambda config: [*TAG_METRICS, "loss"],
    usual_metric=lambda config: TAG_METRICS[0],
    rival=COMMONEST,
)
MASKED_WORDS = replace(
    TEXTS,
    problems=(Problem.none,),
    task=MaskedLanguageModel,
    predictor=MaskedWordPredictor,
    task_option="mlm",
    length_by_rows=False,
    mixes_ngrams=False,
    answers="masked words",
    way_to_task="Leave data.problem out.",
    why_whole=(
        "does not train masked language models in this version: a weight of theirs has two names"
    ),
    metrics=lambda config: [*MASKED_METRICS, "loss"],
    usual_metric=lambda config: MASKED_METRICS[0],
    rival=None,
)
BITS = DataKind(
    settings=BitsDataConfig,
    data_option="bits",
    data=BitData,
    task=GramDecoder,
    predictor=GramPredictor,
    task_option="grams",
    models=tuple(OF_BITS.values()),
    rows="bit strings",
    model_hint="Set model=bitmlp task=grams, or start from +experiment=bloom_bigrams.",
    why_whole="models of bit strings are too small for it",
    metrics=lambda config: [*NAMES, "loss"],
    usual_metric=lambda config: NAMES[0],
    report=_report_exposure,
)
RECORDINGS = DataKind(
    settings=SequenceDataConfig,
    data_option="sequence",
    problems=(SequenceProblem.estimate, SequenceProblem.forecast),
    data=SequenceData,
    task=SequenceRegressor,
    predictor=SequencePredictor,
    task_option="sequence",
    models=tuple(OF_RECORDINGS.values()),
    rows="sequences",
    model_hint="Set model=rnn or model=window_mlp, or start from +experiment=battery_soc.",
    names_task=True,
    metrics=lambda config: list(
        dict.fromkeys([_recording_metric(config), *names_of(config.targets), "loss"])
    ),
    usual_metric=_recording_metric,
    length_by_rows=True,
    draw=draw_answers,
)
LABELLED_RECORDINGS = replace(
    RECORDINGS,
    problems=(SequenceProblem.label,),
    task=SequenceLabeller,
    task_option="classification",
    metrics=lambda config: ["loss", *_names_for(Problem.single), *_names_for(Problem.regression)],
    usual_metric=lambda config: "loss",
    draw=None,
)
KINDS = (TEXTS, TAGS, MASKED_WORDS, BITS, RECORDINGS, LABELLED_RECORDINGS)


def kind_of(config: object) -> DataKind:
    """The kind of data with these settings."""
    is_ours = any(type(config) is kind.settings for kind in KINDS)
    # Settings of another package may be a subclass of ours, and its kind is the closer one.
    others = [] if is_ours else all_parts(PartGroup.kinds)
    return next(kind for kind in (*others, *KINDS) if kind.has(config))


def gives_one_class(config: object) -> TypeGuard[TextDataConfig]:
    """Whether each row of data with these settings has exactly one of several classes."""
    return isinstance(config, TextDataConfig) and config.problem is Problem.single


def kind_of_run(settings: dict[str, Any]) -> DataKind:
    """The kind of a finished run, by the settings in its `model` folder."""
    # Texts are the first kind there was, and their oldest runs name no problem.
    problem = settings.get("problem")
    for kind in KINDS:
        if problem in kind.predictor.problems:
            return kind
    others = [] if problem is None else all_parts(PartGroup.kinds)
    return next((kind for kind in others if problem in kind.predictor.problems), TEXTS)


def load_predictor(
    run: str | Path,
    device: str | torch.device = "cpu",
    precision: Precision = Precision.auto,
    *,
    exact: bool = False,
    at_error: float | None = None,
    answer_with: str | None = None,
) -> RunPredictor:
    """The best model of a run, on any kind of data.

    `exact`: an answer is the same, bit for bit, whichever rows are answered with it. `at_error`:
    answers are left out, so that of the others at most this share is wrong. `answer_with`: "rival"
    or "network", which then answers alone.
    """
    folder = ModelFolder.find(run)
    predictor = kind_of_run(folder.settings()).predictor.load(run, device)
    if answer_with is not None:
        predictor.answer_with(answer_with, folder)
    require(
        not exact or not isinstance(predictor, MaskedWordPredictor),
        "exact",
        f"a run on {predictor.answers_to} answers in batches of any size",
        hint="Leave it out.",
    )
    predictor.precision = precision
    if at_error is not None:
        predictor.leave_out_unsure(at_error)
    # it answers each recording by itself
    predictor.exact = exact and not isinstance(predictor, SequencePredictor)
    if predictor.exact and torch.device(device).type == "cpu":
        predictor.why_inexact = ask_for_equal_bits()
    return predictor


def complete_parts(
    data: FeedingConfig, model: object, task: object
) -> tuple[FeedingConfig, object, object]:
    """Settings of data, model and task, with defaults for those that are None.

    Parts that do not fit each other are refused.
    """
    if isinstance(task, TaskClass):
        _require_task_of(kind_of(_as_masked_words(data, task.config)), task.task)
        data, model, _ = complete_parts(data, model, task.config)
        return data, model, task
    data = _as_masked_words(data, task)
    kind = kind_of(data)
    model = kind.models[0]() if model is None else model
    task = kind.task.settings() if task is None else task
    # A model of your own may read anything: its first batch will show.
    require(
        not _is_ours(model) or type(model) in kind.models,
        "model",
        f"{_option_of(model)} does not fit {kind.rows}",
        hint=kind.model_hint,
    )
    _require_task(task, data, kind, model)
    require(
        not _needs_encoder(kind, model),
        "model",
        f"{_option_of(model)} predicts no {kind.answers}",
        hint="Set model=transformer.",
    )
    if isinstance(data, TextDataConfig):
        data = _with_tokenizer(data, model)
    return data, model, task


def _as_masked_words(data: FeedingConfig, task: object) -> FeedingConfig:
    """Settings of texts without labels, where their masked words are to be predicted."""
    if isinstance(task, MaskedLanguageConfig) and gives_one_class(data):
        # `single` is the default of `data.problem`, and this task needs no labels
        return replace(data, problem=Problem.none)
    return data


def _require_task_of(kind: DataKind, task: type[Task]) -> None:
    """Refuse a task of the user's own for another kind of data."""
    ours = {other.task for other in KINDS}
    base = next((each for each in task.__mro__ if each in ours), Task)
    require(
        base is kind.task,
        "task",
        f"{task.__name__} is a {base.__name__}, and these data need a {kind.task.__name__}",
        hint=f"Subclass {kind.task.__name__}, or name other data.",
    )


def _needs_encoder(kind: DataKind, model: object) -> bool:
    """Whether only an encoder answers this kind of data, and the model is none."""
    return bool(kind.answers) and not isinstance(model, TransformerConfig)


def _require_task(task: object, data: FeedingConfig, kind: DataKind, model: object) -> None:
    """Refuse a task that is not the kind's own, and say how to get the two together.

    Where the model fits neither, the same message says so.
    """
    if isinstance(task, kind.task.settings):
        return
    near = [
        other
        for other in KINDS
        if other.settings is kind.settings and isinstance(task, other.task.settings)
    ]
    require(
        bool(near) or kind.names_task,
        "task",
        f"{_option_of(task)} does not fit {kind.rows}",
        hint=kind.model_hint,
    )
    # The task is one of these rows, but not of their problem; bit strings have no problems.
    assert isinstance(data, TextDataConfig | SequenceDataConfig)
    way = near[0].way_to_task if near else ""
    wanted = near[0] if way else kind
    hint = way or f"Set task={kind.task_option}."
    if _needs_encoder(wanted, model):
        hint = f"{hint} {wanted.answers.capitalize()} need model=transformer, too."
    raise UserError("task", f"{_option_of(task)} with data.problem={data.problem}", hint=hint)


def _with_tokenizer(data: TextDataConfig, model: object) -> TextDataConfig:
    """Settings of texts with what reads them: an encoder's tokenizer.

    From scratch an encoder learns word pieces. Other models read words, and no pairs.
    """
    if not isinstance(model, TransformerConfig):
        reads_pairs = not _is_ours(model) or not data.pair
        require(reads_pairs, "data.pair", "only encoders read pairs", hint="Set model=transformer.")
        return data
    if model.windows is Windows.attention:
        require(
            data.problem is not Problem.tags,
            "model.windows",
            "attention joins the windows of a text into one answer, and tags have one a word",
            hint="Leave it out.",
        )
        require(
            data.long is Long.windows,
            "model.windows",
            "attention joins the windows of a text, and there are none",
            hint="Leave it out, or set data.long=windows for texts with labels.",
        )
    if data.tokenizer is not None:
        return data
    if model.pretrained is not None:
        return replace(data, tokenizer=model.pretrained)
    return replace(data, vocabulary=replace(data.vocabulary, kind=VocabularyKind.wordpiece))


def _is_ours(model: object) -> bool:
    return type(model) in MODELS.values()


def _option_of(part: object) -> str:
    """The name of a part on the command line; of a part of your own, its class."""
    options = MODELS | {kind.task_option: kind.task.settings for kind in KINDS}
    return next((name for name, each in options.items() if type(part) is each), type(part).__name__)
