"""Prediction: the logits of items, and the predictions of a file with a saved model.

Logits do not depend on the number of ranks and, except for rounding, on packing. Files may be larger than memory: examples are read,
tokenised ahead, predicted and written in chunks, and the output is complete or absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from megabert.common.arguments import refuse_replacing
from megabert.common.streaming import in_order
from megabert.distributed.ranks import World, discover
from megabert.finetune import files, save, scores
from megabert.finetune.batches import ItemLayout, collate
from megabert.finetune.encoding import TaskItem, count_truncated, warn_truncated
from megabert.finetune.heads import TOKEN_KINDS, Finetuner
from megabert.finetune.save import Finetuned
from megabert.finetune.tasks import Task
from megabert.hf.inference import on_every_core, one_row, pack_weights
from megabert.hf.packing import groups as groups_of
from megabert.hf.unknown_tokens import UnknownTokens
from megabert.model import evaluating

# Tokens of a forward pass in evaluations.
EVALUATION_TOKENS = 8192
# Examples of a file that are in memory and sorted by length together.
CHUNK = 2048
# Tokens of a forward pass over a file's examples on the CPU, for each core.
BATCH_TOKENS = 1024


def compute_logits(
    module: Finetuner,
    items: Sequence[TaskItem],
    layout: ItemLayout,
    world: World,
    tokens: int = EVALUATION_TOKENS,
    progress: Callable[[], None] = lambda: None,
    every_core: bool = False,
) -> list[np.ndarray]:
    """fp32 logits of every item for `scores.decode`, on every rank. Batches have `tokens` tokens; `progress` is called after each. A
    collective.

    Dropout is off; the module's mode is restored. With `every_core` a batch a core is computed at once, as of `on_every_core`.
    """
    starts = np.cumsum([0, *(len(item.positions) for item in items)])
    groups = groups_of([len(item.ids) for item in items], tokens)[world.rank :: world.size]
    line = every_core and one_row(module.encoder)

    @torch.no_grad()
    def compute(group: list[int]) -> torch.Tensor:
        batch = collate([items[i] for i in group], layout, line).to(world.device)
        return module.logits(batch.read, **batch.packed.inputs())

    results = on_every_core(compute, groups, world.device) if every_core else (compute(group) for group in groups)
    computed = torch.zeros(int(starts[-1]), module.outputs, device=world.device)
    with evaluating(module), closing(results):
        for group, values in zip(groups, results, strict=True):
            places = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in group])
            computed[torch.from_numpy(places).to(world.device)] = values
            progress()
    if world.size > 1:
        dist.all_reduce(computed)  # each row is 0 on all ranks but one
    rows = computed.cpu().numpy()
    # [p, K] for tags and spans; [1, K] for a text becomes [K].
    return [rows[a:b] if module.kind in TOKEN_KINDS else rows[a] for a, b in pairwise(starts)]


def ready(source: str | Path, device: torch.device, precision: str = "") -> Finetuned:
    """A saved model prepared for prediction only. Raises as `save.load`."""
    model = save.load(source, device, precision)
    pack_weights(model.module)
    return model


def predict_file(
    source: str | Path,
    path: str | Path,
    output: str | Path,
    text: Sequence[str] = (),
    identity: str = "",
    precision: str = "",
    lines: bool = False,
    probabilities: bool = False,
) -> int:
    """Write a fine-tuned model's predictions for a file, ignoring its labels; returns their number.

    `text` and `identity` name the file's columns if they differ from those in training; without an id column examples are numbered.
    `precision` is by default that of training; with `lines` each line of the file is a text; with `probabilities` those of the labels
    are written too. Raises ValueError naming what cannot be used, without writing anything.
    """
    if Path(output).is_dir():
        raise ValueError(f"--output {output}: is a folder; name a file")
    if Path(path).resolve() in (Path(output).resolve(), scores.no_answer_file(Path(output)).resolve()):
        raise ValueError(f"--output {output}: the file to predict for would be replaced; name another file")
    world = discover()
    if world.size > 1:
        raise ValueError(f"--predict: one process predicts, {world.size} were started; split the file for more")
    model = ready(source, world.device, precision)
    task = model.described.task
    columns = tuple(text) or task.text
    if task.text and len(columns) != len(task.text):
        raise ValueError(f"--text: names {len(columns)} columns, and {task.name} reads {len(task.text)}; name as many")
    # The label column is not read, so it may be any existing one, but the negatives of a ranking are texts.
    label = columns[0] if columns else ""
    if task.kind == "score" and task.pair and task.label.isdecimal() == label.isdecimal():
        label = task.label
    usual, task = task.id, replace(task, text=columns, label=label, id=identity)
    if not (identity or lines) and files.has_ids(task, usual, Path(path)):
        task = replace(task, id=usual)
    if task.unanswerable:
        refuse_replacing("--output", str(scores.no_answer_file(Path(output))))
    if probabilities and task.kind not in ("classify", "multilabel"):
        raise ValueError(f"--probabilities: are of the labels of a text, and {task.name} is a {task.kind} task")
    return predict_with(model, task, Path(path), Path(output), lines, probabilities)


def predict_with(
    model: Finetuned, task: Task, path: Path, output: Path, lines: bool = False, probabilities: bool = False
) -> int:
    """As `predict_file`, with a model from `ready` and its task with the file's columns."""
    described, unknown, world, truncated = model.described, UnknownTokens(model.tokenizer), discover(), 0
    most = BATCH_TOKENS if world.device.type == "cpu" else EVALUATION_TOKENS

    def encoded(examples: list[Any]) -> tuple[list[Any], list[TaskItem]]:
        nonlocal truncated
        items = model.items(task, examples)
        truncated += count_truncated(items)
        unknown.add(item.ids for item in items)
        return examples, items

    def predicted() -> Iterator[tuple[list[Any], ...]]:
        rest = files.stream(task, path, labelled=False, lines=lines)
        chunks = in_order(encoded, iter(lambda: list(islice(rest, CHUNK)), []), 1, 2)
        with tqdm(unit=" texts", disable=None, leave=False) as bar, closing(chunks):
            for examples, items in chunks:
                logits = compute_logits(model.module, items, described.layout, world, most, every_core=True)
                found = scores.decode(task, examples, items, logits, described.labels, described.threshold)
                yield (examples, found, scores.probabilities(task, logits)) if probabilities else (examples, found)
                bar.update(len(examples))

    count = scores.write(task, predicted(), output, described.labels if probabilities else ())
    unknown.warn(path)
    warn_truncated(path, task, described.max_length, truncated, count)
    return count
