"""A BiLSTM on headlines as usually written: words become numbers inside the model, batch by batch.

Texts arrive as Python strings. Each row is padded to the longest length allowed. Products are fp32,
AdamW has its defaults, and each step reads its loss and writes a log line. A keyword changes one
thing.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flatout.ladder.usual.program import Case, Stopwatch, UsualProgram

log = logging.getLogger("usual.headlines")
_WORD = re.compile(r"\w+|[^\w\s]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadlinesOptions:
    # in the model, keras (its TextVectorization, in the model) or once
    tokenise: str = "in the model"
    feed: str = "DataLoader"  # DataLoader (a row at a time) or gather (a batch by one index)
    # maximum: the longest row allowed; batch: of the batch, whose rows are of like length
    padding: str = "maximum"
    precision: str = "fp32"  # fp32 or bf16
    fused: bool = False  # whether AdamW is one kernel


class WordVocabulary:
    """Words to numbers, in plain Python; 0 is padding, 1 an unknown word."""

    def __init__(self, texts: Sequence[str], size: int = 30_000, min_frequency: int = 2) -> None:
        counts = Counter(word for text in texts for word in _WORD.findall(text.lower()))
        kept = [word for word, count in counts.most_common(size - 2) if count >= min_frequency]
        self.ids = {word: number for number, word in enumerate(kept, 2)}

    def __len__(self) -> int:
        return len(self.ids) + 2

    def encode(self, text: str) -> list[int]:
        return [self.ids.get(word, 1) for word in _WORD.findall(text.lower())] or [1]

    def padded(self, texts: Sequence[str], length: int) -> Tensor:
        """`[B, length]` ids."""
        tokens_BL = torch.zeros(len(texts), length, dtype=torch.long)
        for row, text in enumerate(texts):
            ids = self.encode(text)[:length]
            tokens_BL[row, : len(ids)] = torch.tensor(ids)
        return tokens_BL


class KerasWords:
    """Keras' layer for the same, made from the same texts."""

    def __init__(self, texts: Sequence[str], size: int, length: int) -> None:
        from keras.layers import TextVectorization

        self.layer = TextVectorization(max_tokens=size, output_sequence_length=length)
        self.layer.adapt(list(texts))

    def __len__(self) -> int:
        return len(self.layer.get_vocabulary())

    def padded(self, texts: Sequence[str], length: int) -> Tensor:
        return torch.from_numpy(np.array(self.layer(list(texts)), dtype=np.int64))


class UsualBiLSTM(nn.Module):
    """Embedding, a bidirectional LSTM, the maximum over time, a linear output."""

    def __init__(self, words: int, classes: int, sizes: Mapping[str, Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, sizes["embedding"], padding_idx=0)
        hidden = sizes["hidden"]
        layers = sizes["layers"]
        dropout = sizes["dropout"]
        self.lstm = nn.LSTM(
            sizes["embedding"],
            hidden,
            layers,
            batch_first=True,
            bidirectional=True,
            dropout=dropout if layers > 1 else 0.0,  # of one layer torch warns
        )
        share = sizes["embedding_dropout"]
        self.embedding_dropout = nn.Dropout(dropout if share is None else share)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * hidden, classes)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        states_BLD, _ = self.lstm(self.embedding_dropout(self.embedding(tokens_BL)))
        states_BLD = states_BLD.masked_fill((tokens_BL == 0).unsqueeze(-1), float("-inf"))
        return self.output(self.dropout(states_BLD.amax(1)))


class HeadlinesProgram(UsualProgram[HeadlinesOptions]):
    def __init__(self, case: Case, how: HeadlinesOptions) -> None:
        super().__init__(case, how)
        self.length = case.reading["max_length"]
        train = case.read_texts("train")
        self.names = sorted(set(train["label"]))
        self.texts = train["text"].tolist()
        self.targets = torch.tensor([self.names.index(label) for label in train["label"]])
        size = case.reading["words"]
        self.vocabulary: Any = None
        if how.tokenise == "keras":
            self.vocabulary = KerasWords(self.texts, size, self.length)
        else:
            self.vocabulary = WordVocabulary(self.texts, size, case.reading["min_frequency"])
        self.tokens: Tensor | None = None
        if how.tokenise == "once":
            self.tokens = self.vocabulary.padded(self.texts, self.length)
        self.model = UsualBiLSTM(len(self.vocabulary), len(self.names), case.model).to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=case.lr, fused=how.fused or None
        )

    def train_epoch(self, watch: Stopwatch) -> None:
        self.model.train()
        total = 0.0
        for number, (rows, targets_B) in enumerate(watch.batches(self.batches())):
            tokens_BL = rows
            if not isinstance(rows, Tensor):
                with watch.waiting():  # the device has nothing to do meanwhile
                    tokens_BL = self.vocabulary.padded(rows, self.length)
            is_bf16 = self.how.precision == "bf16"
            with torch.autocast(self.device.type, torch.bfloat16, enabled=is_bf16):
                logits_BC = self.model(tokens_BL.to(self.device))
                loss = nn.functional.cross_entropy(logits_BC, targets_B.to(self.device))
            loss.backward()
            self.update(self.model)
            total += loss.item()
            log.info("batch %d: loss %.4f, mean %.4f", number, loss.item(), total / (number + 1))
            watch.step(len(targets_B), int((tokens_BL > 0).sum()), tokens_BL.numel())

    def batches(self) -> Iterator[tuple[Any, Tensor]]:
        """Rows and targets: texts where the model makes numbers of them, else ids."""
        if self.how.feed != "gather":
            inputs = self.texts if self.tokens is None else self.tokens
            rows: Any = list(zip(inputs, self.targets, strict=True))
            yield from DataLoader(rows, batch_size=self.case.batch, shuffle=True)
            return
        assert self.tokens is not None, "rows are gathered once they are numbers"
        for chosen in self.order():
            tokens_BL = self.tokens[chosen]
            if self.how.padding == "batch":
                tokens_BL = tokens_BL[:, : int((tokens_BL > 0).sum(1).max())]
            yield tokens_BL, self.targets[chosen]

    def order(self) -> list[Tensor]:
        """The rows of each batch, drawn at random; with short padding, rows of like length."""
        # Runs of fifty batches are sorted by length and cut into batches, which are then shuffled.
        batch = self.case.batch
        shuffled = torch.randperm(len(self.targets))
        if self.how.padding != "batch":
            return list(shuffled.split(batch))
        assert self.tokens is not None
        lengths = (self.tokens > 0).sum(1)
        parts = [part[lengths[part].argsort()] for part in shuffled.split(50 * batch)]
        batches = [rows for part in parts for rows in part.split(batch)]
        return [batches[place] for place in torch.randperm(len(batches))]

    @torch.no_grad()
    def test(self) -> dict[str, float]:
        self.model.eval()
        test = self.case.read_texts("test")
        answers = list[str]()
        for start in range(0, len(test), 512):
            texts = test["text"].iloc[start : start + 512].tolist()
            tokens_BL = self.vocabulary.padded(texts, self.length)
            logits_BC = self.model(tokens_BL.to(self.device))
            answers += [self.names[place] for place in logits_BC.argmax(-1).tolist()]
        return {"accuracy": float(np.mean(np.array(answers) == test["label"].to_numpy()))}


# The ladder finds both under these names in each usual program.
OPTIONS = HeadlinesOptions
PROGRAM = HeadlinesProgram
