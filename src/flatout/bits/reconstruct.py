"""From probabilities of 2-grams to the texts they may have come from, best first.

A text is a walk over its grams: each begins with the letter that the one before ended on, the first
with a blank, the last ends on one. A beam of the best walks is kept for each record, over its most
probable grams only; a walk's score is the log-likelihood of its set of grams, plus how usual its
letters are one after the other in the training texts.

Shapes: R records, W walks of a record, E edges (a record's most probable grams), H hashed grams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from flatout.bits.grams import code_points, padded

_EDGES = 48
_WALKS = 24
_KEPT = 10
_RECORDS_AT_ONCE = 256
_MOST_GAIN = 10.0
_LEAST_GAIN = -6.0
_REPEAT = -1.5  # what going over a gram again costs
_USUAL = 0.35  # weight of the letters' order against the grams' probabilities
_LONGER = 4
_ODD_SHAPE = -5.0
_LETTERS = re.compile(r"[^\W\d_]+")
_DIGIT = re.compile(r"\d")
_NEVER = np.float32(-1e9)
Floats = NDArray[np.float32]
Candidates = dict[str, float]  # texts for one record with their scores, the likeliest first


class LetterOrder:
    """What texts look like: how likely a letter is after two others, and the shapes that whole
    texts have.
    """

    def __init__(
        self, grams: Sequence[str], log_next: Floats, shapes: Iterable[str], longest: int
    ) -> None:
        # `log_next`: `[H, letters]` log-probability of the letter after a gram; `longest`: letters
        # of the longest text there may be; `shapes`: of the texts learnt from; a text of any other
        # shape is less likely.
        self.log_next = log_next
        self.shapes = frozenset(shapes)
        self.longest = longest
        self.letters = sorted({letter for gram in grams for letter in gram})

    @classmethod
    def learn(cls, texts: pa.Array, grams: Sequence[str]) -> LetterOrder:
        """From raw texts; letters after a gram are counted, then smoothed by letters after its
        second letter.
        """
        longest = int(pc.max(pc.utf8_length(texts)).as_py() or 0) + _LONGER
        order = cls(
            grams,
            np.empty((0, 0), np.float32),
            {shape_of(text) for text in texts.to_pylist()},
            longest,
        )
        count = len(order.letters)
        points, offsets = code_points(padded(texts))
        number_of = np.full(0x110000, -1, dtype=np.int32)
        number_of[[ord(letter) for letter in order.letters]] = np.arange(count)
        inside = np.ones(len(points), dtype=np.bool_)
        ends = offsets[1:][np.diff(offsets) > 0]
        inside[ends - 1] = inside[np.maximum(ends - 2, 0)] = False  # no triple begins there
        triples = number_of[points][np.flatnonzero(inside) + np.arange(3)[:, None]]
        triples = triples[:, (triples >= 0).all(axis=0)]
        ids = np.array([[number_of[ord(letter)] for letter in gram] for gram in grams])
        after_one = (
            np.bincount(triples[1] * count + triples[2], minlength=count**2).reshape(count, count)
            + 0.1
        )
        seen = 2 * (after_one / after_one.sum(axis=1, keepdims=True))[ids[:, 1]]
        place_of = np.full(count * count, -1)
        place_of[ids[:, 0] * count + ids[:, 1]] = np.arange(len(grams))
        places = place_of[triples[0] * count + triples[1]]
        is_known = places >= 0
        after_two = np.bincount(
            places[is_known] * count + triples[2][is_known], minlength=len(grams) * count
        )
        seen += after_two.reshape(len(grams), count)
        order.log_next = np.log(seen / seen.sum(axis=1, keepdims=True)).astype(np.float32)
        return order

    def save(self, path: Path) -> None:
        about = {"shapes": json.dumps(sorted(self.shapes)), "longest": str(self.longest)}
        save_file({"log_next": self.log_next}, path, metadata=about)

    @classmethod
    def load(cls, path: Path, grams: Sequence[str]) -> LetterOrder:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata()
            return cls(
                grams,
                file.get_tensor("log_next"),
                json.loads(about["shapes"]),
                int(about["longest"]),
            )


class Reconstructor:
    def __init__(self, grams: Sequence[str], order: LetterOrder) -> None:
        self.grams = list(grams)
        self.order = order
        letter_of = {letter: number for number, letter in enumerate(order.letters)}
        self._first = np.array([letter_of[gram[0]] for gram in grams], dtype=np.int16)
        self._second = np.array([letter_of[gram[1]] for gram in grams], dtype=np.int16)
        self._blank = letter_of[" "]  # which every text begins and ends with

    def candidates(self, probabilities: Floats) -> Iterator[Candidates]:
        """Up to ten texts for each row of `[N, H]` probabilities."""
        for start in range(0, len(probabilities), _RECORDS_AT_ONCE):
            clear = np.clip(probabilities[start : start + _RECORDS_AT_ONCE], 1e-6, 1 - 1e-6)
            gains = np.clip(np.log(clear / (1 - clear)), _LEAST_GAIN, _MOST_GAIN).astype(np.float32)
            yield from (self._read(*walks) for walks in self._search(gains))

    def _search(self, gains_RH: Floats) -> Iterator[tuple[NDArray[np.int32], Floats]]:
        """The best finished walks of each record, as grams, and their scores."""
        count = min(_EDGES, gains_RH.shape[1])
        edges_RE = np.argpartition(-gains_RH, count - 1, axis=1)[:, :count].astype(np.int32)
        gain_RE = np.take_along_axis(gains_RH, edges_RE, axis=1)
        first_RE, second_RE = self._first[edges_RE], self._second[edges_RE]
        # What a step from one edge to another is worth for the order of letters alone.
        follows_REE = second_RE[:, :, None] == first_RE[:, None, :]
        usual_REE = _USUAL * self.order.log_next[edges_RE[:, :, None], second_RE[:, None, :]]
        step_REE = np.where(follows_REE, usual_REE, _NEVER).astype(np.float32)
        starts_RE = np.where(first_RE == self._blank, gain_RE, _NEVER)
        beam = _Beam(gain_RE, step_REE, starts_RE, second_RE == self._blank, self.order.longest + 2)
        for length in range(1, self.order.longest + 2):
            beam.step(length)
            if not (beam.score_RW > _NEVER / 2).any():  # no walk can go on
                break
        for edges_E, paths_KL, scores_K in zip(
            edges_RE, beam.done_path, beam.done_score, strict=True
        ):
            yield np.where(paths_KL >= 0, edges_E[paths_KL], -1), scores_K

    def _read(self, walks: NDArray[np.int32], scores: Floats) -> Candidates:
        """Walks as texts, each once; those of an unknown shape are moved back."""
        found: Candidates = {}
        for place in np.argsort(-scores, kind="stable"):
            grams = [self.grams[edge] for edge in walks[place] if edge >= 0]
            if grams and scores[place] > _NEVER / 2:
                text = (grams[0] + "".join(gram[1] for gram in grams[1:])).strip(" ")
                is_odd = shape_of(text) not in self.order.shapes
                found.setdefault(text, float(scores[place]) + (_ODD_SHAPE if is_odd else 0.0))
        return dict(sorted(found.items(), key=lambda each: -each[1]))


class _Beam:
    """The best walks of some hundred records at once, and the best of those that have ended."""

    def __init__(
        self,
        gain_RE: Floats,
        step_REE: Floats,
        starts_RE: Floats,
        ends_RE: NDArray[np.bool_],
        longest: int,
    ) -> None:
        """`ends_RE`: the edges that a walk ends on."""
        self.gain_RE = gain_RE
        self.step_REE = step_REE
        self.ends_RE = ends_RE
        records, count = gain_RE.shape
        self.walks = min(_WALKS, count)
        # so a walk's used edges are one number
        self.bit_E = np.uint64(1) << np.arange(count, dtype=np.uint64)
        self.last_RW = np.argpartition(-starts_RE, self.walks - 1, axis=1)[:, : self.walks]
        self.score_RW = np.take_along_axis(starts_RE, self.last_RW, axis=1).astype(np.float32)
        self.used_RW = self.bit_E[self.last_RW]
        self.path_RWL = np.full((records, self.walks, longest), -1, dtype=np.int8)
        self.path_RWL[:, :, 0] = self.last_RW
        self.done_score = np.full((records, _KEPT), _NEVER, dtype=np.float32)
        self.done_path = np.full((records, _KEPT, longest), -1, dtype=np.int8)

    def step(self, length: int) -> None:
        """Extend every walk by every edge that follows; the best stay, those that end are
        remembered.
        """
        worth = np.where(
            (self.used_RW[:, :, None] & self.bit_E) == 0, self.gain_RE[:, None, :], _REPEAT
        )
        rows = np.arange(len(self.gain_RE))[:, None]
        reached = (self.score_RW[:, :, None] + worth + self.step_REE[rows, self.last_RW]).reshape(
            len(rows), -1
        )
        best = np.argpartition(-reached, self.walks - 1, axis=1)[:, : self.walks]
        came, self.last_RW = np.divmod(best, len(self.bit_E))
        self.score_RW = np.take_along_axis(reached, best, axis=1)
        self.used_RW = np.take_along_axis(self.used_RW, came, axis=1) | self.bit_E[self.last_RW]
        self.path_RWL = np.take_along_axis(self.path_RWL, came[:, :, None], axis=1)
        self.path_RWL[:, :, length] = self.last_RW
        is_end = (self.score_RW > _NEVER / 2) & np.take_along_axis(
            self.ends_RE, self.last_RW, axis=1
        )
        scores = np.concatenate([self.done_score, np.where(is_end, self.score_RW, _NEVER)], axis=1)
        kept = np.argpartition(-scores, _KEPT - 1, axis=1)[:, :_KEPT]
        self.done_score = np.take_along_axis(scores, kept, axis=1)
        paths = np.concatenate([self.done_path, self.path_RWL], axis=1)
        self.done_path = np.take_along_axis(paths, kept[:, :, None], axis=1)
        self.score_RW = np.where(is_end, _NEVER, self.score_RW)  # a walk that ended goes nowhere


def shape_of(text: str) -> str:
    """A text with every run of letters as one `a` and every digit as `0`: `ann lee 2/5/1994` is `a
    a 0/0/0000`.
    """
    return _DIGIT.sub("0", _LETTERS.sub("a", text))


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of records whose text is found among the first candidates."""

    at_1: float
    at_5: float
    at_10: float
    wrong: float  # records whose first candidate is another text
    without: float  # records without any candidate
    num_records: int


def rates(candidates: Sequence[Candidates], texts: Sequence[str]) -> Rates:
    """How often the right text is found; both in raw form."""
    total = max(1, len(texts))
    both = list(zip(candidates, texts, strict=True))
    at_1, at_5, at_10 = (
        sum(text in list(found)[:most] for found, text in both) for most in (1, 5, 10)
    )
    without = sum(not found for found in candidates)
    wrong = len(texts) - at_1 - without
    return Rates(
        at_1 / total, at_5 / total, at_10 / total, wrong / total, without / total, len(texts)
    )
