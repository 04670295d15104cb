"""What a run will take and has taken: its expected end, its energy and its price.

`expect_end` is called before training and `close_price` at the end of a run. Between the two an
`ExpectedEnd` listens to the curves. Open this file to change which runs share a note.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import psutil
import torch

from flatout.callbacks.gpu import Card
from flatout.callbacks.hardware_monitor import HardwareMonitor
from flatout.callbacks.progress_line import ProgressLine
from flatout.data.store.cache import default_cache_folder
from flatout.distributed.ranks import cores_here
from flatout.engine.run_length import validations
from flatout.perf.measure.steps import peak_bytes
from flatout.perf.notes import machine_name
from flatout.price.costs import TRIES_SHARE, TRIES_SHARE_IN_BUDGET, PlannedLengths
from flatout.price.energy import EnergyMeter
from flatout.price.expected_end import ExpectedEnd
from flatout.price.notes import PriceNotes
from flatout.price.pace import Work
from flatout.price.settings import as_kwh
from flatout.run.context import Run, Training
from flatout.run.short_try import EndSoon


def expect_end(run: Run, training: Training) -> ExpectedEnd:
    """Let a run say when it will end."""
    curves = training.curves
    sources = curves.monitor.sources or []
    card = next((source for source in sources if isinstance(source, Card)), None)
    notes = notes_of(run)
    ranks = run.ranks
    meter = EnergyMeter(
        card,
        run.settings.asked.price.watts,
        cards=ranks.world,
        machines=ranks.world // ranks.local_world,
    )
    end = ExpectedEnd(
        measure_lengths=lambda: lengths_of_run(run, training),
        clock=curves.clock,
        meter=meter,
        began=run.began,
        noted=None if notes is None else notes.costs(),
        ratios=[] if notes is None else notes.ratios(),
        say=run.folder.say,
        busy=lambda: busy_fraction(curves.monitor),
        seconds_before=lambda: training.checkpoints.seconds_before,
        leaves_cores=_leaves_cores(run, training),
    )
    if run.ranks.is_first:
        for listener in curves.listeners:
            if isinstance(listener, ProgressLine):
                listener.time_left = end.time_left
        curves.each_second.insert(0, end.note)  # before the progress line asks for its time
        curves.listeners.append(end)
    return end


def _leaves_cores(run: Run, training: Training) -> bool:
    """Whether a run on CPUs has fewer threads than there are cores."""
    is_on_cpu = training.trainer.strategy.root_device.type == "cpu"
    return is_on_cpu and run.ranks.local_world * torch.get_num_threads() < len(cores_here())


def close_price(run: Run, training: Training, end: ExpectedEnd) -> None:
    """Write what the run was expected to take, and took, into the summary and the notes."""
    if not run.ranks.is_first or not end.moments:
        return
    price = run.settings.asked.price
    facts = end.facts()
    kwh = as_kwh(end.meter.joules(facts["took_s"]))
    money = price.money(facts["took_s"], kwh)
    facts |= {"kwh": kwh, "counted": end.meter.sources, "money": money, "currency": price.currency}
    facts |= {"ratios": list(end.ratios), "flops_a_step": flops_a_step(training)}
    facts["busy"] = end.busy()
    facts |= memory_gb(run.device)
    if end.lengths is not None:
        work = end.lengths.work
        facts["plan"] = {
            "steps": work.total_steps,
            "steps_an_epoch": len(work.ends) - 1,
            "computed_tokens": work.total,
            "padding_share": work.padding_share,
            "validations": end.lengths.validations,
            "save_every_s": None
            if math.isinf(end.lengths.save_every_s)
            else end.lengths.save_every_s,
        }
    tokens = training.curves.throughput.volume.total.tokens
    if kwh is not None and tokens:
        facts["kwh_per_million_tokens"] = kwh / (tokens / 1e6)
    costs = end.costs()
    notes = notes_of(run)
    began_here = end.resumed_at.steps == 0
    if costs is not None:
        facts["costs"] = asdict(costs)
    if costs is not None and notes is not None and began_here:
        reached_last_step = training.trainer.global_step == run.settings.total_steps
        ratio = end.ratio(facts["took_s"])
        # A try leaves parts of a run out, so what it took says nothing of an estimate.
        is_try = any(
            isinstance(callback, EndSoon) for callback in run.settings.asked.callbacks.values()
        )
        if ratio is not None and reached_last_step and not is_try:
            notes.note_ratio(ratio)
        notes.note_costs(costs)
    run.folder.summary.set("price", facts)


def flops_a_step(training: Training) -> float | None:
    """Floating-point operations of an optimizer step; None where the network counts none."""
    total = training.curves.throughput.volume.total
    return total.flops / total.steps if total.flops and total.steps else None


def memory_gb(device: torch.device) -> dict[str, float]:
    """Most memory that this process has held, also on its card, and what it could have there.

    What is not known is left out.
    """
    sizes = {"host_peak_gb": peak_bytes(torch.device("cpu"))}
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        sizes["card_peak_gb"] = peak_bytes(device)
        sizes["card_free_gb"] = free + torch.cuda.memory_reserved(device)
    return {name: count / 1e9 for name, count in sizes.items() if count is not None}


def lengths_of_run(run: Run, training: Training) -> PlannedLengths | None:
    """The steps, validations and checkpoints of a run by its plan; None for one without an end."""
    settings = run.settings
    trainer = training.trainer
    tries_share = TRIES_SHARE if settings.asked.budget is None else TRIES_SHARE_IN_BUDGET
    # The steps of a run without an end cannot be counted: Lightning says infinite, or -1.
    total_steps = settings.total_steps or trainer.estimated_stepping_batches
    if not 0 < total_steps < math.inf:
        return None
    # of a stream without an end, the run is one epoch
    batches = min(trainer.num_training_batches, total_steps * trainer.accumulate_grad_batches)
    steps_an_epoch = int(batches) // trainer.accumulate_grad_batches
    count = validations(settings.trainer)
    if count is None:
        count = -(-int(total_steps) // max(1, steps_an_epoch))
    if not trainer.enable_validation:
        count = 0
    minutes = settings.asked.checkpoint.every_minutes
    rows = run.parts.shares_of_rows()
    validation = rows.get("validation", 0.0)
    return PlannedLengths(
        work=Work.of(run.parts.train_feed(), int(total_steps), steps_an_epoch),
        validations=count,
        save_every_s=math.inf if minutes is None else 60 * minutes,
        tries_share=tries_share if settings.asked.monitor.verdict else 0.0,
        validation_share=validation,
        # the evaluation reads the validation rows twice: to tune the answers, and to judge them
        evaluation_share=2 * validation + rows.get("test", 0.0),
    )


def notes_of(run: Run) -> PriceNotes | None:
    """The notes of runs like this one; None for parts of the user's own."""
    facts = run.parts.pace_facts(run.settings)
    if not facts:
        return None
    like = {
        "machine": machine_name(),
        "ranks": run.ranks.world,
        "network": facts["network"],
        "precision": run.settings.precision.value.value,
        "threads": run.settings.values["threads"],
    }
    cache = run.settings.asked.data.cache
    folder = Path(cache) if cache else default_cache_folder()
    # Costs are shared by runs that are alike in all facts, ratios by runs of one network on this
    # machine, with as many ranks and threads and the same precision.
    return PriceNotes(folder, like | facts, like)


def busy_fraction(monitor: HardwareMonitor) -> float:
    """The fraction of this machine's cores that other processes take; 0 if unknown."""
    host = monitor.summary().get("host", {})
    if "machine_cpu_share" not in host:
        return 0.0
    own = host["process_cpu_cores"] / (psutil.cpu_count() or 1)
    return max(0.0, float(host["machine_cpu_share"]) - float(own))
