"""What a head reads of an example stands in the item: ids, the positions it reads, and the targets at them.

Texts longer than the model are truncated, the longer of a pair first (Devlin et al. 2019), or read in windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megabert.finetune.files import Example
from megabert.finetune.tasks import Task
from megabert.tokenizer import Tokenizer


@dataclass(frozen=True)
class Item:
    """One sequence for the model, [CLS] A [SEP] or [CLS] A [SEP] B [SEP]; several of one example are its windows, in order."""

    example: int
    ids: np.ndarray  # int32 [n]
    second: int  # where segment 1 begins; n without a pair
    # int64 [p], token positions the head reads: [0] for a text, the first piece of each word (a word is in one window
    # only), [CLS] and all the context's tokens for a span
    positions: np.ndarray
    # int64 [1] class | float32 [1] score | int64 [p] tags | int64 [2] start and end as indices into `positions`, both
    # included, 0 0 where the window holds no answer; empty where unlabelled
    targets: np.ndarray
    char_spans: (
        np.ndarray
    )  # int64 [p, 2] for a span: where its tokens are in the context, 0 0 for [CLS]; else [0, 2]


def labels_of(task: Task, examples: Sequence[Example]) -> tuple[str, ...]:
    """The labels of a classify or tag task in the order of their classes; () for the other kinds."""
    raise NotImplementedError


def encode(
    task: Task,
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    labels: Sequence[str],
    max_length: int,
    stride: int = 128,
    long: Literal["truncate", "pool"] = "truncate",
) -> list[Item]:
    """The items of the examples, in their order; `max_length` tokens at most each.

    `stride`: tokens from one window's start to the next one's. `long="pool"` reads a long text in windows too.
    """
    raise NotImplementedError
