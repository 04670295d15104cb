"""Rebuild texts from the probabilities of their 2-grams, the likeliest text first.

A text is a walk over its grams: " an" is " a", "an", ... Each gram begins with the letter that the
one before ended on; the first begins with a blank and the last ends on one. A beam search holds the
best walks of each record, over the record's most probable grams only. The score of a walk is the
log-odds of its grams, plus how usual its letters are one after the other in the training texts.

Open this file to change the search, its scores, or how rebuilt texts are counted as right.

Shapes: R records, W walks of a record, K finished walks of a record, L grams of a walk. H hashed
grams, E edges (the most probable grams of a record).
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

from flatout.bits.grams import code_points, pad_with_blanks
from flatout.files import errors_of_the_disk

_EDGES = 48  # most probable grams of a record that are searched; at most 64 (bits of `used_RW`)
_WALKS = 24  # unfinished walks of a record that stay after each step
_CANDIDATES = 10  # finished walks of a record that stay
_RECORDS_AT_ONCE = 256  # bounds the memory of the search
_MOST_GAIN = 10.0  # log-odds; a surer gram is worth no more
_LEAST_GAIN = -6.0  # log-odds; a less likely gram costs no more
_REPEAT = -1.5  # what a gram costs that the walk has used already
_USUAL = 0.35  # weight of the letters' order against the grams' probabilities
_LONGER = 4  # letters by which a text may be longer than all training texts
_ODD_SHAPE = -5.0  # what a shape costs that no training text has
_SMOOTHING = 0.1  # added to every count of a letter after another
_PRIOR = 2  # weight of the estimate from one letter, as a number of observations from two
_CODE_POINTS = 0x110000  # of Unicode
_LETTERS = re.compile(r"[^\W\d_]+")
_DIGIT = re.compile(r"\d")
_NEVER = np.float32(-1e9)  # score of a walk that does not exist
_EXISTS = _NEVER / 2  # scores above belong to walks that exist
Floats = NDArray[np.float32]
Ints = NDArray[np.integer]
Candidates = dict[str, float]  # texts for one record with their scores, the likeliest first


class LetterOrder:
    """What texts look like: the letters that follow each gram, and the shapes of whole texts."""

    def __init__(
        self, grams: Sequence[str], log_next: Floats, shapes: Iterable[str], longest: int
    ) -> None:
        """Keep what `learn` counted.

        Args:
            grams: every hashed gram, in the order of its number.
            log_next: `[H, letters]` log-probability of each letter after each gram.
            shapes: shapes of the training texts; a text of any other shape is less likely.
            longest: letters of the longest text that may be rebuilt.
        """
        self.log_next = log_next
        self.shapes = frozenset(shapes)
        self.longest = longest
        self.letters = sorted(set("".join(grams)))

    @classmethod
    def learn(cls, texts: pa.Array, grams: Sequence[str]) -> LetterOrder:
        """Count which letter follows each gram in raw texts.

        A gram that is rare leans on the letters that follow its second letter alone.
        """
        longest_text = pc.max(pc.utf8_length(texts)).as_py() or 0
        shapes = {shape_of(text) for text in texts.to_pylist()}
        nothing = np.empty((0, 0), np.float32)
        order = cls(grams, nothing, shapes, int(longest_text) + _LONGER)
        order.log_next = _log_of_next(texts, grams, order.letters)
        return order

    def save(self, path: Path) -> None:
        metadata = {"shapes": json.dumps(sorted(self.shapes)), "longest": str(self.longest)}
        with errors_of_the_disk():
            save_file({"log_next": self.log_next}, path, metadata=metadata)

    @classmethod
    def load(cls, path: Path, grams: Sequence[str]) -> LetterOrder:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            log_next = file.get_tensor("log_next")
        shapes = json.loads(metadata["shapes"])
        return cls(grams, log_next, shapes, int(metadata["longest"]))


def _log_of_next(texts: pa.Array, grams: Sequence[str], letters: Sequence[str]) -> Floats:
    """`[H, letters]` log-probability of each letter after each gram.

    For the gram "an" and the letter "n", with two observations' weight for the estimate from "n":

        P(n | an) = (count(ann) + 2 * P(n | n)) / (count(an?) + 2)

    If "an" stands four times, three of them before "n", and P(n | n) is 1/4: (3 + 0.5) / 6 = 0.58.
    """
    num_letters = len(letters)
    num_grams = len(grams)
    number_of = np.full(_CODE_POINTS, -1, dtype=np.int32)
    number_of[[ord(letter) for letter in letters]] = np.arange(num_letters)
    first = number_of[[ord(gram[0]) for gram in grams]]
    second = number_of[[ord(gram[1]) for gram in grams]]
    triples = _letter_triples(texts, number_of)

    # P(third | second letter), counted over all triples as one number each: with 3 letters, the
    # pair (2, 1) is cell 2 * 3 + 1 = 7.
    first_of_triple, second_of_triple, third_of_triple = triples
    pairs = second_of_triple * num_letters + third_of_triple
    counts_of_pairs = np.bincount(pairs, minlength=num_letters**2)
    after_letter = counts_of_pairs.reshape(num_letters, num_letters) + _SMOOTHING
    after_letter /= after_letter.sum(axis=1, keepdims=True)

    # The same for whole grams. A pair that is no hashed gram has no row to count in.
    gram_of_pair = np.full(num_letters**2, -1)
    gram_of_pair[first * num_letters + second] = np.arange(num_grams)
    gram_of_triple = gram_of_pair[first_of_triple * num_letters + second_of_triple]
    is_hashed = gram_of_triple >= 0
    cells = gram_of_triple[is_hashed] * num_letters + third_of_triple[is_hashed]
    after_gram = np.bincount(cells, minlength=num_grams * num_letters)

    counts = _PRIOR * after_letter[second]
    counts += after_gram.reshape(num_grams, num_letters)
    return np.log(counts / counts.sum(axis=1, keepdims=True)).astype(np.float32)


def _letter_triples(texts: pa.Array, number_of: Ints) -> Ints:
    """`[3, N]` numbers of every three neighbouring letters: of "ann" " an", "ann" and "nn "."""
    points, offsets = code_points(pad_with_blanks(texts))
    # The last two characters of a text begin no triple.
    begins_triple = np.ones(len(points), dtype=np.bool_)
    ends = offsets[1:][np.diff(offsets) > 0]
    begins_triple[ends - 1] = False
    begins_triple[np.maximum(ends - 2, 0)] = False
    # Triples that begin at 0 and 1 have the places [[0, 1], [1, 2], [2, 3]].
    places = np.flatnonzero(begins_triple) + np.arange(3)[:, None]
    triples = number_of[points][places]
    is_numbered = (triples >= 0).all(axis=0)
    return triples[:, is_numbered]


class Reconstructor:
    """Searches for the texts that probabilities of grams may have come from."""

    def __init__(self, grams: Sequence[str], order: LetterOrder) -> None:
        """Take the hashed grams in the order of their numbers, and what texts look like."""
        self.grams = list(grams)
        self.order = order
        number_of = {letter: number for number, letter in enumerate(order.letters)}
        self._first_H = np.array([number_of[gram[0]] for gram in grams], dtype=np.int16)
        self._second_H = np.array([number_of[gram[1]] for gram in grams], dtype=np.int16)
        self._blank = number_of[" "]  # which every text begins and ends with

    def candidates(self, probabilities: Floats) -> Iterator[Candidates]:
        """Up to ten texts for each row of `[N, H]` probabilities."""
        for start in range(0, len(probabilities), _RECORDS_AT_ONCE):
            block = probabilities[start : start + _RECORDS_AT_ONCE]
            # Probabilities of 0 and 1 would have infinite log-odds.
            inside = np.clip(block, 1e-6, 1 - 1e-6)
            log_odds = np.log(inside / (1 - inside))
            gains = np.clip(log_odds, _LEAST_GAIN, _MOST_GAIN).astype(np.float32)
            for walks_KL, scores_K in self._search(gains):
                yield self._read(walks_KL, scores_K)

    def _search(self, gains_RH: Floats) -> Iterator[tuple[NDArray[np.int32], Floats]]:
        """The best finished walks of each record, as numbers of grams (-1: none), and scores."""
        # An edge is one of the most probable grams of its record. R records search over E edges
        # each, all at once, though the edges of each record are other grams.
        count = min(_EDGES, gains_RH.shape[1])
        edges_RE = _find_largest(gains_RH, count).astype(np.int32)
        gain_RE = np.take_along_axis(gains_RH, edges_RE, axis=1)
        first_RE = self._first_H[edges_RE]
        second_RE = self._second_H[edges_RE]
        # What a step from one edge to another is worth for the order of letters alone: "an" can be
        # followed by "nn", not by " a".
        follows_REE = second_RE[:, :, None] == first_RE[:, None, :]
        log_next_REE = self.order.log_next[edges_RE[:, :, None], second_RE[:, None, :]]
        step_REE = np.where(follows_REE, _USUAL * log_next_REE, _NEVER).astype(np.float32)
        starts_RE = np.where(first_RE == self._blank, gain_RE, _NEVER)
        ends_RE = second_RE == self._blank
        most_steps = self.order.longest + 2
        beam = _Beam(gain_RE, step_REE, starts_RE, ends_RE, most_steps)
        for length in range(1, most_steps):
            beam.step(length)
            if not (beam.score_RW > _EXISTS).any():  # every walk has ended
                break
        records = zip(edges_RE, beam.done_path_RKL, beam.done_score_RK, strict=True)
        for edges_E, paths_KL, scores_K in records:
            yield np.where(paths_KL >= 0, edges_E[paths_KL], -1), scores_K

    def _read(self, walks_KL: NDArray[np.int32], scores_K: Floats) -> Candidates:
        """Spell walks as texts, each text once with its best walk's score.

        A text of an unknown shape scores less.
        """
        texts: Candidates = {}
        for number in np.argsort(-scores_K, kind="stable"):
            grams = [self.grams[gram] for gram in walks_KL[number] if gram >= 0]
            if not grams or scores_K[number] <= _EXISTS:
                continue
            letters = [grams[0], *(gram[1] for gram in grams[1:])]
            text = "".join(letters).strip(" ")
            score = float(scores_K[number])
            if shape_of(text) not in self.order.shapes:
                score += _ODD_SHAPE
            texts.setdefault(text, score)
        return dict(sorted(texts.items(), key=lambda item: -item[1]))


class _Beam:
    """The best unfinished walks of some hundred records at once, and the best finished ones.

    A walk is stored as its last edge, its score, the set of its edges and its whole path.
    """

    # A record has the log-odds " a" 9, "an" 8, "n " 7 and "nn" 2. Without the order of letters:
    #
    #     after 1 gram     " a" 9
    #     after 2          " a an" 17
    #     after 3          " a an n " 24 has ended: "an"         " a an nn" 19
    #     after 4          " a an nn n " 26 has ended: "ann", the likeliest text

    def __init__(
        self,
        gain_RE: Floats,
        step_REE: Floats,
        starts_RE: Floats,
        ends_RE: NDArray[np.bool_],
        longest: int,
    ) -> None:
        """Begin with the best walks of one edge each.

        Args:
            gain_RE: what an edge is worth the first time it is used.
            step_REE: what going from one edge to another is worth; _NEVER where it cannot follow.
            starts_RE: score of a walk that begins with this edge; _NEVER where none does.
            ends_RE: whether a walk ends on this edge.
            longest: most edges of a walk.
        """
        self.gain_RE = gain_RE
        self.step_REE = step_REE
        self.ends_RE = ends_RE
        records, count = gain_RE.shape
        self.walks = min(_WALKS, count)
        # One bit an edge, so that the set of a walk's edges is one number.
        self.bit_E = np.uint64(1) << np.arange(count, dtype=np.uint64)
        self.last_RW = _find_largest(starts_RE, self.walks)
        self.score_RW = np.take_along_axis(starts_RE, self.last_RW, axis=1).astype(np.float32)
        self.used_RW = self.bit_E[self.last_RW]
        self.path_RWL = np.full((records, self.walks, longest), -1, dtype=np.int8)
        self.path_RWL[:, :, 0] = self.last_RW
        self.done_score_RK = np.full((records, _CANDIDATES), _NEVER, dtype=np.float32)
        self.done_path_RKL = np.full((records, _CANDIDATES, longest), -1, dtype=np.int8)

    def step(self, length: int) -> None:
        """Extend walks of `length` edges by every edge; the best W of a record stay.

        Walks that end are put aside.
        """
        # A name such as "anna" holds a gram twice, so an edge may be used again. That has a price:
        # else the best walk would go round the surest grams for ever.
        is_new_RWE = (self.used_RW[:, :, None] & self.bit_E) == 0
        gain_RWE = np.where(is_new_RWE, self.gain_RE[:, None, :], _REPEAT)
        records = np.arange(len(self.gain_RE))[:, None]
        step_RWE = self.step_REE[records, self.last_RW]
        score_RWE = self.score_RW[:, :, None] + gain_RWE + step_RWE
        # Of W * E longer walks the best W stay: place 5 with 4 edges is walk 1, edge 1.
        scores = score_RWE.reshape(len(records), -1)
        best = _find_largest(scores, self.walks)
        parent_RW, self.last_RW = np.divmod(best, len(self.bit_E))
        self.score_RW = np.take_along_axis(scores, best, axis=1)
        used_before_RW = np.take_along_axis(self.used_RW, parent_RW, axis=1)
        self.used_RW = used_before_RW | self.bit_E[self.last_RW]
        self.path_RWL = np.take_along_axis(self.path_RWL, parent_RW[:, :, None], axis=1)
        self.path_RWL[:, :, length] = self.last_RW
        self._put_ended_aside()

    def _put_ended_aside(self) -> None:
        """Move walks that end to the finished ones, of which the best stay."""
        ends = np.take_along_axis(self.ends_RE, self.last_RW, axis=1)
        # A walk that has ended leaves the beam: its score there becomes that of no walk.
        is_end = (self.score_RW > _EXISTS) & ends
        ended_RW = np.where(is_end, self.score_RW, _NEVER)
        scores = np.concatenate([self.done_score_RK, ended_RW], axis=1)
        paths = np.concatenate([self.done_path_RKL, self.path_RWL], axis=1)
        best = _find_largest(scores, _CANDIDATES)
        self.done_score_RK = np.take_along_axis(scores, best, axis=1)
        self.done_path_RKL = np.take_along_axis(paths, best[:, :, None], axis=1)
        self.score_RW = np.where(is_end, _NEVER, self.score_RW)


def _find_largest(scores: Floats, count: int) -> NDArray[np.intp]:
    """Places of the `count` largest scores in each row, in any order: [3, 9, 7], 2 → [1, 2]."""
    return np.argpartition(-scores, count - 1, axis=1)[:, :count]


def shape_of(text: str) -> str:
    """Every run of letters as one `a`, every digit as `0`: `ann lee2/5/1994` is `a a0/0/0000`."""
    return _DIGIT.sub("0", _LETTERS.sub("a", text))


@dataclass(frozen=True, slots=True)
class Rates:
    """Fractions of records whose text is among the first candidates."""

    at_1: float
    at_5: float
    at_10: float
    wrong: float  # records whose first candidate is another text
    without: float  # records without any candidate
    num_records: int


def measure_rates(candidates: Sequence[Candidates], texts: Sequence[str]) -> Rates:
    """How often the raw text of a record is among its candidates."""
    num_records = len(texts)
    total = max(1, num_records)
    at_1 = _count_right(candidates, texts, 1)
    without = sum(not texts_of_record for texts_of_record in candidates)
    return Rates(
        at_1=at_1 / total,
        at_5=_count_right(candidates, texts, 5) / total,
        at_10=_count_right(candidates, texts, 10) / total,
        wrong=(num_records - at_1 - without) / total,
        without=without / total,
        num_records=num_records,
    )


def _count_right(candidates: Sequence[Candidates], texts: Sequence[str], most: int) -> int:
    """Records whose text is one of the first `most` candidates."""
    pairs = zip(candidates, texts, strict=True)
    return sum(text in list(ranked)[:most] for ranked, text in pairs)
