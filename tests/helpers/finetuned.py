"""A fine-tuned model in its folder, of any kind, without training: every weight random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megabert import hf as pretrained
from megabert.finetune import files, heads, run, save
from megabert.finetune.settings import Settings
from megabert.finetune.tasks import Task
from tests.helpers import runs

LENGTH = 24


def make(
    base: Path, task: Task, file: Path, settings: Any = None, vocabulary: str = "uncased",
    fields: dict[str, Any] | None = None, **model: Any,
) -> Path:  # fmt: skip
    """`base/best`, a model of `task` with the labels of `file`, on the encoder of `runs.make`; `fields`: of the model."""
    runs.make(base / "run", vocabulary, fields=fields, **model)
    return save_untrained(base, task, file, **{"max_length": LENGTH} | (settings or {}))


def save_untrained(base: Path, task: Task, file: Path, **settings: Any) -> Path:
    """`base/best`, a model of `task` on the run `base/run`, whose head is random."""
    start = pretrained.load(base / "run")
    chosen = Settings(**{"precision": "fp32", "stride": 8} | settings)
    data = run.encode_splits(task, {"train": files.read(task, file)}, start.tokenizer, chosen)
    described = run.describe(data, start, chosen, 1)
    torch.manual_seed(1)
    cpu, kind, outputs = torch.device("cpu"), task.kind, described.outputs
    module = heads.build(described.config, kind, outputs, start.weights, cpu, torch.float32, described.layers)
    for parameter in module.head.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5)
    save.save(base / "best", described, module.state_dict(), start.tokenizer, {"step": 3, "dev": {"accuracy": 0.75}})
    return base / "best"
