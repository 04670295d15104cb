"""Compare two groups of finished runs, paired by their seeds.

The result has the means, and the difference with its 95 % interval:

    seeds                  0      1      2
    first group            80.1   80.9   80.3
    second group           80.6   81.5   80.5
    second - first         0.5    0.6    0.2     mean 0.43, 95 % interval -0.08 to 0.95

A group is a run folder, a folder with run folders in it, or a sweep's folder. Of two runs with one
seed the newer counts. Of a sweep only the confirming runs do: its trials were chosen for their
results. Ratios of speeds have intervals of another kind, in `perf/measure/intervals.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.checkpoints.settings import is_better_lower
from flatout.errors import require
from flatout.files import values_of
from flatout.report.summary import FILE as SUMMARY
from flatout.report.summary import read_summary
from flatout.report.sweep_page import ROWS

_SWEEP = "sweep.json"
_ALLOWED_LOSS = 0.5  # points; a smaller loss counts as none


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two groups on the seeds that both have."""

    metric: str
    seeds: list[int]
    first: Group
    second: Group
    difference: Estimate  # of the second over the first; in points where the metric is a share
    # runs that are left out, each with the reason; and other rows that the groups were judged on
    notes: list[str]
    unit: str
    spent: str = ""  # what a run of each group took

    def lines(self, first: str = "the first", second: str = "the second") -> list[str]:
        """The lines below the table, which call the two groups by these names."""
        # of the second group, and positive where that group is better
        gain = self.difference if self.unit else self.difference.reverse()
        if gain.value == 0:
            return [*filter(None, [*self.notes, self.spent]), "both are equal"]
        better = first
        if gain.value > 0:
            better = second
        else:
            gain = gain.reverse()
        unit = f" {self.unit}" if self.unit else f" in {self.metric}, where less is better"
        sentence = f"{better} is better by {gain.value:.3g}{unit} ({_describe_certainty(gain)})"
        return [*filter(None, [*self.notes, self.spent]), sentence]


def _describe_certainty(gain: Estimate) -> str:
    """The interval of a positive difference in words, and whether it may be chance."""
    if gain.low is None:
        return "a single pair of runs: it may be chance"
    interval = f"95 % interval {gain.low:.3g} to {gain.high:.3g}"
    return f"{interval}, so it may be chance" if gain.low <= 0 else interval


def compare_groups(first: Path, second: Path) -> Comparison:
    """Two groups of runs by the test metric that they were chosen by."""
    (runs, left_out, metric), (others, left_out_there, metric_there) = map(
        _read_group, (first, second)
    )
    metrics = f"{metric} in {first}, {metric_there} in {second}"
    require(
        metric == metric_there,
        "compare",
        f"different metrics: {metrics}",
        hint="Set checkpoint.metric alike.",
    )
    seeds = sorted(runs.keys() & others.keys())
    listed = " and ".join(", ".join(map(str, sorted(each))) for each in (runs, others))
    require(
        bool(seeds),
        "compare",
        f"no seed is in both groups (seeds {listed})",
        hint="Train both with seed=0,1,2.",
    )
    # Seeds that one group lacks would compare the luck of seeds, so they are left out.
    notes = left_out + left_out_there
    for group, folder in ((runs, first), (others, second)):
        alone = sorted(group.keys() - set(seeds))
        notes += [f"left out: {folder}, seed {seed}: the other group has none" for seed in alone]
    judged = sorted({_judged_on(runs[seed]) for seed in seeds})
    judged_there = sorted({_judged_on(others[seed]) for seed in seeds})
    if judged != judged_there:
        notes.append(f"judged on other rows: {', '.join(judged)}; and {', '.join(judged_there)}")
    factor, unit = (1.0, "") if is_better_lower(metric) else (100.0, "points")
    values = [factor * _value(runs[seed], metric) for seed in seeds]
    values_there = [factor * _value(others[seed], metric) for seed in seeds]
    difference = paired_difference(values, values_there)
    means = Group.of(values), Group.of(values_there)
    spent = describe_spent([runs[seed] for seed in seeds], [others[seed] for seed in seeds])
    return Comparison(metric, seeds, *means, difference, notes, unit, spent)


def describe_spent(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> str:
    """`a run took 12.3 and 15.1 s, 0.0021 and 0.0026 kWh`: means of what all runs know."""
    texts = []
    for name, unit in (("took_s", "s"), ("kwh", "kWh"), ("money", "")):
        means = [_mean_price(group, name) for group in (first, second)]
        if None not in means:
            shown = unit or first[0]["price"]["currency"]
            texts.append(f"{means[0]:.3g} and {means[1]:.3g} {shown}")
    return f"a run took {', '.join(texts)}" if texts else ""


def _mean_price(group: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = []
    for summary in group:
        value = (summary.get("price") or {}).get(name)
        if value is None:
            return None
        values.append(float(value))
    return statistics.fmean(values)


def summaries_in(folder: Path) -> list[Path]:
    """The summaries of a group; none where a folder neither holds runs nor is one."""
    depths = ["confirm-*/"] if (folder / _SWEEP).is_file() else ["", "*/", "*/*/"]
    return next(filter(None, (sorted(folder.glob(depth + SUMMARY)) for depth in depths)), [])


def _read_group(folder: Path) -> tuple[dict[int, Mapping[str, Any]], list[str], str]:
    """Finished runs by their seed, those that are left out, and the metric that chose them."""
    summaries: dict[int, Mapping[str, Any]] = {}
    left_out: list[str] = []
    # the newest first: of two runs with one seed it counts
    paths = sorted(summaries_in(folder), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    require(
        bool(paths) or not (folder / _SWEEP).is_file(),
        "compare",
        f"{folder} holds no confirming runs",
        hint=(
            f"Confirm its best setting: confirm=3. python -m flatout compare {folder} lists its"
            " trials."
        ),
    )
    require(
        bool(paths),
        "compare",
        f"{folder} holds no runs",
        hint="Name a run folder, or a folder of run folders.",
    )
    # runs of one list differ in their settings, so no one of them stands for the others
    is_list = (folder / ROWS).is_file()
    for path in paths:
        summary = read_summary(path.parent)
        if summary["status"] != "finished":
            left_out.append(f"left out: {path.parent}: {summary['status']}")
            continue
        with values_of(path):
            seed = int(summary["seed"])
            describe_spent([summary], [summary])
            value = _metric(summary, str(summary["metric"]))
            float(0.0 if value is None else value)
        require(
            seed not in summaries or not is_list,
            "compare",
            f"{folder} has several finished runs with seed {seed}",
            hint=f"Name one of them; python -m flatout compare {folder} lists all.",
        )
        if seed in summaries:
            left_out.append(f"left out: {path.parent}: a newer run has seed {seed}, too")
            continue
        summaries[seed] = summary
    require(
        bool(summaries),
        "compare",
        f"{folder} has no finished run",
        hint="Train it to its end first.",
    )
    metrics = sorted({str(summary["metric"]) for summary in summaries.values()})
    require(
        len(metrics) == 1,
        "compare",
        f"{folder} has runs by {' and by '.join(metrics)}",
        hint="Compare like with like.",
    )
    return summaries, left_out, metrics[0]


def _judged_on(summary: Mapping[str, Any]) -> str:
    rows = summary["data"]["rows"]
    split = "test" if rows["test"] else "val"
    return f"{rows[split] or 0:,} {split} rows of {summary['data']['source']}"


def _metric(summary: Mapping[str, Any], metric: str) -> Any:
    """The metric as the summary has it, of the test rows where there are any."""
    return summary["metrics"].get(f"test/{metric}", summary["metrics"].get(f"val/{metric}"))


def _value(summary: Mapping[str, Any], metric: str) -> float:
    """The metric on the test rows, or on the validation rows where there are no test rows."""
    value = _metric(summary, metric)
    require(
        value is not None,
        "compare",
        f"seed {summary['seed']} has no {metric}",
        hint="Train it to its end first.",
    )
    return float(value)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the interval it lies in; without one where too few values bound it."""

    value: float
    low: float | None = None
    high: float | None = None

    def reverse(self) -> Estimate:
        """The difference the other way round: of the first over the second."""
        if self.low is None or self.high is None:
            return Estimate(-self.value)
        return Estimate(-self.value, -self.high, -self.low)


@dataclass(frozen=True, slots=True)
class Group:
    """Mean and standard deviation of some values; of one value it has none."""

    mean: float
    sd: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Group:
        return cls(
            statistics.fmean(values),
            statistics.stdev(values) if len(values) > 1 else None,
            tuple(values),
        )


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Mean of `second - first`, pair by pair, with its 95 % interval."""
    from scipy.special import stdtrit

    # A seed's luck shows in both groups, so the differences vary less than the values do. Their
    # mean follows Student's distribution: 1.96 standard errors would be too few for few seeds.
    differences = [after - before for before, after in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Estimate(mean)
    half = (
        float(stdtrit(len(differences) - 1, 0.975))
        * statistics.stdev(differences)
        / math.sqrt(len(differences))
    )
    return Estimate(mean, mean - half, mean + half)


def quality_sentence(difference: Estimate) -> str:
    """A sentence that says whether quality stayed, by the mean difference in points."""
    shown = f"{difference.value:+.2f} points"
    if difference.low is not None and difference.high is not None:
        shown += f", 95 % interval {difference.low:+.2f} to {difference.high:+.2f}"
    if difference.value < -_ALLOWED_LOSS:
        return f"a loss beyond {_ALLOWED_LOSS:g} points ({shown})"
    is_sure = difference.low is not None and difference.low >= -_ALLOWED_LOSS
    why = "a single pair does not" if difference.low is None else "the interval does not"
    unsure = "" if is_sure else f"; {why} rule out a larger loss"
    return f"no loss beyond {_ALLOWED_LOSS:g} points ({shown}{unsure})"
