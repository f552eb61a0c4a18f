"""Saved fine-tuned models: a folder with the encoder and its added layer, the task it was trained for, and the tokenizer.

    model.safetensors   fp32 weights, `encoder.…` (BertForPreTraining's names) and `head.…`
    task.json           the task, its labels, how texts are encoded, the model's config
    tokenizer.model     or vocab.txt, tokenizer.json

Nothing in it is unpickled, and it is written atomically.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from megabert import config as configuration
from megabert.checkpoint import refuse_non_finite
from megabert.common.files import appearing, canonical, write_tensors
from megabert.config import Config, DataConfig, OpsConfig
from megabert.data.tokenizer import Tokenizer
from megabert.engine.precision import DTYPES, dtype_on
from megabert.finetune import encoding, heads
from megabert.finetune.batches import ItemLayout
from megabert.finetune.datasets import Example
from megabert.finetune.encoding import TaskItem
from megabert.finetune.heads import Finetuner
from megabert.finetune.tasks import DESCRIPTION, Task, located_finetuned
from megabert.hf import TOKENIZER_FILES, Pretrained
from megabert.hf.read import MLM_HEAD, NSP_HEAD, start_state
from megabert.model import BertForPreTraining

WEIGHTS = "model.safetensors"
# of `Described`, as they are in task.json
FIELDS = ("labels", "max_length", "stride", "threshold", "layers", "every_token")


@dataclass(frozen=True)
class Described:
    """Description of a fine-tuned model without its weights. `max_length` and `stride` as of `encoding.encode`, `threshold` as of
    `scores.decode`, `layers` as of `heads.Finetuner`, `every_token` as of `encoding.encode` (false in models saved before it was)."""

    task: Task
    labels: tuple[str, ...]
    max_length: int
    stride: int
    config: Config
    threshold: float = 0.5
    layers: str = "last"
    every_token: bool = False

    @property
    def outputs(self) -> int:
        """Number of outputs of the added layer at each position."""
        return {"score": 1, "span": 2}.get(self.task.kind, len(self.labels))

    @property
    def layout(self) -> ItemLayout:
        """The layout of its batches."""
        return ItemLayout(self.task.kind, self.max_length, self.config.data.masking.causal)


@dataclass(frozen=True)
class Finetuned:
    """A model in its compute dtype and eval mode; `results`: its metrics in training."""

    folder: Path
    described: Described
    tokenizer: Tokenizer
    module: Finetuner
    results: dict[str, Any]

    def items(self, task: Task, examples: Sequence[Example]) -> list[TaskItem]:
        """Examples encoded as in training; `task` is the model's, possibly with other columns. Errors as of `encoding.encode`."""
        d = self.described
        return encoding.encode(task, examples, self.tokenizer, d.labels, d.max_length, d.stride, d.every_token)


def save(
    folder: Path, described: Described, weights: Mapping[str, Tensor], tokenizer: Tokenizer, results: Mapping[str, Any]
) -> None:
    """Write the folder, replacing that of an earlier call."""
    tree = {name: getattr(described, name) for name in FIELDS}
    tree |= {"task": asdict(described.task), "config": described.config.model_dump()}
    tree |= {"tokenizer": tokenizer.sha256, "results": dict(results)}
    with appearing(folder, DESCRIPTION, overwrite=True) as new:
        write_tensors(new / WEIGHTS, weights)
        for name, data in tokenizer.files().items():
            (new / name).write_bytes(data)
        (new / DESCRIPTION).write_bytes(canonical(tree))


def base(found: Finetuned) -> Pretrained:
    """A fine-tuned model, in fp32 on the CPU, as one to fine-tune: its encoder, with the pooler or transform before its added layer
    where pre-training made them. Its pre-training heads, which were not saved, are those of a new model."""
    parts = {"encoder.": "", "head.pooler.": "pooler.", "head.transform.": "mlm."}
    saved = {
        ours + name.removeprefix(theirs): tensor
        for name, tensor in found.module.state_dict().items()
        for theirs, ours in parts.items()
        if name.startswith(theirs)
    }
    old = found.described.config
    model = configuration.replace(old.model, "nsp", old.model.nsp and "pooler.weight" in saved)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(old.seed)
        new = BertForPreTraining(model, OpsConfig(), "cpu", torch.float32, old.data.masking.causal).state_dict()
    cfg = Config(model=model, data=DataConfig(masking=old.data.masking))
    heads = (MLM_HEAD, NSP_HEAD) if model.nsp else (MLM_HEAD,)
    state = start_state(found.folder, cfg, found.tokenizer)
    weights = {name: saved.get(name, tensor) for name, tensor in new.items()}
    return Pretrained(found.folder, weights, state, cfg, found.tokenizer, initialised=heads)


def load(source: str | Path, device: torch.device, precision: str = "") -> Finetuned:
    """The model in `precision`, by default that of training (fp32 on a CPU that would emulate it); `source` is its folder, or its
    name on the hub. Raises ValueError naming a file that is missing, damaged or does not fit the others."""
    folder = located_finetuned(source)
    path = folder / DESCRIPTION
    try:
        tree = json.loads(path.read_text())
        # JSON has lists for tuples.
        task: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tree["task"].items()}
        config = configuration.from_dict(tree["config"])
        lengths = tree["max_length"], tree["stride"]
        layers = str(tree.get("layers", "last"))
        threshold, every = float(tree["threshold"]), bool(tree.get("every_token"))
        described = Described(Task(**task), tuple(tree["labels"]), *lengths, config, threshold, layers, every)
        sha256, results = str(tree["tokenizer"]), dict(tree["results"])
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: does not describe a fine-tuned model ({error!r:.80})") from None
    tokenizers = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not tokenizers:
        raise ValueError(f"{folder}: its tokenizer is missing ({' or '.join(TOKENIZER_FILES)})")
    tokenizer = Tokenizer.load(tokenizers[0])
    if tokenizer.sha256 != sha256:
        raise ValueError(f"{tokenizer.path}: is not the tokenizer of this model (its SHA-256 differs)")
    dtype = DTYPES.get(precision) or dtype_on(device, precision or config.precision)
    module = heads.build(config, described.task.kind, described.outputs, None, device, dtype, layers)
    try:
        weights = load_file(folder / WEIGHTS)
        refuse_non_finite(weights, folder / WEIGHTS)
        module.load_state_dict(weights)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / WEIGHTS}: does not hold this model's weights ({reason:.120})") from None
    return Finetuned(folder, described, tokenizer, module.to(device, dtype).eval(), results)
