"""Which answers to leave out, so that at most a chosen share of the others is wrong.

Rows that were not trained on say how sure each answer was, and whether it was wrong. Ordered by
sureness, they show the error of the surest 5 %, 10 %, … 100 % of the rows. For each of these shares
there is a bound of the error on other rows of the same source. `HeldOutAnswers.choose` takes the
largest share whose bound is at most the error that was asked for.

The promise: with 95 % confidence all bounds hold at once. The confidence is about the draw of the
held-out rows: 5 of 100 such draws may give a bound that is too low. The rows must be exchangeable
with those that are answered later. Nothing is asked of the network.

Shapes: N answers, W words, B, R rows, C classes. A row of tags has several answers, others one.
"""

from __future__ import annotations

import json
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.checks.tags import Entities, find_entities
from flatout.errors import UserError, first_line, require
from flatout.files import write_atomically, written_aside

Array = NDArray[Any]
CALIBRATE = "python -m flatout evaluate RUN labelled.csv --calibrate takes rows of your own."
_SHARES = tuple(number / 20 for number in range(20, 0, -1))  # of rows, that have a bound
_RISK = 0.05 / len(_SHARES)  # that one bound is too low; 5 % for all of them
_ALL = -1.0  # a limit that every sureness is above
# How many times its bytes a file may unpack to, from so many bytes on.
_MOST_RATIO = 100
_ANY_RATIO = 1 << 28


@dataclass(frozen=True, slots=True)
class KeptArrays(ABC):
    """Arrays that a model folder keeps in a file."""

    FILE: ClassVar[str]

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The arrays of a folder, which may come from others; None if it has none."""
        path = folder / cls.FILE
        if not path.is_file():
            return None
        try:
            with zipfile.ZipFile(path) as packed:
                size = sum(part.file_size for part in packed.infolist())
            is_usual = size <= _ANY_RATIO or size <= _MOST_RATIO * path.stat().st_size
            require(is_usual, str(path), f"unpacks to {size:,} bytes")
            with np.load(path, allow_pickle=False) as arrays:
                found = cls(**arrays)
            require(found.fit(), str(path), "its arrays do not fit each other")
            return found
        except UserError:
            raise
        except Exception as error:
            # no narrower class: zipfile, zlib and numpy raise different ones for damaged files
            raise UserError(str(path), f"cannot be read ({first_line(error)})") from error

    @abstractmethod
    def fit(self) -> bool:
        """Whether these are arrays of numbers, in shapes that belong together."""

    def write(self, folder: Path) -> None:
        # a full disk leaves the file of before
        with written_aside(folder / self.FILE) as beside, beside.open("wb") as file:
            np.savez_compressed(file, **asdict(self))


def are_numbers(*arrays: Array) -> bool:
    """Whether arrays hold numbers, or truth values, and no texts."""
    return all(array.dtype.kind in "biuf" for array in arrays)


@dataclass(frozen=True, slots=True)
class Abstention:
    """Above which sureness a predictor answers, and what is possible where it does not."""

    error: float  # that was asked for
    above: float  # sureness; an answer that is no surer is left out
    possible_from: float
    """Least probability of a possible class; for numbers, minus the distance to the ends of their
    interval."""
    has_intervals: bool = False  # whether answers are numbers: all are given, with an interval

    @classmethod
    def of_intervals(cls, error: float) -> Abstention:
        """Leave no answer out, as intervals keep the promise."""
        return cls(error, _ALL, 0.0, has_intervals=True)

    def least_possible(self, shares_BC: Tensor) -> Tensor:
        """`[B, 1]` the least probability of a possible class; the likeliest one always is."""
        return shares_BC.amax(-1, keepdim=True).clamp(max=self.possible_from)

    def choose_possible(self, names: Sequence[str], shares: Sequence[float]) -> list[str]:
        """Names whose share of an answer is large enough; the likeliest one always is."""
        least = min(self.possible_from, max(shares))
        return [name for name, share in zip(names, shares, strict=True) if share >= least]

    def promise(self) -> str:
        """What holds of the answers that are given, as the end of a sentence."""
        miss = "lie outside of their interval" if self.has_intervals else "are wrong"
        return (
            f"at most {100 * self.error:.3g} % of them {miss} (95 % confidence), if these rows come"
            " from the same source as the validation rows"
        )


@dataclass(frozen=True, slots=True)
class WordAnswers:
    """A tag for each word, row after row."""

    ids: Array  # [W]
    probabilities: Array  # [W]
    offsets: Array  # [R + 1] where the words of each row begin
    # [W, K] probabilities of no entity, and of each type; of plain tags those of the tags
    types: Array
    is_plain: bool  # whether each word is an answer, and not each entity

    @classmethod
    def of_tags(cls, shares_WN: Tensor, offsets: Array, *, is_plain: bool) -> WordAnswers:
        """`shares_WN`: the probability of each plain tag, or else of O, and of B and I of each
        type.
        """
        best = shares_WN.max(-1)
        types = shares_WN
        if not is_plain:
            of_types = shares_WN[:, 1::2] + shares_WN[:, 2::2]
            types = torch.cat([shares_WN[:, :1], of_types], 1)
        return cls(best.indices.numpy(), best.values.numpy(), offsets, types.numpy(), is_plain)

    def entities(self) -> Entities:
        """What is answered: entities, or words with a plain tag."""
        return find_entities(self.ids, self.offsets, is_plain=self.is_plain)

    def judge_entities(self, entities: Entities) -> tuple[Array, Array]:
        """How sure each entity is, and `[N, K]` what its words may be: of its least sure word."""
        # `reduceat` takes the bounds of all entities in one list. It answers for what lies between
        # two of them as well: bounds 0 2 5 6 give the words 0–1, 2–4 and 5, of which every other
        # one is an entity. It reads the last bound too, which may lie behind the last word.
        first = self.offsets[entities.row] + entities.start
        stop = self.offsets[entities.row] + entities.stop
        bounds = np.stack([first, stop], 1).ravel()
        values = np.column_stack([self.probabilities, self.types])
        padded = np.pad(values, ((0, 1), (0, 0)))
        least = np.minimum.reduceat(padded, bounds)[::2]
        return least[:, 0], least[:, 1:]


def sureness_of(shares_BC: Tensor, least_C: Tensor | None = None) -> Tensor:
    """`[B]` the probability that an answer is right, as the network sees it.

    `least_C`: from which probability each label is answered, where a row may have several. Its
    labels then count as independent: answers at 0.9 and 0.2 (absent) are right at 0.9 * 0.8.
    """
    if least_C is None:
        return shares_BC.amax(-1)
    return shares_BC.where(shares_BC >= least_C, 1 - shares_BC).prod(-1)


@dataclass(frozen=True, slots=True)
class HeldOutAnswers(KeptArrays):
    """How sure answers to rows were that were not trained on, and which were wrong."""

    FILE = "abstention.npz"
    sureness: Array  # [N]; below 0 for numbers, which are never left out
    wrong: Array  # [N]
    truth: Array  # [N] the probability of what is right; for numbers, minus the distance to it
    rows: Array  # [N] the number of the row that the answer belongs to, in their order

    def fit(self) -> bool:
        arrays = (self.sureness, self.wrong, self.truth, self.rows)
        are_rows = all(array.shape == (self.rows.size,) for array in arrays)
        return are_rows and are_numbers(*arrays) and self.rows.dtype.kind in "iu"

    @classmethod
    def of_rows(cls, sureness_B: Tensor, wrong_B: Tensor, truth_B: Tensor) -> HeldOutAnswers:
        arrays = (sureness_B.numpy(), wrong_B.numpy(), truth_B.numpy())
        return cls(*arrays, np.arange(len(wrong_B)))

    @classmethod
    def of_classes(
        cls, shares_BC: Tensor, targets: Tensor, least_C: Tensor | None = None
    ) -> HeldOutAnswers:
        """`targets`: `[B]` classes, or `[B, C]` labels; of these an answer must have all right."""
        least = least_C
        if least is None:
            least = shares_BC.amax(-1, keepdim=True)
            targets = F.one_hot(targets.long(), shares_BC.shape[1])
        has_BC = targets > 0.5
        is_answered_BC = shares_BC >= least
        wrong_B = (is_answered_BC != has_BC).any(-1)
        # all labels of a row are possible from its least likely one on
        truth_B = shares_BC.masked_fill(~has_BC, 1).amin(-1)
        return cls.of_rows(sureness_of(shares_BC, least_C), wrong_B, truth_B)

    @classmethod
    def of_numbers(cls, values_B: Tensor, targets_B: Tensor) -> HeldOutAnswers:
        distance_B = (values_B - targets_B).abs()
        return cls.of_rows(torch.full_like(distance_B, _ALL / 2), distance_B < 0, -distance_B)

    @classmethod
    def of_words(cls, answers: WordAnswers, tags: Array) -> HeldOutAnswers:
        """The entities that were found, or plain tags; `tags`: the right tag of each word."""
        entities = answers.entities()
        marked = find_entities(tags, answers.offsets, is_plain=answers.is_plain)
        # What is right for the words of an entity: the type that is marked there, from 1, or else
        # no entity, 0. Plain tags count from 0: each word is marked. With marked spans 10 and 30:
        #
        #     spans          10   30   end of all        types   1   2   0
        #     found spans    10   20                     place   0   1
        #     right          1    0                      span 20 is not marked
        first = 0 if answers.is_plain else 1
        spans = np.append(marked.keys() - marked.kind, np.iinfo(np.int64).max)
        types = np.append(marked.kind + first, 0)
        found_spans = entities.keys() - entities.kind
        place = np.searchsorted(spans, found_spans)
        is_marked = spans[place] == found_spans
        right = np.where(is_marked, types[place], 0)
        sureness, shares = answers.judge_entities(entities)
        truth = shares[np.arange(len(right)), right]
        return cls(sureness, right != entities.kind + first, truth, entities.row)

    @classmethod
    def joined(cls, parts: Sequence[HeldOutAnswers]) -> HeldOutAnswers:
        """Parts of a file, whose rows get numbers that no other part has."""
        apart = [
            astuple(replace(part, rows=part.rows + (number << 32)))
            for number, part in enumerate(parts)
        ]
        return cls(*map(np.concatenate, zip(*apart, strict=True)))

    def write(self, folder: Path) -> None:
        KeptArrays.write(self, folder)
        write_atomically(folder / "abstention.json", json.dumps(self.facts(), indent=1))

    def facts(self) -> list[dict[str, float]]:
        """The cuts; none for numbers, which are never left out."""
        return self.cuts() if self._are_of_classes else []

    @property
    def _are_of_classes(self) -> bool:
        """Whether answers may be left out; the sureness of numbers lies below 0."""
        return bool((self.sureness >= 0).any())

    def cuts(self) -> list[dict[str, float]]:
        """Error of the surest 100 %, 95 %, …, 5 % of the rows.

        `share` of the rows, `above` which sureness they are, the `error` among them, and what it is
        `at_most` on other rows. Where rows have several answers, it is a mean over rows.
        """
        from scipy.special import betaincinv  # half a second of imports, which few need

        # Take the sureness of the first row that is left out as given. The rows above it are then
        # independent draws of surer rows, so the number of wrong ones is binomial, and has the
        # bound of Clopper and Pearson. The shares are fixed beforehand, and each bound has its part
        # of the risk: they hold together, whichever is chosen later.
        sureness_R = _by_row(np.maximum, self.sureness, self.rows)
        num_rows = len(sureness_R)
        surest_first = np.append(np.sort(sureness_R)[::-1], _ALL)
        # Bentkus (On Hoeffding's inequalities, 2004): the mean of rows that are wrong in part has
        # at most e times the tail of the count.
        risk = _RISK if num_rows == len(self.rows) else _RISK / math.e
        cuts = []
        for share in _SHARES:
            above = float(surest_first[round(share * num_rows)])
            is_given = self.sureness > above
            rows = self.rows[is_given]
            num_wrong_R = _by_row(np.add, 1.0 * self.wrong[is_given], rows)
            num_answers_R = _by_row(np.add, np.ones(len(rows)), rows)
            errors_R = num_wrong_R / num_answers_R
            wrong = math.ceil(errors_R.sum() - 1e-9)
            right = len(errors_R) - wrong
            at_most = float(betaincinv(wrong + 1, right, 1 - risk)) if right else 1.0
            error = float(errors_R.mean()) if right else 1.0
            cuts.append({"share": share, "above": above, "error": error, "at_most": at_most})
        return cuts

    def choose(self, error: float) -> Abstention:
        """The abstention that answers most rows at this error; refused where none promises it."""
        cuts = self.cuts()
        least = min(cut["at_most"] for cut in cuts)
        needed = math.ceil(math.log(_RISK) / math.log1p(-error))
        require(
            least <= error,
            "--at-error",
            f"{error:.3g} cannot be promised by {len(self.rows):,} answers to validation rows",
            allowed=f"{least:.3g} or more",
            hint=f"It takes {needed:,} rows at least, and few errors among them. {CALIBRATE}",
        )
        above = next(cut["above"] for cut in cuts if cut["at_most"] <= error)
        least_truth = self._least_truth(max(above, 0.0), error)
        return Abstention(error, above, least_truth, has_intervals=not self._are_of_classes)

    def _least_truth(self, above: float, error: float) -> float:
        """The limit that the truth of left-out rows falls below in at most `error` of all cases."""
        # The k-th smallest truth of R rows is a limit that a share of Beta(k, R + 1 - k) of other
        # rows falls below. The largest k is taken for which that is at most `error`, but for the
        # risk. Take 1,000 rows and an error of 0.05: k is 32, not 50.
        from scipy.special import betainc

        is_left = self.sureness < above
        least_R = _by_row(np.minimum, self.truth[is_left], self.rows[is_left])
        places = np.arange(1, len(least_R) + 1)
        is_rare = betainc(places, places[::-1], error) >= 1 - _RISK
        largest_place = is_rare.sum()
        return float(np.sort(least_R)[largest_place - 1]) if largest_place else -math.inf


def _by_row(combine: np.ufunc, values: Array, rows: Array) -> Array:
    """The values of each row, combined to one."""
    return combine.reduceat(values, np.unique(rows, return_index=True)[1])
