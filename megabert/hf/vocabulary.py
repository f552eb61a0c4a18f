"""Transplant of a vocabulary: a trained model with another tokenizer, each new token's vectors made of those of old tokens.

A token that the old vocabulary has too, the space before it included, keeps its vectors, and a special token those of its role.
Every other gets the weighted mean of the shared tokens that are most similar to it in a dataset of the new tokenizer (Minixhofer
et al. 2022, "WECHSEL", arXiv 2112.06598; Dobler & de Melo 2023, "FOCUS", arXiv 2305.14481). One that the dataset does not have, or
every one without a dataset, gets the mean of the tokens into which the old tokenizer splits its text (Gee et al. 2022, "Fast
Vocabulary Transfer", arXiv 2402.09977); where that knows none, it is drawn from the normal distribution of the old vectors' means
and deviations (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"). Embeddings, decoder and its bias
alike; all other weights stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.common.logs import log
from megabert.config import Config, DataConfig, MaskingConfig
from megabert.data.shards import Dataset
from megabert.data.text import prepared
from megabert.data.tokenizer import Tokenizer
from megabert.hf import mapping
from megabert.hf.read import Pretrained, start_state

POSITIONS = "embeddings.position"
# of a dataset, read for the similarity of its tokens
ROWS = 200_000
# dimensions of that similarity: first the most frequent tokens, then singular vectors
FREQUENT, DIMENSIONS = 2_000, 100
# tokens apart at most
CONTEXT = 5
# tokens of which another is the mean, and the temperature of the softmax over their cosines
NEAREST, TEMPERATURE = 10, 0.1
# id of the padding above which the unused rows of RoBERTa's position table are said
FAR = 1_000
# rows of similarities at a time
CHUNK = 1_024


class Similar(NamedTuple):
    """Of M new tokens the most similar shared ones and their shares: int64 [M], int64 [M, K], fp32 [M, K]."""

    tokens: Tensor
    nearest: Tensor
    shares: Tensor


def with_vocabulary(
    model: Pretrained, tokenizer: Tokenizer, sources: Sequence[Sequence[int]], similar: Similar | None = None
) -> Pretrained:
    """The model with the vocabulary of `tokenizer`, each new token's vectors the mean of those of its old `sources`, or of the
    `similar` new tokens that it has, as at the start of a run.

    Where positions follow the padding's id (RoBERTa), they are moved behind the new one.
    """
    old = model.config.model
    first = tokenizer.pad_id + 1 if old.first_position else 0
    new = old.model_copy(update={"vocab_size": tokenizer.vocab_size, "first_position": first})
    if first > FAR:
        log.warning(
            f"{tokenizer.path}: padding has the id {first - 1:,}, and RoBERTa's positions begin behind it, so that the position "
            "table gets as many unused rows"
        )
    draw = torch.Generator().manual_seed(model.config.seed)
    weights = dict(model.weights)
    for name in mapping.PADDED:
        if name in weights:
            entries = mixed(weights[name][: old.vocab_size], sources, draw)
            if similar:
                table = entries.view(len(entries), -1)
                made = F.embedding_bag(similar.nearest, table, per_sample_weights=similar.shares, mode="sum")
                entries[similar.tokens] = made.view(-1, *entries.shape[1:])
            weights[name] = F.pad(entries, [0, 0] * (entries.dim() - 1) + [0, new.padded_vocab - new.vocab_size])
    if first:
        weights[POSITIONS] = F.pad(weights[POSITIONS][old.first_position :], [0, 0, first, 0])
    masking = MaskingConfig(strategy="causal" if model.config.data.masking.causal else "token")
    cfg = Config(model=new, data=DataConfig(masking=masking))
    return replace(
        model, weights=weights, state=start_state(model.run_dir, cfg, tokenizer), config=cfg, tokenizer=tokenizer
    )


def mixed(entries: Tensor, sources: Sequence[Sequence[int]], draw: torch.Generator) -> Tensor:
    """fp32 [V, D] or [V] -> [V', D] or [V'], V' the number of `sources`: the mean of the entries that each names. Where one
    names none, it is drawn from their distribution; a bias is their mean."""
    table = entries.view(len(entries), -1)
    ids = torch.tensor([*chain.from_iterable(sources)], dtype=torch.int64)
    starts = torch.tensor([0, *accumulate(map(len, sources))][:-1])
    made = F.embedding_bag(ids, table, starts, mode="mean")
    without = torch.tensor([not ids for ids in sources])
    deviation = table.std(0) if entries.dim() > 1 else 0.0
    made[without] = table.mean(0) + deviation * torch.randn(int(without.sum()), table.shape[1], generator=draw)
    return made.view(len(sources), *entries.shape[1:])


def similar_tokens(old: Tokenizer, new: Tokenizer, dataset: Dataset) -> Similar:
    """Of each token that only `new` has the NEAREST shared ones in a dataset of `new`; of tokens that the dataset has."""
    vectors = cooccurrence(dataset, new.vocab_size, new.pad_id)
    known, special = set(old.token_bytes()), set(new.special_ids.values())
    shared = torch.tensor([i in special or token in known for i, token in enumerate(new.token_bytes())])
    seen = vectors.any(1)
    tokens, candidates = (seen & ~shared).nonzero()[:, 0], (seen & shared).nonzero()[:, 0]
    count = min(NEAREST, len(candidates))  # a dataset has the special ones at least
    found = [(vectors[part] @ vectors[candidates].T).topk(count) for part in tokens.split(CHUNK)]
    cosines, places = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Similar(tokens, candidates[places], (cosines / TEMPERATURE).softmax(1))


def cooccurrence(dataset: Dataset, size: int, pad_id: int) -> Tensor:
    """fp32 [size, DIMENSIONS], of length 1, or 0 of a token that is not there: the tokens by those around them (Levy & Goldberg
    2014, "Neural Word Embedding as Implicit Matrix Factorization": positive pointwise mutual information, its singular vectors)."""
    firsts = range(0, min(dataset.rows, ROWS), CHUNK)

    def read(first: int) -> np.ndarray:
        """[R, T], filled up with the padding's id, which need not be the 0 of the dataset."""
        rows = dataset.read(np.arange(first, min(first + CHUNK, firsts.stop)))
        used = np.arange(rows.ids.shape[1]) < rows.bounds[:, :, 0].sum(1, keepdims=True)
        return np.where(used, rows.ids, pad_id)

    chunks = [read(first) for first in firsts]
    total = sum(np.bincount(ids.ravel(), minlength=size) for ids in chunks)
    frequent = torch.from_numpy(total).argsort(descending=True, stable=True)[:FREQUENT]
    column = frequent.new_full((size,), -1)
    column[frequent] = torch.arange(len(frequent))
    counts = torch.zeros(size * len(frequent))
    for ids in (torch.from_numpy(chunk.astype(np.int64)) for chunk in chunks):
        for apart in range(1, CONTEXT + 1):
            for token, around in ((ids[:, apart:], ids[:, :-apart]), (ids[:, :-apart], ids[:, apart:])):
                place = token * len(frequent) + column[around]
                place = place[column[around] >= 0]
                counts.index_add_(0, place, torch.ones(len(place)))
    table = counts.view(size, -1)
    rows, columns = table.sum(1, keepdim=True), table.sum(0)
    table = table.mul_(rows.sum()).div_(rows.clamp(min=1)).div_(columns.clamp(min=1)).clamp_(min=1).log_()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        u, s, _ = torch.svd_lowrank(table, q=min(DIMENSIONS, *table.shape), niter=4)
    return F.normalize(u * s.sqrt(), dim=1) * (rows > 0)


def find_sources(old: Tokenizer, new: Tokenizer) -> list[list[int]]:
    """Of each new token the old ones that stand for it: one with the same bytes or the same role, or those of its text; none
    where the old vocabulary cannot express it."""
    known = {token: i for i, token in enumerate(old.token_bytes()) if i not in old.special_ids.values()}
    found = [_tokens_in(token, old, new, known) for token in new.token_bytes()]
    # the roles that share the padding's id come after it
    for role, i in sorted(new.special_ids.items(), key=lambda item: item[0] != "pad"):
        if role != "unk" or new.unk_id != new.pad_id:
            none = role == "unk" and old.unk_id == old.pad_id
            found[i] = [] if none else [old.special_ids[role]]
    return found


def _tokens_in(token: bytes, old: Tokenizer, new: Tokenizer, known: dict[bytes, int]) -> list[int]:
    text = token.decode(errors="replace")
    # a mark that WordPiece cuts off, with a space before it or without
    cut_off = new.continuation and not old.continuation and not text.strip().isalnum()
    forms = (token, token.removeprefix(b" ")) if cut_off else (token,)
    if found := [known[form] for form in forms if form in known]:
        return found
    single = [bytes([byte]) for byte in token]
    if "\ufffd" in text and all(byte in known for byte in single):
        return [known[byte] for byte in single]
    text = token.decode(errors="ignore")
    word = prepared(text, old.form).strip()
    ids = old.encode_words([word])[0]
    if not text.startswith(" "):
        inside = _continued(old, word) if old.continuation else old.encode_inside([word])[0]
        ids = ids if old.unk_id in inside or len(ids) < len(inside) else inside
    return [i for i in ids if i != old.unk_id]


def _continued(old: Tokenizer, word: str) -> list[int]:
    """WordPiece ids of a word as it follows a letter: the model takes the mark for its first characters."""
    processor = old.processor
    text = processor.normalizer.normalize_str(word) if processor.normalizer else word
    words = [part for part, _ in processor.pre_tokenizer.pre_tokenize_str(text)] if processor.pre_tokenizer else [text]
    marked = [old.continuation + words[0], *words[1:]] if words else []
    return [token.id for part in marked for token in processor.model.tokenize(part)]
