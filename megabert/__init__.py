"""MegaBERT: BERT pre-training from verified shards to a model anyone can load.

model = megabert.load("runs/mini")
model.fill("The capital of France is [MASK].")     # for each [MASK] its likeliest (word, probability)
model.encode(["one text", "another"])              # fp32 [2, hidden]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from megabert.commands.fill import Filler
    from megabert.data.tokenizer import Tokenizer
    from megabert.hf import Pretrained
    from megabert.model import BertForPreTraining

__version__ = "0.1.0"


class LoadedModel:
    """A trained model with its tokenizer, in memory; made by `load`."""

    def __init__(self, pretrained: Pretrained) -> None:
        self.pretrained = pretrained

    @property
    def tokenizer(self) -> Tokenizer:
        return self.pretrained.tokenizer

    @cached_property
    def model(self) -> BertForPreTraining:
        """The module, in fp32 on the CPU, in eval mode."""
        import torch

        return self.pretrained.model(torch.device("cpu"))

    def encode(self, texts: Sequence[str], pool: str = "mean") -> np.ndarray:
        """Vectors of texts from the last layer, fp32 [n, hidden], in their order; `pool`: mean, max or cls. On a GPU where
        there is one. A text longer than the model's positions is cut. Raises ValueError for an empty text."""
        from megabert.commands.extraction import Extractor

        return Extractor(self.pretrained, pool=pool).encode(texts)

    def fill(self, text: str, top: int = 5) -> list[list[tuple[str, float]]]:
        """The `top` likeliest (word, probability) of each [MASK] in `text`. Raises ValueError for a text without one or too
        long for the model, and for a model without an MLM head."""
        return self._filler.fill(text, top)

    @cached_property
    def _filler(self) -> Filler:
        from megabert.commands.fill import Filler

        return Filler(self.pretrained)


def load(source: str | Path, tokenizer: str | Path = "") -> LoadedModel:
    """The model of a run folder (its newest whole checkpoint), of one checkpoint, or of a Hugging Face BERT folder.

    `tokenizer`: its file, where it is neither in the folder nor in the run's dataset. Raises ValueError naming what is missing
    or does not belong to the rest.
    """
    from megabert import hf

    return LoadedModel(hf.load(source, tokenizer))
