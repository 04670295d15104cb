"""`Verdict` in somebody's Trainer: what it says of a run, and that it leaves the run as it was, to
the bit.
"""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import flatout
from flatout.callbacks import HardwareMonitor, StepTimer, Throughput, Verdict
from flatout.callbacks.clock import FIRST_STEPS
from flatout.callbacks.throughput import FetchTimes
from flatout.perf.verdict import (
    own_tries,
)
from flatout.perf.verdict.anywhere import in_python
from flatout.perf.verdict.rules import verdict as judged
from tests.callbacks.plain import Rows, Small
from tests.perf.verdict.quiet_evidence import QUIET as QUIET_RUN
from tests.perf.verdict.trainings import Drawing, Noisy, Notes, trainer_of
from tests.trainers import QUIET

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*exists and is not empty.*",
    "ignore:You defined a `validation_step`.*",
    "ignore:.*smaller than the logging interval.*",
    "ignore:.*running in `Trainer.barebones=True.*",
)


@pytest.mark.soak(seconds=40)
@pytest.mark.parametrize(
    ("workers", "raced"),
    [
        (0, ["loop", "eager"]),
        (1, ["prefetch_factor=8"]),
    ],
)
def test_nothing_of_the_run_is_changed_to_the_bit(
    workers, raced, tmp_path, everything_races, monkeypatch
):
    """Weights, statistics, gradients, optimizer, random numbers, the loader's order and what its
    data set notes.
    """
    if workers:  # the other case compiles
        monkeypatch.setattr(own_tries, "_COMPILES", 2.0)
    states = []
    notes = Notes()
    for callbacks in ([], [Verdict(seconds=60, log=notes)]):
        L.seed_everything(3, verbose=False)
        module = Noisy()
        data = Drawing()
        loader = DataLoader(
            data, 2, shuffle=True, generator=torch.Generator().manual_seed(1), num_workers=workers
        )
        files = ModelCheckpoint(
            tmp_path / str(len(callbacks)), every_n_train_steps=40, save_top_k=-1
        )
        trainer = trainer_of(tmp_path, *callbacks, files, enable_checkpointing=True)
        trainer.fit(module, loader)
        (path, *_) = sorted(Path(str(files.dirpath)).iterdir())
        checkpoint = torch.load(path, weights_only=False)
        of_lightning = {
            name: checkpoint[name] for name in ("state_dict", "optimizer_states", "global_step")
        }
        kept = [
            path.name,
            sorted(checkpoint["callbacks"]),
            json.dumps(checkpoint["loops"], default=str),
        ]
        draws = [
            loader.generator.get_state(),
            torch.get_rng_state(),
            data.own.normal(),
            np.random.normal(),
        ]
        gradients = [
            weight.grad.clone() for weight in module.parameters() if weight.grad is not None
        ]
        found = [
            *module.state_dict().values(),
            *gradients,
            *draws,
            random.random(),
            data.read,
            module.kept,
        ]
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader)
        after = [list(module.state_dict().values()), trainer.optimizers[0].state_dict()["state"]]
        states.append([kept, of_lightning, found, after])
    (kept_plain, *plain), (kept_judged, *judged) = states
    assert kept_judged == kept_plain
    torch.testing.assert_close(judged, plain, rtol=0, atol=0)
    tried = " ".join(f"{each.cause} {each.override}" for each in callbacks[0].evidence.tried)
    assert all(each in tried for each in raced), (tried, notes.lines)
    assert sum("ms a batch" in line for line in notes.lines) >= 2


def test_a_run_of_five_steps_has_no_verdict_and_says_so(tmp_path):
    notes = Notes()
    verdict = Verdict(log=notes)
    trainer_of(tmp_path, verdict, max_steps=5).fit(Small(), DataLoader(Rows(), 4))
    why = "a verdict needs 30 steps after the first 5, this training had 5"
    assert notes.lines == [f"verdict: none, {why}"]
    verdict.save(tmp_path / "verdict.json")
    assert json.loads((tmp_path / "verdict.json").read_text())["why_none"] == why


def test_a_barebones_trainer_and_a_second_verdict_get_one_sentence_each(tmp_path):
    notes = Notes()
    bare = {
        "barebones": True,
        "max_epochs": 1,
        "accelerator": "cpu",
        "default_root_dir": tmp_path,
    }
    L.Trainer(callbacks=[Verdict(log=notes)], **bare).fit(Small(), DataLoader(Rows(), 1))
    assert notes.lines == ["verdict: none, the Trainer is barebones, and runs without clocks"]
    first = Verdict(seconds=0, log=Notes())
    second = Verdict(seconds=0, log=Notes())
    trainer_of(tmp_path, first, second).fit(Small(), DataLoader(Rows(), 1))
    assert second._log.lines == ["verdict: none, another one judges this training"]
    assert first.verdict is not None
    assert second.verdict is None


def test_a_verdict_that_is_attached_after_the_training_says_so(tmp_path, capsys):
    trainer = trainer_of(tmp_path)
    trainer.fit(Small(), DataLoader(Rows(), 1))
    assert "verdict" not in capsys.readouterr().out
    verdict = flatout.attach(trainer)
    printed = capsys.readouterr().out
    assert printed.startswith(f"verdict: none, it was attached after {trainer.global_step} steps;")
    verdict.save(tmp_path / "verdict.json")
    assert "it was attached after" in (tmp_path / "verdict.json").read_text(encoding="utf-8")
    assert flatout.attach(trainer) is verdict
    assert capsys.readouterr().out == ""


def test_a_trainer_that_somebody_else_built_gets_all_four_once(tmp_path):
    with pytest.raises(flatout.UserError, match="attach: takes a Trainer, not Small"):
        flatout.attach(Small())
    trainer = trainer_of(tmp_path)
    verdict = flatout.attach(trainer)
    assert flatout.attach(trainer) is verdict
    kinds = [type(each) for each in trainer.callbacks]
    assert kinds[:4] == [StepTimer, Throughput, HardwareMonitor, Verdict]
    assert len(set(kinds)) == len(kinds)
    verdict.seconds = 0
    trainer.fit(Small(forward=0.002), DataLoader(Rows(), 1))
    assert verdict.verdict is not None
    assert verdict.timer is trainer.callbacks[0]
    assert verdict.evidence.ms["forward"] > 1.5


def test_a_timer_that_has_counted_trainings_before_says_nothing_of_them_to_the_verdict(tmp_path):
    timer = StepTimer()
    verdict = Verdict(seconds=0, log=Notes())
    files = ModelCheckpoint(tmp_path / "kept", save_last=True)
    slow = trainer_of(tmp_path, timer, verdict, files, enable_checkpointing=True)
    slow.fit(Small(forward=0.03), DataLoader(Rows(), 1), DataLoader(Rows(), 40))
    slow_ms = verdict.evidence.ms["forward"]
    assert slow_ms > 25
    assert verdict.evidence.counts["validation"] == 2
    again = trainer_of(tmp_path, timer, verdict, files, max_epochs=3, enable_checkpointing=True)
    again.fit(
        Small(forward=0.001),
        DataLoader(Rows(), 1),
        DataLoader(Rows(), 40),
        ckpt_path=files.last_model_path,
    )
    assert verdict.evidence.batches == 40
    assert verdict.evidence.counts["validation"] == 1
    assert 1 < verdict.evidence.ms["forward"] < 0.45 * slow_ms  # with those before: over a half
    assert timer.times.total.batches == 120
    trainer_of(tmp_path, timer, verdict).fit(Small(forward=0.001), DataLoader(Rows(), 1))
    assert 1 < verdict.evidence.ms["forward"] < 0.45 * slow_ms  # with those before: over a half


def test_it_can_be_sent_to_another_process():
    sent = pickle.loads(pickle.dumps(Verdict(seconds=3)))
    assert sent.seconds == 3
    assert sent.verdict is None
    assert pickle.loads(pickle.dumps(FetchTimes())).ms is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("~callbacks.TQDMProgressBar", "Trainer(enable_progress_bar=False)"),
        ("~callbacks.MyProgressBar", "leaving MyProgressBar out of Trainer(callbacks=…)"),
        ("~callbacks.Slow", "leaving Slow out of Trainer(callbacks=…)"),
        ("~callbacks.Slow 2", "leaving Slow 2 out of Trainer(callbacks=…)"),
        ("++trainer.val_check_interval=1.0", "Trainer(val_check_interval=1.0)"),
        ("++trainer.a=1.0 ++trainer.b=1", "Trainer(a=1.0, b=1)"),
        (
            "DataLoader(num_workers=1) threads=1",
            "DataLoader(num_workers=1) torch.set_num_threads(1)",
        ),
        ("precision=bf16", 'Trainer(precision="bf16-mixed")'),
        ("compile=false", "leaving out torch.compile"),
        (
            "checkpoint.every_steps=null checkpoint.every_minutes=10",
            "ModelCheckpoint(every_n_epochs=1), or ExactCheckpoint()",
        ),
    ],
)
def test_words_of_the_command_line_become_python(words, said):
    assert in_python(words) == said


def test_the_advice_is_said_in_python_too():
    evidence = replace(QUIET_RUN, host={"machine_cpu_share": 1.0, "process_cpu_cores": 0.7})
    told = judged(evidence, in_python)
    assert (
        told["fix"]
        == "end the other programs, or run elsewhere; until then torch.set_num_threads(1)"
    )
    often = replace(
        QUIET_RUN,
        ms={"forward": 9.0, "validation": 27.1},
        counts={"validation": 40, "checkpoint": 41},
    )
    advised = judged(often, in_python)["fix"]
    assert advised == "Trainer(val_check_interval=1.0, check_val_every_n_epoch=1)"
    L.Trainer(val_check_interval=1.0, check_val_every_n_epoch=1, **QUIET)


@pytest.mark.parametrize("steps", [40, 20])
def test_steps_are_counted_where_accumulation_does_not_divide_the_epoch(
    steps, tmp_path, monkeypatch
):
    """Ten batches an epoch are one step, not ten sixteenths of one."""
    monkeypatch.setattr(own_tries, "starved", lambda evidence: None)
    verdict = Verdict(seconds=0, log=Notes())
    trainer = trainer_of(tmp_path, verdict, max_epochs=steps, accumulate_grad_batches=16)
    trainer.fit(Small(), DataLoader(Rows(), 4))
    assert trainer.global_step == steps
    if steps < 30:
        assert verdict.evidence is None
        assert verdict.why_none.endswith("this training had 20")
    else:
        assert verdict.evidence.steps == steps - FIRST_STEPS
