"""Updates of pairs: which ones an update holds, a function of the seed and its number, and what each rank encodes of them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabert.data.tokenizer import Tokenizer
from megabert.finetune import encoding
from megabert.finetune.batches import Batch, Layout, Update, collate, order, steps_per_epoch
from megabert.finetune.embed.pairs import Pairs
from megabert.finetune.encoding import Item
from megabert.finetune.examples import Text
from megabert.finetune.tasks import custom

NONE = -1  # no text
TEXTS = custom("score", ["text"], "score")  # how texts are encoded; nothing of it is scored


def encode(texts: Sequence[str], tokenizer: Tokenizer, max_length: int) -> list[Item]:
    """One item a text: [CLS] text [SEP], cut to `max_length` tokens."""
    examples = [Text(str(i), "", text, None, None) for i, text in enumerate(texts)]
    return encoding.encode(TEXTS, examples, tokenizer, (), max_length)


@dataclass(frozen=True)
class Contrast:
    """This rank's n pairs of an update: its texts (n first ones, n second ones, then negatives) in chunks of one forward
    pass each, and the candidates of all ranks, R for each of N ranks, by the numbers of their texts."""

    chunks: list[Batch]
    items: int  # n
    first: Tensor  # int64 [n], texts
    second: Tensor  # int64 [n]
    own: Tensor  # int64 [n], where among the candidates each second text is
    candidates: Tensor  # int64 [N * R]; NONE: there is none
    owners: Tensor  # int64 [N * R]: the first text that a candidate belongs to; NONE: it is a negative, or none

    def to(self, device: torch.device | str) -> Contrast:
        moved: dict[str, Any] = {
            name: getattr(self, name).to(device) for name in ("first", "second", "own", "candidates", "owners")
        }
        return replace(self, chunks=[chunk.to(device) for chunk in self.chunks], **moved)

    def inputs(self) -> dict[str, Any]:
        """What `Embedder.forward` takes."""
        names = ("first", "second", "own", "candidates", "owners")
        return {"chunks": [chunk.reading() for chunk in self.chunks]} | {n: getattr(self, n) for n in names}

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)


def contrast(
    pairs: Pairs, items: Sequence[Item], layout: Layout, shares: Sequence[np.ndarray], rank: int, chunk: int
) -> Contrast:
    """`shares`: the pairs of every rank in this update. `chunk` texts a forward pass, 0: all."""
    own = shares[rank]
    seconds = [pairs.second[share] for share in shares]
    negatives = [np.concatenate([NO_TEXTS, *(pairs.negatives[i] for i in share)]) for share in shares]
    width = max(len(a) + len(b) for a, b in zip(seconds, negatives, strict=True))
    candidates, owners = (np.full((len(shares), width), NONE, np.int64) for _ in range(2))
    for row, share in enumerate(shares):
        here = np.concatenate([seconds[row], negatives[row]])
        candidates[row, : len(here)] = here
        owners[row, : len(share)] = pairs.first[share]
    texts = np.concatenate([pairs.first[own], seconds[rank], negatives[rank]])
    chunk = chunk or max(1, len(texts))
    parts = [texts[at : at + chunk] for at in range(0, max(1, len(texts)), chunk)]
    return Contrast(
        [collate([items[i] for i in part], layout) for part in parts],
        len(own),
        torch.from_numpy(pairs.first[own]),
        torch.from_numpy(seconds[rank]),
        torch.arange(len(own)) + rank * width,
        torch.from_numpy(candidates.reshape(-1)),
        torch.from_numpy(owners.reshape(-1)),
    )


NO_TEXTS = np.zeros(0, np.int64)


def updates(
    pairs: Pairs, items: Sequence[Item], layout: Layout, seed: int, batch: int, first: int, chunk: int,
    rank: int = 0, ranks: int = 1,
) -> Generator[Update, None, None]:  # fmt: skip
    """This rank's part of the updates from `first` on, without end. Ranks split every batch evenly."""
    per_epoch = steps_per_epoch(len(pairs), batch)
    step, epoch, shuffled = first, -1, NO_TEXTS
    while True:
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            shuffled = order(len(pairs), seed, epoch)
        at = step % per_epoch * batch
        shares = np.array_split(shuffled[at : at + batch], ranks)
        whole: Any = contrast(pairs, items, layout, shares, rank, chunk)
        yield Update(step, [whole], epoch, shares[rank])
        step += 1
