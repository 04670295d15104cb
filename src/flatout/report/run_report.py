"""What a run has to say for itself, read off `summary.json` in one place.

The closing table of the terminal, TensorBoard's text and `report.html` show the texts and rows of a
`RunReport`. Open this file to change how a result is worded, or to show more of a summary.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.data.checks.findings import counted
from flatout.errors import printable
from flatout.price.words import (
    describe_correction,
    describe_money,
    describe_seconds,
    describe_span,
)

EARLY_END = "early end of training"  # name of the choice that records that patience ended training
_CHOICE = operator.itemgetter("name", "value", "why", "evidence")
_CHECK = operator.itemgetter("level", "source", "what", "hint")


@dataclass(frozen=True, slots=True)
class Score:
    """A metric of a run, and what stands beside it."""

    name: str
    value: float
    interval: str  # in words
    of_baseline: float | None
    of_commonest: str  # the accuracy of the commonest class, in words

    @property
    def share_of_baseline(self) -> str:
        """The value as a percentage of the baseline's; empty where one is negative or unknown.

        A percentage of a negative score, or by one, has no meaning.
        """
        if self.of_baseline is None or self.of_baseline <= 0 or self.value < 0:
            return ""
        return f"{self.value / self.of_baseline:.1%}"


@dataclass(frozen=True, slots=True)
class RunReport:
    """What is shown of a run. A text or a list is empty where nothing is known.

    The run may still train, or have failed. `per_class`: precision, recall, F1 and rows of each
    class.
    """

    summary: Mapping[str, Any]
    per_class: Sequence[Mapping[str, Any]] = ()

    @property
    def about(self) -> str:
        """`BiLSTM, 1,000 parameters on news.csv: 800 train, 100 val rows`."""
        parameters = self.summary["model"]["parameters"]
        about = self._model
        if parameters:
            about += f", {parameters:,} parameters"
        data = self.summary["data"]
        about += f" on {data['source'] or 'no data yet'}"
        rows = (data.get("rows") or {}).items()
        counts = [f"{count:,} {split}" for split, count in rows if count]
        return f"{about}: {', '.join(counts)} rows" if counts else about

    @property
    def title(self) -> str:
        """`BiLSTM, 30 steps, 4.5 s`, and how it ended if it did not finish."""
        seconds = self.summary["training"]["seconds"]
        status = self.summary["status"]
        parts = [
            self._model,
            self.steps,
            "" if seconds is None else f"{seconds:.1f} s",
            "" if status == "finished" else status,
        ]
        return ", ".join(filter(None, parts))

    @property
    def _model(self) -> str:
        return self.summary["model"]["name"] or "no model yet"

    @property
    def steps(self) -> str:
        steps = self.summary["training"]["steps"]
        return "" if steps is None else counted(steps, "step")

    @property
    def best_epoch(self) -> str:
        """Which epoch's weights answer, and by which metric; empty where none was chosen."""
        training = self.summary["training"]
        best = training.get("best_epoch")
        if best is None or self.summary["metric"] is None:
            return ""
        return f"{best} of {training['epochs']}, by val/{self.summary['metric']}"

    @property
    def early_end(self) -> str:
        """After which epoch patience ended training, why, and which epoch is kept; else empty."""
        for choice in self.summary["choices"]:
            if choice["name"] == EARLY_END:
                return f"{choice['value']}: {choice['why']}; {choice['evidence']}"
        return ""

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics. JSON has no NaN: one that was none is null there, and is left out."""
        metrics = self.summary["metrics"].items()
        return {name: value for name, value in metrics if value is not None}

    @property
    def scores(self) -> list[Score]:
        """Metrics on test rows; on validation rows where no test row was scored."""
        split = self._split
        baseline = self._baseline.get("metrics") or {}
        intervals = self.summary.get("intervals") or {}
        scores = []
        for name, value in self.metrics.items():
            if name.startswith(split):
                commonest = self._commonest_class if name == f"{split}accuracy" else ""
                interval = interval_text(intervals.get(name))
                scores.append(Score(name, value, interval, baseline.get(name), commonest))
        return scores

    @property
    def comparisons(self) -> list[tuple[str, float]]:
        """Metrics of the baseline that the run has none of."""
        baseline = (self._baseline.get("metrics") or {}).items()
        metrics = self.summary["metrics"]
        return [
            item for item in baseline if item[0].startswith(self._split) and item[0] not in metrics
        ]

    @property
    def baseline(self) -> str:
        """The name of what scores are compared with."""
        return str(self._baseline.get("name"))

    @property
    def _baseline(self) -> Mapping[str, Any]:
        return self.summary["baseline"] or {}

    @property
    def _split(self) -> str:
        is_tested = any(name.startswith("test/") for name in self.summary["metrics"])
        return "test/" if is_tested else "val/"

    @property
    def _commonest_class(self) -> str:
        """The accuracy of always answering the commonest class, if half of the rows have it."""
        num_rows = sum(row["support"] for row in self.per_class)
        commonest = max(self.per_class, key=operator.itemgetter("support"), default=None)
        if commonest is None or 2 * commonest["support"] < num_rows or num_rows == 0:
            return ""
        share = commonest["support"] / num_rows
        return f"   {share:.4f} by always answering {printable(commonest['class'])!r}"

    @property
    def findings(self) -> list[tuple[str, str]]:
        """What the result says against itself, as a name and a sentence each."""
        findings = self.summary.get("findings") or []
        return [(finding["name"], finding["text"]) for finding in findings]

    @property
    def rival(self) -> str:
        """A simple model's score on the same data, and whether it beats the run."""
        if not (rival := self.summary.get("rival")):
            return ""
        metric = rival["metric"]
        text = f"{metric} {rival['metrics'][metric]:.4f} by the {rival['name']}"
        if not rival["wins"]:
            return text
        text += f": it wins against {self.summary['metrics'][metric]:.4f}"
        # runs of older versions have no such key
        if rival.get("kept"):
            text += "; python -m flatout predict RUN FILE --with rival answers with it"
        return text

    @property
    def truncation(self) -> str:
        """The score on rows that were cut to the longest length, and on whole ones."""
        if not (scores := self.summary.get("truncation")):
            return ""
        cut = f"{scores['cut']:.4f} on {scores['cut_rows']:,} cut rows"
        if scores["equal_rows"]:
            cut += f" (and {scores['equal_rows']:,} whole ones of their length)"
        whole = f"{scores['whole']:.4f} on {scores['whole_rows']:,} whole rows"
        return f"{scores['metric']} by length: {cut}, {whole}"

    @property
    def card(self) -> str:
        """Load, memory, power, temperature and throttling of the GPU; empty without samples."""
        gpu = self.summary["speed"]["gpu"]
        forms = {
            "utilisation": "busy {:.0%}",
            "memory_gb": "{:.1f} GB",
            "power_w": "{:.0f} W",
            "temperature_c": "{:.0f} °C",
        }
        texts = format_known(gpu, forms)
        for reason, share in (gpu.get("throttled") or {}).items():
            texts.append(f"throttled {share:.0%} of the time by {reason}")
        if others := gpu.get("others"):
            texts.append(
                f"shared {others['share']:.0%} of the time (other processes: {others['processes']})"
            )
        return ", ".join(texts)

    @property
    def time(self) -> str:
        """`expected 4.1 min (3.6–4.8), took 4.3 min`; empty where nothing was expected."""
        price = self.summary.get("price") or {}
        if price.get("expected_s") is None:
            return ""
        took = describe_seconds(price["took_s"])
        expected = describe_span(price["expected_s"], *price["interval_s"])
        correction = describe_correction(price["expected_s"], price["raw_s"])
        return f"expected {expected}, took {took}{correction}"

    @property
    def cost(self) -> str:
        """`0.0124 kWh (card), 0.31 EUR`; empty where neither is known."""
        price = self.summary.get("price") or {}
        texts = []
        if price.get("kwh") is not None:
            texts.append(f"{price['kwh']:.3g} kWh ({', '.join(price['counted'])})")
        if price.get("kwh_per_million_tokens") is not None:
            texts.append(f"{price['kwh_per_million_tokens']:.2g} kWh per million tokens")
        if price.get("money") is not None:
            texts.append(describe_money(price["money"], price["currency"]))
        return ", ".join(texts)

    @property
    def spent(self) -> dict[str, float]:
        """`kwh` and `money`, as far as they are known."""
        price = self.summary.get("price") or {}
        return {name: price[name] for name in ("kwh", "money") if price.get(name) is not None}

    @property
    def verdict(self) -> list[str]:
        """What limited the run, what a ladder has measured of the fix, and the other causes."""
        verdict = self.summary["verdict"]
        if not verdict or not verdict.get("limit"):
            return []
        text = verdict.get("sentence")
        if not text:
            # a summary of an older version has no sentence
            text = str(verdict["limit"])
            if verdict.get("share") is not None:
                text += f" {verdict['share']:.1%}"
            if fix := verdict.get("fix", verdict.get("mend")):
                text += f": {fix}"
        others = [f"also {other['sentence']}" for other in verdict.get("others") or []]
        return [line for line in (str(text), verdict.get("ladder"), *others) if line]

    @property
    def choices(self) -> list[list[str]]:
        """Each automatic choice as a row: its name, the value, why, and the evidence."""
        return [list(_CHOICE(choice)) for choice in self.summary["choices"]]

    @property
    def checks(self) -> list[list[str]]:
        """Findings in the data, warnings first: level, source, what, and what changes it."""
        checks = [list(_CHECK(check)) for check in self.summary["data"].get("checks") or []]
        return sorted(checks, key=lambda cells: cells[0] == "note")


def interval_text(interval: Sequence[float] | None) -> str:
    """An interval behind its score: (0.83, 0.86) gives " (0.830–0.860)"; empty for None."""
    if interval is None:
        return ""
    low, high = interval
    digits = 3 if max(abs(low), abs(high)) >= 0.1 else 4
    return f" ({low:.{digits}f}–{high:.{digits}f})"


def format_known(values: Mapping[str, Any], forms: Mapping[str, str]) -> list[str]:
    """The values that have a form and are known, each formatted: "MFU {:.1%}" for `mfu`."""
    return [
        form.format(values[name]) for name, form in forms.items() if values.get(name) is not None
    ]


def class_cells(row: Mapping[str, Any]) -> list[str]:
    """The name of a class, its precision, recall and F1, and its rows, as texts."""
    scores = (f"{row[name]:.3f}" for name in ("precision", "recall", "f1"))
    return [row["class"], *scores, f"{row['support']:,}"]


def parts_of_step(step_ms: Mapping[str, float | None]) -> list[tuple[str, float, float]]:
    """The known parts of a batch's time as (name, milliseconds, share); empty if all are zero."""
    known_ms = {name: ms for name, ms in step_ms.items() if ms is not None}
    total = sum(known_ms.values())
    if total == 0:
        return []
    return [(name, ms, ms / total) for name, ms in known_ms.items()]
