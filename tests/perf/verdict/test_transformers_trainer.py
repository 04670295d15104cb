"""`HFVerdict` in somebody's Trainer of transformers: what it says, and that it changes nothing."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from flatout import attach
from flatout.callbacks import HFVerdict
from flatout.callbacks.read_places import ReadPlaces
from flatout.perf.verdict.evidence import Evidence
from flatout.perf.verdict.predicted import TransformersFacts, predict_findings
from flatout.perf.verdict.rules import verdict
from flatout.perf.verdict.transformers_trainer import in_transformers
from tests.params import at_once
from tests.perf.verdict.transformers_trainings import KINDS, LENGTH, trainer_of, weights_of


@pytest.mark.parametrize("kind", at_once("masked words", of=KINDS, seconds=5))
def test_weights_and_random_numbers_are_the_same_to_the_bit(kind, tmp_path):
    ends = []
    for callbacks in ([], [HFVerdict()]):
        trainer = trainer_of(kind, tmp_path, *callbacks)
        trainer.train()
        hooks = [*trainer.model._forward_hooks, *trainer.model._forward_pre_hooks]
        assert hooks == []
        ends.append((weights_of(trainer), torch.get_rng_state()))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_the_split_the_padding_and_the_counts_of_a_training_are_those_of_its_data(tmp_path):
    found = HFVerdict()
    more = {
        "logging_steps": 5,
        "eval_strategy": "steps",
        "eval_steps": 15,
        "save_strategy": "epoch",
    }
    trainer = trainer_of("classification", tmp_path / "out", found, slow_s=0.0005, **more)
    trainer.train()
    evidence = found.evidence
    assert evidence is not None
    assert (evidence.steps, evidence.batches, evidence.rows_per_batch) == (45, 45, 8)
    assert evidence.counts == {"logging": 10, "validation": 4, "checkpoint": 1}
    assert evidence.ms["wait"] > 8 * 0.5
    assert {"forward", "backward", "optimizer", "validation"} <= set(evidence.ms)
    assert evidence.padding_share == pytest.approx(1 - 8 / LENGTH, abs=0.03)
    assert (evidence.precision, evidence.epochs) == ("32-true", 1.0)
    found.save(tmp_path / "verdict.json")
    kept = json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))
    assert kept["verdict"]["sentence"] == found.verdict["sentence"]
    assert 0 < kept["steps_per_s"]["low"] <= kept["steps_per_s"]["value"]


class Sleeps(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(0.004)


def test_an_attached_verdict_names_a_slow_callback_and_leaves_it_as_it_was(tmp_path, capsys):
    slow = Sleeps()
    trainer = trainer_of("regression", tmp_path, slow)
    found = attach(trainer)
    assert attach(trainer) is found
    trainer.train()
    assert found.evidence.callbacks["Sleeps"] > 4
    assert "on_step_end" not in vars(slow)
    assert "verdict: 45 steps, " in capsys.readouterr().out


def test_a_short_training_has_no_verdict_and_says_why(tmp_path, capsys):
    found = HFVerdict()
    trainer_of("tags", tmp_path, found, max_steps=20).train()
    assert (found.verdict, found.evidence) == (None, None)
    assert "verdict: none, a verdict needs 30 steps after the first 5" in capsys.readouterr().out


def test_a_verdict_that_is_attached_after_the_training_says_so(tmp_path, capsys):
    trainer = trainer_of("regression", tmp_path, max_steps=2)
    trainer.train()
    capsys.readouterr()
    attach(trainer)
    assert "verdict: none, it was attached after 2 steps;" in capsys.readouterr().out


class Breaks(TrainerCallback):
    def on_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 21:
            raise RuntimeError("planted")


def test_a_training_that_fails_in_a_step_leaves_nothing_to_the_next_one(tmp_path):
    found = HFVerdict()
    breaking = trainer_of("tags", tmp_path, found, Breaks())
    with pytest.raises(RuntimeError, match="planted"):
        breaking.train()
    trainer_of("tags", tmp_path, found, max_steps=2).train()
    assert [*breaking.model._forward_hooks, *breaking.model._forward_pre_hooks] == []
    assert torch.overrides._get_current_function_mode() is None


def evidence_of(**ms: float) -> Evidence:
    return Evidence(
        device="cpu", steps=100, batches=100, rows_per_batch=8, feed="own", ms=ms, cores=8
    )


def first_cause(evidence: Evidence, **facts: Any) -> dict[str, Any]:
    return verdict(
        evidence, in_transformers, predict_findings(evidence, TransformersFacts(**facts))
    )


@pytest.mark.parametrize(
    ("ms", "facts", "cause", "fix"),
    [
        ({"wait": 20.0}, {}, "data", "dataloader_num_workers=4"),
        ({"wait": 20.0}, {"workers": 2, "start_ms": 15.0}, "data", "persistent_workers=True"),
        ({}, {"fixed_padding": 0.6}, "padding", "DataCollatorWithPadding"),
        ({}, {"recomputes": True}, "recomputing", "gradient_checkpointing"),
        ({"logging": 5.0}, {}, "logging", "TrainingArguments(logging_steps=50)"),
        ({"validation": 9.0}, {}, "validation", 'TrainingArguments(eval_strategy="epoch")'),
        ({"checkpoint": 9.0}, {}, "checkpoint", 'TrainingArguments(save_strategy="epoch")'),
    ],
)
def test_a_cause_is_named_with_what_a_script_changes(ms, facts, cause, fix):
    evidence = evidence_of(forward=3.0, backward=5.0, optimizer=1.0, **ms)
    evidence.flush_every = 1
    evidence.counts = {name: 20 for name in ("logging", "validation", "checkpoint") if name in ms}
    evidence.padding_share = 0.7 if "fixed_padding" in facts else 0.0
    found = first_cause(evidence, **facts)
    assert found["cause"] == cause
    assert fix in found["fix"]


@pytest.mark.parametrize(
    ("reads", "fix"),
    [
        ({"project/loss.py:7": 2.0}, "read it every logging_steps steps: project/loss.py:7"),
        ({"transformers/trainer.py:9": 1.0}, "TrainingArguments(logging_nan_inf_filter=False)"),
    ],
)
def test_lines_that_read_from_a_card_in_each_step_are_named(reads, fix):
    evidence = evidence_of(forward=3.0, backward=5.0, optimizer=1.0, other=9.0)
    evidence.device = "cuda"
    found = first_cause(evidence, reads=reads)
    assert found["cause"] == "reads"
    assert fix in found["fix"]


def test_rows_of_unlike_length_are_grouped_unless_they_are_already():
    evidence = evidence_of(forward=30.0, backward=50.0, optimizer=1.0)
    evidence.padding_share = 0.6
    assert "group_by_length" in first_cause(evidence)["fix"]
    assert first_cause(evidence, groups_lengths=True)["cause"] == "nothing"


def test_a_prediction_that_is_uncertain_is_not_called_measured():
    found = first_cause(evidence_of(wait=1.4, forward=10.0))
    assert "predicted, too uncertain to promise" in found["sentence"]


def test_reads_of_numbers_are_counted_by_the_line_that_reads():
    loss = torch.ones(())
    with ReadPlaces() as reads:
        float(loss)
        loss.item()
        bool(loss > 0)
        loss.sum()
    assert sum(reads.counts.values()) == 3
    assert all(place.startswith("verdict/test_transformers_trainer.py:") for place in reads.counts)
