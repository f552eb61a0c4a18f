"""Prediction: the logits of items, the same however many ranks compute them and, but for rounding, whatever they are packed with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megabert.data.packing import groups as groups_of
from megabert.distributed.process_group import World
from megabert.finetune import datasets, encoding, metrics, save
from megabert.finetune import scores as behind
from megabert.finetune.batches import EVALUATION_TOKENS, Layout, collate
from megabert.finetune.encoding import Item
from megabert.finetune.heads import TOKEN_KINDS, Finetuner


@torch.no_grad()
def logits_of(
    module: Finetuner,
    items: Sequence[Item],
    layout: Layout,
    world: World,
    tokens: int = EVALUATION_TOKENS,
    progress: Callable[[], None] = lambda: None,
) -> list[np.ndarray]:
    """fp32 [p, K] of every item, on every rank, `tokens` tokens at a time, after each of which `progress` is called. A collective.

    Dropout is off; the module's mode is afterwards as before.
    """
    training = module.training
    module.eval()
    groups = groups_of([item.tokens for item in items], tokens)
    sizes = [[sum(len(items[i].positions) for i in group) for group in groups[r :: world.size]]
             for r in range(world.size)]  # fmt: skip
    outputs = module.shape.outputs
    found = torch.zeros(max(map(sum, sizes)), outputs, device=world.device)
    at = 0
    for group in groups[world.rank :: world.size]:
        batch = collate([items[i] for i in group], layout).to(world.device)
        values = module.logits(**batch.reading())  # type: ignore[arg-type]
        found[at : at + len(values)] = values
        at += len(values)
        progress()
    module.train(training)
    parts = [found]
    if world.size > 1:
        parts = [torch.empty_like(found) for _ in range(world.size)]
        dist.all_gather(parts, found)
    logits: list[np.ndarray] = [np.zeros((0, outputs), np.float32)] * len(items)
    for rank, part in enumerate(parts):
        rows, at = part.cpu().numpy(), 0
        for i in (i for group in groups[rank :: world.size] for i in group):
            logits[i] = rows[at : at + len(items[i].positions)]
            at += len(items[i].positions)
    return logits


def predict_file(
    source: str | Path,
    path: str | Path,
    output: str | Path,
    world: World,
    null_threshold: float = 0.5,
    text: Sequence[str] = (),
    identity: str = "",
    choices: Sequence[str] = (),
    scores: str = "",
) -> int:
    """Write a fine-tuned model's predictions for a file, whose labels are not read; how many there are.

    `text`, `choices` and `identity` name the file's columns where they are not those the model was trained with. `scores` is
    a file for what stands behind them (`megabert.finetune.scores`).
    A question that may have no answer gets none where its probability is above `null_threshold`. Raises ValueError naming
    what cannot be used; nothing is written then.
    """
    if not 0 <= null_threshold <= 1:
        raise ValueError(f"--null-threshold {null_threshold:g}: is a probability, 0 to 1")
    found = save.load(source, world.device)
    described = found.described
    task = datasets.for_prediction(described.task, path, text, identity, choices)
    examples = datasets.read(task, path, labelled=False)
    items = encoding.encode(
        *(task, examples, found.tokenizer, described.labels, described.max_length),
        stride=described.stride,
        long=described.long,
    )
    logits = [reshape(x, task.kind) for x in logits_of(found.module, items, described.layout, world)]
    labels = described.labels
    predictions: list[Any] = metrics.decode(task, examples, items, logits, labels, null_threshold)
    if world.is_main:
        metrics.write(task, examples, predictions, output)
        if scores:
            behind.write(task, examples, items, logits, predictions, labels, Path(scores))
    return len(predictions)


def reshape(logits: np.ndarray, kind: str) -> np.ndarray:
    """[1, K] of a text -> [K], [K, 1] of compared sequences -> [K], as `metrics.decode` takes them; [p, K] of tags and spans
    stay."""
    return logits if kind in TOKEN_KINDS else logits.reshape(-1)
