"""Remarks about texts that occur more than once, and which rows are dropped for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.data.checks.cleaning_settings import CleaningConfig, Rows
from flatout.data.checks.findings import KINDS, Findings
from flatout.data.checks.twins import Mask, Records, Twins
from flatout.data.tables.splits import SPLITS
from flatout.data.tables.table import Table
from flatout.errors import UserError

_SPOKEN = ("training", "validation", "test")
_RULES = {"conflict": "conflicts", "leak": "leaks", "leak_alike": "leaks", "repeated": "duplicates"}
"""The setting that decides over each kind of finding."""
_BOTH = ((0, 1), (0, 2), (1, 2))
"""Splits that must not share a text, the one that may lose it first."""


@dataclass(frozen=True, slots=True)
class TwinJudge:
    """Applies the rules of some settings to records that were compared."""

    tables: Mapping[str, Table]
    findings: Mapping[str, Findings]
    cleaning: CleaningConfig
    has_classes: bool = True
    """Whether labels are classes, of which a text should have one."""

    def dropped(self, records: Records, splits: NDArray[np.int8], twins: Twins) -> Mask:
        """Report what stands twice; which rows are dropped for it. Only rows of earlier splits ever are."""
        is_train, dropped = splits == 0, np.zeros(len(records), np.bool_)
        if self.has_classes:
            dropped |= self._ruled(records, twins.conflict, "conflict", is_train)
        for split, other in _BOTH:
            here = splits == other
            is_exact = here & (twins.exact_splits & (1 << split) > 0)
            is_alike = here & (twins.alike_splits & (1 << split) > 0) & ~is_exact
            self._tell_leak(records, is_exact, "leak", _SPOKEN[split])
            self._tell_leak(records, is_alike, "leak_alike", _SPOKEN[split])
        if self.cleaning.leaks is Rows.drop:
            later = np.array([0b110, 0b100, 0], np.uint8)[splits]
            is_judged = (twins.alike_splits & later > 0) & ~dropped
            self.tell(records, is_judged, "leak_dropped")
            dropped |= is_judged
        dropped |= self._ruled(records, twins.repeated & ~dropped, "repeated", is_train)
        self.tell(records, twins.alike & ~dropped, "alike")
        return dropped

    def tell(self, records: Records, mask: Mask, name: str, other: str = "") -> None:
        """Note rows under the tables they come from."""
        if mask.any():
            for table, findings in self.findings.items():
                findings.add(name, records["row"][mask & (records["table"] == SPLITS.index(table))], other)

    def _ruled(self, records: Records, mask: Mask, name: str, may_go: Mask) -> Mask:
        """Keep, drop or refuse rows of a kind; which are dropped."""
        rule = getattr(self.cleaning, _RULES[name])
        if rule is Rows.refuse:
            self._refuse(records, mask, name)
        gone = mask & may_go if rule is Rows.drop else np.zeros_like(mask)
        self.tell(records, gone, f"{name}_dropped")
        self.tell(records, mask & ~gone, name)
        return gone

    def _tell_leak(self, records: Records, mask: Mask, name: str, other: str) -> None:
        if self.cleaning.leaks is Rows.refuse:
            self._refuse(records, mask, name, other)
        if self.cleaning.leaks is Rows.keep:
            self.tell(records, mask, name, other)

    def _refuse(self, records: Records, mask: Mask, name: str, other: str = "") -> None:
        if not mask.any():
            return
        first, setting = records[mask][0], f"data.clean.{_RULES[name]}"
        table = self.tables[SPLITS[first["table"]]]
        sentence = KINDS[name].sentence.format(other=other).removesuffix("kept").rstrip(" ,")
        what = f"{table.name} row {table.locate(int(first['row']) + 1)}: one of the rows {sentence}"
        raise UserError(setting, what, hint=f"Correct such rows, or set {setting}=keep or drop.")
