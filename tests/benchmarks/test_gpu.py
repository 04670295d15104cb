"""Each measurement of `bench gpu` takes a device, and is run here on the CPU, at the smallest size.

So the first card meets no programme that has never run. What CUDA alone has is stood in for: its
operators of attention, little memory, and its switch that forbids waits.
"""

from __future__ import annotations

import inspect
import io
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from benchmarks import gpu
from benchmarks.bert import base_claims
from benchmarks.card import graphs, kernels, ranks, runs, speed, steps
from benchmarks.card.every_model import CASES, Parts
from benchmarks.card.place import Place
from benchmarks.claim import Claim, Options, bounded

from flatout.cli.bench import line
from flatout.models.encoder.attention import KERNELS, Kernel
from tests.composed import compose_run
from tests.models.test_attention import Operators
from tests.scarce import Scarce
from tests.warm import begin_warm

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about trainers as small as these
IN_SOAK = pytest.mark.soak(seconds=60)


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(CPU, tmp_path, Options(tiny=True), begin_warm)


def require_rows(found: list[Claim], rows: tuple[str, ...], *failing: str) -> None:
    assert [claim.claim[: len(row)] for claim, row in zip(found, rows, strict=True)] == list(rows)
    assert [claim.claim for claim in found if not claim.holds] == list(failing), "\n".join(
        map(line, found)
    )


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_without_a_card_every_row_says_so(no_card):
    found = list(gpu.claims(Options()))
    assert [claim.claim for claim in found] == [
        row for part in gpu.PARTS.values() for row in part.rows
    ]
    assert len({claim.claim for claim in found}) == len(found) > 60
    assert {claim.note for claim in found} == {"does not apply here: no card"}
    assert not any(claim.applies for claim in found)


def test_what_a_part_needs_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpu.what_is_missing(gpu.PARTS["two cards"]) == "1 card"
    assert gpu.what_is_missing(gpu.PARTS["start"]) == ""
    assert (
        gpu.what_is_missing(replace(gpu.PARTS["start"], needs="no_such_package"))
        == "no package no_such_package"
    )
    late = list(gpu.part_claims("start", Options(), left_s=0))
    assert {claim.note for claim in late} == {"does not apply here: its time was over"}


def test_a_part_whose_process_fails_keeps_the_rows_before(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    first = json.dumps(bounded(runs.START_ROWS[0], 0.0, "", most=0).as_dict())
    script = f"""if True:
        import json, sys
        settings = json.loads(sys.stdin.read())
        open(settings["folder"] + "/rows.jsonl", "w").write({first!r})
        sys.exit("broken on purpose")
    """
    found = list(gpu.part_claims("start", Options(), run=[sys.executable, "-c", script]))
    require_rows(found, runs.START_ROWS, runs.START_ROWS[1])
    assert found[1].note == "ended with 1: broken on purpose"
    assert "NO" in line(found[1])
    assert "broken on purpose" in capsys.readouterr().err


@pytest.mark.soak(seconds=2)
def test_a_part_that_hangs_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    begun = tmp_path / "begun"
    script = f"""if True:
        import subprocess, sys, time
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
        )
        open({str(begun)!r}, "w").write(str(child.pid))
        time.sleep(60)
    """
    found, why = gpu.measured_apart("start", Options(), tmp_path, 2, [sys.executable, "-c", script])
    assert (found, why) == ([], "not ended after 2 s")
    child = int(begun.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_the_process_of_a_part_writes_each_row_as_it_finds_it(monkeypatch, tmp_path):
    def measure(place: Place):
        yield bounded("one", float(place.options.rounds), "", most=3)
        raise RuntimeError("later")

    monkeypatch.setitem(gpu.PARTS, "start", gpu.Part(("one", "two"), measure))
    settings = {
        "part": "start",
        "device": "cpu",
        "folder": str(tmp_path),
        "options": {"quick": True},
    }
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(settings)))
    with pytest.raises(RuntimeError, match="later"):
        gpu.measure_part()
    (row,) = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert Claim(**json.loads(row)) == bounded("one", 3.0, "", most=3)


def test_kernels_of_attention(place, monkeypatch):
    Operators(monkeypatch)
    monkeypatch.setattr(kernels, "_HEADS", ((2, 12), (2, 64)))
    require_rows(list(kernels.kernel_claims(place)), kernels.KERNEL_ROWS)


def test_a_kernel_that_computes_something_else_is_found(monkeypatch):
    padded = KERNELS[Kernel.padded]
    given = (CPU, Kernel.padded, torch.bfloat16)
    assert kernels.difference(*given, "all", "1 row", (2, 12)) < 0.03
    monkeypatch.setitem(
        KERNELS, Kernel.padded, lambda *parts, **named: padded(*parts, **named) * 1.1
    )
    assert kernels.difference(*given, "all", "1 row", (2, 12)) > 0.03


def test_a_mask_that_is_another_one_backwards_is_found(monkeypatch):
    padded = KERNELS[Kernel.padded]

    def of_two_masks(*parts, **named):
        found = padded(*parts, **named)
        other = padded(*parts, **named)
        return found.detach() + other - other.detach()

    monkeypatch.setitem(KERNELS, Kernel.padded, of_two_masks)
    gap, kept = kernels.dropout_gap(CPU, Kernel.padded, torch.float32)
    assert gap > 0.1
    assert kept > 1.1


@pytest.mark.soak(seconds=4)
def test_steps_of_every_model(place):
    require_rows(list(steps.step_claims(place)), steps.STEP_ROWS)


@pytest.mark.parametrize("name", ["bilstm", "bert", "tags"])
def test_a_card_s_batch_of_texts_looks_up_more_than_3072_words(place, name):
    """Of fewer, CUDA computes the gradient of the table in another way."""
    asked: list[tuple[int, ...]] = []

    def note(*sizes: int) -> Parts:
        asked.append(sizes)
        raise RuntimeError("no training here")

    steps.what_waits(replace(place, options=Options()), replace(CASES[name], make=note))
    ((_, rows),) = asked
    data, _ = CASES[name].make(1, rows)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch.num_rows == rows
    assert batch.num_tokens > 3_072


def test_a_step_that_fails_names_why(place, monkeypatch):
    def fails(*unused):
        raise RuntimeError("called a synchronizing CUDA operation\nmore")

    monkeypatch.setattr(steps.ForbidsWaits, "on_train_batch_end", fails)
    assert (
        steps.what_waits(place, CASES["textcnn"])
        == "RuntimeError: called a synchronizing CUDA operation"
    )


def test_waits_are_forbidden_from_the_first_batch_to_the_last(monkeypatch):
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    forbids = steps.ForbidsWaits(torch.device("cuda"))
    for step in (1, 2, 3):
        forbids.on_train_batch_end(SimpleNamespace(global_step=step, max_steps=3))
    forbids.on_train_epoch_end()
    assert modes == ["error", "error", "default", "default"]


@pytest.mark.soak(seconds=6)
def test_processes_of_the_fork_server_are_looked_at():
    assert runs.look_from_fork_server(CPU) == ""
    # a torch for GPUs misses the driver, another one itself
    why = runs.look_from_fork_server(torch.device("cuda"))
    assert why.startswith(("AssertionError", "RuntimeError")) or torch.cuda.is_available(), why


def test_words_of_every_run_are_known(tmp_path):
    place = Place(CPU, tmp_path, Options())
    for name in runs.EXPERIMENTS:
        words = place.words(
            "run", *runs.experiment(place, name, "+trainer.deterministic=true", "precision=bf16")
        )
        config = compose_run([word for word in words[1:] if not word.startswith("hydra.")])
        assert config.trainer["deterministic"]
        assert config.monitor.flush_every == 1


@pytest.mark.soak(seconds=4)
def test_curves_stand_side_by_side(place):
    found = list(runs.curve_claims(place, ("headlines_cnn",)))
    require_rows(found, runs.curve_rows("headlines_cnn"))
    assert found[0].ours == 0
    assert found[0].note.startswith("steps 1 5 9 12 16: headlines_cnn_fp32, ")
    assert found[1].theirs
    assert found[2].note == "does not apply here: no fp16 on a CPU"


@pytest.mark.soak(seconds=4)
def test_a_batch_that_does_not_fit_is_trained_in_pieces(place):
    found = list(runs.memory_claims(place, lambda device: nullcontext({"scarce": Scarce(5)})))
    require_rows(found, runs.MEMORY_ROWS)
    assert found[0].ours >= 1
    assert found[0].note.startswith("trained in pieces: ")


def test_memory_is_little_within_and_whole_after(monkeypatch):
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**34)
    )
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, device: fractions.append(part)
    )
    with runs.little_memory(torch.device("cuda")) as more:
        assert more == {}
        assert fractions == [3 / 64]
    assert fractions == [3 / 64, 1.0]


def test_every_model_that_a_graph_takes_has_a_row(place):
    found = list(graphs.graph_claims(place))
    assert [claim.claim for claim in found] == list(graphs.GRAPH_ROWS)
    assert len(found) == 20
    assert not any(claim.applies for claim in found)  # a CPU captures none


def test_a_training_that_is_not_captured_says_why(place):
    replayed, note = graphs.replay(place, "textcnn")
    assert replayed == 0
    assert "not on a CPU" in note


def test_an_lstm_is_timed_against_both_loops(place):
    found = list(speed.lstm_claims(place))
    assert [claim.claim for claim in found] == list(speed.LSTM_ROWS)
    *loops, captured_loop = found
    assert all(claim.ours > 0 and claim.theirs for claim in loops)
    assert not captured_loop.applies  # a CPU captures none


def test_a_gpu_is_waited_for_where_an_epoch_is_timed(monkeypatch):
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    clock = speed.WaitingClock(torch.device("cuda"))
    clock.on_train_epoch_start(SimpleNamespace(), SimpleNamespace())
    clock.on_train_epoch_end(SimpleNamespace(), SimpleNamespace())
    assert len(waits) == 2
    assert clock.ended >= clock.started > 0


def test_the_encoder_is_that_of_the_other_bench(place, monkeypatch):
    given = []

    def noted(*arguments):
        given.append(inspect.signature(base_claims).bind(*arguments).arguments)
        yield bounded("BERT-base: MFU of real tokens", 1.0, "", most=1)

    monkeypatch.setattr(speed, "base_claims", noted)
    assert len(list(speed.encoder_claims(place))) == 1
    assert given[0]["device"] == CPU
    assert given[0]["options"].rounds == 1


@IN_SOAK
def test_runs_of_a_card_start(place):
    require_rows(list(runs.start_claims(place)), runs.START_ROWS)


@IN_SOAK
@pytest.mark.parametrize("name", runs.RESUMED)
def test_runs_are_killed_and_resumed(place, name):
    require_rows(
        list(runs.resume_claims(place, (name,))),
        (f"{name}: killed and resumed, bytes that differ",),
    )


@IN_SOAK
def test_commands_choose_repeat_compile_and_look(place):
    require_rows(list(runs.command_claims(place)), runs.COMMAND_ROWS)


@IN_SOAK
def test_an_encoder_is_timed_against_the_trainer(place):
    pytest.importorskip("accelerate", reason="the Trainer's side needs the extra bench")
    without_compiled = replace(place, options=Options(tiny=True, quick=True))
    found = list(
        speed.encoder_claims(
            without_compiled,
            {
                "hidden": 32,
                "layers": 1,
                "heads": 2,
            },
        )
    )
    assert [
        claim.claim[: len(row)] for claim, row in zip(found, speed.ENCODER_ROWS, strict=True)
    ] == list(speed.ENCODER_ROWS)


@IN_SOAK
def test_two_ranks_train_as_one_and_a_killed_one_is_named(place):
    require_rows(list(ranks.rank_claims(place)), ranks.RANK_ROWS)
