"""Extraction of vectors: layers, pooling, batches; in the order of the texts, the same whatever they are batched with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.data.packing import groups, pack
from megabert.features.writers import Part
from megabert.pretrained import Pretrained

POOLS = ("none", "cls", "mean", "max")
SENTENCE = "sentence"  # as the model's folder says: its pooling, its length, vectors of length 1
LAYERS = "last, second-to-last, sum-last-4, concat-last-4, sum-all, embeddings, N[,N…], weighted:w0,w1,…"
SORTED = 8  # batches of tokens that are sorted by length together, and whose vectors are in memory together
AT_ONCE = 256  # texts handed to the tokenizer


class Layers(NamedTuple):
    """Hidden states (0 = embeddings, L = the last layer) that are summed with `weights`, or without any concatenated.

    They are `BertForPreTraining.hidden_states`': in a pre-LN model, only the last one is normalised.
    """

    indices: tuple[int, ...]
    weights: tuple[float, ...] = ()

    @staticmethod
    def parse(text: str, count: int) -> Layers:
        """One of LAYERS for a model of `count` layers. Raises ValueError naming what the model has not."""
        every = tuple(range(1, count + 1))
        named = {
            "last": Layers((count,)),
            "second-to-last": Layers((count - 1,)),
            "sum-last-4": Layers(every[-4:], (1.0,) * 4),
            "concat-last-4": Layers(every[-4:]),
            "sum-all": Layers(every, (1.0,) * count),
            "embeddings": Layers((0,)),
        }
        if text in named:
            if text.endswith("-4") and count < 4:
                raise ValueError(f"--layers {text}: the model has {count} layers")
            return named[text]
        kind, _, numbers = text.rpartition(":")
        try:
            if kind == "weighted":
                weights = tuple(float(number) for number in numbers.split(","))
                if not all(map(math.isfinite, weights)):
                    raise ValueError
            else:
                indices = tuple(int(number) for number in text.split(","))
        except ValueError:
            raise ValueError(f"--layers {text}: is none of {LAYERS}") from None
        if kind == "weighted":
            if len(weights) != count + 1:
                raise ValueError(
                    f"--layers {text}: {len(weights)} weights, but the embeddings and {count} layers take {count + 1}"
                )
            return Layers((0, *every), weights)
        if not 0 <= min(indices) <= max(indices) <= count:
            raise ValueError(f"--layers {text}: the model has 0 (embeddings) to {count}")
        return Layers(indices)

    def of(self, states: Sequence[Tensor]) -> Tensor:
        """[B, T, D] each -> [B, T, D], or [B, T, k * D] concatenated."""
        chosen = [states[i] for i in self.indices]
        if not self.weights:
            return torch.cat(chosen, -1)
        total = self.weights[0] * chosen[0]
        for weight, state in zip(self.weights[1:], chosen[1:], strict=True):
            total.add_(state, alpha=weight)
        return total


class Item(NamedTuple):
    """`[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`; segment 1 begins at `second`."""

    ids: np.ndarray
    second: int
    truncated: bool


class Extractor:
    """A model, its tokenizer, and what is wanted of them. Raises ValueError for layers or a length it has not."""

    def __init__(
        self, found: Pretrained, layers: str = "last", pool: str = "none", max_length: int = 0,
        batch_tokens: int = 4096, dtype: str = "float32", normalise: bool = False,
    ) -> None:  # fmt: skip
        """`normalise`: pooled vectors have length 1."""
        model = found.config.model
        self.layers = Layers.parse(layers, model.layers)
        self.max_length = max_length or model.max_positions
        if not 5 <= self.max_length <= model.max_positions:
            raise ValueError(f"--max-length {max_length}: the model takes 5 to {model.max_positions} tokens")
        if batch_tokens < 1:
            raise ValueError(f"--batch-tokens {batch_tokens}: must be 1 or more")
        assert pool in POOLS and not (normalise and pool == "none")
        self.normalise = normalise
        self.found, self.pool, self.batch_tokens, self.dtype = found, pool, batch_tokens, dtype
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = found.model(self.device)
        self.causal = found.config.data.masking.causal  # such a model reads a text at its last token
        self.width = model.hidden * (1 if self.layers.weights else len(self.layers.indices))

    def items(self, texts: Sequence[tuple[str, str | None]]) -> list[Item]:
        """The token ids of texts or pairs, cut to `max_length`: the end of the longer one first, as BERT does."""
        tokenizer = self.found.tokenizer
        first = tokenizer.encode_texts([a for a, _ in texts])
        second = tokenizer.encode_texts([b or "" for _, b in texts])
        items = []
        for (_, pair), a, b in zip(texts, first, second, strict=True):
            room = self.max_length - (2 if pair is None else 3)
            truncated = len(a) + len(b) > room
            if truncated:
                kept = min(len(b), max(room // 2, room - len(a)))
                a, b = a[: room - kept], b[:kept]
            ids = [tokenizer.cls_id, *a, tokenizer.sep_id]
            more = [*b, tokenizer.sep_id] if pair is not None else []
            items.append(Item(np.array(ids + more, np.int32), len(ids), truncated))
        return items

    def parts(self, texts: Iterable[tuple[str, str | None]]) -> Iterator[Part]:
        """Vectors of texts or pairs, in their order, some batches' worth at a time."""
        texts, waiting, tokens = iter(texts), [], 0
        while group := list(islice(texts, AT_ONCE)):
            for item in self.items(group):
                waiting.append(item)
                tokens += len(item.ids)
                if tokens >= SORTED * self.batch_tokens:
                    yield self.part(waiting)
                    waiting, tokens = [], 0
        if waiting:
            yield self.part(waiting)

    def part(self, items: Sequence[Item]) -> Part:
        """The vectors of `items`, batches of similar length computed together.

        Raises ValueError when one is too large for float16.
        """
        lengths = np.array([len(item.ids) for item in items], np.int64)
        ends = lengths.cumsum()
        rows = int(ends[-1]) if self.pool == "none" else len(items)
        vectors = np.empty((rows, self.width), self.dtype)
        for batch in groups(lengths.tolist(), self.batch_tokens):
            with np.errstate(over="ignore"):  # said below
                found = self._vectors([items[i] for i in batch]).astype(self.dtype)
            if not np.isfinite(found).all():
                raise ValueError(f"a vector is not finite in {self.dtype}; take float32, or another model")
            if self.pool != "none":
                vectors[batch] = found
                continue
            at = 0
            for i in batch:
                vectors[ends[i] - lengths[i] : ends[i]] = found[at : at + lengths[i]]
                at += lengths[i]
        ids = np.concatenate([item.ids for item in items])
        return Part(vectors, ids, lengths, np.array([item.truncated for item in items]))

    @torch.no_grad()
    def _vectors(self, items: Sequence[Item]) -> np.ndarray:
        """fp32 [n, D] where pooled, else [N, D], the tokens of the items behind each other."""
        sequences = [item.ids for item in items]
        packed = pack(sequences, [item.second for item in items], causal=self.causal).to(self.device)
        states = self.model.hidden_states(**packed.inputs(), count=1 + max(self.layers.indices))
        hidden = self.layers.of(states).flatten(0, 1)  # (B * T, D)
        lengths = np.array([len(ids) for ids in sequences])
        if self.pool == "cls":
            at = packed.starts + (lengths - 1 if self.causal else 0)
            return self._finished(hidden[torch.from_numpy(at).to(self.device)])
        at = np.concatenate([np.arange(s, s + n) for s, n in zip(packed.starts, lengths, strict=True)])
        hidden = hidden[torch.from_numpy(at).to(self.device)]  # (N, D)
        if self.pool != "none":
            counts = torch.from_numpy(lengths).to(self.device)
            hidden = torch.segment_reduce(hidden, self.pool, lengths=counts, axis=0)
        return self._finished(hidden)

    def _finished(self, vectors: Tensor) -> np.ndarray:
        return (F.normalize(vectors, dim=-1) if self.normalise else vectors).cpu().numpy()
