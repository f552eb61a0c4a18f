"""A trained model in memory, as `megabert.load` opens it: vectors, logits and words of texts, and the model as a folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabert import hf
from megabert.checkpoint import refuse_non_finite
from megabert.commands.export import write
from megabert.commands.extraction import Extractor
from megabert.commands.features import POOLS
from megabert.commands.fill import Filler
from megabert.data.tokenizer import Tokenizer
from megabert.hf import Pretrained
from megabert.hf.tokenizer_export import list_texts, pad_encoded
from megabert.model import BertForPreTraining, evaluating


class TextTokenizer:
    """A model's `Tokenizer`, with its attributes and methods, that is called with texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, texts: str | Sequence[str]) -> Tensor:
        """As `pad_encoded`."""
        return pad_encoded(self._tokenizer, texts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copies and pickles before they have a tokenizer
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


class LoadedModel:
    """A trained model with its tokenizer, in memory; made by `load`."""

    def __init__(self, pretrained: Pretrained) -> None:
        self.pretrained = pretrained
        self._extractor: Extractor | None = None

    def __repr__(self) -> str:
        size = self.pretrained.config.model
        shape = f"{size.kind}, {size.layers} layers of {size.hidden}, {size.vocab_size:,} tokens"
        return f"LoadedModel({str(self.pretrained.run_dir)!r}, step {self.pretrained.step:,}: {shape})"

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """Maps texts to ids, int32 [n, T] from [CLS] to [SEP], padded with 0."""
        return TextTokenizer(self.pretrained.tokenizer)

    @cached_property
    def model(self) -> BertForPreTraining:
        """The module, in fp32 on the CPU, in eval mode. Called with only ids it returns logits as `logits` does."""
        return self.pretrained.model(torch.device("cpu"))

    def encode(self, texts: str | Sequence[str], pool: str = "mean") -> np.ndarray:
        """Vectors of texts from the last layer, fp32 [n, hidden], in their order; `pool`: mean, max or cls. On a GPU where
        there is one. A text longer than the model's positions is cut. Raises ValueError for another pool and for half a
        character in a text, TypeError for what is no text."""
        if pool not in POOLS:
            raise ValueError(f"pool={pool!r}: choose {', '.join(POOLS)}")
        given = list_texts(texts)
        current = self._read_weights()
        if self._extractor is None:
            self._extractor = Extractor(current)
        self._extractor.pool = pool
        return self._extractor.encode(given)

    def logits(self, texts: str | Sequence[str] | Tensor) -> Tensor:
        """Logits of texts, or of ids as `tokenizer` returns them: fp32 [n, T, V]; of the next token for a causal model. Without gradients
        and dropout; use `model` for those. Raises ValueError for a text too long for the model, for ids that are not the vocabulary's,
        and for a model without an MLM head."""
        self._refuse_without_mlm_head()
        config, ids = self.pretrained.config, texts if isinstance(texts, torch.Tensor) else self.tokenizer(texts)
        if ids.ndim != 2 or not ids.shape[1] or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"ids of shape {list(ids.shape)}, {ids.dtype}: expected whole numbers [n, T], as of tokenizer"
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < config.model.vocab_size:
            raise ValueError(
                f"ids {int(ids.min())} to {int(ids.max())}: the model has 0 to {config.model.vocab_size - 1}"
            )
        if ids.shape[1] > config.model.max_positions:
            raise ValueError(
                f"{ids.shape[1]} tokens, the model takes at most {config.model.max_positions}; shorten the text"
            )
        with evaluating(self.model):
            logits: Tensor = self.model(ids, causal=config.data.masking.causal)
            return logits

    def fill(self, text: str | Sequence[str], top: int = 5) -> list[Any]:
        """The `top` likeliest (word, probability) of each [MASK] in `text`; of several texts a list of these. Raises ValueError for a
        text without one or too long for the model, for `top` below 1, and for a model without an MLM head."""
        self._refuse_without_mlm_head()
        filler = Filler(self.pretrained, self.model)
        filled = [filler.fill(one, top) for one in list_texts(text)]
        return filled[0] if isinstance(text, str) else filled

    def _refuse_without_mlm_head(self) -> None:
        """As of `pretrained`, whose new head is trained if its weights have changed in memory."""
        try:
            self.pretrained.refuse_without_mlm_head()
        except ValueError:
            self._read_weights().refuse_without_mlm_head()

    def _read_weights(self) -> Pretrained:
        """Give `pretrained` the weights that `model` has now; returns it. Raises ValueError for NaN or infinite ones."""
        known = self.pretrained.weights
        if "model" in self.__dict__:
            now = {name: weight.cpu().float() for name, weight in self.model.state_dict().items()}
            if not all(now[name].equal(weight) for name, weight in known.items()):
                refuse_non_finite(now, f"{self.pretrained.run_dir}, changed in memory")
                self.pretrained = self.pretrained.with_weights({name: now[name].clone() for name in known})
                self._extractor = None
        return self.pretrained

    def export(self, output: str | Path, overwrite: bool = False) -> None:
        """Write the model, as it is now, as a folder that Hugging Face loads. Raises ValueError for a folder that is not empty, unless
        `overwrite` replaces an exported one."""
        write(self._read_weights(), output, overwrite)

    def save(self, run: str | Path) -> None:
        """Write the model, as it is now, as a new run folder, for commands that read a model, and to train from (`init_from`). Raises
        ValueError for a folder that is not empty."""
        hf.write_run(self._read_weights(), run, dataset="none, saved from Python: begin a new run with init_from")
