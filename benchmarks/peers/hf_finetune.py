"""Hugging Face's Trainer with the options and files of `megabert finetune`: the peer of `bench_finetune.py`.

As in transformers' `run_glue.py` and `run_ner.py`: AutoTokenizer, the kind's Auto class, a padding collator. Rate, warm-up, epochs,
batch, length and seed are the command's, all else is at the Trainer's defaults: dropout of the folder's config, no weight decay, the last
weights (`--dev` is not read). Files are read, and predictions written and scored, by our code.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.common import hardware
from megabert.common.files import write_atomically
from megabert.finetune import __main__ as ours
from megabert.finetune import encoding, files, scores
from megabert.finetune.settings import Settings, list_runs
from megabert.finetune.tasks import Task

CLASSES: dict[str, tuple[Any, Any]] = {
    "classify": (transformers.AutoModelForSequenceClassification, transformers.DataCollatorWithPadding),
    "tag": (transformers.AutoModelForTokenClassification, transformers.DataCollatorForTokenClassification),
}
# options that both sides obey; the others must be at their defaults
OBEYED = (
    "model output train dev test seeds lr batch epochs warmup max_length precision task kind text label labels metric"
)
RESULT = "result.json"
IGNORED = -100  # label of tokens that the loss ignores


def rows_of(
    task: Task, examples: Sequence[Any], tokenizer: Any, classes: dict[str, int], max_length: int
) -> tuple[list[dict[str, Any]], list[dict[int, int]]]:
    """Inputs and labels of the examples, truncated; and of each sentence the position of each word's first token, where its tag is."""
    cut = {"truncation": True, "max_length": max_length}
    if task.kind == "tag":
        encoded = tokenizer([list(e.words) for e in examples], is_split_into_words=True, **cut)
        places = [first_tokens(encoded.word_ids(i)) for i in range(len(examples))]
    else:
        encoded = tokenizer([e.a for e in examples], [e.b for e in examples] if task.pair else None, **cut)
        places = [{} for _ in examples]
    rows = [{name: values[i] for name, values in encoded.items()} for i in range(len(examples))]
    for row, example, at in zip(rows, examples, places, strict=True):
        if task.kind == "tag":
            row["labels"] = [IGNORED] * len(row["input_ids"])
            for word, position in at.items():
                row["labels"][position] = classes[example.tags[word]]
        else:
            row["label"] = classes[example.label]
    return rows, places


def first_tokens(words: Sequence[int | None]) -> dict[int, int]:
    """Position of the first token of each word that has one, by the words of the tokens."""
    return {word: at for at, word in reversed(list(enumerate(words))) if word is not None}


def decode(
    task: Task, examples: Sequence[Any], places: Sequence[dict[int, int]], logits: np.ndarray, labels: Sequence[str]
) -> list[Any]:
    """The predicted label of each text, or the tags of each sentence: "O" for words without a token."""
    best = logits.argmax(-1)
    if task.kind != "tag":
        return [labels[k] for k in best]
    return [
        [labels[tags[at[word]]] if word in at else "O" for word in range(len(example.words))]
        for example, at, tags in zip(examples, places, best, strict=True)
    ]


def train(args: argparse.Namespace, task: Task, settings: Settings, folder: Path) -> dict[str, Any]:
    """Fine-tune with one seed, write the predictions, and return what `result.json` holds."""
    transformers.set_seed(settings.seed)  # the added layer is initialised before the Trainer sets its own
    examples = {name: files.read(task, getattr(args, name)) for name in ("train", "test")}
    labels = encoding.collect_labels(task, examples["train"])
    classes = {label: i for i, label in enumerate(labels)}
    model_class, collator = CLASSES[task.kind]
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    names = {"id2label": dict(enumerate(labels)), "label2id": classes}
    model = model_class.from_pretrained(args.model, dtype=torch.float32, **names)
    rows, _ = rows_of(task, examples["train"], tokenizer, classes, settings.max_length)
    test, places = rows_of(task, examples["test"], tokenizer, classes, settings.max_length)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        arguments = transformers.TrainingArguments(
            output_dir=scratch, learning_rate=settings.lr, num_train_epochs=settings.epochs, seed=settings.seed,
            warmup_steps=settings.warmup,  # below 1: a share of the updates
            per_device_train_batch_size=settings.batch, use_cpu=not torch.cuda.is_available(), report_to="none",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collator(tokenizer))
        seconds = trainer.train().metrics["train_runtime"]
        logits = trainer.predict(test).predictions
    predictions = decode(task, examples["test"], places, logits, labels)
    path = folder / f"predictions-test.{scores.suffix(task, examples['test'])}"
    scores.write(task, [(examples["test"], predictions)], path)
    return {"scores": {"test": scores.score(task, examples["test"], predictions, labels)}, "seconds": seconds}


def main(argv: list[str] | None = None) -> None:
    args, usual = ours.parse(argv), vars(ours.parse(["--model=", "--output="]))
    ours.check(args)
    task = ours.parse_task(args)
    foreign = [name for name, value in vars(args).items() if name not in OBEYED.split() and value != usual[name]]
    if foreign or args.precision != "fp32" or task.kind not in CLASSES:
        raise ValueError(f"the peer is for --precision fp32, texts and tags, not {' '.join(foreign) or task.kind}")
    for name, settings in list_runs(args, task.max_length, task.stride).items():
        folder = Path(args.output) / name
        if not (folder / RESULT).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / RESULT, json.dumps(train(args, task, settings, folder)).encode())


if __name__ == "__main__":
    hardware.run(main)
