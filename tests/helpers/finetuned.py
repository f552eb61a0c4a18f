"""A fine-tuned model in its folder, of any kind, without training: every weight random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megabert import hf as pretrained
from megabert.finetune import datasets, encoding, heads, save, training
from megabert.finetune.tasks import Task
from megabert.finetune.training import Data, Settings, Split
from tests.helpers import runs

LENGTH = 24


def make(
    base: Path, task: Task, file: Path, settings: Any = None, vocabulary: str = "uncased",
    fields: dict[str, Any] | None = None, **run: Any,
) -> Path:  # fmt: skip
    """`base/best`, a model of `task` with the labels of `file`, on the encoder of `runs.make`; `fields`: of the model."""
    runs.make(base / "run", vocabulary, fields=fields, **run)
    start = pretrained.load(base / "run")
    examples = datasets.read(task, file)
    labels = encoding.labels_of(task, examples)
    chosen = Settings(**{"max_length": LENGTH, "stride": 8, "precision": "fp32"} | (settings or {}))
    items = encoding.encode(task, examples, start.tokenizer, labels, LENGTH, stride=8)
    data = Data(task, labels, {"train": Split(examples, items)})
    described = training.describe(data, start, chosen, 1)
    torch.manual_seed(1)
    module = heads.build(described.config, described.shape, start.weights, torch.device("cpu"), torch.float32)
    for parameter in module.head.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    weights = module.state_dict() | (heads.frozen_weights(module, start.weights) if described.shape.frozen else {})
    save.save(base / "best", described, weights, start.tokenizer, {"step": 3, "dev": {"accuracy": 0.75}})
    return base / "best"
