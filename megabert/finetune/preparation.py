"""The encoded files of a task, as a fine-tuning run takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megabert.data.tokenizer import Tokenizer
from megabert.finetune import encoding
from megabert.finetune.examples import Example
from megabert.finetune.tasks import Task
from megabert.finetune.training import Data, Settings, Split


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
