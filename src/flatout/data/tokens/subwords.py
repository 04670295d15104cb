"""Tokenizers of transformers: texts, pairs of texts and lists of words to the ids that an encoder
was trained on.

The fast tokenizer's own Rust code does the work, over whole blocks; the ids that open, part and
close a row are put in by arithmetic. A row is cut so that these always fit. All files of the
tokenizer are kept for transformers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from flatout.data.tables.roles import Roles
from flatout.data.tables.table import is_list
from flatout.data.tokens.long_texts import CUT, Long, LongTexts, pieces_of
from flatout.data.tokens.run_model import RunModel, model_of_run
from flatout.data.tokens.vocabulary import (
    EncodedBlock,
    Vocabulary,
    VocabularyConfig,
    VocabularyKind,
)
from flatout.errors import UserError, require

# stands between the two texts of a pair; a code that Unicode keeps from being a character of any
# text
PAIR = "\ufdd0"
_NOTHING = "?"
_BEGINS = "▁"
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ROWS_A_CALL = 4_096
_ENDINGS = (".json", ".txt", ".jinja", ".model")  # of a tokenizer's files: all are data
_KIND = "subwords"
# ids of texts, one run after the other, and how many each has
Runs = tuple[NDArray[np.int32], NDArray[np.int64]]
# ids that every row gets, or the runs of all rows with their lengths and how much of each is kept
Part = Any


@dataclass(frozen=True, slots=True)
class Frame:
    """Ids that are put around what a tokenizer makes of a text."""

    opening: list[int]
    closing: list[int]
    parting: list[int]  # between the texts of a pair
    padding: int
    unknown: int
    # the id after which a pair's second text begins, for models that number the texts of a pair
    separator: int | None

    @property
    def size(self) -> int:
        return len(self.opening) + len(self.closing)


@dataclass(frozen=True, slots=True)
class EncodedWords:
    """Token ids of rows of words, and where each word begins."""

    block: EncodedBlock
    firsts: NDArray[np.bool_]  # for each token whether it is the first of a word
    words: NDArray[np.int64]  # words of each row that were kept


class Subwords:
    """A tokenizer of transformers, as encoder of text blocks."""

    def __init__(self, tokenizer: Tokenizer, frame: Frame, files: dict[str, str]) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.frame = frame
        self.files = files
        self.size: int = tokenizer.get_vocab_size()

    @classmethod
    def load(
        cls, name: str, where: str = "model.pretrained, data.tokenizer", *, words: bool = False
    ) -> Subwords:
        """The tokenizer of a folder, of a run, of the cache, or of the Hub; for texts, or for lists
        of words.
        """
        if run := model_of_run(name):
            return cls._of_run(run, words=words)
        from transformers import AutoTokenizer

        from flatout.data.tables.hub import fetched

        opened = partial(
            AutoTokenizer.from_pretrained, name, use_fast=True, trust_remote_code=False
        )
        found = fetched(name, where, opened)
        if not getattr(found, "is_fast", False):
            raise UserError(
                where, f"{name} has no fast tokenizer", hint="Convert it to a tokenizer.json first."
            )
        require(
            len(found) > len(found.all_special_ids),
            where,
            f"{name} has no words: its tokenizer's files are missing",
            hint="Set data.tokenizer=FOLDER.",
        )
        if words and "ByteLevel" in found.backend_tokenizer.to_str():
            # Pieces with a blank before them are other pieces: each word of a list has one, as in a
            # text.
            found = opened(add_prefix_space=True)
        return cls.of(found)

    @classmethod
    def _of_run(cls, run: RunModel, *, words: bool) -> Subwords:
        found = run.read(lambda: cls.from_json(run.text("tokenizer.json")))
        if not words or "ByteLevel" not in found.tokenizer.to_str():
            return found
        with tempfile.TemporaryDirectory() as folder:
            found.save(Path(folder))
            return cls.load(folder, words=True)

    @classmethod
    def of(cls, fast: Any) -> Subwords:
        """A fast tokenizer of transformers."""
        with tempfile.TemporaryDirectory() as folder:
            fast.save_pretrained(folder)
            files = {
                path.name: path.read_text(encoding="utf-8")
                for path in sorted(Path(folder).iterdir())
            }
        tokenizer = Tokenizer.from_str(fast.backend_tokenizer.to_str())
        return cls(tokenizer, _frame_of(tokenizer, fast), files)

    @classmethod
    def train(cls, blocks: Iterable[pa.Array], config: VocabularyConfig) -> Subwords:
        """Word pieces of the training texts, framed as BERT frames a row; for encoders trained from
        scratch.
        """
        from transformers import PreTrainedTokenizerFast

        pieces = {piece: number for number, piece in enumerate(_word_pieces(blocks, config))}
        tokenizer = Tokenizer(
            models.WordPiece(pieces, unk_token="[UNK]", max_input_chars_per_word=100)
        )
        tokenizer.normalizer = _normalizer(config)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.add_special_tokens(_SPECIAL)
        closing, opening = ((name, _SPECIAL.index(name)) for name in ("[SEP]", "[CLS]"))
        tokenizer.post_processor = processors.BertProcessing(closing, opening)
        names = dict(
            zip(
                ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"),
                _SPECIAL,
                strict=True,
            )
        )
        return cls.of(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names))

    @classmethod
    def from_json(cls, text: str) -> Subwords:
        held = json.loads(text)
        for name in held["files"]:
            is_plain = Path(name).name == name and name.endswith(_ENDINGS)
            require(
                is_plain,
                "tokenizer.json",
                f"holds a file named {name!r}",
                allowed=", ".join(_ENDINGS),
            )
        return cls(Tokenizer.from_str(held["tokenizer"]), Frame(**held["frame"]), held["files"])

    def to_json(self) -> str:
        held = {
            "kind": _KIND,
            "frame": asdict(self.frame),
            "tokenizer": self.tokenizer.to_str(),
            "files": self.files,
        }
        return json.dumps(held, ensure_ascii=False)

    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.to_json().encode("utf-8", "surrogatepass"))

    def require_mask(self, name: str) -> int:
        """The id that stands for a word to be predicted; a tokenizer without one is refused."""
        token = json.loads(self.files.get("tokenizer_config.json", "{}")).get("mask_token")
        token = token.get("content") if isinstance(token, dict) else token
        found = self.tokenizer.token_to_id(token) if token else None
        hint = (
            "Name a tokenizer of a masked language model, or leave it out: one is made from the"
            " training rows."
        )
        if found is None:
            raise UserError("data.tokenizer", f"{name} has no mask token", hint=hint)
        return found

    def special_ids(self) -> list[int]:
        """Ids that are no part of a text: of the frame, of padding, of masks, of what
        is unknown.
        """
        return [
            number
            for number, token in self.tokenizer.get_added_tokens_decoder().items()
            if token.special
        ]

    def save(self, folder: Path) -> None:
        """Write the files that transformers reads."""
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")

    def encode(self, texts: pa.Array, *, max_length: int, long: LongTexts = CUT) -> EncodedBlock:
        """Ids of each text or pair, framed; `max_length` of a text are kept, and what windows share
        counts once.
        """
        firsts, seconds = _parted(texts)
        runs = self._runs(firsts)
        if seconds is not None:
            return self._framed_pairs(runs, self._runs(seconds), max_length)
        return self._framed(runs, max_length, long)

    def encode_words(
        self, words: pa.Array, *, max_length: int, long: LongTexts = CUT
    ) -> EncodedWords:
        """Ids of rows that are lists of words; a word of which no token fits is lost, and one
        window has each word.
        """
        runs, firsts = [], []
        for rows in _pieces(words):
            encodings = self.tokenizer.encode_batch(
                rows, is_pretokenized=True, add_special_tokens=False
            )
            for row, encoding in zip(rows, encodings, strict=True):
                if len(found := set(encoding.word_ids)) < len(row):
                    # Words that a tokenizer makes nothing of, such as lone control characters,
                    # become a mark.
                    whole = [
                        word if number in found else _NOTHING for number, word in enumerate(row)
                    ]
                    encoding = self.tokenizer.encode(
                        whole, is_pretokenized=True, add_special_tokens=False
                    )
                runs.append(np.array(encoding.ids, np.int32))
                firsts.append(np.diff(np.array(encoding.word_ids, np.int64), prepend=-1) > 0)
        tokens, lengths = _joined(runs)
        long = long if long.window else CUT
        block = self._framed((tokens, lengths), max_length, long)
        # The same frame around the marks: nothing of a frame begins a word.
        marks = (
            self._framed((_joined(firsts)[0], lengths), max_length, long, marks=True).tokens == 1
        )
        ends = np.cumsum(block.lengths, dtype=np.int64)
        total = np.append(0, np.cumsum(marks))
        return EncodedWords(block, marks, total[ends] - total[ends - block.lengths])

    def _runs(self, texts: pa.Array) -> Runs:
        encoded = (
            self.tokenizer.encode_batch_fast(rows, add_special_tokens=False)
            for rows in _pieces(texts)
        )
        return _joined(
            [np.array(encoding.ids, np.int32) for encodings in encoded for encoding in encodings]
        )

    def _framed(
        self, runs: Runs, max_length: int, long: LongTexts, *, marks: bool = False
    ) -> EncodedBlock:
        """Each text or window in a frame, or the first and the last tokens in one; a mark stays in
        one window.
        """
        frame = self.frame
        tokens, lengths = runs
        if marks:  # as long, of zeros
            frame = replace(
                frame, opening=[0] * len(frame.opening), closing=[0] * len(frame.closing)
            )
        kept = np.minimum(lengths, max(1, max_length - frame.size))
        there = lengths
        framed = kept
        rows = kept + frame.size
        if long.kind is not Long.cut:
            starts, sizes, text = long.pick(lengths, kept, frame.size)
            tokens = pieces_of(tokens, lengths, starts, sizes, text)
            tokens = tokens * long.answers_of(sizes, text) if marks else tokens
            framed = sizes if long.window else kept
            there = framed
            rows = np.bincount(text, sizes + frame.size, len(lengths)) if long.window else rows
        whole = _put_together([frame.opening, (tokens, there, framed), frame.closing], len(framed))
        block = EncodedBlock.of(whole, kept + frame.size, lengths + frame.size, frame.unknown)
        return replace(block, lengths=rows.astype(np.int32))

    def _framed_pairs(self, first: Runs, second: Runs, max_length: int) -> EncodedBlock:
        """The longer text of a pair is cut first."""
        frame = self.frame
        added = self.frame.size + len(self.frame.parting)
        room = max(2, max_length - added)
        cuts = np.minimum(first[1], np.maximum(room - second[1], (room + 1) // 2))
        more_cuts = np.minimum(second[1], room - cuts)
        parts = [frame.opening, (*first, cuts), frame.parting, (*second, more_cuts), frame.closing]
        whole = _put_together(parts, len(cuts))
        return EncodedBlock.of(
            whole, cuts + more_cuts + added, first[1] + second[1] + added, frame.unknown
        )


Encoder = Vocabulary | Subwords  # whatever turns blocks of texts into ids


def train_encoder(blocks: Iterable[pa.Array], config: VocabularyConfig) -> Encoder:
    """A vocabulary of the kind asked for, made from the training texts."""
    return (Subwords if config.kind is VocabularyKind.wordpiece else Vocabulary).train(
        blocks, config
    )


def encode_texts(
    encoder: Encoder, texts: pa.Array, max_length: int, long: LongTexts
) -> EncodedBlock:
    """Ids of texts; only encoders read long ones otherwise than cut."""
    if isinstance(encoder, Subwords):
        return encoder.encode(texts, max_length=max_length, long=long)
    return encoder.encode(texts, max_length=max_length)


def read_encoder(text: str) -> Encoder:
    """What either's `to_json` wrote."""
    return (
        Subwords.from_json(text)
        if text.startswith(f'{{"kind": "{_KIND}"')
        else Vocabulary.from_json(text)
    )


def _joined(runs: list[NDArray[Any]]) -> Runs:
    return np.concatenate([*runs, np.empty(0, np.int32)], dtype=np.int32), np.array(
        list(map(len, runs)), np.int64
    )


def _put_together(parts: list[Part], num_rows: int) -> NDArray[np.int32]:
    kept = [
        np.full(num_rows, len(part)) if not isinstance(part, tuple) else part[2] for part in parts
    ]
    lengths = np.sum(kept, axis=0, dtype=np.int64)
    place = np.cumsum(lengths) - lengths
    found = np.empty(int(lengths.sum()), np.int32)
    for part, counts in zip(parts, kept, strict=True):
        counts = counts.astype(np.int64)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens, whole = (
            part[:2] if isinstance(part, tuple) else (np.asarray(part, np.int32), 0 * counts)
        )
        found[np.repeat(place, counts) + within] = tokens[
            np.repeat(np.cumsum(whole) - whole, counts) + within
        ]
        place = place + counts
    return found


def _normalizer(config: VocabularyConfig) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        lowercase=config.lowercase, strip_accents=config.strip_accents
    )


def _word_pieces(blocks: Iterable[pa.Array], config: VocabularyConfig) -> list[str]:
    """The special entries, then every letter at and after the beginning of a word, then the
    commonest pieces.
    """
    # The library's own trainer of word pieces numbers letters in the order of a hash table, another
    # in each process; its byte-pair trainer does not. So words are marked at their beginning, which
    # separates the two kinds of pieces.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _normalizer(config)
    marked = pre_tokenizers.Metaspace(replacement=_BEGINS, prepend_scheme="always", split=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), marked])
    sizes: dict[str, Any] = {"vocab_size": config.size, "min_frequency": config.min_frequency}
    trainer = trainers.BpeTrainer(**sizes, show_progress=False, special_tokens=[])
    # words of a list one by one
    texts = (pc.list_flatten(block) if is_list(block.type) else block for block in blocks)
    tokenizer.train_from_iterator((block.to_pylist() for block in texts), trainer)
    learnt = [piece for piece, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    letters = [piece for piece in learnt if len(piece) == 1 and piece != _BEGINS]
    longer = [
        piece[1:] if piece.startswith(_BEGINS) else f"##{piece}"
        for piece in learnt
        if len(piece) > 1
    ]
    return list(
        dict.fromkeys([*_SPECIAL, *letters, *(f"##{letter}" for letter in letters), *longer])
    )[: config.size]


def _frame_of(tokenizer: Tokenizer, fast: Any) -> Frame:
    """What the tokenizer puts around a text and between two, read off what it makes of
    a known one.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    one, two = tokenizer.encode("a").ids, tokenizer.encode("a", "a").ids
    opening = one[: next((at for at in range(len(one)) if one[at : at + len(plain)] == plain), 0)]
    closing = one[len(opening) + len(plain) :]
    parting = two[len(opening) + len(plain) : len(two) - len(closing) - len(plain)]
    padding = fast.pad_token_id if fast.pad_token_id is not None else 0
    unknown = fast.unk_token_id if fast.unk_token_id is not None else -1
    return Frame(opening, closing, parting, padding, unknown, parting[-1] if parting else None)


def _parted(texts: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """Texts, or the first and the second text of pairs."""
    texts = texts.cast(pa.large_string())
    parts = pc.split_pattern(texts, PAIR, max_splits=1)
    if len(texts) == 0 or pc.max(pc.list_value_length(parts)).as_py() < 2:
        return texts, None
    return pc.list_element(parts, 0), pa.array([(*each, "")[1] for each in parts.to_pylist()])


def _pieces(values: pa.Array) -> Iterable[list[Any]]:
    """Some thousand rows at a time, as Python has them: what Rust is handed."""
    for start in range(0, len(values), _ROWS_A_CALL):
        yield values.slice(start, _ROWS_A_CALL).to_pylist()


def pair_separator(encoder: Encoder, roles: Roles) -> int | None:
    """The id that parts the texts of pairs; None where rows are no pairs."""
    return encoder.frame.separator if isinstance(encoder, Subwords) and roles.join == PAIR else None
