"""An audit of texts or tagged words from rows to files: the story that the command starts.

`measure_texts` puts an encoder or a run's own network beside the words, where there is one, and
measures. `report_texts` prints the figures and the findings, and writes the table and the page.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scipy.sparse import csr_matrix

from flatout.audit.encoder_view import read_encoder
from flatout.audit.findings import SUSPECTS, find_findings
from flatout.audit.measure import AuditMeasurement, measure
from flatout.audit.network_view import TrainInFolds, read_network
from flatout.audit.rows import AuditRows
from flatout.audit.text_report import describe_texts, write_suspects, write_text_page
from flatout.engine.precision import Precision
from flatout.models.encoder.transformer import TransformerConfig
from flatout.run_log import Say

PAGE = "audit.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextViews:
    """Models that may read the texts beside the quick model."""

    train_in_folds: TrainInFolds | None = None  # of a run; None: no run is audited
    encoder: TransformerConfig | None = None  # read where no network answers
    precision: Precision = Precision.auto  # of the encoder
    limit_s: float = 0.0  # how long the encoder may read


def measure_texts(
    rows: AuditRows, num_folds: int, max_length: int, views: TextViews, say: Say
) -> AuditMeasurement:
    """Measure with the first view that answers: the run's network, an encoder, or words alone."""
    encoded: csr_matrix | None = None
    view = "network"
    if views.train_in_folds is not None:
        encoded = read_network(rows, num_folds, views.train_in_folds, say)
    # An encoder gives a vector for a text. Tagged words would need one for each word.
    if encoded is None and views.encoder is not None and not rows.is_tagged:
        view = "encoder"
        texts = list(rows.texts)
        encoded = read_encoder(
            views.encoder, texts, max_length, views.precision, views.limit_s, say
        )
    return measure(rows, num_folds, max_length, say, encoded, view)


def report_texts(
    measured: AuditMeasurement, num_folds: int, folder: Path, command: str, say: Say
) -> None:
    """Print figures and findings, and write `suspects.csv` and `audit.html` into a folder."""
    for line in describe_texts(measured, num_folds):
        say(line)
    findings = find_findings(measured, str(folder / SUSPECTS))
    say("" if findings else "no finding is worth 0.3 points")
    for number, finding in enumerate(findings, 1):
        say(f"{number}. {finding.line()}")
    folder.mkdir(parents=True, exist_ok=True)
    write_suspects(measured, folder / SUSPECTS)
    title = f"Audit of {measured.rows.files[0]}"
    write_text_page(measured, findings, title, command, folder / PAGE)
