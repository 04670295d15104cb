"""From one gram to its numbers: the hash functions that encodings are built on, each from a secret.

A gram is hashed once, however many records hold it: there are some thousand grams and any number of records, so the
hash functions may be the real, slow ones.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_KEY_BYTES = 64
_NUMBERS_A_DIGEST = 32


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
