"""Encodings of records: Bloom filter, tabulation MinHash and two-step hash, whole columns at once.

Each encoder hashes a gram once into a row of a table. A record is then a union (Bloom filter), a
minimum (MinHash) or a sort (two-step hash) over the rows of its grams. A gram is hashed once,
however many records hold it, so the hash functions may be the real, slow ones. Each follows from a
secret. Bits are packed eight to a byte, the first bit of a record in the highest bit of its first
byte. A Bloom filter of 8 bits, 2 a gram, folded once:

    " a" sets 1, 6     . x . . . . x .
    "an" sets 1, 4     . x . . x . . .
    the record         . x . . x . x .     folded: . x . .  xor  x . x .  =  x x x .

Sources: Bloom filters of 2-grams (Schnell, Bachteler, Reiher 2009), XOR-folding (Schnell, Borgs
2016), diffusion (Armknecht, Heng, Schnell 2023), tabulation MinHash (Smith 2017), two-step hash
(Ranbaduge, Christen, Schnell 2020).
"""

from __future__ import annotations

import hashlib
import hmac
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.bits.grams import GramIndex, pad_with_blanks, sort_distinct
from flatout.data.ragged import row_bounds
from flatout.errors import check_settings, require, setting
from flatout.masking import is_masked

# a block's gathered table rows should stay in the cache
_BYTES_AT_ONCE = 1 << 21
_GRAMS_A_RECORD = 24
_ROWS_AT_ONCE = 4096
_MOST_HASHES_TWO_STEP = 24
Packed = NDArray[np.uint8]
# numbers row after row, and how many each row has
Sets = tuple[NDArray[np.int32], NDArray[np.int32]]
_KEY_BYTES = 64
_NUMBERS_A_DIGEST = 32
_KEYED_NUMBERS = 1 << 16  # numbers of two bytes, of which a position is the remainder
# a size that divides no 65,536 favours its first positions: by 1/8 here, by 1/2 at 40,000
_LARGEST_UNEVEN = 8192
EncodingKind = StrEnum("EncodingKind", "bloom minhash twostep")
Hashing = StrEnum("Hashing", "keyed double")


@dataclass(kw_only=True, slots=True)
class EncodingConfig:
    """An encoding of records, and its strength."""

    kind: EncodingKind = setting(
        EncodingKind.bloom, "Bloom filter, tabulation MinHash (bits), two-step hash (sets)."
    )
    size: int = setting(
        1024,
        "Bits of a Bloom filter, MinHash functions, or columns of a two-step hash.",
        least=1,
        allowed="a whole number, 1 or more; bits of a filter: a multiple of 8, at most 65,536",
    )
    hashes: int = setting(
        10, "Bits a gram sets in a Bloom filter, or rows of a two-step hash.", least=1
    )
    hashing: Hashing = setting(
        Hashing.keyed, "Bloom filter: keyed BLAKE2b, or double hashing by HMAC-SHA1 and -MD5."
    )
    padding: bool = setting(
        True, "Whether a blank stands before and after the text, which marks its ends."
    )
    secret: str = setting(
        "flatout",
        "What the hash functions follow from; who knows it can encode guesses.",
        example="'data.encoding.secret=${oc.env:FLATOUT_SECRET}'",
    )
    fold: int = setting(
        0, "Bloom filter: times the filter is halved by XOR of its halves.", least=0, most=13
    )
    diffusion: int = setting(
        0, "Bloom filter: bits whose XOR a bit is.", least=0, allowed="0 to the filter's bits"
    )

    def __post_init__(self) -> None:
        check_settings(self, "encoding")
        require(
            not is_masked(self.secret),
            "encoding.secret",
            f"{self.secret} stands in place of the secret, which no run folder holds",
            hint="Type the secret, or data.encoding.secret=${oc.env:NAME}.",
        )
        # words of a command line may have bytes that are no UTF-8
        require(
            self.secret.encode("utf-8", "ignore").decode() == self.secret,
            "encoding.secret",
            "holds bytes that are no UTF-8",
            hint="Type it in letters and digits.",
        )
        settings_of_bloom = [
            ("fold", self.fold, 0),
            ("diffusion", self.diffusion, 0),
            ("hashing", self.hashing, Hashing.keyed),
            ("hashes", self.hashes, 10),
        ]
        for name, value, usual in settings_of_bloom:
            is_read = self.kind is EncodingKind.bloom or (
                name == "hashes" and self.kind is EncodingKind.twostep
            )
            require(
                is_read or value == usual,
                f"encoding.{name}",
                f"{value} does not apply to {self.kind}",
                hint=f"Set it to {usual}, or the kind to bloom.",
            )
        if self.kind is EncodingKind.twostep:
            require(
                self.hashes <= _MOST_HASHES_TWO_STEP,
                "encoding.hashes",
                f"{self.hashes}",
                allowed=f"1 to {_MOST_HASHES_TWO_STEP} for twostep",
            )
            self._require_even_positions()
            return
        # Each folding halves the filter, and what is left must be whole bytes.
        step = 8 << self.fold
        allowed, hint = f"a multiple of {step} here", f"Set it to {-(-self.size // step) * step}."
        require(self.size % step == 0, "encoding.size", f"{self.size}", allowed=allowed, hint=hint)
        require(
            self.size <= 1 << 16, "encoding.size", f"{self.size}", allowed="at most 65,536 bits"
        )
        if self.kind is EncodingKind.bloom and self.hashing is Hashing.keyed:
            self._require_even_positions()
        require(
            self.diffusion <= self.num_bits,
            "encoding.diffusion",
            f"{self.diffusion} of {self.size} bits",
            hint=f"Set it to {self.num_bits} or less, or make the filter larger.",
        )

    def _require_even_positions(self) -> None:
        # Four bytes a position would be even, but would no longer equal earlier encodings and those
        # of clkhash.
        is_even = self.size <= _LARGEST_UNEVEN or _KEYED_NUMBERS % self.size == 0
        larger = min(_KEYED_NUMBERS, 1 << (self.size - 1).bit_length())
        require(
            is_even,
            "encoding.size",
            f"{self.size}: the first positions would be set up to twice as often as others",
            allowed="up to 8,192, or 16384, 32768 or 65536",
            hint=f"Set it to {larger}.",
        )

    @property
    def num_bits(self) -> int:
        """Bits of a record; a set has none."""
        return self.size >> self.fold

    def build(self) -> Encoder | TwoStepEncoder:
        if self.kind is EncodingKind.twostep:
            return TwoStepEncoder(self)
        return BloomEncoder(self) if self.kind is EncodingKind.bloom else MinHashEncoder(self)

    def without_secret(self) -> dict[str, Any]:
        """The settings with a digest in place of the secret: other secrets give other digests."""
        digest = hashlib.blake2b(
            self.secret.encode(), digest_size=16, person=b"flatout"
        ).hexdigest()
        return asdict(self) | {"secret": digest}

    def line(self) -> str:
        """The encoding in words."""
        if self.kind is EncodingKind.minhash:
            return f"tabulation MinHash, {self.size} functions of one bit"
        if self.kind is EncodingKind.twostep:
            return f"two-step hash, {self.hashes} rows of {self.size} columns"
        extras = [f"folded {self.fold}×"] if self.fold else []
        extras += [f"diffused over {self.diffusion} bits"] if self.diffusion else []
        return ", ".join(
            [f"Bloom filter of {self.size} bits, {self.hashes} a gram ({self.hashing})", *extras]
        )


class Encoder(ABC):
    """Encodes texts as rows of packed bits."""

    _table: NDArray[np.unsignedinteger]  # a row for each gram

    def __init__(self, config: EncodingConfig) -> None:
        self.config = config
        self.grams = GramIndex()

    def encode(self, raw: pa.Array) -> Packed:
        """`[N, bits / 8]` packed bits of the raw texts; a text without a gram is all zeros."""
        ids, lengths = self.grams.rows(pad_with_blanks(raw) if self.config.padding else raw)
        self._hash_new_grams()
        offsets = row_bounds(lengths)
        encoded = np.zeros((len(raw), self.config.num_bits // 8), dtype=np.uint8)
        bytes_of_gram = self._table.shape[1] * self._table.itemsize
        step = max(16, _BYTES_AT_ONCE // (_GRAMS_A_RECORD * bytes_of_gram))
        for start in range(0, len(raw), step):
            bounds = offsets[start : start + step + 1]
            filled = np.flatnonzero(np.diff(bounds))
            if len(filled):
                block_ids = ids[bounds[0] : bounds[-1]]
                encoded[start + filled] = self._unite_grams(block_ids, bounds[filled] - bounds[0])
        return encoded

    @abstractmethod
    def _hash_new_grams(self) -> None:
        """Hash the grams that were met for the first time."""

    @abstractmethod
    def _unite_grams(self, ids: NDArray[np.int32], starts: NDArray[np.int64]) -> Packed:
        """The records whose grams begin at `starts`; none is empty."""


class BloomEncoder(Encoder):
    """Every gram sets its bits; folding and diffusion then hide which bits stand together."""

    def __init__(self, config: EncodingConfig) -> None:
        super().__init__(config)
        keys = derived_keys(config.secret, 2)
        self._positions: Callable[..., list[int]] = partial(double_positions, keys=keys)
        if config.hashing is Hashing.keyed:
            self._positions = partial(keyed_positions, key=keys[0])
        self._table = np.zeros((0, config.size // 8), dtype=np.uint8)
        self._sources: NDArray[np.int64] | None = None
        if config.diffusion:
            random = random_stream(config.secret, "diffusion")
            order = random.random((config.num_bits, config.num_bits)).argsort(axis=1)
            self._sources = order[:, : config.diffusion]

    def _hash_new_grams(self) -> None:
        new = self.grams.names[len(self._table) :]
        bits = np.zeros((len(new), self.config.size), dtype=np.uint8)
        for row, gram in zip(bits, new, strict=True):
            row[self._positions(gram, hashes=self.config.hashes, size=self.config.size)] = 1
        self._table = np.concatenate([self._table, np.packbits(bits, axis=1)])

    def _unite_grams(self, ids: NDArray[np.int32], starts: NDArray[np.int64]) -> Packed:
        filters = np.bitwise_or.reduceat(self._table[ids], starts, axis=0)
        for _ in range(self.config.fold):
            half = filters.shape[1] // 2
            filters = filters[:, :half] ^ filters[:, half:]
        if self._sources is None:
            return filters
        bits = np.unpackbits(filters, axis=1)
        out = bits[:, self._sources[:, 0]]
        for source in self._sources.T[1:]:
            out ^= bits[:, source]
        return np.packbits(out, axis=1)


class MinHashEncoder(Encoder):
    """Each function keeps the lowest bit of the least hash among a record's grams."""

    # Hashes are only ever compared, so each function's hashes are replaced by their ranks among all
    # grams, with the bit that is kept in the last place: four times less to read than 64-bit
    # hashes, and the same answer. One function, three grams:
    #
    #     hashes                90   17   55
    #     ranks                  2    0    1
    #     lowest bits            0    1    1
    #     rank * 2 + bit         4    1    3     a record of grams 0 and 2: least 3, so its bit is 1

    def __init__(self, config: EncodingConfig) -> None:
        super().__init__(config)
        self._key = derived_keys(config.secret, 1)[0]
        self._tables = random_stream(config.secret, "tabulation").integers(
            0, 2**64, (8, 256, config.size), np.uint64
        )
        self._hashes = np.zeros((0, config.size), dtype=np.uint64)
        self._table = np.zeros((0, config.size), dtype=np.uint32)

    def _hash_new_grams(self) -> None:
        new = self.grams.names[len(self._hashes) :]
        if not new:
            return
        self._hashes = np.concatenate([self._hashes, [self.hashes(gram) for gram in new]])
        narrow = np.uint16 if len(self._hashes) < 1 << 15 else np.uint32
        ranks = self._hashes.argsort(axis=0).argsort(axis=0).astype(narrow)
        lowest_bits = (self._hashes & np.uint64(1)).astype(narrow)
        self._table = ranks << np.array(1, narrow) | lowest_bits

    def hashes(self, gram: str) -> NDArray[np.uint64]:
        """`[functions]` independent 64-bit hashes by simple tabulation.

        Each of a digest's eight bytes picks a random number, and a hash is the XOR of the eight.
        """
        digest = hashlib.blake2b(gram.encode(), key=self._key, digest_size=8).digest()
        return np.bitwise_xor.reduce(self._tables[np.arange(8), list(digest)], axis=0)

    def _unite_grams(self, ids: NDArray[np.int32], starts: NDArray[np.int64]) -> Packed:
        least = np.minimum.reduceat(self._table[ids], starts, axis=0)
        return np.packbits((least & 1).astype(np.uint8), axis=1)


class TwoStepEncoder:
    """Encodes a text as a set of numbers.

    Each gram sets one bit in each row of a matrix. Then each column that holds a bit becomes a
    number, which depends on the column and its bits.
    """

    def __init__(self, config: EncodingConfig) -> None:
        self.config = config
        self.grams = GramIndex()
        self._keys = derived_keys(config.secret, config.hashes)
        self._columns = np.zeros((0, config.hashes), dtype=np.int64)

    def encode(self, raw: pa.Array) -> Sets:
        """The numbers of each text in rising order; a text without a gram has none."""
        ids, lengths = self.grams.rows(pad_with_blanks(raw) if self.config.padding else raw)
        self._hash_new_grams()
        blocks = [(np.empty(0, np.int32), np.empty(0, np.int32))]
        for start in range(0, len(raw), _ROWS_AT_ONCE):
            block_lengths = lengths[start : start + _ROWS_AT_ONCE]
            block_ids, ids = np.split(ids, [block_lengths.sum()])
            blocks.append(self._block(block_ids, block_lengths))
        values, counts = map(np.concatenate, zip(*blocks, strict=True))
        return values, counts

    def _hash_new_grams(self) -> None:
        size = self.config.size
        positions = list[list[int]]()
        for gram in self.grams.names[len(self._columns) :]:
            positions += [keyed_positions(gram, key=key, hashes=1, size=size) for key in self._keys]
        new_columns = np.array(positions, np.int64).reshape(-1, self.config.hashes)
        self._columns = np.concatenate([self._columns, new_columns])

    def _block(self, ids: NDArray[np.int32], lengths: NDArray[np.int32]) -> Sets:
        """The sets of some texts, from the grams of each."""
        # Matrices are kept as lists of their bits. A record of two grams, a matrix of 2 rows and 4
        # columns, a cell being column * 2 + row:
        #
        #     "an" sets columns 1, 3     row 0   . x . .     cells 2, 7
        #     "nn" sets columns 1, 0     row 1   x . . x     cells 2, 1
        #     without repeats            cells 1, 2, 7
        #     columns and their bits     0: row 1    1: row 0    3: row 1
        hashes = self.config.hashes
        cells = self._columns[ids] * hashes + np.arange(hashes)
        cells, counts = sort_distinct(cells.ravel(), lengths * hashes)
        row = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
        column, hash_row = np.divmod(cells.astype(np.int64), hashes)
        places = row * self.config.size + column
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        patterns = np.add.reduceat(np.int64(1) << hash_row, starts)
        codes = (column[starts] << _MOST_HASHES_TWO_STEP | patterns).astype(np.uint64)
        numbers = (mix_codes(codes, self.config.secret) >> np.uint64(33)).astype(np.int32)
        return sort_distinct(numbers, np.bincount(row[starts], minlength=len(lengths)))


def derived_keys(secret: str, count: int) -> list[bytes]:
    """Keys of 64 bytes from a secret, by HKDF with SHA-256 (RFC 5869) without salt."""
    extracted = hmac.new(bytes(32), secret.encode(), hashlib.sha256).digest()
    expanded = b""
    block = b""
    wanted = count * _KEY_BYTES
    while len(expanded) < wanted:
        number = len(expanded) // len(extracted) + 1
        block = hmac.new(extracted, block + bytes([number]), hashlib.sha256).digest()
        expanded += block
    return [expanded[start : start + _KEY_BYTES] for start in range(0, wanted, _KEY_BYTES)]


def keyed_positions(gram: str, *, key: bytes, hashes: int, size: int) -> list[int]:
    """`hashes` positions below `size` from keyed BLAKE2b, two bytes each, as the clkhash library.

    Where `size` does not divide 65,536, the first positions come up more often: by 1.5 % at 1,000,
    by 1/8 at 8,191.
    """
    digests = b""
    for number in range(-(-hashes // _NUMBERS_A_DIGEST)):
        salt = str(number).encode()
        digests += hashlib.blake2b(gram.encode(), key=key, salt=salt).digest()
    numbers = np.frombuffer(digests, dtype="<u2")[:hashes].tolist()
    return [number % size for number in numbers]


def double_positions(gram: str, *, keys: Sequence[bytes], hashes: int, size: int) -> list[int]:
    """`hashes` positions in equal steps: HMAC-SHA1 gives the first one, HMAC-MD5 the step.

    First 5, step 3 and size 8 → 5, 0, 3, 6, …
    """
    sha1 = hmac.new(keys[0], gram.encode(), hashlib.sha1).digest()
    md5 = hmac.new(keys[1], gram.encode(), hashlib.md5).digest()
    start = int.from_bytes(sha1, "big")
    step = int.from_bytes(md5, "big")
    return [(start + number * step) % size for number in range(hashes)]


def random_stream(secret: str, purpose: str) -> np.random.Generator:
    """Random numbers that follow from a secret, another stream for each purpose."""
    key = hashlib.sha256(secret.encode()).digest()
    seed = hashlib.blake2b(purpose.encode(), key=key, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "big")))


def mix_codes(values: NDArray[np.uint64], secret: str) -> NDArray[np.uint64]:
    """64-bit numbers, each turned into another one by the secret, no two into the same.

    They stand for the random numbers of a real encoder. This is no cipher.
    """
    keys = random_stream(secret, "mixed").integers(0, 2**64, 3, dtype=np.uint64)
    factors = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15)
    for key, factor in zip(keys, factors, strict=True):
        values = (values ^ key) * np.uint64(factor)
        values ^= values >> np.uint64(31)
    return values
