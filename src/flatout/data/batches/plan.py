"""The plan: which rows, in which step, on which rank.

It is a pure function of lengths, settings and epoch. A *global* order is made first and cut into
optimizer steps; it knows nothing of ranks or micro-batches. Each step is then divided among
`world * accumulate` parts. So any `world` and `accumulate` with the same product train on the same
rows in the same step. Models that need no padding get random rows. Models that pad get rows of like
length: a random order is cut into megabatches, each sorted by length and cut into steps, and the
steps are shuffled. Where a cap of tokens is set, all rows are one megabatch.

Everything is arithmetic on whole arrays. Ten million rows take seconds; any step is found in
constant time. Open this file to change which rows are trained together; `feed` has what makes
batches of them.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from flatout.data.ragged import row_begins, row_bounds, row_indices
from flatout.errors import require

Rows = NDArray[np.int64]
Ints = NDArray[np.integer]
_EVEN_ROUNDS = 64
"""Rounds dealt by tokens. What is left then are the shortest rows of large batches: they are dealt
in turns."""
FeedKind = StrEnum("FeedKind", "auto resident threaded workers")  # where batches are gathered


@dataclass(slots=True, kw_only=True)
class BatchRows:
    """A run of consecutive batches: whose rows, how many each, and how many of those count."""

    rows: Rows  # [R] row numbers, batch after batch, each batch shortest row first
    bounds: Rows  # [batches + 1] where each batch begins in `rows`
    num_real: Rows  # [batches] rows that count in each batch
    # [batches] real rows of the optimizer step each batch belongs to, over all ranks
    step_rows: Rows
    ends_step: NDArray[np.bool_]  # [batches] whether the optimizer steps after it


class BatchLayout(StrEnum):
    """What a model eats: a run of tokens, or a padded rectangle."""

    flat = "flat"
    padded = "padded"

    @classmethod
    def of(cls, network: object) -> BatchLayout:
        """What a network reads: the `layout` that it names, or else flat rows."""
        return cls(getattr(network, "layout", cls.flat))


@dataclass(kw_only=True, slots=True)
class PlanSettings:
    """What a plan depends on besides the lengths and the epoch."""

    rows_per_batch: int = 32  # rows one rank computes at once
    tokens_per_batch: int | None = None
    """Cap on the tokens one rank computes at once (padding counted where the layout pads); replaces
    rows_per_batch."""
    accumulate: int = 1  # batches one rank computes before the optimizer steps
    layout: BatchLayout = BatchLayout.flat  # whether rows of like length are put together
    shuffle: bool = True  # random order, another each epoch; otherwise all rows by length
    repeats: bool = False  # whether each epoch repeats the order of the first
    seed: int = 0  # start of every random order
    rank: int = 0  # which of the `world` plans this is
    world: int = 1  # ranks that share each step
    is_stream: bool = False
    """Whether rows continue each other: a recording's chunks stand in batches one after the
    other."""
    # steps' worth of random rows that are sorted together when the layout pads
    megabatch_steps: int = 100

    def __post_init__(self) -> None:
        require(
            self.rows_per_batch > 0,
            "data.batch_size",
            f"{self.rows_per_batch} rows",
            allowed="1 or more",
        )
        require(
            self.accumulate > 0,
            "data.accumulate",
            f"{self.accumulate} batches",
            allowed="1 or more",
        )
        assert 0 <= self.rank < self.world

    @property
    def parts(self) -> int:
        """Pieces each optimizer step is divided into."""
        return self.world * self.accumulate


class Plan:
    """One epoch of one rank: `num_batches` batches, `accumulate` of them to an optimizer step."""

    def __init__(
        self, lengths: Ints, settings: PlanSettings, epoch: int = 0, *, window: int = 0
    ) -> None:
        """`window`: which of an epoch's windows these rows are (see `large_plan`); each has another
        order.
        """
        self.settings = settings
        self.lengths = lengths
        self.order, self.bounds = _global_steps(lengths, settings, epoch, window)
        """All rows in training order, and where each optimizer step begins among them."""

    @property
    def num_steps(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_batches(self) -> int:
        return self.num_steps * self.settings.accumulate

    def rows_of_step(self, step: int) -> Rows:
        """Numbers of the rows that all ranks train in a step."""
        return self.order[self.bounds[step] : self.bounds[step + 1]]

    def batches(self, start: int, stop: int) -> BatchRows:
        """Batches `start` to `stop` of this rank, without making those before them."""
        accumulate = self.settings.accumulate
        # Rows are dealt within whole steps alone, so the steps around the batches are made, and the
        # batches cut out.
        first = start // accumulate
        last = -(-stop // accumulate)
        bounds = self.bounds[first : last + 1]
        rows = self.order[bounds[0] : bounds[-1]]
        sizes = np.diff(bounds)
        # with one part a step is one batch, and the steps are those that were asked for
        counts = sizes
        real = sizes
        wanted = slice(start - first * accumulate, stop - first * accumulate)
        if self.settings.parts > 1:
            rows, counts, real = _take_share(rows, sizes, self.lengths, self.settings)
            # The batches of the first step that come before `start` are dealt as well, and left out
            # here.
            begin = int(counts[: wanted.start].sum())
            counts = counts[wanted]
            real = real[wanted]
            rows = rows[begin : begin + int(counts.sum())]
        return BatchRows(
            rows=rows,
            bounds=row_bounds(counts),
            num_real=real,
            # Of all ranks: the loss is a sum divided by it, so parts of unequal size weigh what
            # their rows weigh.
            step_rows=np.repeat(sizes, accumulate)[wanted],
            ends_step=(np.arange(start, stop) + 1) % accumulate == 0,
        )


def count_batches(lengths: Ints, settings: PlanSettings) -> int:
    """Batches of an epoch, the same for all epochs and ranks; not for plans of streams."""
    if settings.tokens_per_batch is None:
        # A feed asks for the count when it is built; fixed steps are counted without planning an
        # epoch for it.
        return -(-len(lengths) // (settings.rows_per_batch * settings.parts)) * settings.accumulate
    return Plan(lengths, settings).num_batches


def generator_of(seed: int, number: int) -> np.random.Generator:
    """The random numbers that belong to a seed and a number, of 64 bits each."""
    # An array of uint64: numpy would round a list of two such integers to floats.
    key = np.array([seed & (2**64 - 1), number], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def _global_steps(
    lengths: Ints, settings: PlanSettings, epoch: int, window: int
) -> tuple[Rows, Rows]:
    """All rows in training order, and where each optimizer step begins among them."""
    num_rows = len(lengths)
    if num_rows == 0:
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    # Seed and epoch are the generator's key, not its place in a stream: any epoch is planned
    # without those before it. A window's number stands above the lower 40 bits, which are the
    # epoch's.
    random = generator_of(settings.seed, (0 if settings.repeats else epoch) + (window << 40))
    order = random.permutation(num_rows) if settings.shuffle else np.arange(num_rows)
    if settings.tokens_per_batch is not None:
        order, bounds = _cut_by_tokens(order, lengths, settings, settings.tokens_per_batch)
    else:
        order, bounds = _cut_by_rows(order, lengths, settings, settings.rows_per_batch)
    if settings.shuffle and settings.layout is BatchLayout.padded:
        # Padded steps stand shortest first inside a megabatch; flat ones keep the random order they
        # came from.
        order, bounds = _shuffle_steps(order, bounds, random)
    return order, bounds


def _cut_by_rows(
    order: Rows, lengths: Ints, settings: PlanSettings, rows_per_batch: int
) -> tuple[Rows, Rows]:
    """Steps of equally many rows, the last one taking what is left."""
    # The step is cut by its whole product: 8 x 1 and 2 x 4 batches have the same rows in the same
    # step.
    step_rows = rows_per_batch * settings.parts
    bounds = np.append(np.arange(0, len(order), step_rows), len(order))
    if not settings.shuffle:
        groups = bounds[[0, -1]]
    elif settings.layout is BatchLayout.flat:
        # A flat step is sorted too: its rows are dealt over ranks and micro-batches from the
        # longest down.
        groups = bounds
    else:
        # Megabatches of whole steps, evenly many each: a short last one would pad its rows more
        # than the others do.
        num_steps = len(bounds) - 1
        megabatches = max(1, round(num_steps / settings.megabatch_steps))
        groups = bounds[-(-np.arange(megabatches + 1) * num_steps // megabatches)]
    _sort_groups(order, groups, lengths)
    return order, bounds


def _cut_by_tokens(
    order: Rows, lengths: Ints, settings: PlanSettings, cap: int
) -> tuple[Rows, Rows]:
    """Steps that keep every part under the token cap; their number is the same for every order of
    the same rows.
    """
    longest = int(lengths.max())
    require(
        cap >= longest,
        "data.tokens_per_batch",
        f"{cap} tokens cannot hold the longest row",
        allowed=f"{longest} or more here",
    )
    if settings.layout is BatchLayout.padded or not settings.shuffle:
        # One sorted run, whatever the order was: steps then depend on lengths alone, and every
        # epoch has as many.
        _sort_groups(order, np.array([0, len(order)]), lengths)
        return order, _padded_bounds(lengths[order], settings.parts, cap)
    # A step may exceed its share by one row, and a part that of the step by one row: room is left
    # for one longest row each. A single part needs only the first.
    room = settings.parts * (cap - longest * min(settings.parts, 2))
    if room < 2 * longest:
        # Targets are at least half the room apart. If that were less than the longest row, a step
        # could stay empty. A fixed number of rows always fits.
        return _cut_by_rows(order, lengths, settings, cap // longest)
    ends = np.cumsum(lengths[order], dtype=np.int64)
    # Steps are counted from the sum of all tokens, which no order changes.
    num_steps = -(-int(ends[-1]) // room)
    # tokens * step // num_steps, in two terms: their product passes 63 bits at 1e9 rows of 8,192
    # tokens.
    whole, rest = divmod(int(ends[-1]), num_steps)
    steps = np.arange(1, num_steps)
    targets = steps * whole + steps * rest // num_steps
    bounds = np.concatenate(([0], np.searchsorted(ends, targets, side="right"), [len(order)]))
    _sort_groups(order, bounds, lengths)
    return order, bounds


def _padded_bounds(sorted_lengths: Ints, parts: int, cap: int) -> Rows:
    """Cut rows sorted by length so that (rows of a part) x (longest of the step) never passes the
    cap.
    """
    # Each bound depends on the one before, so this loops over steps; halving keeps the work at a
    # step small.
    bounds = [0]
    total = len(sorted_lengths)
    while bounds[-1] < total:
        start = bounds[-1]
        # `fits`: the most rows of a part, n, with n times the longest of the step within the cap.
        # One row always fits, so the search begins with 2. More than the shortest row allows never
        # fit.
        more = range(2, cap // max(1, int(sorted_lengths[start])) + 1)
        fits = 1 + bisect_right(
            more, cap, key=lambda n: n * int(sorted_lengths[min(start + n * parts, total) - 1])
        )
        bounds.append(min(start + fits * parts, total))
    return np.array(bounds, dtype=np.int64)


def _sort_groups(order: Rows, bounds: Rows, lengths: Ints) -> None:
    """Sort the rows of each group in place, shortest first, ties as they stood."""
    groups = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    above = int(lengths.max()) + 1
    # group and length in one number: one stable sort, twice as fast
    if above * len(bounds) < 2**63:
        groups *= above
        groups += lengths[order]
        order[:] = order[np.argsort(groups, kind="stable")]
    else:
        # By group, then by length: slower, and reached only where the product passes 63 bits. No
        # window of int32 tokens has such lengths.
        order[:] = order[np.lexsort((lengths[order], groups))]


def _shuffle_steps(order: Rows, bounds: Rows, random: np.random.Generator) -> tuple[Rows, Rows]:
    """Put whole steps into random order: rows [a b | c | d e] → [d e | a b | c]."""
    steps = random.permutation(len(bounds) - 1)
    sizes = np.diff(bounds)[steps]
    return order[row_indices(bounds[:-1][steps], sizes)], row_bounds(sizes)


def _take_share(
    rows: Rows, sizes: Rows, lengths: Ints, settings: PlanSettings
) -> tuple[Rows, Rows, Rows]:
    """This rank's rows of some whole steps: rows, rows per batch, real rows per batch."""
    # Rows are dealt longest first, a round at a time, each round's longest row to the part with the
    # fewest tokens (see `_deal_evenly`): parts differ by at most one row, and little in tokens. A
    # model that pads gets its micro-batches as runs of like length. Each run is dealt over the
    # ranks in turns (see `_deal_in_turns`).
    # Two steps of 3 and 2 rows: step [0 0 0, 1 1], place from the end [2 1 0, 1 0].
    step = np.repeat(np.arange(len(sizes)), sizes)
    size = sizes[step]
    place_from_end = np.repeat(np.cumsum(sizes), sizes) - 1 - np.arange(len(rows))
    if settings.layout is BatchLayout.padded:
        # Sizes as equal as they can be, the first `extra` micro-batches one row larger: those of
        # the longest rows. 7 rows in 3 micro-batches: base 2, extra 1, so 3 2 2. Places 0 1 2 from
        # the end belong to the first, and `beyond` counts the places after these.
        base, extra = np.divmod(size, settings.accumulate)
        beyond = place_from_end - extra * (base + 1)
        micro = np.where(
            beyond < 0, place_from_end // (base + 1), extra + beyond // np.maximum(base, 1)
        )
        begin = micro * base + np.minimum(micro, extra)
        rank = _deal_in_turns(place_from_end - begin, settings.world)
    else:
        part = _deal_evenly(lengths[rows], step, place_from_end, settings.parts)
        micro, rank = np.divmod(part, settings.world)
    mine = rank == settings.rank
    batch = step[mine] * settings.accumulate + micro[mine]
    # Stable, so that rows of a batch stay shortest first, as the plan of one rank has them.
    by_batch = np.argsort(batch, kind="stable")
    real = np.bincount(batch, minlength=len(sizes) * settings.accumulate)
    # Batches that got no row take their step's shortest, uncounted, so that every rank makes every
    # step.
    empty = np.flatnonzero(real == 0)
    shortest = rows[row_begins(sizes)][empty // settings.accumulate]
    return (
        np.insert(rows[mine][by_batch], np.cumsum(real)[empty], shortest),
        np.maximum(real, 1),
        real,
    )


def _deal_evenly(lengths: Ints, step: Rows, position: Rows, parts: int) -> Rows:
    """The part of each row, so that parts of a step have about as many tokens.

    `position`: of each row in its step, counted from the longest row. Lengths 9 7 5 2 in two parts:
    the first round deals 9 | 7, the second 5 to the lighter part and 2 to the other: 9 2 | 7 5.
    """
    part = _deal_in_turns(position, parts)
    turn, seat = np.divmod(position, parts)
    # One loop over rounds, not over steps: a round deals one row to every part of every step at
    # once.
    loads = np.zeros((int(step[-1]) + 1, parts), dtype=np.int64)
    by_turn = np.argsort(turn, kind="stable")
    bounds = np.searchsorted(turn[by_turn], np.arange(min(_EVEN_ROUNDS, int(turn.max()) + 1) + 1))
    for start, stop in itertools.pairwise(bounds):
        dealt = by_turn[start:stop]
        lightest_first = np.argsort(loads, axis=1, kind="stable")
        part[dealt] = lightest_first[step[dealt], seat[dealt]]
        loads[step[dealt], part[dealt]] += lengths[dealt]
    return part


def _deal_in_turns(position: Rows, parts: int) -> Rows:
    """The part of each row, dealt like cards: places 0 to 5 in three parts → 0 1 2 2 1 0."""
    # Back and forth: the first part of one turn is the last of the next, so that none gets the
    # longer row each time.
    turn, seat = np.divmod(position, parts)
    return np.where(turn % 2 == 0, seat, parts - 1 - seat)


class StreamPlan(Plan):
    """One epoch of one rank, of rows that continue each other: chunks of recordings, whose hidden
    state is passed on from batch to batch.
    """

    # A lane is a place in the batch. Each recording is dealt to a lane, the longest first to the
    # lane with the fewest chunks, and a lane's recordings follow one another in random order. The
    # n-th batch holds the n-th chunk of each lane. Loads do not depend on the order in which
    # recordings are dealt, so every epoch has as many batches, on every rank.
    #
    # Recordings A of 3 chunks, B of 2 and C of 1 in two lanes:
    #
    #     lane 0   A0 A1 A2        batch 0   A0 B0
    #     lane 1   B0 B1 C0        batch 1   A1 B1
    #                              batch 2   A2 C0

    def __init__(
        self, lengths: Ints, recordings: Ints, settings: PlanSettings, epoch: int = 0
    ) -> None:
        """`recordings`: the number of each row's recording; equal numbers stand side by side."""
        self.settings = settings
        self.lengths = lengths
        # Equal numbers stand side by side, so a recording is a run of rows: its first row and its
        # count say all of it.
        is_first = np.append(True, recordings[1:] != recordings[:-1])
        firsts = np.flatnonzero(is_first[: len(recordings)])
        counts = np.diff(np.append(firsts, len(recordings)))
        random = generator_of(settings.seed, 0 if settings.repeats else epoch)
        # Recordings are shuffled, never their chunks: the order inside one is what a carried state
        # depends on.
        drawn = random.permutation(len(counts)) if settings.shuffle else np.arange(len(counts))
        firsts = firsts[drawn]
        counts = counts[drawn]
        # Lanes are counted over all ranks, so that two ranks train on the recordings of one in the
        # same steps.
        lane = _deal_to_lanes(counts, settings.rows_per_batch * settings.world)
        # A slot is the batch of all ranks in which a chunk stands: those of a recording follow each
        # other from its first one on.
        rows = row_indices(firsts, counts)
        slots = row_indices(_first_slots(counts, lane), counts)
        lanes = np.repeat(lane, counts)
        # By batch, then shortest first as every batch is; the lane settles ties, so the order is
        # the same on all ranks.
        order = np.lexsort((lanes, lengths[rows], slots)) if len(rows) else np.empty(0, np.int64)
        # A lane stays on its rank: the hidden state that is carried on lies in that rank's memory.
        self.order = rows[order]
        self._rank = lanes[order] % settings.world
        num_slots = int(slots.max()) + 1 if len(slots) else 0
        num_steps = -(-num_slots // settings.accumulate)
        # Batches beyond the last slot are empty ones that fill up the last step.
        self._slots = np.searchsorted(slots[order], np.arange(num_steps * settings.accumulate + 1))
        self.bounds = self._slots[:: settings.accumulate]

    def batches(self, start: int, stop: int) -> BatchRows:
        """Batches `start` to `stop` of this rank.

        A batch in which this rank has no row gets a filler row, which does not count.
        """
        numbers = np.arange(start, stop)
        rows_of_batches = [np.empty(0, np.int64)]
        real = np.zeros(stop - start, np.int64)
        for column, number in enumerate(numbers):
            whole = slice(self._slots[number], self._slots[number + 1])
            mine = self.order[whole][self._rank[whole] == self.settings.rank]
            real[column] = len(mine)
            # A rank without a row must still make the step, or the others would wait for its
            # gradients for ever.
            rows_of_batches.append(mine if len(mine) else self.order[:1])
        return BatchRows(
            rows=np.concatenate(rows_of_batches),
            bounds=row_bounds(np.maximum(real, 1)),
            num_real=real,
            step_rows=np.diff(self.bounds)[numbers // self.settings.accumulate],
            ends_step=(numbers + 1) % self.settings.accumulate == 0,
        )


def _deal_to_lanes(counts: Rows, lanes: int) -> Rows:
    """The lane of each recording: the longest first, to the lane with the fewest chunks."""
    # Ties go to the lowest lane and recordings of one length are alike, so loads are the same
    # however they are ordered.
    loads = [(0, lane) for lane in range(lanes)]
    lane_of = np.zeros(len(counts), np.int64)
    for number in np.argsort(-counts, kind="stable").tolist():
        load, lane = loads[0]
        lane_of[number] = lane
        heapq.heapreplace(loads, (load + int(counts[number]), lane))
    return lane_of


def _first_slots(counts: Rows, lane: Rows) -> Rows:
    """The slot in which each recording begins: after those before it in its lane.

    Counts [3, 2, 1] in lanes [0, 1, 1] → [0, 0, 2].
    """
    by_lane = np.argsort(lane, kind="stable")
    sorted_lane = lane[by_lane]
    before = row_begins(counts[by_lane])
    # Where each one's lane begins: what was summed up before it belongs to other lanes.
    first = np.searchsorted(sorted_lane, sorted_lane)
    begin = np.empty(len(counts), np.int64)
    begin[by_lane] = before - before[first]
    return begin
