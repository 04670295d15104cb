"""Texts: from their settings to batches.

`settings` → `opening` (tables, columns) → `source` (blocks of rows) → `preparation` (a store) →
`data` (the DataModule). `encoded_units` and `parts` share what was encoded; `decisions` leaves rows
out or gives them another label.
"""
