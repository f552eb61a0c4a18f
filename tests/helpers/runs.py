"""Run folders as training leaves them, with a small random model and a tokenizer of either kind in them."""

from __future__ import annotations

import io
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from megabert.checkpoint import write_start
from megabert.config import Config, DataConfig, MaskingConfig, ModelConfig, OpsConfig
from megabert.data.tokenizer import Tokenizer
from megabert.model import BertForPreTraining
from tests.helpers import wordpiece

TEXT = [
    "The quick brown fox jumps over the lazy dog near the river bank, 2,666 times.",
    "She sells sea shells by the sea shore; the shells she sells are surely sea shells.",
    "A language model learns which words follow which, and how often they do so (naïvely).",
] * 50
PLAIN = OpsConfig(attention="sdpa", mlm_loss="torch", layer="torch")
KINDS = ("unigram", "bpe", "uncased", "cased")


@cache
def sentencepiece_model(**changes: Any) -> bytes:
    """A model with the special tokens where ours are, trained on TEXT."""
    names = {"pad": "[PAD]", "unk": "[UNK]", "bos": "[CLS]", "eos": "[SEP]"}
    options: dict[str, Any] = {f"{k}_id": i for i, k in enumerate(names)}
    options |= {f"{k}_piece": v for k, v in names.items()}
    options |= {"control_symbols": "[MASK]", "vocab_size": 120, "normalization_rule_name": "nmt_nfkc"}
    options["hard_vocab_limit"] = False
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT), model_writer=model, minloglevel=2, **(options | changes)
    )
    return model.getvalue()


def tokenizer(folder: Path, kind: str = "unigram") -> Tokenizer:
    """A tokenizer file in `folder`, under the name it has in a run folder; `kind` may be a vocabulary's file."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind in ("unigram", "bpe"):
        path = folder / "tokenizer.model"
        path.write_bytes(sentencepiece_model(model_type=kind))
        return Tokenizer.load(path)
    if Path(kind).is_file():
        return Tokenizer.load(shutil.copy(kind, folder / "vocab.txt"))
    return Tokenizer.load(wordpiece.write(folder / "vocab.txt", cased=kind == "cased"))


def model(cfg: ModelConfig, ops: OpsConfig = PLAIN) -> BertForPreTraining:
    """Every parameter random, none where it began: a swapped norm or bias shows."""
    torch.manual_seed(1)
    built = BertForPreTraining(cfg, ops, "cpu", torch.float32)
    for name, p in built.named_parameters():
        torch.nn.init.normal_(p, 1.0 if name.endswith("norm_weight") else 0.0, 0.1)
        if name.startswith("embeddings.word."):
            torch.nn.init.zeros_(p[cfg.vocab_size :])
    return built.eval()


def make(
    folder: Path, kind: str = "unigram", causal: bool = False, fields: dict[str, Any] | None = None, **others: Any
) -> Path:
    """`folder`, a run of 2 layers of 32 with the checkpoint of step 0; `causal`: as if trained causally; `kind` is the
    tokenizer's, `fields` and `others` the model's."""
    found = tokenizer(folder, kind)
    shape: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "max_positions": 40, "nsp": not causal}
    data = DataConfig(masking=MaskingConfig(strategy="causal" if causal else "token"))
    cfg = ModelConfig(**(shape | {"vocab_size": found.vocab_size} | (fields or {}) | others))
    state = {"config": Config(model=cfg, data=data).model_dump(), "dataset": "d" * 64, "tokenizer": found.sha256}
    write_start(folder, model(cfg).state_dict(), state | {"seconds": 9.0})
    return folder
