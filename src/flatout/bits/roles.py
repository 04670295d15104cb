"""Which column of a table of people is which: names of records, encodings, plain text.

Settings name columns; where they do not, names and values are looked at. Open this file to change
what is recognised, or what is asked where several columns may be meant.
"""

from __future__ import annotations

from flatout.bits.columns import UIDS, is_index, uid_of
from flatout.bits.people import PeopleTable
from flatout.bits.recognise import LikelyEncoding, find_encodings
from flatout.bits.settings import KNOWN_BITS, BitsDataConfig
from flatout.data.tables.table import Table, require_columns
from flatout.errors import UserError, require

NAME_TEXTS = "Name the columns of plain text: data.columns=[GivenName,Surname]."


class RoleFinder:
    """Finds the columns of one table."""

    def __init__(self, config: BitsDataConfig, table: Table) -> None:
        self.config = config
        self.table = table
        if config.uid != UIDS[0]:
            require_columns(table, {"data.uid": config.uid})
        # column that names each record; None where there is none
        self.uid = uid_of(table.columns, config.uid)
        self.left_out: list[LikelyEncoding] = []  # other encodings among the plain columns

    def find_bits(self) -> str | None:
        """The column of the encodings; None where records are encoded here."""
        table = self.table
        if self.config.bits is not None:
            require_columns(table, {"data.bits": self.config.bits})
            return self.config.bits
        names = [name for name in table.columns if name.lower() in KNOWN_BITS]
        if len(names) > 1:
            raise UserError(
                "data.bits",
                f"{table.name} has several encodings",
                allowed=", ".join(names),
                hint=f"Name one: data.bits={names[0]}.",
            )
        if names:
            return names[0]
        named = {self.uid, *(self.config.columns or [])}
        return self._recognised_column([name for name in table.columns if name not in named])

    def _recognised_column(self, columns: list[str]) -> str | None:
        """The one column whose values look like an encoding; a mistake if several may be meant."""
        table = self.table
        likely = self._find_encodings(columns)
        encodings = [encoding for encoding in likely if not encoding.looks_random]
        if len(encodings) > 1:
            raise self._several([encoding.line() for encoding in encodings], encodings[0].name)
        if encodings or not likely:
            return encodings[0].name if encodings else None
        name = likely[0].name
        problem = f"column {name!r} of {table.name} looks like an encoding or like digests"
        texts = [*(self.config.columns or self._columns_before(None)), name]
        hint = (
            f"Name it: data.bits={name} for an encoding, data.uid={name} for an id, or for plain"
            " text"
        )
        hint += f" 'data.columns=[{','.join(dict.fromkeys(texts))}]'."
        raise UserError("data.bits", problem, allowed=likely[0].line(), hint=hint)

    def _find_encodings(self, columns: list[str]) -> list[LikelyEncoding]:
        is_sample = isinstance(self.table, PeopleTable)
        return [] if is_sample else find_encodings(self.table, columns)

    def _several(self, lines: list[str], first: str) -> UserError:
        return UserError(
            "data.bits",
            f"{self.table.name} has several columns that look like encodings",
            allowed=", ".join(lines),
            hint=(
                f"Name the encoding: data.bits={first}; name columns of plain text:"
                " data.columns=[A,B]."
            ),
        )

    def _columns_before(self, bits: str | None) -> list[str]:
        """Every column before the encoding but the uid and an index of pandas."""
        columns = self.table.columns
        end = columns.index(bits) if bits else len(columns)
        return [name for name in columns[:end] if name != self.uid and not is_index(name)]

    def find_texts(self, bits: str | None) -> list[str]:
        """The columns of plain text, in the order in which they are joined.

        Settings name them, or they are all before the encoding; the uid and other encodings are no
        plain text.
        """
        if self.config.columns is not None:
            require(
                bool(self.config.columns),
                "data.columns",
                "an empty list",
                hint="Name columns, or leave the setting out.",
            )
            return list(self.config.columns)
        names = self._columns_before(bits)
        others = self._find_encodings(names)
        if others and bits and self.config.bits is None:
            lines = [bits, *(encoding.line() for encoding in others)]
            raise self._several(lines, bits)
        self.left_out = others
        left_out = {encoding.name for encoding in others}
        names = [name for name in names if name not in left_out]
        require(
            bool(names),
            "data.columns",
            f"no column of {self.table.name} stands before the encoding",
            allowed=", ".join(self.table.columns),
            hint=NAME_TEXTS,
        )
        return names
