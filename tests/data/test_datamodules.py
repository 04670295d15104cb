"""TextData and TagData in a plain Trainer with somebody else's LightningModule."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from tests.data import two_ranks
from tests.data.tiny_module import TinyModule
from tests.refusals import refused
from tests.started import free_port, said_by_all
from tests.trainers import quiet_trainer
from tests.warm import begin_function

from flatout.data import TagData, TextData, TextDataConfig
from flatout.data.batches.plan import BatchLayout
from flatout.data.batches.store_data import Placement
from flatout.errors import UserError


def table_of(number: int = 200) -> dict[str, list[str]]:
    return {
        "text": [f"row {i} of {'many ' * (i % 5)}words {i * 7 % 13}" for i in range(number)],
        "label": ["aab"[i % 3] for i in range(number)],
    }


class KeptLog:
    """A RunLog that keeps what it gets."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.decisions: list[tuple[str, object]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def decision(self, name: str, value: object, why: str, evidence: str) -> None:
        self.decisions.append((name, value))


def text_data(**settings) -> TextData:
    return TextData(
        **{
            "source": table_of(),
            "batch_size": 16,
            "log": KeptLog(),
            **settings,
        }
    )


def module_for(data: TextData) -> TinyModule:
    data.setup()
    return TinyModule(data.info.vocabulary.size, len(data.info.labels.classes))


def fitted(data: TextData, **settings) -> TinyModule:
    module = module_for(data)
    quiet_trainer(**settings).fit(module, datamodule=data)
    return module


def pages_read_ahead(folder: Path) -> set[bool]:
    """Of each mapped column of a store, whether the system may read on from what is asked for."""
    found = set()
    is_own = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0]:
            is_own = str(folder) in line
        elif is_own and line.startswith("VmFlags:"):
            found.add("rr" not in line.split())
    return found


@pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="only Linux says how files are mapped"
)
@pytest.mark.parametrize("free", [10, 10**12])
def test_rows_that_memory_cannot_hold_are_read_by_single_pages(free, tmp_path, monkeypatch):
    monkeypatch.setattr("flatout.data.batches.store_data.free_bytes", lambda: free)
    data = text_data(cache=str(tmp_path))
    data.setup()
    rows = [row for batch in data.train_dataloader() for row in batch.rows.tolist()]
    assert sorted(rows) == list(range(data.store.splits["train"].num_rows))
    assert (("reading", "single pages") in data.run_log.decisions) is (free == 10)
    assert pages_read_ahead(data.store.folder) == {free != 10}


def test_each_training_row_comes_once_an_epoch():
    data = text_data()
    module = fitted(data, max_epochs=2)
    rows = sorted(row for *_, rows in module.train_batches for row in rows)
    num_rows = data.store.splits["train"].num_rows
    assert rows == sorted([*range(num_rows), *range(num_rows)])
    first, second = (
        module.train_batches[start:][: len(data.feeds.train)]
        for start in (0, len(data.feeds.train))
    )
    assert [rows for *_, rows in first] != [rows for *_, rows in second]


def test_validation_test_and_prediction_read_all_rows_of_their_split():
    data = text_data(eval_batch_size=5)
    trainer = quiet_trainer()
    module = module_for(data)
    trainer.fit(module, datamodule=data)  # the two batches of Lightning's sanity check come first
    splits = data.store.splits
    assert len(module.validation_rows[0]) == 10
    assert sorted(module.validation_rows[1]) == list(range(splits["validation"].num_rows))
    trainer.validate(module, datamodule=data, verbose=False)
    assert sorted(module.validation_rows[2]) == list(range(splits["validation"].num_rows))
    trainer.test(module, datamodule=data, verbose=False)
    assert sorted(module.test_rows) == list(range(splits["test"].num_rows))
    answers = trainer.predict(module, datamodule=data)
    assert sorted(torch.cat([rows for rows, _ in answers]).tolist()) == list(
        range(splits["test"].num_rows)
    )


def test_a_validation_that_stops_early_starts_with_the_first_batch_each_time():
    data = text_data(eval_batch_size=4)
    module = fitted(data, limit_val_batches=2, val_check_interval=0.5, num_sanity_val_steps=0)
    assert len(module.validation_rows) == 2
    assert module.validation_rows[0] == module.validation_rows[1]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_batches_know_the_real_rows_of_their_step(accumulate):
    data = text_data()
    module = fitted(data, accumulate_grad_batches=accumulate)
    steps = [
        module.train_batches[start:][:accumulate]
        for start in range(0, len(module.train_batches), accumulate)
    ]
    for step in steps:
        assert {step_rows for _, step_rows, *_ in step} == {sum(real for real, *_ in step)}
        assert [ends for _, _, ends, _ in step] == [False] * (accumulate - 1) + [True]
    assert sum(step[0][1] for step in steps) == data.store.splits["train"].num_rows


def test_accumulation_of_four_small_batches_trains_as_one_large_batch_does():
    once = fitted(text_data(batch_size=64))
    four = fitted(text_data(batch_size=16), accumulate_grad_batches=4)
    for name, value in once.state_dict().items():
        torch.testing.assert_close(four.state_dict()[name], value, rtol=0, atol=1e-6)


def test_a_state_after_some_batches_leaves_exactly_the_rest():
    whole = text_data(seed=3)
    begun = text_data(seed=3)
    resumed = text_data(seed=3)
    for data in (whole, begun, resumed):
        data.setup()
    expected = [batch.rows.tolist() for batch in whole.train_dataloader()]
    batches = iter(begun.train_dataloader())
    taken = [next(batches).rows.tolist() for _ in range(4)]
    resumed.load_state_dict(begun.state_dict())  # before there is a feed
    assert taken + [batch.rows.tolist() for batch in resumed.train_dataloader()] == expected


class SaveAt(L.Callback):
    """Saves a checkpoint of Lightning after one step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("step", [3, 7, 10, 13])
def test_a_checkpoint_of_lightning_resumes_with_exactly_the_rest(tmp_path: Path, step):
    path = tmp_path / "kept.ckpt"
    whole = fitted(text_data(), max_epochs=2, callbacks=[SaveAt(step, path)])
    data = text_data()
    module = module_for(data)
    quiet_trainer(max_epochs=2).fit(module, datamodule=data, ckpt_path=path)
    assert len(whole.train_batches) == 20
    assert module.train_batches == whole.train_batches[step:]
    for name, value in whole.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)


def test_a_second_fit_starts_from_the_first_batch():
    data = text_data()
    first, second = (fitted(data, limit_train_batches=3) for _ in range(2))
    assert first.train_batches == second.train_batches


def test_reloading_keeps_the_feeds():
    data = text_data()
    made = []
    module = module_for(data)

    class Collect(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            made.append(trainer.train_dataloader)

    quiet_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, callbacks=[Collect()]).fit(
        module, datamodule=data
    )
    assert made[0] is made[1] is made[2] is data.feeds.train
    assert data.feeds.train.wait_s > 0


def test_overfitting_repeats_the_same_batches():
    data = text_data()
    module = module_for(data)
    with pytest.warns(UserWarning, match="overfit"):
        quiet_trainer(overfit_batches=2, max_epochs=3).fit(module, datamodule=data)
    assert module.train_batches[:2] == module.train_batches[2:4] == module.train_batches[4:]


def test_what_the_store_holds_and_the_kind_of_feed_are_reported_once():
    log = KeptLog()
    data = text_data(log=log)
    fitted(data)
    fitted(data)
    assert log.lines == data.info.lines
    assert log.lines[0].startswith("cache: ")
    assert [name for name, _ in log.decisions] == ["feed"]


def test_without_a_log_the_lines_are_printed(capsys):
    data = TextData(source=table_of())
    data.setup()
    data.train_dataloader()
    assert capsys.readouterr().out.splitlines()[-1].startswith("feed: resident (all rows fit")


def test_a_task_finds_what_it_needs_to_build_its_network():
    data = text_data(max_length=9)
    data.setup()
    info = data.info
    assert (info.labels.classes, info.labels.num_outputs, info.max_length) == (["a", "b"], 2, 9)
    assert sum(info.labels.counts) == info.labels.num_rows == info.summary()["rows"]["train"]
    assert info.vocabulary.size >= 20
    assert (info.key, info.report.hit) == (info.report.key, False)
    assert text_data(max_length=9).open_store().report.hit


def test_a_built_in_sample_knows_its_ceilings():
    from flatout import HeadlinesConfig

    data = TextData(sample=HeadlinesConfig(rows=200, eval_rows=50), log=KeptLog())
    data.setup()
    assert set(data.info.ceilings) == {"train", "validation", "test"}


def test_settings_of_hydra_make_the_same_data():
    config = TextDataConfig(source=table_of(), batch_size=16, accumulate=2)
    data = TextData.of(config, seed=5, log=KeptLog())
    assert data.config == config
    data.setup()
    assert data.feeds.train.plan.accumulate == 2
    assert data.feeds.train.plan.seed == 5


def test_a_placement_wins_over_the_trainer():
    data = text_data(accumulate=3)
    data.setup()
    data.place(Placement(rank=1, world=2, layout=BatchLayout.padded))
    plan = data.feeds.train.plan
    assert (plan.rank, plan.world, plan.accumulate, plan.layout) == (1, 2, 3, BatchLayout.padded)
    assert (data.feeds.validation.plan.rank, data.feeds.validation.plan.accumulate) == (1, 1)


def test_the_layout_is_that_of_the_module_s_network():
    data = text_data()
    module = module_for(data)
    module.model = torch.nn.Identity()
    module.model.layout = "padded"
    quiet_trainer(max_steps=1).fit(module, datamodule=data)
    assert data.feeds.train.plan.layout is BatchLayout.padded


def test_no_test_rows_are_no_test():
    data = text_data(
        source=None, train=table_of(), validation={"text": ["x y"] * 9, "label": list("aab") * 3}
    )
    module = module_for(data)
    assert data.feeds.test is None
    assert data.test_dataloader() == []
    answers = quiet_trainer().predict(module, datamodule=data)
    assert sum(len(rows) for rows, _ in answers) == 9


def tagged_table(number: int = 90) -> dict[str, list[list[str]]]:
    return {
        "tokens": [["Anna", "Lee", f"saw{i}", "Oslo"] for i in range(number)],
        "tags": [["B-PER", "I-PER", "O", "B-LOC"] for _ in range(number)],
    }


def test_tagged_words_come_with_a_tag_at_the_first_piece_of_each_word():
    data = TagData(source=tagged_table(), batch_size=8, log=KeptLog())
    data.setup()
    info = data.info
    assert info.labels.names[0] == "O"
    assert set(info.labels.types) == {"PER", "LOC"}
    assert info.labels.words_per_row == 4
    rows = data.store.splits["train"].num_rows
    counts = dict(zip(info.labels.names, info.count_tags(), strict=True))
    assert counts == {
        "O": rows,
        "B-PER": rows,
        "I-PER": rows,
        "B-LOC": rows,
        "I-LOC": 0,
    }
    batch = next(iter(data.train_dataloader()))
    assert int((batch.targets >= 0).sum()) == 4 * batch.num_rows


BAD = {
    "accumulate beside the Trainer's": (
        {"accumulate": 4},
        {"accumulate_grad_batches": 2},
        (
            r"data.accumulate: 4, but the Trainer takes 2 batches a step. Set"
            r" Trainer\(accumulate_grad_batches=4\), or"
        ),
    ),
    "accumulate alone": (
        {"accumulate": 4},
        {},
        r"takes 1 batch a step. Set Trainer\(accumulate_grad_batches=4\), or",
    ),
    "effective batch": (
        {"effective_batch": 64},
        {},
        (
            r"data.effective_batch: 64 rows are 4 batches a step, but the Trainer takes 1. Set"
            r" Trainer\(acc.*=4\)\."
        ),
    ),
    "accumulation that changes": (
        {},
        {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]},
        "accumulate_grad_batches: changes from epoch to epoch",
    ),
    "a limit inside a step": (
        {},
        {"accumulate_grad_batches": 4, "limit_train_batches": 6},
        (
            r"limit_train_batches: 6 ends an epoch inside a step of 4 batches. Set"
            r" Trainer\(limit_train_batches=4\)"
        ),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_accumulation_that_does_not_fit_the_trainer_is_refused(name):
    settings, of_trainer, message = BAD[name]
    with pytest.raises(UserError, match=message):
        fitted(text_data(**settings), **of_trainer)


@pytest.mark.parametrize(
    "settings",
    [
        {"effective_batch": 64},
        {"accumulate": 4},
        {},
    ],
    ids=str,
)
def test_a_step_that_is_also_the_trainers_is_kept(settings):
    module = fitted(text_data(**settings), accumulate_grad_batches=4)
    assert module.train_batches[0][1] == 64


def test_mistakes_of_a_constructor_are_one_sentence():
    with refused("TextData.batchsize", fix="'batch_size'"):
        TextData(batchsize=3)
    with pytest.raises(UserError, match=r"data.problem: tags in TextData. Use TagData"):
        TextData(problem="tags")
    with pytest.raises(UserError, match=r"data.problem: single in TagData. Use TextData"):
        TagData(problem="single")
    with refused("TextData.info", fix="setup()"):
        TextData().info  # noqa: B018
    from flatout import VocabularyConfig

    with pytest.raises(UserError, match=r"data.vocabulary.kind: bpe with tags \(wordpiece\)"):
        TagData(vocabulary=VocabularyConfig(kind="bpe"))


def test_batches_of_other_data_are_moved_as_lightning_moves_them():
    data = text_data()
    data.setup()
    batch = next(iter(data.train_dataloader()))
    device = torch.device("cpu")
    assert data.transfer_batch_to_device(batch, device, 0) is batch
    moved = data.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved.tokens.device.type == "meta"
    assert moved.lengths.device == device
    assert np.array_equal(data.transfer_batch_to_device([torch.ones(2)], device, 0)[0], np.ones(2))


def run_two_ranks(folder: Path, source: str) -> list[tuple[int, str]]:
    """Exit code and output of each rank."""
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [
        begin_function(
            two_ranks.main, folder, source, RANK=str(rank), LOCAL_RANK=str(rank), **place
        )
        for rank in range(2)
    ]
    try:
        texts = said_by_all(ranks, seconds=150)
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, texts, strict=True)]


def write_table(path: Path, rows: dict[str, list[str]]) -> str:
    lines = [f"{text},{label}\n" for text, label in zip(rows["text"], rows["label"], strict=True)]
    path.write_text("text,label\n" + "".join(lines), encoding="utf-8")
    return str(path)


@pytest.mark.soak(seconds=8)
def test_two_ranks_share_each_step_and_train_as_one_process_does(tmp_path: Path):
    source = write_table(tmp_path / "rows.csv", table_of())
    for number in range(2):
        write_table(tmp_path / f"{number}.csv", table_of(100 + number))
    ended = run_two_ranks(tmp_path, source)
    assert [code for code, _ in ended] == [0, 0], ended
    assert [text.count("cache: ") for _, text in ended] == [2, 0]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    alone = TextData(source=source, batch_size=32, cache=str(tmp_path / "cache"), log=KeptLog())
    alone.setup()
    module = TinyModule(vocabulary=200, classes=2)
    quiet_trainer().fit(module, datamodule=alone)
    steps = [sorted(rows) for *_, rows in module.train_batches]
    for number, rows in enumerate(steps):
        parts = [
            part for rank in (first, second) for part in rank["train"][2 * number : 2 * number + 2]
        ]
        assert sorted(row for *_, rows in parts for row in rows) == rows
        assert (
            {step_rows for _, step_rows, *_ in parts}
            == {sum(real for real, *_ in parts)}
            == {len(rows)}
        )
    for split in ("validation", "test"):
        name = split[:3] if split == "validation" else split
        assert sorted(first[name] + second[name]) == list(range(alone.store.splits[split].num_rows))
    assert first["line"] == second["line"]
    torch.testing.assert_close(
        torch.tensor(first["line"]), module.line.weight.detach(), rtol=0, atol=1e-6
    )
    assert first["refused"] == ""
    assert second["refused"].startswith(
        "data: rank 1 sees other data than the first rank. Every machine needs the"
    )
