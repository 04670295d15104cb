"""Imports torchmetrics as a run wants it. The warm server imports this module before all others."""

from __future__ import annotations

from flatout.engine.torchmetrics_internals import import_torchmetrics

import_torchmetrics()
