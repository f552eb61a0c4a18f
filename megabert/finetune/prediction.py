"""Prediction: the logits of items, the same however many ranks compute them and, but for rounding, whatever they are packed with.

Files may be larger than memory: examples are read, tokenised ahead, predicted and written some at a time. What a file's
examples are computed with depends on the file alone, so that a run that was killed and goes on writes the same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from megabert.common.files import appearing_file
from megabert.common.logs import log
from megabert.common.streaming import Spool, in_order
from megabert.data.packing import groups as groups_of
from megabert.distributed.process_group import World
from megabert.distributed.together import together
from megabert.finetune import datasets, metrics, save
from megabert.finetune import scores as behind
from megabert.finetune.batches import EVALUATION_TOKENS, Layout, collate
from megabert.finetune.encoding import Item
from megabert.finetune.heads import TOKEN_KINDS, Finetuner
from megabert.finetune.metrics import Form
from megabert.finetune.save import Finetuned
from megabert.finetune.tasks import Task
from megabert.hf.inference import one_thread, pack_weights, threads_apart, workers

CHUNK = 2048  # examples that are sorted by length together, and in memory
BATCH_TOKENS = 1024  # of a file that is predicted, computed at once: by one core, where it is the CPU


@torch.no_grad()
def logits_of(
    module: Finetuner,
    items: Sequence[Item],
    layout: Layout,
    world: World,
    tokens: int = EVALUATION_TOKENS,
    progress: Callable[[], None] = lambda: None,
    threads: int = 0,
) -> list[np.ndarray]:
    """fp32 [p, K] of every item, on every rank, `tokens` tokens at a time, after each of which `progress` is called. A collective.

    Dropout is off; the module's mode is afterwards as before. With `threads` so many batches are computed at once, each by a
    thread that torch divides no further; to be called inside `threads_apart`.
    """
    training = module.training
    module.eval()
    groups = groups_of([item.tokens for item in items], tokens)
    sizes = [[sum(len(items[i].positions) for i in group) for group in groups[r :: world.size]]
             for r in range(world.size)]  # fmt: skip
    outputs = module.shape.outputs
    found = torch.zeros(max(map(sum, sizes)), outputs, device=world.device)
    at = 0
    line = threads > 0 and reads_lines(module)

    @torch.no_grad()
    def compute(group: list[int]) -> torch.Tensor:
        batch = collate([items[i] for i in group], layout, line).to(world.device)
        return module.logits(**batch.reading())  # type: ignore[arg-type]

    own = groups[world.rank :: world.size]
    computed = in_order(compute, own, threads, 2 * threads, one_thread) if threads else map(compute, own)
    for values in computed:
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


def reads_lines(module: Finetuner) -> bool:
    """Whether rows may be as long as a batch: the CPU's own attention takes no longer over them."""
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
    scores: str = "",
    precision: str = "",
    stopped: Callable[[], bool] = lambda: False,
) -> int | None:
    """Write a fine-tuned model's predictions for a file, whose labels are not read; how many there are. A collective.

    `text`, `choices` and `identity` name the file's columns where they are not those the model was trained with. `scores` is
    a file for what stands behind them (`megabert.finetune.scores`); `precision` is that of training where none is named. A
    question that may have no answer gets none where its probability is above `null_threshold`. The same call goes on where one
    was killed, or `stopped` on a rank, which gives None. Raises ValueError naming what cannot be used; nothing is written then.
    """
    for option, target, others in (("--output", output, [path]), ("--scores", scores, [path, output])):
        if target and Path(target).resolve() in [Path(other).resolve() for other in others]:
            raise ValueError(f"{option} {target}: is named twice and would be replaced; name another file")
    if not 0 <= null_threshold <= 1:
        raise ValueError(f"--null-threshold {null_threshold:g}: is a probability, 0 to 1")
    found = ready(source, world.device, precision)
    task = datasets.for_prediction(found.described.task, path, text, identity, choices)
    behind_them = Path(scores) if scores else None
    return predict_with(found, task, Path(path), Path(output), world, null_threshold, behind_them, precision, stopped)


def ready(source: str | Path, device: torch.device, precision: str = "") -> Finetuned:
    """A saved model that will only predict. Raises as `save.load`."""
    found = save.load(source, device, precision)
    for part in (found.module, *found.module.fixed):
        pack_weights(part)
    return found


def predict_with(
    found: Finetuned,
    task: Task,
    path: Path,
    output: Path,
    world: World,
    null_threshold: float = 0.5,
    scores: Path | None = None,
    precision: str = "",
    stopped: Callable[[], bool] = lambda: False,
) -> int | None:
    """As `predict_file`, with a model that is `ready`, in `precision`, and its task with the file's columns."""
    described, module = found.described, found.module
    total = datasets.count(task, path)
    facts = {
        "weights": found.weights_sha256, "task": asdict(task), "described": described.tree(),
        "tokenizer": found.tokenizer.sha256, "input": datasets.digest(path), "null_threshold": null_threshold,
        "scores": str(scores), "precision": precision, "ranks": world.size,
    }  # fmt: skip
    forms: dict[Path, Form] = metrics.forms(task, output)
    given: dict[Path, Form] = dict(forms) | ({scores: behind.FORM} if scores else {})

    def encoded(examples: list[Any]) -> tuple[list[Any], list[Item]]:
        return examples, found.items(task, examples)

    with ExitStack() as stack:
        files = PredictionFiles(given, output, facts)
        together(world, lambda: files.begin(stack))
        done = world.broadcast(files.done)
        if done and world.is_main:
            log.info(f"{output}: goes on behind {done:,} of {total:,} examples")
        rest = islice(datasets.stream(task, path), done, None)
        chunks = in_order(encoded, iter(lambda: list(islice(rest, CHUNK)), []), 1, 2)
        bar = tqdm(total=total, initial=done, unit=" texts", disable=None if world.is_main else True, leave=False)
        stack.enter_context(bar)
        stack.enter_context(threads_apart())
        for examples, items in stack.enter_context(closing(chunks)):
            logits = logits_of(*(module, items, described.layout, world, BATCH_TOKENS), threads=workers(world.device))
            logits = [reshape(x, task.kind) for x in logits]
            labels = described.labels
            predictions = metrics.decode(task, examples, items, logits, labels, null_threshold)
            lines = {file: form.lines(examples, predictions) for file, form in forms.items()}
            if scores:
                told = behind.lines(task, examples, items, logits, predictions, labels)
                lines[scores] = behind.FORM.lines(examples, list(told))
            together(world, partial(files.add, len(examples), lines))
            bar.update(len(examples))
            if world.agree_any(stopped()):
                return None
        together(world, files.finish)
    return total


class PredictionFiles:
    """Rank 0's files of predictions, spooled until all are there; `done` examples were written before this process began."""

    def __init__(self, forms: Mapping[Path, Form], output: Path, facts: Mapping[str, Any]) -> None:
        self.forms, self.output = forms, output
        self.names = {path: f"{number}-{path.name}" for number, path in enumerate(forms)}
        self.spool = Spool(output, facts, list(self.names.values()))
        self.done = 0

    def begin(self, stack: ExitStack) -> None:
        for path in self.forms:
            path.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(self.spool)
        self.done = self.written = int(self.spool.state.get("examples", 0))

    def add(self, examples: int, lines: Mapping[Path, str]) -> None:
        """What each file says of the next so many examples."""
        for path, form in self.forms.items():
            file = self.spool.files[self.names[path]]
            if lines[path]:
                file.write(((form.between if file.tell() else form.begin) + lines[path]).encode())
        self.written += examples
        self.spool.advance({"examples": self.written})

    def finish(self) -> None:
        self.spool.commit()
        for path, form in self.forms.items():
            file = self.spool.files[self.names[path]]
            end = form.end if file.tell() else form.empty
            with appearing_file(path) as target:
                file.seek(0)
                shutil.copyfileobj(file, target)
                target.write(end.encode())
        self.spool.finish()


def reshape(logits: np.ndarray, kind: str) -> np.ndarray:
    """[1, K] of a text -> [K], [K, 1] of compared sequences -> [K], as `metrics.decode` takes them; [p, K] of tags and spans
    stay."""
    return logits if kind in TOKEN_KINDS else logits.reshape(-1)
