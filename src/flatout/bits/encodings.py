"""Encodings of records: Bloom filter, tabulation MinHash and two-step hash, whole columns at once.

Each encoder hashes a gram once into a row of a table; a record is then a union, a minimum or a sort over the rows of
its grams. Bits leave packed, eight to a byte, the first bit of a record in the highest bit of its first byte. A gram is
hashed once, however many records hold it, so the hash functions may be the real, slow ones; each follows from a secret.

Sources: Bloom filters of 2-grams (Schnell, Bachteler and Reiher 2009), XOR-folding (Schnell and Borgs 2016), diffusion
(Armknecht, Heng and Schnell 2023), tabulation MinHash (Smith 2017), two-step hash (Ranbaduge, Christen and Schnell
2020).
"""

from __future__ import annotations

import hashlib
import hmac
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flatout.bits.grams import GramIndex, distinct, padded
from flatout.errors import check_settings, require, setting

_BYTES_AT_ONCE, _GRAMS_A_RECORD = 1 << 21, 24  # a block's gathered table rows should stay in the cache
_ROWS_AT_ONCE = 4096
_MOST_HASHES_TWO_STEP = 24

Packed = NDArray[np.uint8]
Sets = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Numbers row after row, and how many each row has."""
_KEY_BYTES = 64
_NUMBERS_A_DIGEST = 32


class EncodingKind(StrEnum):
    """How a record is encoded."""

    bloom = "bloom"
    minhash = "minhash"
    twostep = "twostep"


class Hashing(StrEnum):
    """How a Bloom filter finds a gram's bits."""

    keyed = "keyed"
    double = "double"


@dataclass(kw_only=True, slots=True)
class EncodingConfig:
    """An encoding of records, and its strength."""

    kind: EncodingKind = setting(
        EncodingKind.bloom, "Bloom filter, one bit of each tabulation MinHash, or a two-step hash (a set of numbers)."
    )
    size: int = setting(
        1024,
        "Bits of a Bloom filter, MinHash functions, or columns of a two-step hash.",
        least=1,
        allowed="a whole number, 1 or more; bits of a filter: a multiple of 8, at most 65,536",
    )
    hashes: int = setting(10, "Bits a gram sets in a Bloom filter, or rows of a two-step hash.", least=1)
    hashing: Hashing = setting(
        Hashing.keyed,
        "Bloom filter: independent positions from keyed BLAKE2b, or double hashing with HMAC-SHA1 and HMAC-MD5.",
    )
    padding: bool = setting(
        True, "Whether a blank stands before and after the text, so that its first and last letter are hashed as such."
    )
    secret: str = setting(
        "flatout",
        "What the hash functions follow from; who knows it can encode guesses.",
        example="'data.encoding.secret=${oc.env:FLATOUT_SECRET}'",
    )
    fold: int = setting(0, "Bloom filter: times the filter is halved by XOR of its halves.", least=0)
    diffusion: int = setting(
        0,
        "Bloom filter: bits whose XOR each output bit is; 0: none.",
        least=0,
        allowed="a whole number, 0 to the bits of the filter",
    )

    def __post_init__(self) -> None:
        check_settings(self, "encoding")
        for name in ("fold", "diffusion"):
            value = getattr(self, name)
            hardens = value == 0 or self.kind is EncodingKind.bloom
            require(
                hardens,
                f"encoding.{name}",
                f"{value} does not apply to {self.kind}",
                hint="Set it to 0, or the kind to bloom.",
            )
        if self.kind is EncodingKind.twostep:
            fits = self.hashes <= _MOST_HASHES_TWO_STEP
            require(fits, "encoding.hashes", f"{self.hashes}", allowed=f"1 to {_MOST_HASHES_TWO_STEP} for twostep")
            return
        step = 8 << self.fold
        require(
            self.size % step == 0,
            "encoding.size",
            f"{self.size}",
            allowed=f"a multiple of {step} here",
            hint=f"Set it to {-(-self.size // step) * step}.",
        )
        require(self.size <= 1 << 16, "encoding.size", f"{self.size}", allowed="at most 65,536 bits")
        require(
            self.diffusion <= self.size >> self.fold,
            "encoding.diffusion",
            f"{self.diffusion} of {self.size} bits",
            hint=f"Set it to {self.size >> self.fold} or less, or make the filter larger.",
        )

    def build(self) -> Encoder | TwoStepEncoder:
        kinds = {EncodingKind.bloom: BloomEncoder, EncodingKind.minhash: MinHashEncoder}
        return TwoStepEncoder(self) if self.kind is EncodingKind.twostep else kinds[self.kind](self)

    def without_secret(self) -> dict[str, Any]:
        """The settings, with a digest in place of the secret: enough to tell two encodings apart."""
        digest = hashlib.blake2b(self.secret.encode(), digest_size=16, person=b"flatout").hexdigest()
        return asdict(self) | {"secret": digest}

    def line(self) -> str:
        """The encoding in words."""
        if self.kind is EncodingKind.minhash:
            return f"tabulation MinHash, {self.size} functions of one bit"
        if self.kind is EncodingKind.twostep:
            return f"two-step hash, {self.hashes} rows of {self.size} columns"
        extras = [f"folded {self.fold}×"] if self.fold else []
        extras += [f"diffused over {self.diffusion} bits"] if self.diffusion else []
        return ", ".join([f"Bloom filter of {self.size} bits, {self.hashes} a gram ({self.hashing})", *extras])


class Encoder(ABC):
    """Encodes texts as rows of packed bits."""

    _table: NDArray[np.unsignedinteger]
    """A row for each gram."""

    def __init__(self, config: EncodingConfig) -> None:
        self.config = config
        self.grams = GramIndex()

    @property
    def num_bits(self) -> int:
        return self.config.size >> self.config.fold

    def encode(self, raw: pa.Array) -> Packed:
        """`[N, bits / 8]` packed bits of the raw texts; a text without a gram is all zeros."""
        ids, lengths = self.grams.rows(padded(raw) if self.config.padding else raw)
        self._hash_new_grams()
        offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
        encoded = np.zeros((len(raw), self.num_bits // 8), dtype=np.uint8)
        step = max(16, _BYTES_AT_ONCE // (_GRAMS_A_RECORD * self._table.shape[1] * self._table.itemsize))
        for start in range(0, len(raw), step):
            bounds = offsets[start : start + step + 1]
            filled = np.flatnonzero(np.diff(bounds))
            if len(filled):
                block = ids[bounds[0] : bounds[-1]]
                encoded[start + filled] = self._united(block, bounds[filled] - bounds[0])
        return encoded

    @abstractmethod
    def _hash_new_grams(self) -> None:
        """Hash the grams that were met for the first time."""

    @abstractmethod
    def _united(self, ids: NDArray[np.int32], starts: NDArray[np.int64]) -> Packed:
        """The records whose grams begin at `starts`; none is empty."""


class BloomEncoder(Encoder):
    """Every gram sets its bits; folding and diffusion then hide which bits stand together."""

    def __init__(self, config: EncodingConfig) -> None:
        super().__init__(config)
        size, hashes = config.size, config.hashes
        keys = derived_keys(config.secret, 2)
        keyed = partial(keyed_positions, key=keys[0], hashes=hashes, size=size)
        double = partial(double_positions, keys=keys, hashes=hashes, size=size)
        self._positions = keyed if config.hashing is Hashing.keyed else double
        self._table = np.zeros((0, size // 8), dtype=np.uint8)
        self._sources: NDArray[np.int64] | None = None
        if config.diffusion:
            order = random_stream(config.secret, "diffusion").random((self.num_bits, self.num_bits)).argsort(axis=1)
            self._sources = order[:, : config.diffusion]

    def _hash_new_grams(self) -> None:
        new = self.grams.names[len(self._table) :]
        bits = np.zeros((len(new), self.config.size), dtype=np.uint8)
        for row, gram in zip(bits, new, strict=True):
            row[self._positions(gram)] = 1
        self._table = np.concatenate([self._table, np.packbits(bits, axis=1)])

    def _united(self, ids: NDArray[np.int32], starts: NDArray[np.int64]) -> Packed:
        filters = np.bitwise_or.reduceat(self._table[ids], starts, axis=0)
        for _ in range(self.config.fold):
            half = filters.shape[1] // 2
            filters = filters[:, :half] ^ filters[:, half:]
        return filters if self._sources is None else _diffused(filters, self._sources)


def _diffused(filters: Packed, sources: NDArray[np.int64]) -> Packed:
    """Each output bit is the XOR of its source bits."""
    bits = np.unpackbits(filters, axis=1)
    out = bits[:, sources[:, 0]]
    for number in range(1, sources.shape[1]):
        out ^= bits[:, sources[:, number]]
    return np.packbits(out, axis=1)


class MinHashEncoder(Encoder):
    """Each function keeps the lowest bit of the least hash among a record's grams.

    Hashes are only ever compared, so each function's hashes are replaced by their ranks among all grams, with the
    bit that is kept in the last place: four times less to read than 64-bit hashes, and the same answer.
    """

    def __init__(self, config: EncodingConfig) -> None:
        super().__init__(config)
        self._tabulation = Tabulation(config.secret, config.size)
        self._hashes = np.zeros((0, config.size), dtype=np.uint64)
        self._table = np.zeros((0, config.size), dtype=np.uint32)

    def _hash_new_grams(self) -> None:
        new = self.grams.names[len(self._hashes) :]
        if not new:
            return
        self._hashes = np.concatenate([self._hashes, [self._tabulation.hashes(gram) for gram in new]])
        narrow = np.uint16 if len(self._hashes) < 1 << 15 else np.uint32
        ranks = self._hashes.argsort(axis=0).argsort(axis=0).astype(narrow)
        self._table = ranks << np.array(1, narrow) | (self._hashes & np.uint64(1)).astype(narrow)

    def _united(self, ids: NDArray[np.int32], starts: NDArray[np.int64]) -> Packed:
        least = np.minimum.reduceat(self._table[ids], starts, axis=0)
        return np.packbits((least & 1).astype(np.uint8), axis=1)


class TwoStepEncoder:
    """Step one sets one bit a row of a bit matrix for each gram; step two turns each column that holds a bit into a
    number that stands for the column and its bits.
    """

    def __init__(self, config: EncodingConfig) -> None:
        self.config = config
        self.grams = GramIndex()
        self._keys = derived_keys(config.secret, config.hashes)
        self._columns = np.zeros((0, config.hashes), dtype=np.int64)

    def encode(self, raw: pa.Array) -> Sets:
        """The numbers of each text in rising order; a text without a gram has none."""
        ids, lengths = self.grams.rows(padded(raw) if self.config.padding else raw)
        self._hash_new_grams()
        offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
        blocks = [
            self._block(
                ids[offsets[start] : offsets[min(start + _ROWS_AT_ONCE, len(raw))]], lengths[start:][:_ROWS_AT_ONCE]
            )
            for start in range(0, len(raw), _ROWS_AT_ONCE)
        ]
        if not blocks:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        return np.concatenate([values for values, _ in blocks]), np.concatenate([counts for _, counts in blocks])

    def _hash_new_grams(self) -> None:
        hashes, size = self.config.hashes, self.config.size
        new = [
            [keyed_positions(gram, key=key, hashes=1, size=size)[0] for key in self._keys]
            for gram in self.grams.names[len(self._columns) :]
        ]
        self._columns = np.concatenate([self._columns, np.array(new, dtype=np.int64).reshape(-1, hashes)])

    def _block(self, ids: NDArray[np.int32], lengths: NDArray[np.int32]) -> Sets:
        hashes = self.config.hashes
        cells = self._columns[ids] * hashes + np.arange(hashes)
        cells, counts = distinct(cells.ravel(), lengths * hashes)  # one entry for each bit of a record's matrix
        row = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
        column, hash_row = np.divmod(cells.astype(np.int64), hashes)
        places = row * self.config.size + column
        if len(places) == 0:
            return np.empty(0, np.int32), np.zeros(len(lengths), np.int32)
        starts = np.flatnonzero(np.append(True, places[1:] != places[:-1]))
        patterns = np.add.reduceat(np.int64(1) << hash_row, starts)
        codes = (column[starts] << _MOST_HASHES_TWO_STEP | patterns).astype(np.uint64)
        numbers = (mixed(codes, self.config.secret) >> np.uint64(33)).astype(np.int32)
        return distinct(numbers, np.bincount(row[starts], minlength=len(lengths)))


def derived_keys(secret: str, count: int) -> list[bytes]:
    """Keys of 64 bytes from a secret, by HKDF with SHA-256 (RFC 5869) without salt."""
    extracted = hmac.new(bytes(32), secret.encode(), hashlib.sha256).digest()
    made, block = b"", b""
    while len(made) < count * _KEY_BYTES:
        block = hmac.new(extracted, block + bytes([len(made) // 32 + 1]), hashlib.sha256).digest()
        made += block
    return [made[start : start + _KEY_BYTES] for start in range(0, count * _KEY_BYTES, _KEY_BYTES)]


def keyed_positions(gram: str, *, key: bytes, hashes: int, size: int) -> list[int]:
    """`hashes` positions below `size` from keyed BLAKE2b, two bytes each; the way of the clkhash library."""
    numbers: list[int] = []
    for digest in range(-(-hashes // _NUMBERS_A_DIGEST)):
        made = hashlib.blake2b(gram.encode(), key=key, salt=str(digest).encode()).digest()
        numbers += np.frombuffer(made, dtype="<u2").tolist()
    return [number % size for number in numbers[:hashes]]


def double_positions(gram: str, *, keys: Sequence[bytes], hashes: int, size: int) -> list[int]:
    """`hashes` positions in equal steps: HMAC-SHA1 says where to start, HMAC-MD5 how far to step."""
    start = int.from_bytes(hmac.new(keys[0], gram.encode(), hashlib.sha1).digest(), "big")
    step = int.from_bytes(hmac.new(keys[1], gram.encode(), hashlib.md5).digest(), "big")
    return [(start + number * step) % size for number in range(hashes)]


def random_stream(secret: str, purpose: str) -> np.random.Generator:
    """Random numbers that follow from a secret, another stream for each purpose."""
    seed = hashlib.blake2b(purpose.encode(), key=hashlib.sha256(secret.encode()).digest(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "big")))


class Tabulation:
    """`count` independent 64-bit hashes of a gram by simple tabulation: eight bytes look up eight random numbers."""

    def __init__(self, secret: str, count: int) -> None:
        self._key = derived_keys(secret, 1)[0]
        self._tables = random_stream(secret, "tabulation").integers(0, 2**64, (8, 256, count), dtype=np.uint64)

    def hashes(self, gram: str) -> NDArray[np.uint64]:
        """`[count]` hashes."""
        digest = hashlib.blake2b(gram.encode(), key=self._key, digest_size=8).digest()
        return np.bitwise_xor.reduce(self._tables[np.arange(8), list(digest)], axis=0)


def mixed(values: NDArray[np.uint64], secret: str) -> NDArray[np.uint64]:
    """64-bit numbers spread over all 64-bit numbers, one to one, in a way that follows from the secret.

    Not meant to withstand cryptanalysis: it stands for the random numbers that a real encoder draws.
    """
    keys = random_stream(secret, "mixed").integers(0, 2**64, 3, dtype=np.uint64)
    for key, factor in zip(keys, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15), strict=True):
        values = (values ^ key) * np.uint64(factor)
        values ^= values >> np.uint64(31)
    return values
