"""Preparation of fine-tuning runs: settings that are in range, and the encoded files of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megabert.data.tokenizer import Tokenizer
from megabert.finetune import encoding
from megabert.finetune.examples import Example
from megabert.finetune.tasks import Task
from megabert.finetune.training import Data, Settings, Split


def check(settings: Settings) -> None:
    """Raises ValueError naming an option that is out of range."""
    at_least = {
        **{"batch": 1, "micro_batch": 0, "epochs": 1, "max_length": 4, "stride": 1, "evaluations": 1},
        **{"patience": 0, "weight_decay": 0, "dropout": 0, "warmup": 0, "lr": 0},
    }
    below = {"dropout": 1.0, "warmup": 1.0, "lr": 1.0}
    for name, least in at_least.items():
        value, option = getattr(settings, name), name.replace("_", "-")
        if not least <= value < below.get(name, float("inf")) or (name == "lr" and not value):
            limit = f" and below {below[name]:g}" if name in below else ""
            raise ValueError(
                f"--{option} {value}: must be {'above' if name == 'lr' else 'at least'} {least}{limit}"
            )


def encoded(
    task: Task,
    examples: Mapping[str, Sequence[Example]],
    tokenizer: Tokenizer,
    settings: Settings,
    labels: Sequence[str] = (),
) -> Data:
    """The splits of a task, as many tokens long as `settings` say. `labels`: where not those of the split "train".

    Raises ValueError naming file and line of a label that is not among them.
    """
    labels = labels or encoding.labels_of(task, examples["train"])
    splits = {}
    for name, part in examples.items():
        items = encoding.encode(
            *(task, part, tokenizer, labels, settings.max_length),
            stride=settings.stride,
            long=settings.long,  # type: ignore[arg-type]
        )
        splits[name] = Split(part, items)
    return Data(task, tuple(labels), splits)
