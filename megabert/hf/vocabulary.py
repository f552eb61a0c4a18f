"""Transplant of a vocabulary: a trained model with another tokenizer, each new token's vectors made of the old tokens in its text.

A token that the old vocabulary has too, the space before it included, keeps its vectors, and a special token those of its role.
Every other gets the mean of the tokens into which the old tokenizer splits its text (Gee et al. 2022, "Fast Vocabulary Transfer",
arXiv 2402.09977); where that knows none, it is drawn from the normal distribution of the old vectors' means and deviations
(Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"). Embeddings, decoder and its bias alike; all other
weights stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.config import Config, DataConfig, MaskingConfig
from megabert.data.tokenizer import Tokenizer
from megabert.hf import mapping
from megabert.hf.read import Pretrained, start_state

POSITIONS = "embeddings.position"


def with_vocabulary(model: Pretrained, tokenizer: Tokenizer, sources: Sequence[Sequence[int]]) -> Pretrained:
    """The model with the vocabulary of `tokenizer`, each new token's vectors the mean of those of its old `sources`, as at the
    start of a run.

    Where positions follow the padding's id (RoBERTa), they are moved behind the new one.
    """
    old = model.config.model
    first = tokenizer.pad_id + 1 if old.first_position else 0
    new = old.model_copy(update={"vocab_size": tokenizer.vocab_size, "first_position": first})
    draw = torch.Generator().manual_seed(model.config.seed)
    weights = dict(model.weights)
    for name in mapping.PADDED:
        if name in weights:
            entries = mixed(weights[name][: old.vocab_size], sources, draw)
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


def sources_of(old: Tokenizer, new: Tokenizer) -> list[list[int]]:
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
    if new.continuation and not old.continuation and not text.strip().isalnum():
        # a mark that WordPiece cuts off, with a space before it or without
        forms = [known[form] for form in (token, token.removeprefix(b" ")) if form in known]
    else:
        forms = [known[token]] if token in known else []
    if forms:
        return forms
    single = [bytes([byte]) for byte in token]
    if "\ufffd" in text and all(byte in known for byte in single):
        return [known[byte] for byte in single]
    text = token.decode(errors="ignore")
    word = old.prepared(text).strip()
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
