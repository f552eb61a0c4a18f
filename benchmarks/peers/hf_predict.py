"""The peers of `bench_predict.py`: sentence-transformers' `encode`, transformers' pipeline, and their models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.hf_step import peer_config
from megabert.config import ModelConfig

LENGTH = 512


def make(size: ModelConfig, vocab: Path, labels: Sequence[str], folder: Path) -> tuple[Path, Path]:
    """Folders of an encoder and of a classifier with random weights."""
    from transformers import BertForPreTraining, BertForSequenceClassification, BertTokenizerFast, logging

    logging.set_verbosity_error()  # that the pre-training heads are not the classifier's
    logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = BertTokenizerFast(str(vocab), do_lower_case=True, model_max_length=LENGTH)
    config = peer_config(size)
    config.initializer_range = 0.05  # labels differ
    BertForPreTraining(config).save_pretrained(folder / "encoder")
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    made = BertForSequenceClassification.from_pretrained(folder / "encoder", **names)
    torch.nn.init.normal_(made.classifier.weight, std=0.2)
    made.save_pretrained(folder / "classifier")
    for name in ("encoder", "classifier"):
        tokenizer.save_pretrained(folder / name)
        (folder / name / "vocab.txt").write_bytes(vocab.read_bytes())
    return folder / "encoder", folder / "classifier"


def encoder(folder: Path, dtype: torch.dtype) -> Callable[[Sequence[str], int], np.ndarray]:
    """Mean-pooled vectors float32 [n, D] of texts, in batches."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    transformer = Transformer(str(folder), max_seq_length=LENGTH)
    pooling = Pooling(transformer.auto_model.config.hidden_size, "mean")
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu").to(dtype)
    encode = partial(model.encode, show_progress_bar=False)
    return lambda texts, batch: np.asarray(encode(list(texts), batch_size=batch), np.float32)


def classifier(folder: Path, dtype: torch.dtype) -> Callable[[Sequence[str], int], list[dict[str, Any]]]:
    """`{"label", "score"}` of texts, in batches."""
    from transformers import pipeline

    made: Any = pipeline("text-classification", model=str(folder), device="cpu", dtype=dtype)
    return lambda texts, batch: made(list(texts), batch_size=batch, truncation=True)
