"""Comparison of a word's vectors: in each of its contexts, and in the embedding table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from megabert.commands.features.extraction import Extractor


@dataclass(frozen=True)
class Use:
    """A word in a text: its vector in this context and its static one, both means over its pieces."""

    text: str
    contextual: np.ndarray
    static: np.ndarray


def uses_of(word: str, texts: Sequence[str], extractor: Extractor) -> list[Use]:
    """Every occurrence of a word. Raises ValueError for a text without it, or one that is too long."""
    tokenizer, table = extractor.found.tokenizer, extractor.found.weights["embeddings.word.weight"].numpy()
    uses = []
    for text in texts:
        places = [match.span() for match in re.finditer(rf"\b{re.escape(word)}\b", text, re.IGNORECASE)]
        if not places:
            raise ValueError(f"--compare {word}: the word is not in {text!r}")
        ((ids, offsets),) = tokenizer.encode_with_offsets([text])
        (item,) = extractor.items([(text, None)])
        if item.truncated:
            raise ValueError(f"--compare: {text!r:.60} has more than {extractor.max_length} tokens")
        assert item.ids[1:-1].tolist() == ids
        vectors = extractor.part([item]).vectors[1:-1]
        for start, end in places:
            own = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            own_ids = item.ids[1:-1][own]
            uses.append(Use(text, vectors[own].mean(0), table[own_ids].mean(0)))
    return uses


def comparison(word: str, uses: Sequence[Use], layers: str) -> str:
    """Cosines between the uses of a word, in context and in the word-embedding table."""

    def cosines(vectors: list[np.ndarray]) -> np.ndarray:
        unit = F.normalize(torch.from_numpy(np.stack(vectors)), dim=-1)
        return (unit @ unit.T).numpy()

    table = cosines([use.contextual for use in uses])
    static = float(cosines([use.static for use in uses]).min())
    return "\n".join(
        [
            *(f"{i:>3}  {use.text}" for i, use in enumerate(uses, 1)),
            "",
            f"cosines between the vectors of {word!r} in context (layers: {layers})",
            "     " + "".join(f"{i:>7}" for i in range(1, len(uses) + 1)),
            *(f"{i:>3}  " + "".join(f"{value:7.3f}" for value in row) for i, row in enumerate(table, 1)),
            "",
            f"smallest cosine between its vectors in the static table of word embeddings: {static:.3f}",
        ]
    )
