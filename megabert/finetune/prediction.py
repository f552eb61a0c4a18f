"""Prediction: the logits of items, and the predictions of a file with a saved model.

Logits are the same however many ranks compute them and, but for rounding, whatever they are packed with. Files may be larger than
memory: examples are read, tokenised ahead, predicted and written in chunks, and the output appears whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from megabert.common.files import appearing_file
from megabert.common.streaming import in_order
from megabert.data.packing import groups as groups_of
from megabert.distributed.ranks import World, on_main
from megabert.finetune import datasets, save, scores
from megabert.finetune.batches import ItemLayout, collate
from megabert.finetune.encoding import TaskItem
from megabert.finetune.heads import TOKEN_KINDS, Finetuner
from megabert.finetune.save import Finetuned
from megabert.finetune.tasks import Task
from megabert.hf.inference import one_thread, pack_weights, threads_apart, workers

# Tokens of one forward pass without gradients, in evaluations.
EVALUATION_TOKENS = 8192
# Examples of a file that are sorted by length together, and in memory.
CHUNK = 2048
# Tokens of one forward pass over a file's examples: on the CPU each core computes its own.
BATCH_TOKENS = 1024


@torch.no_grad()
def logits_of(
    module: Finetuner,
    items: Sequence[TaskItem],
    layout: ItemLayout,
    world: World,
    tokens: int = EVALUATION_TOKENS,
    progress: Callable[[], None] = lambda: None,
    threads: int = 0,
) -> list[np.ndarray]:
    """fp32 logits of every item as `scores.decode` takes them, on every rank, `tokens` tokens at a time, after each of which
    `progress` is called. A collective.

    Dropout is off; the module's mode is restored. With `threads` that many batches are computed at once, each by a thread that
    torch divides no further; to be called inside `threads_apart`.
    """
    training = module.training
    module.eval()
    groups = groups_of([item.tokens for item in items], tokens)
    rows_of_ranks = [
        sum(len(items[i].positions) for group in groups[r :: world.size] for i in group) for r in range(world.size)
    ]
    outputs = module.shape.outputs
    rows_of_rank = torch.zeros(max(rows_of_ranks), outputs, device=world.device)
    line = threads > 0 and reads_lines(module)

    @torch.no_grad()
    def compute(group: list[int]) -> torch.Tensor:
        batch = collate([items[i] for i in group], layout, line).to(world.device)
        return module.logits(**batch.reading())  # type: ignore[arg-type]

    groups_of_rank = groups[world.rank :: world.size]
    computed = (
        in_order(compute, groups_of_rank, threads, 2 * threads, one_thread) if threads else map(compute, groups_of_rank)
    )
    at = 0
    for values in computed:
        rows_of_rank[at : at + len(values)] = values
        at += len(values)
        progress()
    module.train(training)
    parts = [rows_of_rank]
    if world.size > 1:
        parts = [torch.empty_like(rows_of_rank) for _ in range(world.size)]
        dist.all_gather(parts, rows_of_rank)
    logits: list[np.ndarray] = [np.zeros((0, outputs), np.float32)] * len(items)
    for rank, part in enumerate(parts):
        rows, at = part.cpu().numpy(), 0
        for i in (i for group in groups[rank :: world.size] for i in group):
            own_rows = rows[at : at + len(items[i].positions)]
            # [p, K] of tags and spans; [1, K] of a text and [choices, 1] become [K].
            logits[i] = own_rows if module.shape.kind in TOKEN_KINDS else own_rows.reshape(-1)
            at += len(own_rows)
    return logits


def reads_lines(module: Finetuner) -> bool:
    """Whether rows may be as long as a batch: with the CPU's native attention they cost no more."""
    encoder = module.fixed[0] if module.fixed else module.encoder
    return encoder.embeddings.word.weight.device.type == "cpu" and encoder.backends.attention.name == "native"


def predict_file(
    source: str | Path,
    path: str | Path,
    output: str | Path,
    world: World,
    null_threshold: float = 0.5,
    text: Sequence[str] = (),
    identity: str = "",
    choices: Sequence[str] = (),
    probabilities: str = "",
    precision: str = "",
    stopped: Callable[[], bool] = lambda: False,
) -> int | None:
    """Write a fine-tuned model's predictions for a file, whose labels are not read; returns their number. A collective.

    `text`, `choices` and `identity` name the file's columns where they are not those the model was trained with.
    `probabilities` is a file of JSON lines (`scores.probability_lines`); `precision` is that of training unless named. A
    question that may have no answer gets none where its probability is above `null_threshold`. Once `stopped` is true on a rank
    nothing is written and the result is None. Raises ValueError naming what cannot be used; nothing is written then.
    """
    for option, target, others in (("--output", output, [path]), ("--scores", probabilities, [path, output])):
        if target and Path(target).resolve() in [Path(other).resolve() for other in others]:
            raise ValueError(f"{option} {target}: is named twice and would be replaced; name another file")
    if not 0 <= null_threshold <= 1:
        raise ValueError(f"--null-threshold {null_threshold:g}: is a probability, 0 to 1")
    model = ready(source, world.device, precision)
    task = datasets.for_prediction(model.described.task, path, text, identity, choices)
    lines_to = Path(probabilities) if probabilities else None
    return predict_with(model, task, Path(path), Path(output), world, null_threshold, lines_to, stopped)


def ready(source: str | Path, device: torch.device, precision: str = "") -> Finetuned:
    """A saved model that will only predict. Raises as `save.load`."""
    model = save.load(source, device, precision)
    for part in (model.module, *model.module.fixed):
        pack_weights(part)
    return model


class PredictionStopped(Exception):
    """A rank was asked to stop."""


def predict_with(
    model: Finetuned,
    task: Task,
    path: Path,
    output: Path,
    world: World,
    null_threshold: float = 0.5,
    probabilities: Path | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> int | None:
    """As `predict_file`, with a model that is `ready` and its task with the file's columns."""
    forms = scores.forms(task, output)
    written = forms | ({probabilities: scores.PROBABILITIES} if probabilities else {})
    labels = model.described.labels

    def encoded(examples: list[Any]) -> tuple[list[Any], list[TaskItem]]:
        return examples, model.items(task, examples)

    rest = datasets.stream(task, path, labelled=False)
    chunks = in_order(encoded, iter(lambda: list(islice(rest, CHUNK)), []), 1, 2)
    count = 0
    try:
        with ExitStack() as stack:
            bar = stack.enter_context(tqdm(unit=" texts", disable=None if world.is_main else True, leave=False))
            stack.enter_context(threads_apart())
            files = PredictionFiles(stack, written)
            on_main(world, files.begin)
            for examples, items in stack.enter_context(closing(chunks)):
                logits = logits_of(
                    model.module, items, model.described.layout, world, BATCH_TOKENS, threads=workers(world.device)
                )
                predictions = scores.decode(task, examples, items, logits, labels, null_threshold)
                lines = {target: form.lines(examples, predictions) for target, form in forms.items()}
                if probabilities:
                    shown = scores.probability_lines(task, examples, items, logits, predictions, labels)
                    lines[probabilities] = scores.PROBABILITIES.lines(examples, list(shown))
                on_main(world, partial(files.add, lines))
                count += len(examples)
                bar.update(len(examples))
                if world.agree_any(stopped()):
                    raise PredictionStopped
            on_main(world, files.end)
    except PredictionStopped:
        return None
    return count


class PredictionFiles:
    """Rank 0's output files, which appear whole when `stack` is left without an error."""

    def __init__(self, stack: ExitStack, forms: dict[Path, scores.PredictionForm]) -> None:
        self.stack, self.forms = stack, forms
        self.files: dict[Path, BinaryIO] = {}

    def begin(self) -> None:
        for path in self.forms:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.files[path] = self.stack.enter_context(appearing_file(path))

    def add(self, lines: dict[Path, str]) -> None:
        for path, form in self.forms.items():
            if lines[path]:
                begin = form.between if self.files[path].tell() else form.begin
                self.files[path].write((begin + lines[path]).encode())

    def end(self) -> None:
        for path, form in self.forms.items():
            self.files[path].write((form.end if self.files[path].tell() else form.empty).encode())
