"""Tokenizers of transformers: from texts, pairs of texts and lists of words to token ids.

`Subwords.load` opens a tokenizer of a folder, a run or the Hub; `Subwords.train` makes one from the
training texts. `encode` hands whole blocks to the tokenizer's Rust code, without special tokens,
and puts these around each row by arithmetic on arrays. A row is cut so that its special tokens
always fit. Open this file to change how texts of an encoder become ids.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from flatout.data.ragged import row_begins, row_indices
from flatout.data.tables.roles import Roles
from flatout.data.tables.table import is_list
from flatout.data.tokens.checked_tokenizer import (
    parse_tokenizer,
    require_modest_growth,
    require_tokenizer_files,
)
from flatout.data.tokens.long_texts import CUT, Long, LongTexts
from flatout.data.tokens.run_model import RunModel, model_of_run
from flatout.data.tokens.vocabulary import (
    EncodedBlock,
    Vocabulary,
    VocabularyConfig,
    VocabularyKind,
    explain_tokenizer,
    require_known_ids,
)
from flatout.errors import UserError, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAIR = "\ufdd0"
"""Stands between the two texts of a pair. Unicode keeps this code from being a character of any
text."""
_NO_WORD = "?"
"""Replaces a word of which the tokenizer makes no token."""
_WORD_BEGIN = "▁"
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ROWS_A_CALL = 4_096  # rows handed to Rust at once: enough for all cores, few enough for memory
_KIND = "subwords"
_MOST_IDS = 1 << 31


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Token ids of rows: each has `lengths` of `tokens`, from `starts` on.

    Rows [a0 a1 a2] and [b0] one after the other: starts [0, 3], lengths [3, 1].
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: NDArray[np.int32], lengths: NDArray[np.int64]) -> TokenRows:
        """Rows that lie one after the other."""
        return cls(tokens, row_begins(lengths), lengths)

    @classmethod
    def of_rows(cls, rows: list[NDArray[Any]]) -> TokenRows:
        tokens = np.concatenate([*rows, np.empty(0, np.int32)], dtype=np.int32)
        return cls.of(tokens, np.array([len(row) for row in rows], np.int64))

    @classmethod
    def same(cls, ids: list[int], num_rows: int) -> TokenRows:
        """The same ids in each row, such as those that open it."""
        starts = np.zeros(num_rows, np.int64)
        return cls(np.asarray(ids, np.int32), starts, np.full(num_rows, len(ids)))

    def cut(self, lengths: NDArray[np.int64]) -> TokenRows:
        """The beginning of each row."""
        return replace(self, lengths=lengths)


@dataclass(frozen=True, slots=True)
class Frame:
    """The special tokens that a tokenizer puts around a text, such as [CLS] and [SEP]."""

    opening: list[int]
    closing: list[int]
    parting: list[int]  # between the texts of a pair
    padding: int
    unknown: int
    # the id after which a pair's second text begins, for models that number the texts of a pair
    separator: int | None

    @classmethod
    def read(cls, values: dict[str, Any]) -> Frame:
        """A frame that may come from others: ids that are none are refused."""
        frame = cls(**values)
        rows = (frame.opening, frame.closing, frame.parting)
        are_lists = all(isinstance(row, list) for row in rows)
        require(are_lists, "tokenizer.json", "its special tokens are no lists of ids")
        separators = [] if frame.separator is None else [frame.separator]
        # an unknown token that there is none of is -1
        ids = [*frame.opening, *frame.closing, *frame.parting, frame.padding, *separators]
        are_ids = all(type(number) is int and 0 <= number < _MOST_IDS for number in ids)
        is_known = type(frame.unknown) is int and -1 <= frame.unknown < _MOST_IDS
        require(are_ids and is_known, "tokenizer.json", "its special tokens are no ids")
        return frame

    @property
    def size(self) -> int:
        """Special tokens around a single text."""
        return len(self.opening) + len(self.closing)


@dataclass(frozen=True, slots=True)
class EncodedWords:
    """Token ids of rows of words, and where each word begins."""

    block: EncodedBlock
    firsts: NDArray[np.bool_]  # for each token whether it is the first of a word
    word_counts: NDArray[np.int64]  # words of each row that were kept


class Subwords:
    """A tokenizer of transformers that makes ids of text blocks."""

    def __init__(self, tokenizer: Tokenizer, frame: Frame, files: dict[str, str]) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.frame = frame
        self.unknown = frame.unknown
        self.files = files
        self.num_ids = _MOST_IDS  # ids that the network knows; all, where no network is known
        self.size: int = tokenizer.get_vocab_size()

    @classmethod
    def load(
        cls, name: str, where: str = "model.pretrained, data.tokenizer", *, words: bool = False
    ) -> Subwords:
        """The tokenizer of a folder, of a run, of transformers' cache, or of the Hub.

        `words`: it will encode lists of words, as for tags. `where` names the setting in errors.
        """
        if run := model_of_run(name):
            return cls._of_run(run, words=words)
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        from flatout.data.tables.hub import fetch_model

        opened = partial(
            AutoTokenizer.from_pretrained, name, use_fast=True, trust_remote_code=False
        )
        tokenizer = fetch_model(name, where, opened)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                where, f"{name} has no fast tokenizer", hint="Convert it to a tokenizer.json first."
            )
        require(
            len(tokenizer) > len(tokenizer.all_special_ids),
            where,
            f"{name} has no words: its tokenizer's files are missing",
            hint="Set data.tokenizer=FOLDER.",
        )
        if words and "ByteLevel" in tokenizer.backend_tokenizer.to_str():
            # To such a tokenizer " word" and "word" are different tokens. In a text a word has a
            # blank before it, so each word of a list gets one.
            tokenizer = opened(add_prefix_space=True)
            assert isinstance(tokenizer, PreTrainedTokenizerFast)
        return cls.of(tokenizer)

    @classmethod
    def _of_run(cls, run: RunModel, *, words: bool) -> Subwords:
        of_texts = run.read(lambda: cls.from_json(run.text("tokenizer.json")))
        if not words or "ByteLevel" not in of_texts.tokenizer.to_str():
            return of_texts
        with tempfile.TemporaryDirectory() as folder:
            of_texts.save(Path(folder))
            return cls.load(folder, words=True)

    @classmethod
    def of(cls, fast: PreTrainedTokenizerFast) -> Subwords:
        """A fast tokenizer of transformers."""
        with tempfile.TemporaryDirectory() as folder:
            fast.save_pretrained(folder)
            # templates of chats lie in a folder of their own; texts are not put into any
            files = {
                path.name: path.read_text(encoding="utf-8")
                for path in sorted(Path(folder).iterdir())
                if path.is_file()
            }
        tokenizer = Tokenizer.from_str(fast.backend_tokenizer.to_str())
        # A run that keeps it could not be opened again: `from_json` refuses such rules.
        require_modest_growth(tokenizer)
        return cls(tokenizer, _frame_of(tokenizer, fast), files)

    @classmethod
    def train(cls, blocks: Iterable[pa.Array], config: VocabularyConfig) -> Subwords:
        """Word pieces of the training texts, for an encoder that is trained from scratch.

        Rows begin with [CLS] and end with [SEP], as those of BERT.
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
        closing = ("[SEP]", _SPECIAL.index("[SEP]"))
        opening = ("[CLS]", _SPECIAL.index("[CLS]"))
        tokenizer.post_processor = processors.BertProcessing(closing, opening)
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="[PAD]",
            unk_token="[UNK]",
            cls_token="[CLS]",
            sep_token="[SEP]",
            mask_token="[MASK]",
        )
        return cls.of(fast)

    @classmethod
    def from_json(cls, text: str) -> Subwords:
        """What `to_json` wrote. Names of files are checked: the text may come from others."""
        held = json.loads(text)
        require_tokenizer_files(held["files"])
        tokenizer = parse_tokenizer(held["tokenizer"])
        return cls(tokenizer, Frame.read(held["frame"]), held["files"])

    def to_json(self) -> str:
        """All of the tokenizer as one text, which a store and a run keep."""
        held = {
            "kind": _KIND,
            "frame": asdict(self.frame),
            "tokenizer": self.tokenizer.to_str(),
            "files": self.files,
        }
        return json.dumps(held, ensure_ascii=False)

    def fingerprint(self) -> str:
        """A hash of the tokenizer and its files. Stores of another one have another key."""
        return xxhash.xxh3_128_hexdigest(self.to_json().encode("utf-8", "surrogatepass"))

    def require_mask(self, name: str) -> int:
        """The id that stands for a word to be predicted; a tokenizer without one is refused."""
        token = json.loads(self.files.get("tokenizer_config.json", "{}")).get("mask_token")
        if isinstance(token, dict):
            token = token.get("content")
        mask_id = self.tokenizer.token_to_id(token) if token else None
        if mask_id is None:
            raise UserError(
                "data.tokenizer",
                f"{name} has no mask token",
                hint=(
                    "Name a tokenizer of a masked language model, or leave it out: one is made"
                    " from the training rows."
                ),
            )
        return mask_id

    def special_ids(self) -> list[int]:
        """Ids of special tokens: those around a text, padding, the mask, the unknown token."""
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
        """Ids of each text or pair, special tokens included, cut at `max_length`.

        A token of each text always stays; `_require_room` in `data/texts/preparation.py` refuses a
        `max_length` without room for it. `long` says what becomes of longer texts. In windows a row
        is longer than `max_length`: special tokens stand around each window, and neighbours share
        tokens. `whole_lengths` and what was cut count a shared token once, `lengths` twice.
        """
        firsts, seconds = _split_pairs(texts)
        token_rows = self._tokenize(firsts)
        if seconds is not None:
            return self._frame_pairs(token_rows, self._tokenize(seconds), max_length)
        return self._frame_texts(token_rows, max_length, long)

    def encode_words(
        self, words: pa.Array, *, max_length: int, long: LongTexts = CUT
    ) -> EncodedWords:
        """Ids of rows that are lists of words, and which token begins a word.

        Words behind the cut are lost. Of windows that share tokens, one marks each word.
        """
        token_rows: list[NDArray[np.int32]] = []
        begins_word_rows: list[NDArray[np.bool_]] = []
        with explain_tokenizer():
            for encoding in self._encode_rows_of_words(words):
                token_rows.append(np.array(encoding.ids, np.int32))
                # word_ids [0, 0, 1] → the first and the third token begin a word
                word_ids = np.array(encoding.word_ids, np.int64)
                begins_word_rows.append(np.diff(word_ids, prepend=-1) > 0)
        rows = TokenRows.of_rows(token_rows)
        if not long.window:
            long = CUT
        block = self._frame_texts(rows, max_length, long)
        # The marks are cut and framed as their tokens are. Special tokens begin no word.
        marks = TokenRows.of_rows(begins_word_rows)
        begins_word = self._frame_texts(marks, max_length, long, are_marks=True).tokens == 1
        row_ends = np.cumsum(block.lengths, dtype=np.int64)
        words_before = np.append(0, np.cumsum(begins_word))
        words_of_row = words_before[row_ends] - words_before[row_ends - block.lengths]
        return EncodedWords(block, begins_word, words_of_row)

    def _encode_rows_of_words(self, words: pa.Array) -> Iterator[Any]:
        """What the tokenizer makes of each row; every word has a token."""
        for rows in _batches_of_rows(words):
            encodings = self.tokenizer.encode_batch(
                rows, is_pretokenized=True, add_special_tokens=False
            )
            for row, encoding in zip(rows, encodings, strict=True):
                # Of some words a tokenizer makes nothing, such as of a lone control character.
                # They become a mark, so that each word keeps its tag.
                words_without_tokens = set(range(len(row))) - set(encoding.word_ids)
                if words_without_tokens:
                    for number in words_without_tokens:
                        row[number] = _NO_WORD
                    encoding = self.tokenizer.encode(
                        row, is_pretokenized=True, add_special_tokens=False
                    )
                yield encoding

    def _tokenize(self, texts: pa.Array) -> TokenRows:
        """Ids of texts without special tokens."""
        rows: list[NDArray[np.int32]] = []
        for batch in _batches_of_rows(texts):
            with explain_tokenizer():
                encodings = self.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                rows += [np.array(encoding.ids, np.int32) for encoding in encodings]
        return TokenRows.of_rows(rows)

    def _frame_texts(
        self, rows: TokenRows, max_length: int, long: LongTexts, *, are_marks: bool = False
    ) -> EncodedBlock:
        """Put special tokens around each text, around its two ends, or around each of its windows.

        `are_marks`: the rows are marks of tokens, 0 or 1. Then special tokens have the mark 0, and
        of several windows that share a token only one keeps its mark.
        """
        frame = self.frame
        if are_marks:
            zeros = [0] * frame.size
            num_opening = len(frame.opening)
            frame = replace(frame, opening=zeros[:num_opening], closing=zeros[num_opening:])
        lengths = rows.lengths
        cut_lengths = np.minimum(lengths, max(1, max_length - frame.size))
        framed_rows = rows.cut(cut_lengths)
        row_lengths = cut_lengths + frame.size
        if long.kind is not Long.cut:
            picked = long.pick(lengths, cut_lengths, frame.size)
            starts = rows.starts[picked.text] + picked.starts
            tokens = rows.tokens[row_indices(starts, picked.sizes)]
            if are_marks:
                tokens = tokens * long.is_answered(picked)
            # Each window gets a frame. The two ends of a text stand in one frame, side by side.
            framed_rows = TokenRows.of(tokens, cut_lengths)
            if long.window:
                framed_rows = TokenRows.of(tokens, picked.sizes)
                row_lengths = np.bincount(picked.text, picked.sizes + frame.size, len(lengths))
        num_frames = len(framed_rows.lengths)
        opening = TokenRows.same(frame.opening, num_frames)
        closing = TokenRows.same(frame.closing, num_frames)
        tokens = _join_rows([opening, framed_rows, closing])
        require_known_ids(tokens, self.num_ids)
        block = EncodedBlock.of(
            tokens, cut_lengths + frame.size, lengths + frame.size, frame.unknown
        )
        return replace(block, lengths=row_lengths.astype(np.int32))

    def _frame_pairs(self, first: TokenRows, second: TokenRows, max_length: int) -> EncodedBlock:
        """Put special tokens around and between the texts of each pair.

        Of a pair that is too long, the longer text is cut until both are as long, then both are
        cut. With room for 6 tokens, lengths (9, 2) → (4, 2), and (9, 5) → (3, 3).
        """
        frame = self.frame
        num_special = frame.size + len(frame.parting)
        room = max(2, max_length - num_special)
        first_counts = np.minimum(first.lengths, np.maximum(room - second.lengths, (room + 1) // 2))
        second_counts = np.minimum(second.lengths, room - first_counts)
        num_rows = len(first_counts)
        opening = TokenRows.same(frame.opening, num_rows)
        parting = TokenRows.same(frame.parting, num_rows)
        closing = TokenRows.same(frame.closing, num_rows)
        tokens = _join_rows(
            [opening, first.cut(first_counts), parting, second.cut(second_counts), closing]
        )
        require_known_ids(tokens, self.num_ids)
        framed_lengths = first_counts + second_counts + num_special
        whole = first.lengths + second.lengths + num_special
        return EncodedBlock.of(tokens, framed_lengths, whole, frame.unknown)


Encoder = Vocabulary | Subwords
"""What turns blocks of texts into ids: no network, as an encoder of transformers is one."""


def train_encoder(blocks: Iterable[pa.Array], config: VocabularyConfig) -> Encoder:
    """A vocabulary of the kind that the settings name, made from the training texts."""
    if config.kind is VocabularyKind.wordpiece:
        return Subwords.train(blocks, config)
    return Vocabulary.train(blocks, config)


def encode_texts(
    encoder: Encoder, texts: pa.Array, max_length: int, long: LongTexts
) -> EncodedBlock:
    """Ids of texts. `long` is for word pieces: a vocabulary of words always cuts."""
    if isinstance(encoder, Subwords):
        return encoder.encode(texts, max_length=max_length, long=long)
    return encoder.encode(texts, max_length=max_length)


def read_encoder(text: str) -> Encoder:
    """The encoder that `to_json` of either class wrote."""
    if text.startswith(f'{{"kind": "{_KIND}"'):
        return Subwords.from_json(text)
    return Vocabulary.from_json(text)


def _join_rows(parts: list[TokenRows]) -> NDArray[np.int32]:
    """Rows of several parts each, one row after the other.

    Two rows, opened by 1 and closed by 2, with the tokens [7 8] and [9] between:

        row lengths   [4, 3]
        opening       written at [0, 4]
        tokens        written at [1 2, 5]
        closing       written at [3, 6]
        result        [1 7 8 2, 1 9 2]
    """
    row_lengths = np.stack([part.lengths for part in parts]).sum(axis=0)
    position = row_begins(row_lengths)  # where the next part of each row is written
    joined = np.empty(int(row_lengths.sum()), np.int32)
    for part in parts:
        lengths = part.lengths
        joined[row_indices(position, lengths)] = part.tokens[row_indices(part.starts, lengths)]
        position = position + lengths
    return joined


def _normalizer(config: VocabularyConfig) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(
        lowercase=config.lowercase, strip_accents=config.strip_accents
    )


def _word_pieces(blocks: Iterable[pa.Array], config: VocabularyConfig) -> list[str]:
    """The special tokens, then letters that begin a word or stand in it, then longer pieces.

    Longer pieces come the commonest first.
    """
    # The library's own trainer of word pieces numbers letters in the order of a hash table, which
    # is another one in each process. Its byte-pair trainer does not. So that trainer is used, and a
    # mark at the beginning of each word separates pieces that begin a word from those within.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = _normalizer(config)
    marked = pre_tokenizers.Metaspace(replacement=_WORD_BEGIN, prepend_scheme="always", split=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), marked])
    trainer = trainers.BpeTrainer(
        vocab_size=config.size,
        min_frequency=config.min_frequency,
        show_progress=False,
        special_tokens=[],
    )

    def texts_of_blocks() -> Iterator[list[str | None]]:
        for block in blocks:
            # Rows of tagged words are lists: their words are handed over one by one.
            texts = pc.list_flatten(block) if is_list(block.type) else block
            yield texts.to_pylist()

    tokenizer.train_from_iterator(texts_of_blocks(), trainer)
    number_of = tokenizer.get_vocab()
    learnt = sorted(number_of, key=number_of.__getitem__)
    letters = [piece for piece in learnt if len(piece) == 1 and piece != _WORD_BEGIN]
    inner_letters = map(_word_piece, letters)
    longer = [_word_piece(piece) for piece in learnt if len(piece) > 1]
    pieces = dict.fromkeys([*_SPECIAL, *letters, *inner_letters, *longer])  # each once, in order
    return list(pieces)[: config.size]


def _word_piece(piece: str) -> str:
    """A byte pair as BERT writes pieces: `▁un` begins a word → `un`, `able` does not → `##able`."""
    return piece[1:] if piece.startswith(_WORD_BEGIN) else f"##{piece}"


def _frame_of(tokenizer: Tokenizer, fast: PreTrainedTokenizerFast) -> Frame:
    """The special tokens around a text and between two, read off what becomes of a short text.

    `fast` is the tokenizer of transformers that `tokenizer` is the core of.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = _first_text_with_tokens(tokenizer)
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    single = tokenizer.encode(text).ids  # such as [CLS] a [SEP]
    pair = tokenizer.encode(text, text).ids  # such as [CLS] a [SEP] a [SEP]
    places = (place for place in range(len(single)) if single[place : place + len(plain)] == plain)
    opening = single[: next(places, 0)]
    closing = single[len(opening) + len(plain) :]
    parting = pair[len(opening) + len(plain) : len(pair) - len(closing) - len(plain)]
    padding = fast.pad_token_id if fast.pad_token_id is not None else 0
    unknown = fast.unk_token_id if fast.unk_token_id is not None else -1
    return Frame(opening, closing, parting, padding, unknown, parting[-1] if parting else None)


def _first_text_with_tokens(tokenizer: Tokenizer) -> str:
    """ "a", or a token of the vocabulary where the tokenizer makes nothing of an "a"."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for text in itertools.chain("a", sorted(tokenizer.get_vocab().keys() - added)):
        if tokenizer.encode(text, add_special_tokens=False).ids:
            return text
    return "a"


def _split_pairs(texts: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """The first and the second text of pairs; of plain texts the second is None."""
    texts = texts.cast(pa.large_string())
    parts = pc.split_pattern(texts, PAIR, max_splits=1)
    if len(texts) == 0 or pc.max(pc.list_value_length(parts)).as_py() < 2:
        return texts, None
    # a row without a second text has an empty one
    seconds = [(*row, "")[1] for row in parts.to_pylist()]
    return pc.list_element(parts, 0), pa.array(seconds)


def _batches_of_rows(values: pa.Array) -> Iterator[list[Any]]:
    """Some thousand rows at a time, as Python values: texts, or lists of words."""
    for start in range(0, len(values), _ROWS_A_CALL):
        yield values.slice(start, _ROWS_A_CALL).to_pylist()


def pair_separator(encoder: Encoder, roles: Roles) -> int | None:
    """The id after which the second text of a pair begins. None if rows are no pairs."""
    if isinstance(encoder, Subwords) and roles.join == PAIR:
        return encoder.frame.separator
    return None
