"""`python -m flatout export`: what transformers and ONNX make of an exported run is what the run
itself says.
"""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from flatout import (
    BiLSTMConfig,
    HeadlinesConfig,
    Predictor,
    TaggedTweetsConfig,
    TagPredictor,
    TextDataConfig,
    fit,
)
from flatout.cli.export import _complete_folder
from flatout.data.batches.flat_batch import flat_batch
from flatout.data.problem import Problem
from flatout.data.tables.roles import Roles
from flatout.data.tokens.subwords import PAIR, Subwords
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.errors import UserError
from flatout.inference.export import export, made_up_rows
from flatout.inference.folder_predictors import predictors_of_folder
from flatout.inference.model_folder import WEIGHTS
from flatout.models.encoder.lora import LoraConfig
from flatout.models.encoder.transformer import Outputs, TransformerConfig
from tests.params import at_once
from tests.refusals import require_printed
from tests.run_files import model_weights
from tests.verbs import verb

TEXTS = ["A senate, a ballot!", "", "striker playoff goal " * 60, "comet 42 ünknown"]


def train_tiny(
    folder: Path, data: TextDataConfig | None = None, model: Any = None, **settings: Any
) -> Path:
    """The folder of a tiny finished run, its weights spread out so that rows are told apart after
    so few steps.
    """
    data = data or TextDataConfig(sample=HeadlinesConfig(rows=200, eval_rows=50, classes=3))
    data.cache = str(folder / "cache")
    data.batch_size = 32
    model = model or TransformerConfig(hidden=32, layers=2, heads=4, **settings)
    run = fit(data, model, epochs=1, output=str(folder / "runs")).folder
    weights = model_weights(run)
    random = torch.Generator().manual_seed(3)
    for weight in weights.values():
        if weight.ndim > 1:
            weight += 0.2 * torch.randn(weight.shape, generator=random)
    save_file(weights, run / "model" / WEIGHTS)
    return run


def answers(folder: Path, texts: list[Any], *pairs: list[str]) -> Tensor:
    """Logits as anybody gets them who has transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits: Tensor = model(
            **tokenizer(texts, *pairs, padding=True, truncation=True, return_tensors="pt")
        ).logits
    return logits


def calibrated(run: Path, texts: list[str]) -> Tensor:
    """What a run answers, at its temperature, or in the unit of its labels."""
    predictor = Predictor.load(run)
    return predictor.outputs(pa.array(texts)) / predictor.temperature


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert expected.std(0).max() > 0.01, "rows are told apart"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("export"))


def test_an_exported_run_answers_in_transformers_as_it_does_here(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert verb("export", finished, "--out", tmp_path / "made" / "out") == 0
    said = capfd.readouterr()
    assert said.err == ""
    written, opening, difference = said.out.splitlines()
    assert written == f"written to {tmp_path / 'made' / 'out'}"
    assert opening.startswith("open it with AutoModelForSequenceClassification.from_pretrained(")
    assert difference.startswith("largest difference from the run's own logits: ")
    assert_same(answers(tmp_path / "made" / "out", TEXTS), calibrated(finished, TEXTS))


def test_an_export_knows_its_classes_and_nothing_of_us(finished: Path, tmp_path: Path) -> None:
    assert verb("export", finished, "--out", tmp_path / "out") == 0
    config = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config
    assert config.id2label == dict(enumerate(Predictor.load(finished).labels.classes))
    assert config.label2id == {name: number for number, name in config.id2label.items()}
    assert config.problem_type == "single_label_classification"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 128
    for path in (tmp_path / "out").glob("*.json"):
        assert "flatout" not in path.read_text(encoding="utf-8")


FAMILIES = [
    "albert",
    "deberta-v2",
    "distilbert",
    "electra",
    "eurobert",
    "modernbert",
    "mpnet",
    "roberta",
    "xlm-roberta",
]


@pytest.mark.parametrize("family", at_once("modernbert", of=FAMILIES, seconds=3))
def test_other_families_answer_the_same(tmp_path: Path, family: str) -> None:
    run = train_tiny(tmp_path, family=family)
    assert verb("export", run) == 0
    assert_same(answers(run / "export", TEXTS), calibrated(run, TEXTS))


@pytest.mark.soak(seconds=3)
def test_matrices_of_lora_are_merged(tmp_path: Path) -> None:
    run = train_tiny(tmp_path, lora=LoraConfig(rank=2))
    assert verb("export", run) == 0
    assert_same(answers(run / "export", TEXTS), calibrated(run, TEXTS))


def numbers(text: str) -> TextDataConfig:
    random = np.random.default_rng(0)
    values = random.integers(0, 10, 200)
    table = {
        "text": [f"{text} {value} of ten" for value in values],
        "label": [f"{1000 + 50 * v}" for v in values],
    }
    return TextDataConfig(
        train=table,
        text="text",
        label="label",
        problem=Problem.regression,
        vocabulary=VocabularyConfig(kind=VocabularyKind.wordpiece, min_frequency=1),
    )


@pytest.mark.parametrize("family", ["bert", *at_once(of=["roberta"], seconds=1)])
def test_a_regression_answers_in_the_unit_of_its_labels(tmp_path: Path, family: str) -> None:
    run = train_tiny(tmp_path, numbers("grade"), family=family)
    assert verb("export", run) == 0
    expected = calibrated(run, TEXTS)
    assert expected.mean() > 900
    assert_same(answers(run / "export", TEXTS), expected)


def pairs() -> TextDataConfig:
    random = np.random.default_rng(0)
    words = np.array("oak fern rose slate".split())
    first = words[random.integers(4, size=200)]
    second = words[random.integers(4, size=200)]
    same = np.where(first == second, "same", "other").tolist()
    return TextDataConfig(
        train={
            "a": [f"{word} {row}" for row, word in enumerate(first)],
            "b": second.tolist(),
            "label": same,
        },
        text=["a", "b"],
        label="label",
        join=PAIR,
        vocabulary=VocabularyConfig(kind=VocabularyKind.wordpiece, min_frequency=1),
    )


def test_the_texts_of_pairs_are_told_apart_as_in_training(tmp_path: Path) -> None:
    run = train_tiny(tmp_path, pairs())
    assert verb("export", run) == 0
    expected = calibrated(run, [f"oak{PAIR}fern rose", f"slate{PAIR}slate"])
    assert_same(answers(run / "export", ["oak", "slate"], ["fern rose", "slate"]), expected)


def several() -> TextDataConfig:
    random = np.random.default_rng(0)
    words = np.array("oak fern rose slate".split())[random.integers(4, size=200)]
    labels = [word + ["|odd", "", ""][row % 3] for row, word in enumerate(words.tolist())]
    return TextDataConfig(
        train={"text": [f"{word} {row}" for row, word in enumerate(words)], "label": labels},
        problem=Problem.multi,
        label_delimiter="|",
        vocabulary=VocabularyConfig(kind=VocabularyKind.wordpiece, min_frequency=1),
    )


def test_each_of_several_labels_answers_the_same(tmp_path: Path) -> None:
    run = train_tiny(tmp_path, several())
    assert verb("export", run) == 0
    opened = AutoModelForSequenceClassification.from_pretrained(run / "export")
    assert opened.config.problem_type == "multi_label_classification"
    assert_same(answers(run / "export", TEXTS), calibrated(run, TEXTS))


def tagged(folder: Path, family: str) -> Path:
    """The folder of a tiny finished run on tags."""
    tweets = TaggedTweetsConfig(rows=200, eval_rows=50)
    data = TextDataConfig(problem=Problem.tags, sample=tweets, max_length=64)
    return train_tiny(folder, data, family=family)


def rows_of_words(run: Path, rows: list[list[str]]) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Rows of words as transformers is given them, and where each word begins."""
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    given = tokenizer(rows, is_split_into_words=True, padding=True, return_tensors="pt")
    begins = []
    for row in range(len(rows)):
        words = given.word_ids(row)
        begins.append(
            [
                place
                for place, word in enumerate(words)
                if word is not None and word not in words[:place]
            ]
        )
    return given["input_ids"], given["attention_mask"], begins


WORDS = [
    ["met", "Zarbo", "in", "Velm", "tonight"],
    ["nothing"],
    "a longer row of words with ünknown 42 ones !".split(),
]


@pytest.mark.parametrize("family", at_once("roberta", of=["bert", "roberta"], seconds=2))
def test_a_run_on_tags_answers_in_transformers_word_by_word_as_it_does_here(
    tmp_path: Path, family: str
) -> None:
    run = tagged(tmp_path, family)
    assert verb("export", run) == 0
    tokens, mask, begins = rows_of_words(run, WORDS)
    opened = AutoModelForTokenClassification.from_pretrained(run / "export").eval()
    with torch.inference_mode():
        logits = opened(input_ids=tokens, attention_mask=mask).logits
    predictor = TagPredictor.load(run)
    words = torch.cat([logits[row, places] for row, places in enumerate(begins)])
    best = words.softmax(-1).max(-1)
    found = predictor.tags(pa.array(WORDS, pa.list_(pa.large_string())))
    assert len(set(found.ids.tolist())) > 1, "words are told apart"
    assert found.ids.tolist() == best.indices.tolist()
    torch.testing.assert_close(
        torch.from_numpy(found.probabilities), best.values, rtol=1e-5, atol=1e-5
    )
    assert opened.config.id2label == dict(enumerate(predictor.names))


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_tags_are_exported_token_by_token(tmp_path: Path, family: str) -> None:
    vocabulary = Subwords.train(
        [pa.array(["oak fern rose slate granite"] * 9)], VocabularyConfig(min_frequency=1)
    )
    config = TransformerConfig(family=family, hidden=32, layers=2, heads=4)
    outputs = Outputs(["O", "B-tree", "I-tree"], "tags")
    model = config.build(
        outputs,
        vocabulary_size=vocabulary.size,
        padding_id=vocabulary.frame.padding,
        separator_id=3,
    )
    roles = Roles(("words",), "tags")
    tagger = TagPredictor(model.eval(), vocabulary, list(outputs.names), 64, roles)
    assert export(tagger, tmp_path) < 1e-5
    opened = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    assert opened.config.id2label[1] == "B-tree"
    row = made_up_rows(tagger)[3]
    with torch.inference_mode():
        torch.testing.assert_close(
            opened(torch.tensor([row])).logits[0], model(flat_batch([row])), rtol=1e-5, atol=1e-5
        )
    (form,) = predictors_of_folder(tagger, tmp_path).values()
    words = pa.array([["oak", "fern"], ["slate"]])
    assert len(form.tags(words).ids) == 3
    form.logits_of = lambda given: torch.zeros(len(given["input_ids"]), 3)
    with pytest.raises(
        UserError, match=r"answers 2 for rows and tokens 2 × 4\. Export the run again"
    ):
        form.tags(words)


@pytest.mark.parametrize(
    "family",
    ["bert", *(pytest.param(family, marks=pytest.mark.soak(seconds=25)) for family in FAMILIES)],
)
def test_onnx_answers_the_same_for_any_shape(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], family: str
) -> None:
    from onnxruntime import InferenceSession

    run = train_tiny(tmp_path, family=family)
    capfd.readouterr()
    assert verb("export", run, "--onnx") == 0
    said = capfd.readouterr()
    assert said.err == ""
    assert said.out.splitlines()[-1].startswith(
        "model.onnx: largest difference from transformers: "
    )
    assert {path.name for path in (run / "export").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.onnx",
        "abstention.json",
        "abstention.npz",
    }
    assert str(Path.cwd()).encode() not in (run / "export" / "model.onnx").read_bytes()
    session = InferenceSession(run / "export" / "model.onnx")
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    for texts in (TEXTS, TEXTS[:1], TEXTS[2:]):
        (found,) = session.run(
            None, dict(tokenizer(texts, padding=True, truncation=True, return_tensors="np"))
        )
        expected = calibrated(run, texts)
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.soak(seconds=30)
def test_onnx_answers_tags_and_pairs_the_same(tmp_path: Path) -> None:
    from onnxruntime import InferenceSession

    run = tagged(tmp_path / "tags", "bert")
    assert verb("export", run, "--onnx") == 0
    tokens, mask, _ = rows_of_words(run, WORDS)
    session = InferenceSession(run / "export" / "model.onnx")
    (found,) = session.run(None, {"input_ids": tokens.numpy(), "attention_mask": mask.numpy()})
    with torch.inference_mode():
        opened = AutoModelForTokenClassification.from_pretrained(run / "export").eval()
        expected = opened(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(
        torch.from_numpy(found)[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-4
    )

    run = train_tiny(tmp_path / "pairs", pairs())
    assert verb("export", run, "--onnx") == 0
    session = InferenceSession(run / "export" / "model.onnx")
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    given = tokenizer(["oak", "slate"], ["fern rose", "slate"], padding=True, return_tensors="np")
    assert [each.name for each in session.get_inputs()] == [
        "input_ids",
        "attention_mask",
        "token_type_ids",
    ]
    (found,) = session.run(None, dict(given))
    expected = calibrated(run, [f"oak{PAIR}fern rose", f"slate{PAIR}slate"])
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)


def test_a_folder_with_something_in_it_is_left_as_it_is(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    assert verb("export", finished, "--out", tmp_path) == 2
    assert f"--out: {tmp_path} exists. Name another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_an_empty_folder_is_filled_and_nothing_lies_beside(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert verb("export", finished, "--out", tmp_path / "out") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_tokenizer_that_would_answer_otherwise_is_not_handed_over(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predictor = Predictor.load(finished)
    predictor.vocabulary.files["tokenizer.json"] = Subwords.train(
        [pa.array(["oak fern"])], VocabularyConfig(min_frequency=1)
    ).files["tokenizer.json"]
    predictor.save(tmp_path / "run" / "model", TransformerConfig(hidden=32, layers=2, heads=4))
    assert verb("export", tmp_path / "run") == 2
    require_printed(capsys.readouterr().err, "export: ", "tokenizer", "other tokens")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["model"]


def test_logits_that_differ_are_not_handed_over(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from flatout.inference import export as module

    opened = module._opened

    def moved(predictor: Any, folder: Path) -> Any:
        net = opened(predictor, folder)
        net.classifier.bias.data += 8e-5
        return net

    monkeypatch.setattr(module, "_opened", moved)
    assert verb("export", finished, "--out", tmp_path / "out") == 2
    assert (
        "export: the exported model answers otherwise: logits differ by" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


def test_a_run_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_tiny(tmp_path, model=BiLSTMConfig(embedding=8, hidden=8))
    assert verb("export", run) == 2
    said = capsys.readouterr().err
    require_printed(said, "model=bilstm", "ONNX", "--onnx")
    assert verb("export", Path(run).parent) == 2
    require_printed(capsys.readouterr().err, "no finished run", "model/", f"{run}?")
    assert verb("export", Path(run).parent.parent) == 2
    require_printed(capsys.readouterr().err, "no finished run", f"{run}?")
    assert verb("predict", Path(run) / "model" / "labels.json", run) == 2
    require_printed(capsys.readouterr().err, "It is a file: the folder of a run stands first")
    assert "Traceback" not in said


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb("export", tmp_path) == 2
    assert "no finished run" in capsys.readouterr().err


def test_missing_packages_of_onnx_are_named_before_anything_is_done(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert verb("export", finished, "--onnx") == 2
    expected = "--onnx: needs the package onnxruntime. Install it with pip install 'flatout[onnx]'."
    assert expected in capsys.readouterr().err
    assert not (finished / "export").exists()


def test_an_export_that_the_disk_refuses_is_one_sentence_and_leaves_nothing(tmp_path):
    def write(tensors: int) -> None:
        with _complete_folder(tmp_path / "export") as beside:
            if tensors:
                save_file({"a": torch.zeros(tensors)}, beside / "a.safetensors")
            (beside / "a.txt").write_text("a" * 1000)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        for tensors in (0, 1000):
            with pytest.raises(UserError, match=r"--out: cannot write .*File too large"):
                write(tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_run_that_cannot_be_read_is_not_called_one_that_cannot_be_written(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    with (
        pytest.raises(UserError, match=r"model: cannot be read: Is a directory\. See who may"),
        _complete_folder(tmp_path / "export") as beside,
    ):
        (beside / "kept.txt").write_text("a")
        source.read_bytes()
    assert list(tmp_path.iterdir()) == [source]


def test_a_folder_that_another_export_has_filled_meanwhile_is_not_called_unreadable(tmp_path):
    with (
        pytest.raises(UserError, match=r"--out: cannot write .*Directory not empty"),
        _complete_folder(tmp_path / "export"),
    ):
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "kept.txt").write_text("a")
    assert [path.name for path in tmp_path.rglob("*")] == ["export", "kept.txt"]
