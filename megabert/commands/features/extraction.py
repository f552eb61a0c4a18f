"""Extraction of vectors: layers, pooling, batches; in the order of the texts, the same whatever they are batched with."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.commands.features.writers import Part
from megabert.common.ahead import in_order
from megabert.data.packing import groups, pack, pack_line
from megabert.hf import Pretrained
from megabert.hf.inference import one_thread, pack_weights, threads_apart, workers

POOLS = ("none", "cls", "mean", "max")
SENTENCE = "sentence"  # as the model's folder says: its pooling, its length, vectors of length 1
LAYERS = "last, second-to-last, sum-last-4, concat-last-4, sum-all, embeddings, N[,N…], weighted:w0,w1,…"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SORTED = 8  # batches of tokens that are sorted by length together, and whose vectors are in memory together
BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
AT_ONCE = 256  # texts handed to the tokenizer
AHEAD = 8  # times as many are tokenised ahead


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


@dataclass
class Window:
    """Items that are computed in batches of similar length: `left` of them are not yet there."""

    items: list[Item]
    vectors: np.ndarray  # [n, D] where pooled, else [N, D]
    ends: np.ndarray  # int64 [n], of the tokens of each
    left: int = field(default=0)

    def part(self) -> Part:
        ids = np.concatenate([item.ids for item in self.items])
        lengths = np.diff(self.ends, prepend=0)
        return Part(self.vectors, ids, lengths, np.array([item.truncated for item in self.items]))


class Extractor:
    """A model, its tokenizer, and what is wanted of them. Raises ValueError for layers or a length it has not."""

    def __init__(
        self, found: Pretrained, layers: str = "last", pool: str = "none", max_length: int = 0,
        batch_tokens: int | None = None, dtype: str = "float32", precision: str = "fp32", normalise: bool = False,
    ) -> None:  # fmt: skip
        """`batch_tokens` are computed at once, on the CPU by one core (None: as many as suit the device); `normalise`: pooled
        vectors have length 1."""
        model = found.config.model
        self.layers = Layers.parse(layers, model.layers)
        self.max_length = max_length or model.max_positions
        if not 5 <= self.max_length <= model.max_positions:
            raise ValueError(f"--max-length {max_length}: the model takes 5 to {model.max_positions} tokens")
        if batch_tokens is not None and batch_tokens < 1:
            raise ValueError(f"--batch-tokens {batch_tokens}: must be 1 or more")
        assert pool in POOLS and not (normalise and pool == "none")
        self.found, self.pool, self.dtype = found, pool, dtype
        self.normalise = normalise
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = found.model(self.device, PRECISIONS[precision])
        pack_weights(self.model)
        self.workers = workers(self.device)
        self.batch_tokens = batch_tokens or BATCH_TOKENS[self.device.type]
        self.line = self.device.type == "cpu" and self.model.backends.attention.name == "native"
        self.causal = found.config.data.masking.causal  # such a model reads a text at its last token
        self.width = model.hidden * (1 if self.layers.weights else len(self.layers.indices))
        self.last = self.layers == Layers((model.layers,))

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

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """[n, D]: one vector a text, in their order. For a `pool`; of no text [0, D]."""
        assert self.pool != "none"
        found = [part.vectors for part in self.parts((text, None) for text in texts)]
        return np.concatenate([np.empty((0, self.width), self.dtype), *found])

    def parts(self, texts: Iterable[tuple[str, str | None]]) -> Generator[Part, None, None]:
        """Vectors of texts or pairs, in their order, some batches' worth at a time.

        Where a part ends depends on the texts since the part before alone, and what is in it on no other part. Raises
        ValueError when a vector is too large for float16.
        """

        def jobs() -> Iterator[tuple[Window, list[int]]]:
            for items in self._windows(iter(texts)):
                window, batches = self._window(items)
                yield from ((window, batch) for batch in batches)

        computed = in_order(self._compute, jobs(), self.workers, 2 * self.workers, one_thread)
        with threads_apart(), closing(computed):
            for window in computed:
                window.left -= 1
                if not window.left:
                    yield window.part()

    def part(self, items: Sequence[Item]) -> Part:
        """The vectors of `items`, computed here and now."""
        window, batches = self._window(list(items))
        for batch in batches:
            self._compute((window, batch))
        return window.part()

    def _windows(self, texts: Iterator[tuple[str, str | None]]) -> Iterator[list[Item]]:
        """Items of SORTED batches, tokenised ahead."""
        groups_of_texts = iter(lambda: list(islice(texts, AT_ONCE)), [])
        waiting: list[Item] = []
        tokens = 0
        for items in in_order(self.items, groups_of_texts, 1, AHEAD):
            for item in items:
                waiting.append(item)
                tokens += len(item.ids)
                if tokens >= SORTED * self.batch_tokens:
                    yield waiting
                    waiting, tokens = [], 0
        if waiting:
            yield waiting

    def _window(self, items: list[Item]) -> tuple[Window, list[list[int]]]:
        """The window of `items`, and which of them are computed together."""
        lengths = [len(item.ids) for item in items]
        batches = groups(lengths, self.batch_tokens)
        rows = sum(lengths) if self.pool == "none" else len(items)
        vectors = np.empty((rows, self.width), self.dtype)
        return Window(items, vectors, np.cumsum(lengths, dtype=np.int64), len(batches)), batches

    def _compute(self, job: tuple[Window, list[int]]) -> Window:
        """Fills in the vectors of a batch."""
        window, batch = job
        items = [window.items[i] for i in batch]
        with np.errstate(over="ignore"):  # said below
            found = self._vectors(items).astype(self.dtype, copy=False)
        if not np.isfinite(found).all():
            raise ValueError(f"a vector is not finite in {self.dtype}; take float32, or another model")
        if self.pool != "none":
            window.vectors[batch] = found
            return window
        at = 0
        for i, item in zip(batch, items, strict=True):
            end = window.ends[i]
            window.vectors[end - len(item.ids) : end] = found[at : at + len(item.ids)]
            at += len(item.ids)
        return window

    @torch.no_grad()
    def _vectors(self, items: Sequence[Item]) -> np.ndarray:
        """fp32 [n, D] where pooled, else [N, D], the tokens of the items behind each other."""
        sequences, seconds = [item.ids for item in items], [item.second for item in items]
        put = pack_line if self.line else pack
        packed = put(sequences, seconds, causal=self.causal).to(self.device)
        inputs = packed.inputs() | {"seed": torch.zeros(1, dtype=torch.int64, device=self.device)}
        lengths = np.array([len(ids) for ids in sequences])
        if self.pool == "cls":
            at = torch.from_numpy(packed.starts + (lengths - 1 if self.causal else 0)).to(self.device)
            if self.last:
                return self._finished(self.model.encode(**inputs, keep=at).float())
            return self._finished(self._hidden(inputs)[at].float())
        hidden = self._hidden(inputs).float()
        if not self.line:
            at = torch.from_numpy(
                np.concatenate([np.arange(s, s + n) for s, n in zip(packed.starts, lengths, strict=True)])
            )
            hidden = hidden[at.to(self.device)]  # (N, D)
        if self.pool == "none":
            return hidden.cpu().numpy()
        counts = torch.from_numpy(lengths).to(self.device)
        return self._finished(torch.segment_reduce(hidden, self.pool, lengths=counts, axis=0))

    def _hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """(B * T, D) of the layers that are wanted."""
        states = self.model.hidden_states(**inputs, count=1 + max(self.layers.indices))
        return self.layers.of(states).flatten(0, 1)

    def _finished(self, vectors: Tensor) -> np.ndarray:
        """[n, D]"""
        return (F.normalize(vectors, dim=-1) if self.normalise else vectors).cpu().numpy()


def encode(found: Pretrained, texts: Sequence[str], pool: str = "mean", **options: Any) -> np.ndarray:
    """fp32 [n, D]: one vector a text, in their order. `options` are Extractor's, and errors."""
    return Extractor(found, pool=pool, **options).encode(texts)
