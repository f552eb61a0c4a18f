"""A tiny pre-trained model without files, and items of every kind for it."""

from __future__ import annotations

import numpy as np
import torch

from megabert.config import Config
from megabert.finetune.encoding import TaskItem
from tests.helpers import tiny

CLS, SEP = 2, 3


def config(**overrides: object) -> Config:
    return tiny.config(**{"model__layers": 4} | overrides)


def weights(cfg: Config) -> dict[str, torch.Tensor]:
    return tiny.model(cfg).state_dict()


def items(kind: str, count: int) -> list[TaskItem]:
    """Texts of 3 to 12 random tokens; class = parity of the first, score = its id / 40, tags = parities, the
    answer is the first token from 30 on and the one behind it."""
    draw = np.random.default_rng(1)
    found = []
    for example in range(count):
        inner = draw.integers(5, 40, draw.integers(1, 11))
        ids = np.concatenate([[CLS], inner, [SEP]]).astype(np.int32)
        words = np.arange(1, len(inner) + 1)
        positions = {"tag": words, "span": np.arange(len(inner) + 1)}.get(kind, np.zeros(1))
        if kind == "score":
            targets = (inner[:1] / 40).astype(np.float32)
        elif kind == "span":
            first = next((i for i, token in enumerate(ids[1:-1], 1) if token >= 30), 0)
            targets = np.array([first, min(first + 1, len(inner)) if first else 0])
        else:
            targets = (inner if kind == "tag" else inner[:1]) % 2
        spans = np.zeros((len(positions) if kind == "span" else 0, 2), np.int64)
        found.append(TaskItem(example, ids, len(ids), positions.astype(np.int64), targets, spans))
    return found
