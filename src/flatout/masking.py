"""Mask secrets in settings, words of the command line and addresses.

Whatever is written into a run folder, logged or printed passes one of the functions below. A mask
is `***-` and four hexadecimal digits, such as `***-9f3c`. The digits follow from the secret alone,
so two runs can be compared: another secret is noticed but for one in 65,536. Sixteen bits say
little to who guesses: among a million guesses some fifteen fit, however many run folders there are.
(A salt for each run would give more bits away with every run.) A reference such as `${oc.env:NAME}`
is no secret and stays. From the 257th secret of a process on, all have one mask, `***-0000`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Of PBKDF2: some 50 ms a guess. Masks are kept in memory, so a run pays once for each secret.
_ROUNDS = 100_000
# More of them are no person's: all further ones have one mask, or a text of others takes hours.
_MOST_SECRETS = 256
_MASK_OF_MANY = "***-0000"
_MASKED = re.compile(r"\*\*\*-[0-9a-f]{4}")
_REFERENCE = re.compile(r"\$\{[\w.:]+\}")
# Names of settings that hold secrets: `token` is one, `max_tokens` is not.
_NAME = (
    r"(?:\w*_)?(?:secret|password|passwd|passphrase|credentials|api_?key|access_key(?:_id)?"
    r"|secret_key|private_key)|token|\w*(?:access|auth|bearer|session|refresh|api|hf|hub)_token"
)
_IS_SECRET = re.compile(_NAME, re.IGNORECASE)
# A setting within a mapping that is typed as one word: {api_key: abc, mode: online}
_IN_MAPPING = re.compile(
    rf"(?<=[{{,\s])((?:{_NAME})\s*+:\s*+)"
    # between quotes, with quotes behind backslashes; a reference; words without quotes
    r"('(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\$\{[^{}]*\}|[^,}\]]*[^,}\]\s])",
    re.IGNORECASE,
)
# Texts of others are searched: no expression reads a part of a text once more for each place in it.
_WORD = re.compile(r"[^\s'\"]++")
# The name of a part of an address's query, and its value: ?sig=abc&expires=3
_QUERY_NAME = re.compile(r"(?<=[?&;#])([\w.-]++)=")
_QUERY_VALUE = re.compile(r"[^&;\s#'\"]+")
# Names of such parts that hold a secret, as storage services sign addresses.
_IS_SECRET_OF_QUERY = re.compile(
    r"token|secret|password|passwd|signature|credential|access_?key|api_?key"
    r"|^(?:sig|sas|key|pwd|pass|passphrase|auth|jwt|bearer)$",
    re.IGNORECASE,
)
# The user part ends at the last @ before the path; a key may hold a slash, which a port's number
# does not precede.
_USER = re.compile(r"(?<=://)([^/\s?#'\"]+|[^/\s:@?#'\"]+:(?!\d+[/?#])[^\s@'\"]+)(?=@)")
_masks: dict[str, str] = {}  # of the secrets of this process


def mask(secret: str) -> str:
    """The mask of a secret: `***-9f3c`. A mask, a reference and an empty text stay."""
    is_no_secret = not _REFERENCE.sub("", secret).strip(":'\"") or _MASKED.fullmatch(secret)
    if is_no_secret:
        return secret
    if secret not in _masks and len(_masks) >= _MOST_SECRETS:
        return _MASK_OF_MANY
    if secret not in _masks:
        secret_bytes = secret.encode("utf-8", "surrogatepass")
        digest = hashlib.pbkdf2_hmac("sha256", secret_bytes, b"flatout mask", _ROUNDS, dklen=2)
        _masks[secret] = f"***-{digest.hex()}"
    return _masks[secret]


def is_masked(text: str) -> bool:
    """Whether a text holds a mask in place of a secret."""
    return _MASKED.search(text) is not None


def mask_addresses(text: str) -> str:
    """Mask the user parts of addresses in a text, and keys and tokens of their queries."""
    if "://" not in text:
        return text
    return _mask_queries(_WORD.sub(_mask_users, text))


def _mask_users(word: re.Match[str]) -> str:
    # behind the last @ there is no user part: it is not searched
    before, at, rest = word[0].rpartition("@")
    return _USER.sub(lambda user: mask(user[1]), before + at) + rest


def _mask_queries(text: str) -> str:
    """Mask the values behind secret names. A value may hold a query, such as `?next=…?token=`."""
    pieces = []
    end = 0
    for name in _QUERY_NAME.finditer(text):
        value = _QUERY_VALUE.match(text, name.end())
        if name.start() >= end and value and _IS_SECRET_OF_QUERY.search(name[1]):
            pieces += [text[end : name.end()], mask(value[0])]
            end = value.end()
    return "".join([*pieces, text[end:]])


def mask_settings(value: object, key: str = "") -> Any:
    """Settings, or facts of a run, with every secret masked.

    A value is secret by the name of its key (`api_key`) or of one above it (`credentials.user`), a
    part of an address by its place.
    """
    names = re.split(r"[.\[\]]", key)
    is_secret = any(_IS_SECRET.fullmatch(name) is not None for name in names)
    if isinstance(value, Mapping):
        # all of a mapping is secret where its own name is
        masked = {}
        for name, item in value.items():
            masked[name] = mask_settings(item, key if is_secret else str(name))
        return masked
    if isinstance(value, list | tuple):
        return [mask_settings(item, key) for item in value]
    if is_secret and type(value) in (int, float):
        return mask(str(value))  # YAML reads a password of digits as a number
    if type(value) is not str:
        return value
    return mask(value) if is_secret else mask_addresses(value)


def mask_words(words: Iterable[str]) -> list[str]:
    """Words of a command line with every secret masked."""
    return [_mask_word(word) for word in words]


def _mask_word(word: str) -> str:
    """`logger.wandb.api_key=abc` → `logger.wandb.api_key=***-9f3c`; in `{api_key: abc}`, too."""
    name, equals, value = word.partition("=")
    value = mask_settings(value, name.lstrip("+~"))
    return name + equals + _IN_MAPPING.sub(lambda part: part[1] + mask(part[2]), value)
